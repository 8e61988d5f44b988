"""Rows of a cut dim that numbers name which are cut over the same ranks: each row travels once to each rank that names
it, and sums of what is added to it travel the same way home.

Which rows travel is worked out once for an index: in a trace for all lookups and additions by it, those of the backward
pass included. What is looked up remembers how the rows are cut (`Cut.rows`): a tensor of as many rows that is made on
the way is cut like them, such as the sums over a graph's edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import (
    Links,
    Reduction,
    add_rows,
    block_shape,
    block_size,
    find_links,
    named_rows,
    reduce_rows,
    rows_travel,
    take_rows,
)
from shardcompile.compat import OpOverload
from shardcompile.layout import Cut, IntLike, Layout, contiguous_stride, neighbouring
from shardcompile.ops.view.rows import moved, reduced, wrap
from shardcompile.sharded import Sharded, block_of, first_sharded

aten = torch.ops.aten

_COUNTING_FROM_THE_END = (aten.index.Tensor, aten.index_put.default)
"""Ops that take negative numbers."""
_LOOKED_UP = ("rows that were looked up",)
"""The key, in a trace, of how the rows are cut that numbers have looked up."""
_TAKEN: Any = compat.WeakIdKeyDictionary()
"""What lookups in traces were made of, by their results."""
_FEW_ROWS = 64
"""How many numbers there may be for each row. Where there are more, every rank is likely to name all rows."""


def is_linked(index: Tensor, cut: Cut | None) -> TypeGuard[Sharded]:
    """Whether numbers of rows are cut by the mesh dim that cuts the rows, which is one, and by it along one dim."""
    return isinstance(index, Sharded) and fits(cut, index._spec.layout)


def fits(cut: Cut | None, layout: Layout) -> bool:
    """`is_linked` of the layout of an index."""
    if cut is None or len(cut.mesh_dims) != 1 or layout.is_partial:
        return False
    if layout.dtype.is_floating_point or layout.dtype in (torch.bool, torch.uint8):
        return False
    entries, rows = math.prod(map(compat.size_hint, layout.shape)), compat.size_hint(cut.extent)
    if entries > _FEW_ROWS * rows:
        return False
    by = [c for c in layout.cuts if c is not None and set(c.mesh_dims) & set(cut.mesh_dims)]
    return [c.mesh_dims for c in by] == [cut.mesh_dims]


def beside(indices: Sequence[Any], x: Tensor) -> list[Any]:
    """Indices on the device of what they count: a tensor on a GPU takes those on the CPU, too."""
    return [i if i is None or i.device == x.device else i.to(x.device) for i in indices]


def links_of(numbers: Tensor, cut: Cut, mesh: DeviceMesh, about: IntLike, op: OpOverload) -> Links:
    """Which rows travel for this rank's numbers, in a trace worked out once.

    Args:
        numbers: [e].
        cut: of the rows.
        mesh: the mesh.
        about: how many numbers there are on all ranks.
        op: that names the rows. The error of an index that is out of range names the first op.
    """
    wraps = op in _COUNTING_FROM_THE_END
    parts = (cut.kind, cut.mesh_dims, *map(compat.expression_of, (cut.key, cut.extent, cut.inner, cut.scale)))
    group, runs = compat.group_name_of(mesh, cut.mesh_dims[0]), compat.expression_of(cut.runs)
    what = ("links", *parts, cut.blocks, runs, wraps, group)

    def make() -> Links:
        with compat.unrecorded_symbols(numbers):
            return find_links(_turned(numbers, cut, wraps), neighbouring(cut), mesh, about, str(op), wraps=wraps)

    return compat.once_for_value(numbers, what, make)


def _turned(numbers: Tensor, cut: Cut, wraps: bool) -> Tensor:
    """Numbers of rows where the first rows of all stretches come first, then the second ones, and so on.

    In this order the rows of a block are neighbours. Numbers that are out of range stay so.
    """
    if compat.is_one(cut.runs):
        return numbers
    extent: Any = cut.extent
    stretch = numbers.new_full([], extent // cut.runs).clamp(min=1)
    number = torch.where(numbers < 0, numbers + extent, numbers) if wraps else numbers
    segments: Any = cut.runs
    turned = number.remainder(stretch) * segments + number.div(stretch, rounding_mode="floor")
    return torch.where((number < 0) | (number >= extent), numbers, turned)


def _rows_beside(block: Tensor, cut: Cut) -> Tensor:
    """The rows of a block, [n, ...], in the order of `_turned`."""
    return block if compat.is_one(cut.runs) else _exchanged(block, cut.runs, block.shape[0] // cut.runs)


def _rows_behind(block: Tensor, cut: Cut) -> Tensor:
    """The way back from `_rows_beside`."""
    return block if compat.is_one(cut.runs) else _exchanged(block, block.shape[0] // cut.runs, cut.runs)


def _exchanged(block: Tensor, outer: IntLike, inner: IntLike) -> Tensor:
    rest = block.shape[1:]
    parts = aten.view.default(block.clone(memory_format=torch.contiguous_format), [outer, inner, *rest])
    turned = parts.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return aten.view.default(turned, [block.shape[0], *rest])


def _placed(
    layout: Layout, dim: int, index: Layout, at: int, shape: Sequence[IntLike]
) -> tuple[list[Placement], list[Cut | None]] | None:
    """Placements and cuts of what is looked up, or None if two dims of it would be cut by one mesh dim.

    Args:
        layout: of the rows.
        dim: along which they lie.
        index: the layout of their numbers.
        at: how many dims these have.
        shape: of the result.
    """
    rows = layout.cut_of(dim)
    cuts: list[Cut | None] = [None] * len(shape)
    for d, c in enumerate(layout.cuts):
        if d != dim:
            cuts[d if d < dim else d + at - 1] = c
    for d, c in enumerate(index.cuts):
        cuts[dim + d] = c.naming(rows) if c is not None and c.mesh_dims == rows.mesh_dims else c
    placements: list[Placement] = [Replicate()] * len(layout.placements)
    for d, c in enumerate(cuts):
        for m in () if c is None else c.mesh_dims:
            if not isinstance(placements[m], Replicate):
                return None
            placements[m] = Shard(d)
    return placements, cuts


def taken(
    x: Sharded, dim: int, index: Sharded, shape: Sequence[IntLike], stride: Sequence[IntLike], op: OpOverload
) -> Tensor:
    """The rows that an index of any shape names, in place of `dim`; NotImplemented if they cannot lie so.

    Args:
        x: the rows.
        dim: along which they lie.
        index: for which `is_linked` holds.
        shape: of the result.
        stride: of the result.
        op: that looks them up.
    """
    layout, numbers = x._spec.layout, index._spec.layout
    placed = _placed(layout, dim, numbers, numbers.ndim, shape)
    if layout.is_partial or placed is None:
        return NotImplemented
    block = index._local_tensor
    rows = _rows_of(x._local_tensor, dim, block.reshape(-1), layout, math.prod(numbers.shape), op)
    values = rows.movedim(0, dim).unflatten(dim, block.shape) if numbers.ndim != 1 else rows.movedim(0, dim)
    placements, cuts = placed
    found = wrap(x, values, Layout.of(layout.mesh, placements, shape, x.dtype, cuts), stride)
    if compat.is_fake(values) and dim == 0 and numbers.ndim == 1:
        _TAKEN[found] = x, index
    return found


def rows_taken(x: Tensor) -> tuple[Sharded, Sharded] | None:
    """In a trace the table in whose rows a tensor was looked up along dim 0, and the numbers of these: [e]."""
    return _TAKEN.get(x)  # type: ignore[no-any-return]


def _rows_of(block: Tensor, dim: int, numbers: Tensor, layout: Layout, about: IntLike, op: OpOverload) -> Tensor:
    """The rows that this rank's numbers name, along dim 0."""
    cut, mesh = layout.cut_of(dim), layout.mesh
    compat.once_for_value(numbers, _LOOKED_UP, lambda: cut)
    links = links_of(numbers, cut, mesh, about, op)
    group_name = compat.group_name_of(mesh, cut.mesh_dims[0])
    arriving = links.came_cut.local_size(compat.coordinate(mesh))
    table = _rows_beside(block.movedim(dim, 0), cut)
    parts = (links.asked, links.sent, links.place, arriving, group_name)
    (rows,) = take_rows([table], *parts, travels=rows_travel(links.came_cut))
    return rows


