"""Gathers and scatters rows of a sharded dim by a gather plan, for an index that is sharded over the same ranks.

Each row is sent once to each rank whose part of the index names it, and sums of what is added to it are sent back the
same way. The plan is made once for an index: in a trace for all gathers and additions by it, including those of the
backward pass. A gathered tensor remembers the partition of the rows (`Partition.rows`): a new tensor of as many rows,
such as the sums over a graph's edges, is sharded like them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import (
    LocalGatherPlan,
    Reduction,
    local_shape_of,
    make_gather_plan,
)
from shardcompile.compat import OpOverload
from shardcompile.errors import LayoutError
from shardcompile.ops import NotServed
from shardcompile.ops.support.kept import keep, kept, sees_writes
from shardcompile.ops.support.sharded_rows import local_shard_in, reduced, wrap
from shardcompile.ops.support.view_elements import Elements, flat_elements
from shardcompile.sharded import Sharded, first_sharded, shard_of
from shardcompile.sharding import IntLike, Layout, Partition, contiguous_stride, trace_key, with_one_segment

aten = torch.ops.aten

_WRAPPING_OPS = (aten.index.Tensor, aten.index_put.default)
"""Ops that take negative indices, which count from the end."""
_GATHERED_ROWS = ("gathered rows",)
"""The key under which a trace keeps, for an index, the partition of the rows that it gathered."""
_GATHERED: Any = compat.WeakIdKeyDictionary()
"""The table and the index of each gather in a trace, by its result."""
_MAX_INDICES_PER_ROW = 64
"""The most indices per row for which a plan pays off. With more, every rank is likely to name all rows."""


def has_gather_plan(index: Tensor, partition: Partition | None) -> TypeGuard[Sharded]:
    """Whether a gather plan fits: a single mesh dim shards the rows, and it shards the index, too, along one dim."""
    return isinstance(index, Sharded) and fits(partition, index._spec.layout)


def fits(partition: Partition | None, layout: Layout) -> bool:
    """`has_gather_plan` for the layout of an index."""
    return not _misfit(partition, layout)


def no_gather_plan(index: Tensor, partition: Partition | None) -> NotServed:
    """Why `has_gather_plan` does not hold."""
    return NotServed(
        _misfit(partition, index._spec.layout) if isinstance(index, Sharded) else "the index is not sharded"
    )


def _misfit(partition: Partition | None, layout: Layout) -> str:
    """Why no gather plan fits the layout of an index; empty if one does."""
    if partition is None or len(partition.mesh_dims) != 1:
        return "the rows are not sharded over exactly one mesh dim"
    if layout.is_partial:
        return "the index has a pending reduction"
    if layout.dtype.is_floating_point or layout.dtype in (torch.bool, torch.uint8):
        return "the index is not of integers"
    entries, rows = math.prod(map(compat.size_hint, layout.shape)), compat.size_hint(partition.size)
    if entries > _MAX_INDICES_PER_ROW * rows:
        return "the index has too many entries per row for a gather plan"
    by = [c for c in layout.partitions if c is not None and set(c.mesh_dims) & set(partition.mesh_dims)]
    return (
        "" if [c.mesh_dims for c in by] == [partition.mesh_dims] else "the index is sharded differently from the rows"
    )


def on_device_of(indices: Sequence[Any], x: Tensor) -> list[Any]:
    """Moves indices to the device of the tensor that they index: a tensor on a GPU accepts indices on the CPU, too."""
    return [i if i is None or i.device == x.device else i.to(x.device) for i in indices]


def gather_plan_of(
    index: Sharded | None, numbers: Tensor, partition: Partition, mesh: DeviceMesh, about: IntLike, op: OpOverload
) -> LocalGatherPlan:
    """Returns the gather plan for this rank's indices. It is made once: in a trace, or until the index is written to.

    Args:
        index: the index; None if it has been redistributed.
        numbers: this rank's row indices: [e].
        partition: partition of the rows.
        mesh: the mesh.
        about: number of indices on all ranks.
        op: the op that uses the plan. The error of an index that is out of range names the op that made it.
    """
    group = compat.group_name_of(mesh, partition.mesh_dims[0])
    what = ("gather plan", *trace_key(partition), group)

    def make() -> LocalGatherPlan:
        with compat.unrecorded_symbols(numbers):
            return make_gather_plan(_interleaved(numbers, partition), with_one_segment(partition), mesh, about, str(op))

    held = None if index is None or compat.is_fake(index._local_tensor) else flat_elements(index)
    if held is None or not sees_writes(held[0]):
        plan = compat.once_for_value(numbers, what, make)
    else:
        plan = _kept_plan(*held, numbers, what, make)
    return plan if op in _WRAPPING_OPS else plan.without_negatives(str(op))


def _kept_plan(
    base: Sharded,
    elements: tuple[object, ...],
    numbers: Tensor,
    what: tuple[object, ...],
    make: Callable[[], LocalGatherPlan],
) -> LocalGatherPlan:
    """Returns the plan that eager mode keeps with a tensor, for an index that is a view of it.

    Args:
        base: the tensor.
        elements: which of its elements the index holds; see `flat_elements`.
        numbers: this rank's row indices: [e].
        what: the key of the plan of an index.
        make: makes the plan.

    Raises:
        LayoutError: the index has been written to in a way that PyTorch does not see.
    """
    key = (*what, elements)
    found = kept(base, key)
    if found is None:
        found = make(), numbers.clone()
        keep(base, key, found)
    plan, copy = found
    if not torch.equal(copy, numbers):
        raise LayoutError(
            f"an index, {base._spec.layout.describe()} or a view of it, has other values than when it was last used, "
            "but PyTorch has seen no write to it: its local shard has been written to by other means, such as NumPy or "
            "a collective. Pass that memory to from_local again"
        )
    return plan


def _interleaved(index: Tensor, partition: Partition) -> Tensor:
    """Converts row indices to the order in which the first rows of all segments come first, then the second ones, etc.

    In this order the rows of a shard are contiguous. Indices that are out of range or negative stay so.
    """
    if compat.is_one(partition.num_segments):
        return index
    size: Any = partition.size
    segment_size = index.new_full([], size // partition.num_segments).clamp(min=1)
    row = torch.where(index < 0, index + size, index)
    segments: Any = partition.num_segments
    interleaved = row.remainder(segment_size) * segments + row.div(segment_size, rounding_mode="floor")
    return torch.where((row < 0) | (row >= size), index, torch.where(index < 0, interleaved - size, interleaved))


def _interleave_rows(shard: Tensor, partition: Partition) -> Tensor:
    """Permutes the rows of a shard, [n, ...], to the order of `_interleaved`."""
    return (
        shard
        if compat.is_one(partition.num_segments)
        else _transposed(shard, partition.num_segments, shard.shape[0] // partition.num_segments)
    )


def _deinterleave_rows(shard: Tensor, partition: Partition) -> Tensor:
    """The inverse of `_interleave_rows`."""
    return (
        shard
        if compat.is_one(partition.num_segments)
        else _transposed(shard, shard.shape[0] // partition.num_segments, partition.num_segments)
    )


def _transposed(shard: Tensor, outer: IntLike, inner: IntLike) -> Tensor:
    rest = shard.shape[1:]
    parts = aten.view.default(shard.clone(memory_format=torch.contiguous_format), [outer, inner, *rest])
    swapped = parts.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return aten.view.default(swapped, [shard.shape[0], *rest])


def _result_placements(
    layout: Layout, dim: int, index: Layout, at: int, shape: Sequence[IntLike]
) -> tuple[list[Placement], list[Partition | None]] | None:
    """Placements and partitions of a gathered tensor; None if one mesh dim would shard two of its dims.

    Args:
        layout: layout of the rows.
        dim: the dim of the rows.
        index: layout of the index.
        at: number of dims of the index.
        shape: shape of the result.
    """
    rows = layout.partition_of(dim)
    partitions: list[Partition | None] = [None] * len(shape)
    for d, c in enumerate(layout.partitions):
        if d != dim:
            partitions[d if d < dim else d + at - 1] = c
    for d, c in enumerate(index.partitions):
        partitions[dim + d] = c.with_indexed_rows(rows) if c is not None and c.mesh_dims == rows.mesh_dims else c
    placements: list[Placement] = [Replicate()] * len(layout.placements)
    for d, c in enumerate(partitions):
        for m in () if c is None else c.mesh_dims:
            if not isinstance(placements[m], Replicate):
                return None
            placements[m] = Shard(d)
    return placements, partitions


def taken(
    x: Sharded, dim: int, index: Sharded, shape: Sequence[IntLike], stride: Sequence[IntLike], op: OpOverload
) -> Tensor | NotServed:
    """Gathers the rows that an index of any shape names, in place of `dim`; NotServed if no layout fits.

    Args:
        x: the rows.
        dim: the dim of the rows.
        index: an index for which `has_gather_plan` holds.
        shape: shape of the result.
        stride: strides of the result.
        op: the op that gathers.
    """
    layout, index_layout = x._spec.layout, index._spec.layout
    placed = _result_placements(layout, dim, index_layout, index_layout.ndim, shape)
    if layout.is_partial:
        return NotServed("the rows have a pending reduction")
    if placed is None:
        return NotServed("one mesh dim would shard two dims of the result")
    shard = index._local_tensor
    rows = _gather_rows(x._local_tensor, dim, index, layout, op)
    values = rows.movedim(0, dim).unflatten(dim, shard.shape) if index_layout.ndim != 1 else rows.movedim(0, dim)
    placements, partitions = placed
    found = wrap(x, values, Layout.of(layout.mesh, placements, shape, x.dtype, partitions), stride)
    if compat.is_fake(values) and dim == 0 and index_layout.ndim == 1:
        _GATHERED[found] = x, index
    return found


def rows_taken(x: Tensor) -> tuple[Sharded, Sharded] | None:
    """In a trace, the table and the index, [e], by which a tensor was gathered along dim 0; None for other tensors."""
    return _GATHERED.get(x)  # type: ignore[no-any-return]


def _gather_rows(shard: Tensor, dim: int, index: Sharded, layout: Layout, op: OpOverload) -> Tensor:
    """Gathers the rows that this rank's indices name, along dim 0."""
    partition, mesh = layout.partition_of(dim), layout.mesh
    numbers, about = index._local_tensor.reshape(-1), math.prod(index._spec.shape)
    compat.once_for_value(numbers, _GATHERED_ROWS, lambda: partition)
    (rows,) = gather_plan_of(index, numbers, partition, mesh, about, op).take(
        [_interleave_rows(shard.movedim(dim, 0), partition)]
    )
    return rows


