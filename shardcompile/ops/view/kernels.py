"""Views of blocks: copies where the strides of a block forbid what those of the whole tensor allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile.layout import IntLike
from shardcompile.ops import state
from shardcompile.ops.support.blocks import view_block

aten = torch.ops.aten


def unbound(x: Tensor, dim: int = 0) -> Sequence[Tensor]:
    """`unbind`; as rows that are selected, where torch's own (2.11 - 2.15) asks in a trace for sizes as numbers.

    Of a dim whose extent is a symbol it keeps the dim, unless it is known to be 1. A write to a row it brings back to
    the whole by asking for all sizes.
    """
    if all(isinstance(n, int) for n in x.shape):
        return aten.unbind.int(x, dim)
    return [aten.select.int(x, dim, i) for i in range(int(x.shape[dim]))]


def add_windows(grad: Tensor, extent: IntLike, dim: int, size: int, step: int) -> Tensor:
    """The sums of windows, the last dim, where they lie along a dim. For blocks that may have none.

    In a trace torch's own `unfold_backward` flattens windows, and asks whether a block is stored so that it can.

    Args:
        grad: the windows.
        extent: of the dim in the result.
        dim: along which they lie.
        size: of a window.
        step: from one to the next.
    """
    shape = [extent if d == dim else n for d, n in enumerate(grad.shape[:-1])]
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
state(aten.view.default, kernel=view_block)
state(aten._unsafe_view.default, kernel=view_block)
state(aten.reshape.default, kernel=view_block)
# A block must not be conjugated or negated lazily: below `__torch_dispatch__` nothing heeds the bit.
state(aten._conj.default, kernel=aten._conj_physical.default, copies_block=True)
state(aten._neg_view.default, kernel=aten.neg.default, copies_block=True)
# The rule names the dims that go: on a block, others may have extent 1 as well.
state(aten.squeeze.default, kernel=aten.squeeze.dims)
state(aten.squeeze.dim, kernel=aten.squeeze.dims)
