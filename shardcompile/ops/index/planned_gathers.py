"""Rows of a sharded dim that numbers name which are sharded over the same ranks: each row travels once to each rank
that names it, and sums of what is added to it travel the same way home.

Which rows travel is worked out once for an index: in a trace for all lookups and additions by it, those of the backward
pass included. What is looked up remembers how the rows are sharded (`Partition.rows`): a tensor of as many rows that
is made on the way is sharded like them, such as the sums over a graph's edges.
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
    find_links,
    local_shape_of,
    named_rows,
    reduce_rows,
    rows_travel,
    shard_size,
    take_rows,
)
from shardcompile.compat import OpOverload
from shardcompile.ops.view.rows import moved, reduced, wrap
from shardcompile.sharded import Sharded, first_sharded, shard_of
from shardcompile.sharding import IntLike, Layout, Partition, contiguous_stride, neighbouring

aten = torch.ops.aten

_COUNTING_FROM_THE_END = (aten.index.Tensor, aten.index_put.default)
"""Ops that take negative numbers."""
_LOOKED_UP = ("rows that were looked up",)
"""The key, in a trace, of how the rows are sharded that numbers have looked up."""
_TAKEN: Any = compat.WeakIdKeyDictionary()
"""What lookups in traces were made of, by their results."""
_FEW_ROWS = 64
"""How many numbers there may be for each row. Where there are more, every rank is likely to name all rows."""


def is_linked(index: Tensor, partition: Partition | None) -> TypeGuard[Sharded]:
    """Whether row indices are sharded over the mesh dim that shards the rows, which is one, and by it along one dim."""
    return isinstance(index, Sharded) and fits(partition, index._spec.layout)


def fits(partition: Partition | None, layout: Layout) -> bool:
    """`is_linked` of the layout of an index."""
    if partition is None or len(partition.mesh_dims) != 1 or layout.is_partial:
        return False
    if layout.dtype.is_floating_point or layout.dtype in (torch.bool, torch.uint8):
        return False
    entries, rows = math.prod(map(compat.size_hint, layout.shape)), compat.size_hint(partition.size)
    if entries > _FEW_ROWS * rows:
        return False
    by = [c for c in layout.partitions if c is not None and set(c.mesh_dims) & set(partition.mesh_dims)]
    return [c.mesh_dims for c in by] == [partition.mesh_dims]


def beside(indices: Sequence[Any], x: Tensor) -> list[Any]:
    """Indices on the device of what they count: a tensor on a GPU takes those on the CPU, too."""
    return [i if i is None or i.device == x.device else i.to(x.device) for i in indices]


def links_of(numbers: Tensor, partition: Partition, mesh: DeviceMesh, about: IntLike, op: OpOverload) -> Links:
    """Which rows travel for this rank's numbers, in a trace worked out once.

    Args:
        numbers: [e].
        sharded: of the rows.
        mesh: the mesh.
        about: how many numbers there are on all ranks.
        op: that names the rows. The error of an index that is out of range names the first op.
    """
    wraps = op in _COUNTING_FROM_THE_END
    parts = (
        partition.kind,
        partition.mesh_dims,
        *map(compat.expression_of, (partition.key, partition.size, partition.inner, partition.scale)),
    )
    group, runs = compat.group_name_of(mesh, partition.mesh_dims[0]), compat.expression_of(partition.runs)
    what = ("links", *parts, partition.shards, runs, wraps, group)

    def make() -> Links:
        with compat.unrecorded_symbols(numbers):
            return find_links(
                _turned(numbers, partition, wraps), neighbouring(partition), mesh, about, str(op), wraps=wraps
            )

    return compat.once_for_value(numbers, what, make)


def _turned(numbers: Tensor, partition: Partition, wraps: bool) -> Tensor:
    """Numbers of rows where the first rows of all stretches come first, then the second ones, and so on.

    In this order the rows of a shard are neighbours. Numbers that are out of range stay so.
    """
    if compat.is_one(partition.runs):
        return numbers
    size: Any = partition.size
    stretch = numbers.new_full([], size // partition.runs).clamp(min=1)
    number = torch.where(numbers < 0, numbers + size, numbers) if wraps else numbers
    segments: Any = partition.runs
    turned = number.remainder(stretch) * segments + number.div(stretch, rounding_mode="floor")
    return torch.where((number < 0) | (number >= size), numbers, turned)


def _rows_beside(shard: Tensor, partition: Partition) -> Tensor:
    """The rows of a shard, [n, ...], in the order of `_turned`."""
    return (
        shard if compat.is_one(partition.runs) else _exchanged(shard, partition.runs, shard.shape[0] // partition.runs)
    )


def _rows_behind(shard: Tensor, partition: Partition) -> Tensor:
    """The way back from `_rows_beside`."""
    return (
        shard if compat.is_one(partition.runs) else _exchanged(shard, shard.shape[0] // partition.runs, partition.runs)
    )


def _exchanged(shard: Tensor, outer: IntLike, inner: IntLike) -> Tensor:
    rest = shard.shape[1:]
    parts = aten.view.default(shard.clone(memory_format=torch.contiguous_format), [outer, inner, *rest])
    turned = parts.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return aten.view.default(turned, [shard.shape[0], *rest])


def _placed(
    layout: Layout, dim: int, index: Layout, at: int, shape: Sequence[IntLike]
) -> tuple[list[Placement], list[Partition | None]] | None:
    """Placements and partitions of what is looked up, or None if two dims of it would be sharded over one mesh dim.

    Args:
        layout: of the rows.
        dim: along which they lie.
        index: the layout of their numbers.
        at: how many dims these have.
        shape: of the result.
    """
    rows = layout.partition_of(dim)
    partitions: list[Partition | None] = [None] * len(shape)
    for d, c in enumerate(layout.partitions):
        if d != dim:
            partitions[d if d < dim else d + at - 1] = c
    for d, c in enumerate(index.partitions):
        partitions[dim + d] = c.naming(rows) if c is not None and c.mesh_dims == rows.mesh_dims else c
    placements: list[Placement] = [Replicate()] * len(layout.placements)
    for d, c in enumerate(partitions):
        for m in () if c is None else c.mesh_dims:
            if not isinstance(placements[m], Replicate):
                return None
            placements[m] = Shard(d)
    return placements, partitions


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
    shard = index._local_tensor
    rows = _rows_of(x._local_tensor, dim, shard.reshape(-1), layout, math.prod(numbers.shape), op)
    values = rows.movedim(0, dim).unflatten(dim, shard.shape) if numbers.ndim != 1 else rows.movedim(0, dim)
    placements, partitions = placed
    found = wrap(x, values, Layout.of(layout.mesh, placements, shape, x.dtype, partitions), stride)
    if compat.is_fake(values) and dim == 0 and numbers.ndim == 1:
        _TAKEN[found] = x, index
    return found


def rows_taken(x: Tensor) -> tuple[Sharded, Sharded] | None:
    """In a trace the table in whose rows a tensor was looked up along dim 0, and the numbers of these: [e]."""
    return _TAKEN.get(x)  # type: ignore[no-any-return]


def _rows_of(shard: Tensor, dim: int, numbers: Tensor, layout: Layout, about: IntLike, op: OpOverload) -> Tensor:
    """The rows that this rank's numbers name, along dim 0."""
    partition, mesh = layout.partition_of(dim), layout.mesh
    compat.once_for_value(numbers, _LOOKED_UP, lambda: partition)
    links = links_of(numbers, partition, mesh, about, op)
    group_name = compat.group_name_of(mesh, partition.mesh_dims[0])
    arriving = links.arrived_partition.local_size(compat.coordinate(mesh))
    table = _rows_beside(shard.movedim(dim, 0), partition)
    parts = (links.asked, links.sent, links.place, arriving, group_name)
    (rows,) = take_rows([table], *parts, travels=rows_travel(links.arrived_partition))
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
        size, step = layout.shape[d], index._spec.stride[d]
        one = isinstance(size, int) and size == 1
        if layout.partitions[d] is not None or not (one or (isinstance(step, int) and step == 0)):
            return None
        if (isinstance(size, int) and size == 0) or not compat.same_symbol(size, like[d]):
            return None
    shard = index._local_tensor
    for d in reversed(others):
        shard = shard.select(d, 0)
    placements = [Shard(0) if p.is_shard() else p for p in layout.placements]
    column = Layout.of(layout.mesh, placements, [layout.shape[dim]], layout.dtype, [layout.partitions[dim]])
    return wrap(index, shard, column, (1,))