def column_of(index: Tensor, dim: int, like: Sequence[IntLike]) -> Sharded | None:
    """The row indices, [e], of an index of `gather` or `scatter` in which they are expanded over all other dims.

    Args:
        index: the expanded index.
        dim: the dim along which it varies.
        like: shape of the tensor that it indexes. The result is None if the index differs in size along another dim.
    """
    if not isinstance(index, Sharded) or index._spec.layout.is_partial:
        return None
    layout = index._spec.layout
    others = [d for d in range(index.ndim) if d != dim]
    for d in others:
        size, stride = layout.shape[d], index._spec.stride[d]
        is_one = isinstance(size, int) and size == 1
        if layout.partitions[d] is not None or not (is_one or (isinstance(stride, int) and stride == 0)):
            return None
        if (isinstance(size, int) and size == 0) or not compat.guard_equal(size, like[d]):
            return None
    shard = index._local_tensor
    for d in reversed(others):
        shard = shard.select(d, 0)
    placements = [Shard(0) if p.is_shard() else p for p in layout.placements]
    column = Layout.of(layout.mesh, placements, [layout.shape[dim]], layout.dtype, [layout.partitions[dim]])
    found = wrap(index, shard, column, (1,))
    if not compat.is_fake(shard):
        base, elements = flat_elements(index, found.numel())
        found._elements = Elements(base, elements, elements, found.numel())
    return found


