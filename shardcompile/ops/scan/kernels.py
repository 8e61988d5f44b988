"""Running extrema of shards, and shards that are rolled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcompile.compat import OpOverload, is_unbacked
from shardcompile.ops import state
from shardcompile.ops.support.local_shards import Scalar, highest, lowest, padded
from shardcompile.sharding import IntLike

aten = torch.ops.aten


def _running_extremum(
    op: OpOverload, worst: Callable[[torch.dtype], Scalar]
) -> Callable[[Tensor, int], Sequence[Tensor]]:
    """`cummax` or `cummin` of a shard, which in a trace has a row more along dims that may be empty on some ranks.

    Run for shapes alone, torch's kernel asks whether there are elements, to look at `dim` then. Nothing can be said of
    a size that a run gives; of another the answer would be a guard that holds on some ranks only.
    """

    def run(x: Tensor, dim: int) -> Sequence[Tensor]:
        dims = [d for d in range(x.ndim) if isinstance(x.shape[d], torch.SymInt)]
        found = op(padded(x, dims, worst(x.dtype)) if dims else x, dim)
        for d in dims:
            found = [aten.slice.Tensor(t, d, 0, x.shape[d]) for t in found]
        # Stored as kernels store it, not as a part of what has a row more: a graph returns these strides.
        return [aten.clone.default(t, memory_format=torch.contiguous_format) for t in found] if dims else found

    return run


def _roll(x: Tensor, shifts: Sequence[IntLike], dims: Sequence[int] = ()) -> Tensor:
    """`roll`; inside a trace torch's own asks whether the shard is empty."""
    if type(x) is Tensor or not dims:
        return aten.roll.default(x, shifts, dims)
    for shift, dim in zip(shifts, dims, strict=True):
        rows = x.shape[dim]
        start = (rows - shift) % (torch.sym_max(rows, 1) if is_unbacked(rows) else max(rows, 1))
        x = aten.cat.default([x.narrow(dim, start, rows - start), x.narrow(dim, 0, start)], dim)
    return x


def _shape_of_roll(x: Tensor, shifts: Sequence[IntLike], dims: Sequence[int] = ()) -> Tensor:
    """Where only a run tells the number of rows: torch's formula divides by it, which may be 0."""
    if any(map(is_unbacked, x.shape)):
        return x.new_empty(x.shape)
    return aten.roll.default(x, shifts, dims)


running_maximum = _running_extremum(aten.cummax.default, lowest)
running_minimum = _running_extremum(aten.cummin.default, highest)

state(aten.cummax.default, kernel=running_maximum)
state(aten.cummin.default, kernel=running_minimum)
state(aten.roll.default, kernel=_roll, shape_kernel=_shape_of_roll)
