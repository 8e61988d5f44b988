"""`zeros_like`, `ones_like` and `zero_` of a local shard, without guards on its size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardcompile.compat import OpOverload
from shardcompile.ops import state
from shardcompile.ops.record import Run
from shardcompile.ops.support.local_shards import copy_shard
from shardcompile.sharding import order_of

aten = torch.ops.aten


def _fill_like(op: OpOverload, value: int) -> Run:
    """Returns `zeros_like` or `ones_like`. Inductor's lowering guards on the strides of a shard, hence on its sizes."""

    def local(x: Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        memory_format = options.get("memory_format")
        if type(x) is Tensor or memory_format not in (None, torch.preserve_format, torch.contiguous_format):
            return op(x, dtype=dtype, device=device, **options)
        order = list(range(x.ndim)) if memory_format is torch.contiguous_format else order_of(x.stride())
        filled = x.new_full([x.shape[d] for d in order], value, dtype=dtype or x.dtype, device=device or x.device)
        return filled.permute(sorted(range(x.ndim), key=order.__getitem__))

    return local


_zeros_like = _fill_like(aten.zeros_like.default, 0)


def _zero_(x: Tensor) -> Tensor:
    """`zero_`, which functionalization replaces by `zeros_like`."""
    return aten.zero_.default(x) if type(x) is Tensor else copy_shard(x, _zeros_like(x))  # type: ignore[arg-type]


state(aten.zeros_like.default, kernel=_zeros_like)
state(aten.ones_like.default, kernel=_fill_like(aten.ones_like.default, 1))
state(aten.zero_.default, kernel=_zero_)
