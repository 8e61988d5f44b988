"""Rows that are added to rows by their numbers, where the rows to be added are cut: sums over edges, and gradients of
lookups.

Each rank adds what it has into zeros; the ranks' sums are then added up where the target's rows are. Rows stay with
their ranks, at the price of a reduction of the target's size, which is why larger targets are left to the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardcompile import compat
from shardcompile.layout import IntLike, Layout, contiguous_stride
from shardcompile.ops import state
from shardcompile.ops.view.rows import moved, reduced, wrap
from shardcompile.sharded import Sharded

aten = torch.ops.aten


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """``aten.index_add`` of a source that is cut along `dim`."""
    if index.ndim != 1 or source.ndim != x.ndim or not x.ndim:
        return NotImplemented
    dim = dim % x.ndim
    if not _fits(source, dim, x):
        return NotImplemented
    added = reduced(source)
    layout = added._spec.layout
    cut = layout.cut_of(dim)
    placements = [Shard(0) if m in cut.mesh_dims else Replicate() for m in range(len(layout.placements))]
    numbers = moved(index, Layout.of(layout.mesh, placements, index.shape, index.dtype, [cut]))
    return _sums(
        x, dim, added, lambda zeros: aten.index_add.default(zeros, dim, numbers, added._local_tensor, alpha=alpha)
    )


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``aten.scatter_add`` of a source that is cut along `dim`."""
    if not index.ndim == source.ndim == x.ndim or not x.ndim or not _same(index.shape, source.shape):
        return NotImplemented
    dim = dim % x.ndim
    if not _fits(source, dim, x):
        return NotImplemented
    added = reduced(source)
    numbers = moved(index, added._spec.layout)
    return _sums(x, dim, added, lambda zeros: aten.scatter_add.default(zeros, dim, numbers, added._local_tensor))


def index_put(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Tensor:
    """``aten.index_put`` that adds, by numbers of one dim, or that writes one value where a mask says."""
    at = [d for d, index in enumerate(indices) if index is not None]
    if at == [0] and indices[0].dtype is torch.bool and values.ndim == 0 and not accumulate and indices[0].ndim:
        mask = indices[0]
        if mask.ndim > x.ndim or not _same(mask.shape, x.shape[: mask.ndim]):
            return NotImplemented
        return torch.where(mask[(..., *[None] * (x.ndim - mask.ndim))], values.to(x.dtype), x)
    if not accumulate or len(at) != 1 or indices[at[0]].ndim != 1:
        return NotImplemented
    index = indices[at[0]]
    if index.dtype in (torch.bool, torch.uint8) or values.ndim != x.ndim:
        return NotImplemented
    if not _same(values.shape[at[0] : at[0] + 1], index.shape):
        return NotImplemented
    return index_add(x, at[0], torch.where(index < 0, index + x.shape[at[0]], index), values)


def _same(a: Sequence[IntLike], b: Sequence[IntLike]) -> bool:
    return all(compat.same_symbol(m, n) for m, n in zip(a, b, strict=True))


def _fits(source: Tensor, dim: int, x: Tensor) -> TypeGuard[Sharded]:
    """Whether the source is cut along `dim`, fits the target otherwise, and is no smaller than it."""
    if not isinstance(source, Sharded) or source._spec.layout.cuts[dim] is None or x.dtype is not source.dtype:
        return False
    others = [d for d in range(x.ndim) if d != dim]
    if x.dtype is torch.bool or not _same([x.shape[d] for d in others], [source.shape[d] for d in others]):
        return False
    return math.prod(map(compat.size_hint, x.shape)) <= math.prod(map(compat.size_hint, source.shape))


def _sums(x: Tensor, dim: int, source: Sharded, add: Callable[[Tensor], Tensor]) -> Tensor:
    layout, block = source._spec.layout, source._local_tensor
    over = layout.cut_of(dim).mesh_dims
    placements = [Partial("sum") if m in over else p for m, p in enumerate(layout.placements)]
    cuts = [None if d == dim else c for d, c in enumerate(layout.cuts)]
    sums = add(block.new_zeros([x.shape[dim] if d == dim else n for d, n in enumerate(block.shape)]))
    pending = Layout.of(layout.mesh, placements, tuple(x.shape), x.dtype, cuts)
    return x + wrap(source, sums, pending, contiguous_stride(x.shape))


state(aten.index_add.default, sharded=index_add)
state(aten.index_put.default, sharded=index_put)
state(aten.scatter_add.default, sharded=scatter_add)
state(aten.index_add.default, not_decomposed="torch's fails for an index of 0 dims")
