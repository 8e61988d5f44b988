"""Views of blocks: copies where the strides of a block forbid what those of the whole tensor allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def _add_windows(grad: Tensor, shape: Sequence[IntLike], dim: int, size: int, step: int) -> Tensor:
    """`unfold_backward`. In a trace torch's own flattens windows, and asks whether a block is stored so that it can."""
    if type(grad) is Tensor or not shape:
        return aten.unfold_backward.default(grad, shape, dim, size, step)
    dim = dim % len(shape)
    extent: Any = shape[dim]
    rows = torch.arange(extent, device=grad.device).unfold(0, size, step)
    index = [*[None] * dim, rows]
    return aten._unsafe_index_put.default(grad.new_zeros(shape), index, grad.movedim(-1, dim + 1), True)


state(aten.unfold_backward.default, kernel=_add_windows)
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