def _target_partition(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Partition | None:
    """The partition of the rows to which a source is added: their own, or, if they are replicated, that of the rows
    from which the source was gathered.

    In a trace the gradient of a gather is added to new zeros. These are partitioned like the rows that were gathered.
    """
    if isinstance(index, Sharded) and compat.is_new_zeros(shard_of(x)):
        partition = compat.made_for_value(index._local_tensor, _GATHERED_ROWS)
        if isinstance(partition, Partition) and compat.statically_known_true(partition.size == x.shape[dim]):
            return partition
    if isinstance(x, Sharded) and x._spec.layout.partitions[dim] is not None:
        return x._spec.layout.partitions[dim]
    partition = source._spec.layout.partitions[dim] if isinstance(source, Sharded) else None
    return None if partition is None else partition.indexed_rows_of_size(x.shape[dim])


def filled(x: Sharded, dim: int, index: Sharded, value: Tensor | float, stride: Sequence[IntLike]) -> Tensor:
    """Fills the rows that an index names with a value. Nothing but the indices is sent.

    Args:
        x: the rows.
        dim: the dim of the rows.
        index: an index for which `has_gather_plan` holds: [e].
        value: the value.
        stride: strides of the result.
    """
    layout, shard = x._spec.layout, x._local_tensor
    partition, mesh = layout.partition_of(dim), layout.mesh
    plan = gather_plan_of(index, index._local_tensor, partition, mesh, index._spec.shape[0], aten.scatter.value)
    is_named = _deinterleave_rows(plan.named(), partition)
    shape = [shard.shape[dim] if d == dim else 1 for d in range(shard.ndim)]
    return wrap(x, torch.where(is_named.view(shape), value, shard).to(shard.dtype), layout, stride)


def zeros_in(x: Tensor, layout: Layout) -> Tensor | None:
    """This rank's local shard, in another layout, of zeros that a trace has just made; None for anything else."""
    shard = shard_of(x)
    return shard.new_zeros(local_shape_of(layout)) if compat.is_new_zeros(shard) else None


def _align_entries(source: Tensor, dim: int, index: Tensor) -> Tensor:
    """Redistributes entries to the partition of their index if that moves fewer bytes.

    Otherwise the index is redistributed to the partition of the entries, and needs another gather plan.
    """
    if not isinstance(source, Sharded) or not isinstance(index, Sharded):
        return source
    layout, partition = source._spec.layout, index._spec.layout.partitions[0]
    entries = layout.partitions[dim]
    if (
        partition is None
        or entries is None
        or partition.guard_same_shards(entries)
        or partition.mesh_dims != entries.mesh_dims
    ):
        return source
    entry_bytes = math.prod(compat.size_hint(n) for d, n in enumerate(layout.shape) if d != dim) * source.element_size()
    if entry_bytes > 2 * index.element_size():
        return source
    partitions = [partition if d == dim else c for d, c in enumerate(layout.partitions)]
    target = Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions)
    return wrap(source, local_shard_in(source, target), target, contiguous_stride(target.shape))


