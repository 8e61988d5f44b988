"""Constant padding of a sharded dim: the new rows go to the first and the last rank, all others stay on their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shardcompile.ops import NotServed, state
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.local_shards import Scalar
from shardcompile.ops.support.sharded_rows import place_rows_at, reduced
from shardcompile.ops.view.slices import slice_rows
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike

aten = torch.ops.aten
_T = TypeVar("_T", bound=Tensor)


def pad(x: Sharded, amounts: Sequence[IntLike], value: Scalar = 0) -> Tensor | NotServed:
    """``aten.constant_pad_nd`` where a padded dim is sharded: the new rows go to the first and the last rank."""
    by_dim = {x.ndim - 1 - i // 2: (amounts[i], amounts[i + 1]) for i in range(0, len(amounts) - 1, 2)}
    global_meta(aten.constant_pad_nd.default, (x, amounts, value), {})
    sharded_dims = [d for d, a in by_dim.items() if x._spec.layout.partitions[d] is not None and not _are_zero(a)]
    if not sharded_dims:
        return NotServed("no padded dim is sharded")
    x = x if value == 0 and _has_only_sums(x) else reduced(x)
    for d in sharded_dims:
        before, after = by_dim.pop(d)
        if _is_negative(before) or _is_negative(after):
            x = slice_rows(x, d, -before if _is_negative(before) else 0, after if _is_negative(after) else None)
        before, after = (0 if _is_negative(n) else n for n in (before, after))
        if _are_zero((before, after)):
            x = aten.clone.default(x)  # a slice would share its memory
        else:
            x = place_rows_at(x, d, before, 1, before + x.shape[d] + after, value)
    rest = [n for d in range(x.ndim - 1, -1, -1) for n in by_dim.get(d, (0, 0))]
    return x if _are_zero(rest) else aten.constant_pad_nd.default(x, rest, value)


def _are_zero(amounts: Sequence[IntLike]) -> bool:
    return all(isinstance(n, int) and n == 0 for n in amounts)


def _is_negative(amount: IntLike) -> bool:
    return bool(amount < 0)


def _has_only_sums(x: Sharded) -> bool:
    return all(getattr(p, "reduce_op", "sum") in ("sum", "avg") for p in x._spec.layout.placements)


state(aten.constant_pad_nd.default, sharded=pad)