def column_of(index: Tensor, dim: int, like: Sequence[IntLike]) -> Sharded | None:
    """Numbers of rows that were expanded over all other dims, as `gather` and `scatter` want them: [e].

    Args:
        index: the numbers.
        dim: along which they differ.
        like: the shape of what they are for; None is the answer if they are not as large along the other dims.
    """
    if not isinstance(index, Sharded) or index._spec.layout.is_partial:
        return None
    layout = index._spec.layout
    others = [d for d in range(index.ndim) if d != dim]
    for d in others:
        extent, step = layout.shape[d], index._spec.stride[d]
        one = isinstance(extent, int) and extent == 1
        if layout.cuts[d] is not None or not (one or (isinstance(step, int) and step == 0)):
            return None
        if (isinstance(extent, int) and extent == 0) or not compat.same_symbol(extent, like[d]):
            return None
    block = index._local_tensor
    for d in reversed(others):
        block = block.select(d, 0)
    placements = [Shard(0) if p.is_shard() else p for p in layout.placements]
    column = Layout.of(layout.mesh, placements, [layout.shape[dim]], layout.dtype, [layout.cuts[dim]])
    return wrap(index, block, column, (1,))


def _target_cut(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Cut | None:
    """How rows are cut to which those of a source are added: as they are, or, if they are whole, as those are that the
    source was looked up in.

    In a trace the gradient of a lookup is added to new zeros. They are cut as the rows that were looked up.
    """
    if isinstance(index, Sharded) and compat.is_new_zeros(block_of(x)):
        cut = compat.made_for_value(index._local_tensor, _LOOKED_UP)
        if isinstance(cut, Cut) and compat.statically_known_true(cut.extent == x.shape[dim]):
            return cut
    if isinstance(x, Sharded) and x._spec.layout.cuts[dim] is not None:
        return x._spec.layout.cuts[dim]
    cut = source._spec.layout.cuts[dim] if isinstance(source, Sharded) else None
    return None if cut is None else cut.named_rows(x.shape[dim])


def filled(x: Sharded, dim: int, index: Sharded, value: Tensor | float, stride: Sequence[IntLike]) -> Tensor:
    """Rows, those of them that numbers name filled with a value. Nothing but the numbers travels.

    Args:
        x: the rows.
        dim: along which they lie.
        index: for which `is_linked` holds: [e].
        value: the value.
        stride: of the result.
    """
    layout, block = x._spec.layout, x._local_tensor
    cut, mesh = layout.cut_of(dim), layout.mesh
    links = links_of(index._local_tensor, cut, mesh, index._spec.shape[0], aten.scatter.value)
    named = named_rows(links.sent, links.place, block.shape[dim], links.came_cut.local_size(compat.coordinate(mesh)))
    named = _rows_behind(named, cut)
    shape = [block.shape[dim] if d == dim else 1 for d in range(block.ndim)]
    return wrap(x, torch.where(named.view(shape), value, block).to(block.dtype), layout, stride)


def zeros_in(x: Tensor, layout: Layout) -> Tensor | None:
    """This rank's block, in another layout, of zeros that a trace has just made; None for anything else."""
    block = block_of(x)
    return block.new_zeros(block_shape(layout)) if compat.is_new_zeros(block) else None


def _beside_numbers(source: Tensor, dim: int, index: Tensor) -> Tensor:
    """Entries, brought to the blocks of their numbers if that moves less.

    Otherwise the numbers go to the entries, and it has to be worked out anew which rows travel.
    """
    if not isinstance(source, Sharded) or not isinstance(index, Sharded):
        return source
    layout, cut = source._spec.layout, index._spec.layout.cuts[0]
    entries = layout.cuts[dim]
    if cut is None or entries is None or cut.same_blocks(entries) or cut.mesh_dims != entries.mesh_dims:
        return source
    width = math.prod(compat.size_hint(n) for d, n in enumerate(layout.shape) if d != dim) * source.element_size()
    if width > 2 * index.element_size():
        return source
    cuts = [cut if d == dim else c for d, c in enumerate(layout.cuts)]
    wanted = Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, cuts)
    return wrap(source, moved(source, wanted), wanted, contiguous_stride(wanted.shape))


