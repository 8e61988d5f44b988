"""Determinants and solutions for each matrix of a cut batch.

The kernels factor a contiguous matrix as its transpose, and the gradients ask the whole tensor whether it was one. So a
block is stored as the whole tensor is, before it is factored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.compat import OpOverload, global_extents, retrace, same_symbol
from shardcompile.layout import IntLike, Layout
from shardcompile.ops import state
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.view.rows import layout_of, moved, reduced, wrap
from shardcompile.sharded import Sharded, first_sharded

aten = torch.ops.aten


def _of_each(op: OpOverload) -> Callable[..., object]:
    """An op of square matrices, whose results have the same batch."""

    def run(x: Sharded) -> object:
        x = reduced(x)
        layout = x._spec.layout
        if not _cuts_batch_alone(layout, x.ndim - 2):
            return NotImplemented
        return _results(op, (x,), layout, op(_stored_alike(x._local_tensor, x)))

    return run


def solve(x: Tensor, right: Tensor, *, left: bool = True, check_errors: bool = False) -> object:
    """``aten._linalg_solve_ex`` for matrices and right sides of the same batch."""
    if check_errors:  # all ranks have to raise, and so to see all matrices
        return NotImplemented
    mesh = first_sharded([t for t in (x, right) if isinstance(t, Sharded)])._spec.layout.mesh
    x, right = reduced(x), reduced(right)
    of_x, of_right = layout_of(x, mesh), layout_of(right, mesh)
    batch = x.ndim - 2
    vector = right.ndim == batch + 1 and _same(right.shape, x.shape[:-1])
    if right.ndim != batch + 2 - vector or not _same(right.shape[:batch], x.shape[:batch]):
        return NotImplemented
    like = of_x if any(c is not None for c in of_x.cuts) else of_right
    if not _cuts_batch_alone(like, batch):
        return NotImplemented
    matrices, sides = (_cut_like(like, batch, of.shape, of.dtype) for of in (of_x, of_right))
    block = _stored_alike(moved(x, matrices), x)
    out = aten._linalg_solve_ex.default(block, moved(right, sides), left=left)
    return _results(aten._linalg_solve_ex.default, (x, right), matrices, out, left=left)


def _cuts_batch_alone(layout: Layout, batch: int) -> bool:
    return not layout.is_partial and all(c is None for c in layout.cuts[batch:])


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_symbol, a, b))


def _cut_like(like: Layout, batch: int, shape: Sequence[IntLike], dtype: torch.dtype) -> Layout:
    """The layout of a tensor whose batch is cut as that of another one."""
    cuts = [*like.cuts[:batch], *[None] * (len(shape) - batch)]
    return Layout.of(like.mesh, like.placements, shape, dtype, cuts)


def _stored_alike(block: Tensor, x: Tensor) -> Tensor:
    """A copy of a block that is contiguous if the whole tensor is, and is not otherwise."""
    if x.is_contiguous():
        return block.clone(memory_format=torch.contiguous_format)
    return block.mT.clone(memory_format=torch.contiguous_format).mT


def _results(op: OpOverload, args: tuple[Any, ...], like: Layout, blocks: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The results of a batch that is cut as that of `like`."""
    meta, sharded = global_meta(op, args, kwargs), first_sharded([a for a in args if isinstance(a, Sharded)])
    out = []
    for block, told in zip(blocks, meta, strict=True):
        layout = _cut_like(like, like.ndim - 2, global_extents(told.shape), block.dtype)
        out.append(wrap(sharded, block, layout, retrace(told.stride())))
    return tuple(out)


for _op in (aten._linalg_det.default, aten._linalg_slogdet.default):
    state(_op, sharded=_of_each(_op))
state(aten._linalg_solve_ex.default, sharded=solve)
