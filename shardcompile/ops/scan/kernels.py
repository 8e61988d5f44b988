"""Cumulative extrema of local shards, and the roll of a local shard."""

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
    op: OpOverload, identity: Callable[[torch.dtype], Scalar]
) -> Callable[[Tensor, int], Sequence[Tensor]]:
    """Returns `cummax` or `cummin` of a local shard. In a trace dims of symbolic size are padded by a row.

    Torch's meta kernel checks whether there are elements before it validates `dim`. For an unbacked size this check is
    undecidable; for a backed size it would install a guard that holds on some ranks only. A padded dim is never empty.
    """

    def run(x: Tensor, dim: int) -> Sequence[Tensor]:
        dims = [d for d in range(x.ndim) if isinstance(x.shape[d], torch.SymInt)]
        found = op(padded(x, dims, identity(x.dtype)) if dims else x, dim)
        for d in dims:
            found = [aten.slice.Tensor(t, d, 0, x.shape[d]) for t in found]
        # Contiguous, as kernels store it, not a slice of the padded result: a graph returns these strides.
        return [aten.clone.default(t, memory_format=torch.contiguous_format) for t in found] if dims else found

    return run


def _roll(x: Tensor, shifts: Sequence[IntLike], dims: Sequence[int] = ()) -> Tensor:
    """`roll`; inside a trace torch's own kernel guards on whether the shard is empty."""
    if type(x) is Tensor or not dims:
        return aten.roll.default(x, shifts, dims)
    for shift, dim in zip(shifts, dims, strict=True):
        rows = x.shape[dim]
        start = (rows - shift) % (torch.sym_max(rows, 1) if is_unbacked(rows) else max(rows, 1))
        x = aten.cat.default([x.narrow(dim, start, rows - start), x.narrow(dim, 0, start)], dim)
    return x


def _roll_shape(x: Tensor, shifts: Sequence[IntLike], dims: Sequence[int] = ()) -> Tensor:
    """The shape kernel. Torch's meta function divides by the number of rows, which may be 0 if it is unbacked."""
    if any(map(is_unbacked, x.shape)):
        return x.new_empty(x.shape)
    return aten.roll.default(x, shifts, dims)


running_maximum = _running_extremum(aten.cummax.default, lowest)
running_minimum = _running_extremum(aten.cummin.default, highest)

state(aten.cummax.default, kernel=running_maximum)
state(aten.cummin.default, kernel=running_minimum)
state(aten.roll.default, kernel=_roll, shape_kernel=_roll_shape)