def combined(
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    op: OpOverload,
    reduce: Reduction = "sum",
    *,
    include_self: bool = True,
) -> Tensor:
    """Rows, and what is meant for each of them, brought together at home; NotImplemented for what does not fit.

    Args:
        x: the rows, [..., n, ...].
        dim: along which they lie.
        index: the number of the row that each entry is meant for: [e].
        source: the entries, [..., e, ...], cut along `dim`.
        op: that brings them together.
        reduce: what becomes of several that are meant for one row.
        include_self: whether a row that something is meant for counts itself.
    """
    cut, source = _target_cut(x, dim, index, source), _beside_numbers(reduced(source), dim, index)
    layout = source._spec.layout if isinstance(source, Sharded) else None
    entries = None if layout is None else layout.cuts[dim]
    if cut is None or layout is None or entries is None or entries.mesh_dims != cut.mesh_dims:
        return NotImplemented
    mesh = layout.mesh
    numbers = Layout.of_cuts(mesh, index.shape, index.dtype, [entries])
    if not fits(cut, numbers):
        return NotImplemented
    cuts = [cut if d == dim else c for d, c in enumerate(layout.cuts)]
    home = Layout.of(mesh, layout.placements, x.shape, x.dtype, cuts)
    zeros, values = zeros_in(x, home), block_of(source).movedim(dim, 0)
    rows = moved(reduced(x), home) if zeros is None else zeros
    links = links_of(moved(index, numbers), cut, mesh, layout.shape[dim], op)
    arriving = links.came_cut.local_size(compat.coordinate(mesh))
    ends = (block_size(cut, mesh), arriving, compat.group_name_of(mesh, cut.mesh_dims[0]))
    parts = (links.asked, links.sent, links.place, *ends)
    if reduce == "sum" and include_self:
        (sums,) = add_rows([values], *parts, travels=rows_travel(links.came_cut))
        found = rows + _rows_behind(sums, cut).movedim(0, dim)
    else:
        own = _rows_beside(rows.movedim(dim, 0), cut)
        found = _rows_behind(reduce_rows(own, values, reduce, include_self, *parts), cut).movedim(0, dim)
    return wrap(first_sharded((source,)), found, home, contiguous_stride(home.shape))
