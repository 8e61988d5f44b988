"""`bincount` and `histc`: each rank counts the values of its local shard, and the counts are summed."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial

from shardcompile import compat
from shardcompile.ops import NotServed, state
from shardcompile.ops.support.sharded_rows import local_shard_in, reduced, wrap
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout

aten = torch.ops.aten


def bincount(x: Sharded, weights: Tensor | None = None, minlength: int = 0) -> Tensor | NotServed:
    """``aten.bincount`` of a sharded tensor; in a trace, where its values are unknown, the rules apply."""
    if not isinstance(x, Sharded):
        return NotServed("the input is not sharded")
    if x.ndim != 1:
        return NotServed("the input is not 1-d")
    if x.dtype.is_floating_point:
        return NotServed("the dtype is floating point")
    if compat.is_fake(x._local_tensor):
        return NotServed("the number of counts is unknown in a trace")
    x = reduced(x)
    if x._spec.layout.partitions[0] is None:
        return NotServed("the input is not sharded")
    if x.shape[0] == 0:
        return NotServed("the input is empty")
    if weights is not None and weights.shape != x.shape:
        return NotServed("weights and input differ in shape")
    lowest, highest = (int(e.item()) for e in (aten.min.default(x), aten.max.default(x)))
    if lowest < 0:
        return NotServed("the input has negative values")  # torch raises the error
    layout = x._spec.layout
    local_weights = None if weights is None else local_shard_in(weights, layout.with_dtype(weights.dtype))
    counts = aten.bincount.default(x._local_tensor, local_weights, max(minlength, highest + 1))
    if local_weights is not None:  # of an empty shard torch gives integers
        counts = counts.to(torch.float32 if local_weights.dtype is torch.float32 else torch.float64)
    return reduced(_pending_sum(x, counts))  # as in a trace, where the op runs on full values


def histc(x: Sharded, bins: int = 100, min: float = 0, max: float = 0) -> Tensor | NotServed:
    """``aten.histc`` of a sharded tensor; in a trace only between limits that are given."""
    if not isinstance(x, Sharded):
        return NotServed("the input is not sharded")
    if not (min < max or min == max == 0):
        return NotServed("min is not less than max, and not both are 0")
    x = reduced(x)
    if not any(c is not None for c in x._spec.layout.partitions):
        return NotServed("the input is not sharded")
    if 0 in x.shape:
        return NotServed("the input is empty")
    if min == max:
        if compat.is_fake(x._local_tensor):
            return NotServed("the range of the values is unknown in a trace")
        min, max = (float(e.item()) for e in (aten.min.default(x), aten.max.default(x)))
        if not (math.isfinite(min) and math.isfinite(max)):
            return NotServed("the range of the values is not finite")  # torch raises the error
        min, max = (min - 1, max + 1) if min == max else (min, max)
        return reduced(_pending_sum(x, aten.histc.default(x._local_tensor, bins, min, max)))  # as in a trace
    return _pending_sum(x, aten.histc.default(x._local_tensor, bins, min, max))


def _pending_sum(x: Sharded, counts: torch.Tensor) -> Tensor:
    """Wraps the counts of the local shards as a pending sum."""
    layout = x._spec.layout
    over = {m for c in layout.partitions if c is not None for m in c.mesh_dims}
    placements = [Partial("sum") if m in over else p for m, p in enumerate(layout.placements)]
    shape = tuple(counts.shape)
    return wrap(x, counts, Layout.of(layout.mesh, placements, shape, counts.dtype, [None]), counts.stride())


state(aten.bincount.default, sharded=bincount)
state(aten.histc.default, sharded=histc)