def combined(
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    op: OpOverload,
    reduce: Reduction = "sum",
    *,
    include_self: bool = True,
) -> Tensor | NotServed:
    """Reduces entries into the rows that an index names, on the ranks of these rows; NotServed if no plan fits.

    Args:
        x: the rows, [..., n, ...].
        dim: the dim of the rows.
        index: the row of each entry: [e].
        source: the entries, [..., e, ...], sharded along `dim`.
        op: the op that reduces.
        reduce: how several entries of one row are reduced.
        include_self: whether the old value of a row that has entries is reduced with them.
    """
    partition, source = _target_partition(x, dim, index, source), _align_entries(reduced(source), dim, index)
    layout = source._spec.layout if isinstance(source, Sharded) else None
    entries = None if layout is None else layout.partitions[dim]
    if layout is None or entries is None:
        return NotServed("the source is not sharded along the dim")
    if partition is None:
        return NotServed("the partition of the rows of the target is unknown")
    if entries.mesh_dims != partition.mesh_dims:
        return NotServed("source and target are sharded over different mesh dims")
    mesh = layout.mesh
    index_layout = Layout.of_partitions(mesh, index.shape, index.dtype, [entries])
    misfit = _misfit(partition, index_layout)
    if misfit:
        return NotServed(misfit)
    partitions = [partition if d == dim else c for d, c in enumerate(layout.partitions)]
    target = Layout.of(mesh, layout.placements, x.shape, x.dtype, partitions)
    zeros, values = zeros_in(x, target), shard_of(source).movedim(dim, 0)
    rows = local_shard_in(reduced(x), target) if zeros is None else zeros
    as_given = index if isinstance(index, Sharded) and index._spec.layout == index_layout else None
    numbers = local_shard_in(index, index_layout)
    plan = gather_plan_of(as_given, numbers, partition, mesh, layout.shape[dim], op)
    if reduce == "sum" and include_self:
        (sums,) = plan.add([values])
        found = rows + _deinterleave_rows(sums, partition).movedim(0, dim)
    else:
        local_rows = _interleave_rows(rows.movedim(dim, 0), partition)
        found = _deinterleave_rows(plan.reduce(local_rows, values, reduce, include_self), partition).movedim(0, dim)
    return wrap(first_sharded((source,)), found, target, contiguous_stride(target.shape))
