"""Matrix products of local shards, without reshapes that would guard on the shard size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.ops import state
from shardcompile.ops.support.local_shards import view_shard
from shardcompile.sharding import IntLike

aten = torch.ops.aten


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """`matmul`; torch's own kernel reshapes the batch, and in a trace specializes on the size of the local shard."""
    if type(a) is Tensor or a.ndim < 3 or b.ndim < 3:
        return aten.matmul.default(a, b)
    ndim = max(a.ndim, b.ndim)
    a, b = (x[(None,) * (ndim - x.ndim)] for x in (a, b))
    batch = [n if isinstance(m, int) and m == 1 else m for m, n in zip(a.shape[:-2], b.shape[:-2], strict=True)]
    out = aten.bmm.default(_flat_batch(a, batch), _flat_batch(b, batch))
    return view_shard(out, [*batch, *out.shape[1:]])


def _flat_batch(x: Tensor, batch: Sequence[IntLike]) -> Tensor:
    """Broadcasts the batch dims to `batch` and flattens them into one."""
    if any(isinstance(m, int) and m == 1 and n is not m for m, n in zip(x.shape, batch, strict=False)):
        x = x.expand([*batch, -1, -1])
    return view_shard(x, [math.prod(batch), *x.shape[-2:]])


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand_a: list[int], expand_b: list[int], expand_c: list[int], total: list[int]
) -> Tensor:
    """`_trilinear`; torch's own kernel converts sizes to ints, and in a trace specializes on the size of the shard."""
    if type(a) is Tensor:
        return aten._trilinear.default(a, b, c, expand_a, expand_b, expand_c, total)
    out: Any = 1
    for x, dims in ((a, expand_a), (b, expand_b), (c, expand_c)):
        for d in sorted(dims):
            x = x.unsqueeze(d)
        out = x * out
    return out.sum(total)


state(aten._trilinear.default, kernel=lambda a, b, c, x, y, z, total, unroll=1: _trilinear(a, b, c, x, y, z, total))
state(aten.matmul.default, kernel=_matmul)