def _target_partition(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Partition | None:
    """How rows are sharded to which those of a source are added: as they are, or, if they are whole, as those are that
    the source was looked up in.

    In a trace the gradient of a lookup is added to new zeros. They are sharded as the rows that were looked up.
    """
    if isinstance(index, Sharded) and compat.is_new_zeros(shard_of(x)):
        partition = compat.made_for_value(index._local_tensor, _LOOKED_UP)
        if isinstance(partition, Partition) and compat.statically_known_true(partition.size == x.shape[dim]):
            return partition
    if isinstance(x, Sharded) and x._spec.layout.partitions[dim] is not None:
        return x._spec.layout.partitions[dim]
    partition = source._spec.layout.partitions[dim] if isinstance(source, Sharded) else None
    return None if partition is None else partition.named_rows(x.shape[dim])


def filled(x: Sharded, dim: int, index: Sharded, value: Tensor | float, stride: Sequence[IntLike]) -> Tensor:
    """Rows, those of them that numbers name filled with a value. Nothing but the numbers travels.

    Args:
        x: the rows.
        dim: along which they lie.
        index: for which `is_linked` holds: [e].
        value: the value.
        stride: of the result.
    """
    layout, shard = x._spec.layout, x._local_tensor
    partition, mesh = layout.partition_of(dim), layout.mesh
    links = links_of(index._local_tensor, partition, mesh, index._spec.shape[0], aten.scatter.value)
    named = named_rows(
        links.sent, links.place, shard.shape[dim], links.arrived_partition.local_size(compat.coordinate(mesh))
    )
    named = _rows_behind(named, partition)
    shape = [shard.shape[dim] if d == dim else 1 for d in range(shard.ndim)]
    return wrap(x, torch.where(named.view(shape), value, shard).to(shard.dtype), layout, stride)


def zeros_in(x: Tensor, layout: Layout) -> Tensor | None:
    """This rank's shard, in another layout, of zeros that a trace has just made; None for anything else."""
    shard = shard_of(x)
    return shard.new_zeros(local_shape_of(layout)) if compat.is_new_zeros(shard) else None


def _beside_numbers(source: Tensor, dim: int, index: Tensor) -> Tensor:
    """Entries, brought to the shards of their numbers if that moves less.

    Otherwise the numbers go to the entries, and it has to be worked out anew which rows travel.
    """
    if not isinstance(source, Sharded) or not isinstance(index, Sharded):
        return source
    layout, partition = source._spec.layout, index._spec.layout.partitions[0]
    entries = layout.partitions[dim]
    if (
        partition is None
        or entries is None
        or partition.same_shards(entries)
        or partition.mesh_dims != entries.mesh_dims
    ):
        return source
    width = math.prod(compat.size_hint(n) for d, n in enumerate(layout.shape) if d != dim) * source.element_size()
    if width > 2 * index.element_size():
        return source
    partitions = [partition if d == dim else c for d, c in enumerate(layout.partitions)]
    wanted = Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions)
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
        source: the entries, [..., e, ...], sharded along `dim`.
        op: that brings them together.
        reduce: what becomes of several that are meant for one row.
        include_self: whether a row that something is meant for counts itself.
    """
    partition, source = _target_partition(x, dim, index, source), _beside_numbers(reduced(source), dim, index)
    layout = source._spec.layout if isinstance(source, Sharded) else None
    entries = None if layout is None else layout.partitions[dim]
    if partition is None or layout is None or entries is None or entries.mesh_dims != partition.mesh_dims:
        return NotImplemented
    mesh = layout.mesh
    numbers = Layout.of_partitions(mesh, index.shape, index.dtype, [entries])
    if not fits(partition, numbers):
        return NotImplemented
    partitions = [partition if d == dim else c for d, c in enumerate(layout.partitions)]
    home = Layout.of(mesh, layout.placements, x.shape, x.dtype, partitions)
    zeros, values = zeros_in(x, home), shard_of(source).movedim(dim, 0)
    rows = moved(reduced(x), home) if zeros is None else zeros
    links = links_of(moved(index, numbers), partition, mesh, layout.shape[dim], op)
    arriving = links.arrived_partition.local_size(compat.coordinate(mesh))
    ends = (shard_size(partition, mesh), arriving, compat.group_name_of(mesh, partition.mesh_dims[0]))
    parts = (links.asked, links.sent, links.place, *ends)
    if reduce == "sum" and include_self:
        (sums,) = add_rows([values], *parts, travels=rows_travel(links.arrived_partition))
        found = rows + _rows_behind(sums, partition).movedim(0, dim)
    else:
        own = _rows_beside(rows.movedim(dim, 0), partition)
        found = _rows_behind(reduce_rows(own, values, reduce, include_self, *parts), partition).movedim(0, dim)
    return wrap(first_sharded((source,)), found, home, contiguous_stride(home.shape))
