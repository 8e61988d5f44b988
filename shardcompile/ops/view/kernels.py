"""Kernels of view ops for local shards: they copy where the strides of a shard forbid what the global strides allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile.ops import state
from shardcompile.ops.support.local_shards import view_shard
from shardcompile.sharding import IntLike

aten = torch.ops.aten


def unbound(x: Tensor, dim: int = 0) -> Sequence[Tensor]:
    """`unbind`; with symbolic sizes, as a `select` of each row, because torch's own (2.11 - 2.15) needs sizes as ints.

    Torch's keeps a dim of symbolic size, unless that is known to be 1. To bring a write to a row back to the base, it
    reads all sizes as ints.
    """
    if all(isinstance(n, int) for n in x.shape):
        return aten.unbind.int(x, dim)
    return [aten.select.int(x, dim, i) for i in range(int(x.shape[dim]))]


def add_windows(grad: Tensor, dim_size: IntLike, dim: int, size: int, step: int) -> Tensor:
    """Sums windows, which are the last dim, at their positions along a dim. For shards that may have no windows.

    In a trace torch's own `unfold_backward` flattens windows, and asks whether the strides of a shard allow that.

    Args:
        grad: the windows.
        dim_size: size of the dim in the result.
        dim: the dim along which the windows lie.
        size: size of a window.
        step: distance from one window to the next.
    """
    shape = [dim_size if d == dim else n for d, n in enumerate(grad.shape[:-1])]
    if type(grad) is Tensor and grad.shape[dim]:
        return aten.unfold_backward.default(grad, shape, dim, size, step)
    starts = torch.arange(grad.shape[dim], device=grad.device) * step
    rows = starts.unsqueeze(-1) + torch.arange(size, device=grad.device)
    index = [*[None] * dim, rows]
    return aten._unsafe_index_put.default(grad.new_zeros(shape), index, grad.movedim(-1, dim + 1), True)


def _unfold_backward(grad: Tensor, shape: Sequence[IntLike], dim: int, size: int, step: int) -> Tensor:
    if type(grad) is Tensor or not shape:
        return aten.unfold_backward.default(grad, shape, dim, size, step)
    return add_windows(grad, shape[dim], dim % len(shape), size, step)


state(aten.unfold_backward.default, kernel=_unfold_backward)
state(aten.unbind.int, kernel=unbound, shape_kernel=unbound)
state(aten.view.default, kernel=view_shard)
state(aten._unsafe_view.default, kernel=view_shard)
state(aten.reshape.default, kernel=view_shard)
# A shard must not be conjugated or negated lazily: below `__torch_dispatch__` nothing reads the bit.
state(aten._conj.default, kernel=aten._conj_physical.default, copies_shard=True)
state(aten._neg_view.default, kernel=aten.neg.default, copies_shard=True)
# The rule lists the dims that are squeezed: in a local shard, others may have size 1 as well.
state(aten.squeeze.default, kernel=aten.squeeze.dims)
state(aten.squeeze.dim, kernel=aten.squeeze.dims)
