"""Rows that a mask keeps. They stay on their ranks; how many each rank keeps is the cut of the result.

One small collective tells the counts. Only a cut by one mesh dim along dim 0 is served here: there the order of the
blocks is the order of the rows. All else is left to the op itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from shardcompile import compat
from shardcompile.collectives import cut_of_sizes, first_rows, gather_counts
from shardcompile.layout import Layout, Spec, contiguous_stride
from shardcompile.ops.view.rows import first_row, has_known_blocks
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import FromLocal, ToLocal, redistributed


def is_mask(index: object) -> bool:
    """Whether an index of ``x[index]`` is a mask."""
    return isinstance(index, Tensor) and index.dtype is torch.bool and index.ndim > 0


def getitem(func: Callable[..., object], x: Tensor, mask: Tensor) -> object:
    """``x[mask]``."""
    return _keep_rows(x, mask) if _serves(x, mask) else func(x, mask)


def masked_select(func: Callable[..., object], input: Tensor, mask: Tensor, **options: object) -> object:
    """``torch.masked_select``; what is broadcast is left to torch."""
    if options or not is_mask(mask) or tuple(mask.shape) != tuple(input.shape) or not _serves(input, mask):
        return func(input, mask, **options)
    return _keep_rows(input, mask)


def nonzero(func: Callable[..., object], input: Tensor, *, out: Tensor | None = None, as_tuple: bool = False) -> object:
    """``torch.nonzero``."""
    if out is not None or not _serves(input, input):
        options = {} if out is None else {"out": out}
        return func(input, as_tuple=as_tuple, **options)
    numbers = _numbers(input)
    return numbers.unbind(1) if as_tuple else numbers


def _serves(x: Tensor, mask: Tensor) -> bool:
    layouts = [t._spec.layout for t in (x, mask) if isinstance(t, Sharded)]
    if not isinstance(x, Sharded) or not 0 < mask.ndim <= x.ndim:
        return False
    if not all(compat.same_symbol(a, b) for a, b in zip(mask.shape, x.shape, strict=False)):
        return False
    cut, *inner = x._spec.layout.cuts[: mask.ndim]
    if cut is None or len(cut.mesh_dims) > 1 or any(c is not None for c in inner) or has_known_blocks(x):
        return False
    return not any(layout.is_partial for layout in layouts) and layouts[0].mesh == layouts[-1].mesh


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _keep_rows(x: Any, mask: Any) -> object:
    """``x[mask]`` where dim 0 of `x` is cut by one mesh dim, and no other dim of the mask's."""
    layout = x._spec.layout
    if not isinstance(mask, Sharded):
        mask = FromLocal.apply(mask, type(x), Spec.of(Layout.whole(layout.mesh, mask.shape, mask.dtype), mask.stride()))
    keep = ToLocal.apply(redistributed(mask, _first_dims(layout, mask)), None)
    cut, numbers = chosen(keep.reshape(-1), layout)
    rows = ToLocal.apply(x, None).flatten(0, mask.ndim - 1).index_select(0, numbers)
    placements = [Shard(p.dim - mask.ndim + 1) if p.is_shard() and p.dim else p for p in layout.placements]
    shape = (cut.extent, *layout.shape[mask.ndim :])
    result = Layout.of(layout.mesh, placements, shape, rows.dtype, [cut, *layout.cuts[mask.ndim :]])
    return FromLocal.apply(rows, type(x), Spec.of(result, contiguous_stride(shape)))


@torch.compiler.allow_in_graph
def _numbers(x: Any) -> Any:
    """``x.nonzero()`` where dim 0 alone is cut."""
    layout = x._spec.layout
    keep = ToLocal.apply(x.detach(), None) != 0
    cut, numbers = chosen(keep.reshape(-1), layout)
    places = []
    for extent in reversed(layout.shape[1:]):
        places.append(numbers % extent)
        numbers = numbers // extent
    first: Any = first_row(layout.cut_of(0), layout)
    rows = torch.stack([numbers + first, *reversed(places)], 1)
    shape = (cut.extent, x.ndim)
    result = Layout.of_cuts(layout.mesh, shape, rows.dtype, [cut, None])
    return FromLocal.apply(rows, type(x), Spec.of(result, contiguous_stride(shape)))


def _first_dims(layout: Layout, mask: Tensor) -> Layout:
    """The layout that a mask needs to fit what it masks."""
    cut = layout.cut_of(0)
    cuts = [cut, *[None] * (mask.ndim - 1)]
    return Layout.of_cuts(layout.mesh, layout.shape[: mask.ndim], mask.dtype, cuts)


def chosen(keep: Tensor, layout: Layout) -> tuple[Any, Tensor]:
    """The cut of what all ranks keep, and the numbers of what this rank keeps: where a flat mask is true."""
    (mesh_dim,) = layout.cut_of(0).mesh_dims
    group_name = compat.group_name_of(layout.mesh, mesh_dim)
    sizes = gather_counts(keep.sum().view(1), group_name).view(-1)
    cut = cut_of_sizes(sizes, layout.mesh, [mesh_dim], about=compat.size_hint(layout.shape[0]))
    block, extent = cut.local_size(compat.coordinate(layout.mesh)), keep.shape[0]
    place = torch.where(keep, keep.cumsum(0) - 1, extent)
    numbers = torch.arange(extent, device=keep.device)
    return cut, first_rows(place.new_zeros([extent + 1]).scatter(0, place, numbers), block)
