"""Looks up rows of a sharded dim by their numbers. Every rank takes the rows that it holds, and the results are added
up.

This is how a table that is sharded over rows is looked up in without gathering it (as in Shoeybi et al.,
"Megatron-LM", 2019, for the vocabulary). An index that is out of range for the whole dim is out of range for every
shard: inside a graph the kernel raises, on all ranks that look up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import shard_size
from shardcompile.compat import OpOverload
from shardcompile.ops import Form, state
from shardcompile.ops.index.joined_indices import linked_numbers
from shardcompile.ops.index.planned_gathers import beside, column_of, combined, filled, is_linked, taken
from shardcompile.ops.index.rule import neighbours
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.local_shards import padded
from shardcompile.ops.view.rows import first_row, moved, reduced, wrap
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Partition

aten = torch.ops.aten


def _whole_along(x: Tensor, mesh_dims: Sequence[int], mesh: DeviceMesh) -> tuple[Layout, Tensor]:
    """Make a tensor whole along some mesh dims. It keeps its other placements, but for reductions."""
    if not isinstance(x, Sharded):
        return Layout.whole(mesh, x.shape, x.dtype), x
    now = x._spec.layout.reduced()
    gone = {d for d, c in enumerate(now.partitions) if c is not None and set(c.mesh_dims) & set(mesh_dims)}
    kept = [Replicate() if isinstance(p, Shard) and p.dim in gone else p for p in now.placements]
    layout = Layout.of(
        mesh, kept, now.shape, now.dtype, [None if d in gone else c for d, c in enumerate(now.partitions)]
    )
    return layout, moved(x, layout)


def _own(
    index: Tensor, partition: Partition, layout: Layout, dim: int, wraps: bool, elsewhere: Any = 0
) -> tuple[Tensor, Tensor]:
    """Which numbers are rows of this rank's local shard, and the numbers within it.

    A number that is out of range stays so. Kernels count negative numbers from the end of the shard, and shards may
    have a row of padding: that does not change it.

    Args:
        index: the numbers.
        sharded: of the dim whose rows they are.
        layout: of the tensor.
        dim: the dim.
        wraps: whether negative numbers count from its end.
        elsewhere: what stands for the rows of others.
    """
    size: Any = layout.shape[dim]
    first: Any = first_row(partition, layout)
    place = torch.where(index < 0, index + size if wraps else index, index)
    mine = (place >= first) & (place < first + shard_size(partition, layout.mesh))
    known = (place >= 0) & (place < size)
    outside = torch.where(index < 0, index - size - 1, index + 1)
    return mine, torch.where(mine, place - first, torch.where(known, elsewhere, outside))


def _sum(values: Tensor, mine: Tensor) -> tuple[Tensor, str]:
    """This rank's term of a reduction: its own values, and a neutral value elsewhere."""
    if values.dtype is torch.bool:
        return values & mine, "max"
    return torch.where(mine, values, 0), "sum"


def _place(
    layout: Layout, partition: Partition, ndim: int, of_x: dict[int, int], other: Layout, of_index: dict[int, int]
) -> tuple[list[Placement], list[Partition | None]] | None:
    """Placements and partitions of the result, or None if both inputs are sharded over one mesh dim.

    Args:
        layout: of the tensor that is looked up in.
        sharded: of the dim by which it is.
        ndim: of the result.
        of_x: result dim for each dim of the tensor that it has.
        other: layout of the index.
        of_index: result dim for each dim of the index.
    """
    placements: list[Placement] = [Replicate()] * len(layout.placements)
    partitions: list[Partition | None] = [None] * ndim
    for source, dims in ((layout, of_x), (other, of_index)):
        for d, c in enumerate(source.partitions):
            if c is None or c is partition:
                continue
            if d not in dims or any(not isinstance(placements[m], Replicate) for m in c.mesh_dims):
                return None
            partitions[dims[d]] = c
            for m in c.mesh_dims:
                placements[m] = Shard(dims[d])
    return placements, partitions


def _finish(
    x: Sharded,
    partition: Partition,
    values: Tensor,
    mine: Tensor,
    placed: tuple[list[Placement], list[Partition | None]],
    shape: Sequence[IntLike],
    stride: Sequence[IntLike],
) -> Tensor:
    placements, partitions = placed
    term, reduce_op = _sum(values, mine)
    layout = x._spec.layout
    for m in partition.mesh_dims:
        placements[m] = Partial(reduce_op)
    return wrap(x, term, Layout.of(layout.mesh, placements, shape, values.dtype, partitions), stride)


def embedding(weight: Sharded, indices: Tensor, *options: object) -> Tensor:
    """``aten.embedding`` with a table that is sharded over rows."""
    partition = weight._spec.layout.partitions[0] if isinstance(weight, Sharded) else None
    if partition is None:
        return NotImplemented
    weight = reduced(weight)
    meta = global_meta(aten.embedding.default, (weight, indices, *options), {})
    if is_linked(indices, partition):
        shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
        found = taken(weight, 0, indices, shape, stride, aten.embedding.default)
        if found is not NotImplemented:
            return found
    layout = weight._spec.layout
    other, index = _whole_along(indices, partition.mesh_dims, layout.mesh)
    ndim = indices.ndim
    placed = _place(layout, partition, ndim + 1, {1: ndim}, other, {d: d for d in range(ndim)})
    if placed is None:
        return NotImplemented
    table = padded(weight._local_tensor, [0], 0)
    mine, local = _own(index, partition, layout, 0, wraps=False)
    values = aten.embedding.default(table, local)
    shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
    return _finish(weight, partition, values, mine.unsqueeze(-1), placed, shape, stride)


def _is_worth_it(x: Tensor, shape: Sequence[IntLike]) -> bool:
    """Whether adding up the results, which moves each twice, takes fewer bytes than gathering the tensor."""
    out, whole = 2, 1
    for n in shape:
        out *= compat.size_hint(n)
    for n in x.shape:
        whole *= compat.size_hint(n)
    return out <= whole


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``aten.index_select`` along a sharded dim."""
    if not isinstance(x, Sharded) or not x.ndim or index.ndim != 1:
        return NotImplemented
    dim = dim % x.ndim
    return _index(x, [index if d == dim else None for d in range(x.ndim)], aten.index_select.default, (x, dim, index))


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``aten.index`` by index along a sharded dim."""
    if not isinstance(x, Sharded):
        return NotImplemented
    indices = beside(indices, x)
    return _index(x, indices, aten.index.Tensor, (x, indices))


def _index_joined(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``aten.index`` by index along a dim into which others were flattened."""
    indices = beside(indices, x)
    at = [d for d, i in enumerate(indices) if i is not None]
    return _look_up(x, at[0], indices[at[0]], aten.index.Tensor, (x, indices)) if len(at) == 1 else NotImplemented


def _index_select_joined(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``aten.index_select`` along a dim into which others were flattened."""
    return _look_up(x, dim % max(x.ndim, 1), index, aten.index_select.default, (x, dim, index))


def _named(
    x: Sharded,
    indices: Sequence[Any],
    at: Sequence[int],
    partition: Partition,
    shape: Sequence[IntLike],
    stride: Sequence[IntLike],
    op: OpOverload,
) -> Tensor:
    """Elements that numbers name which are sharded over the same ranks; NotImplemented where they are not."""
    rows: Any = x
    numbers = indices[at[0]]
    if len(at) > 1:
        numbers = linked_numbers(partition, [x.shape[d] for d in at], [indices[d] for d in at])
        if numbers is None:
            return NotImplemented
        rows = x.flatten(at[0], at[-1])
    fits = is_linked(numbers, rows._spec.layout.partitions[at[0]])
    return taken(rows, at[0], numbers, shape, stride, op) if fits else NotImplemented


def _look_up(x: Tensor, dim: int, index: Any, op: OpOverload, args: tuple[object, ...]) -> Tensor:
    partition = x._spec.layout.partitions[dim] if isinstance(x, Sharded) else None
    if not isinstance(x, Sharded) or x._spec.layout.is_partial or not is_linked(index, partition):
        return NotImplemented
    if any(c is not None and not compat.is_one(c.runs) for d, c in enumerate(x._spec.layout.partitions) if d != dim):
        return NotImplemented
    meta = global_meta(op, args, {})
    return taken(x, dim, index, compat.global_sizes(meta.shape), compat.retrace(meta.stride()), op)


def _index(x: Sharded, indices: Sequence[Any], op: OpOverload, args: tuple[object, ...]) -> Tensor:
    layout = x._spec.layout
    at = neighbours(indices)
    sharded_dims = [d for d in at if layout.partitions[d] is not None]
    if len(sharded_dims) != 1 or layout.is_partial:
        return NotImplemented
    (dim,) = sharded_dims
    partition = layout.partition_of(dim)
    meta = global_meta(op, args, {})
    shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
    found = _named(x, indices, at, partition, shape, stride, op)
    if found is not NotImplemented:
        return found
    rank = len(shape) - (x.ndim - len(at))
    if not _is_worth_it(x, shape) or (len(at) > 1 and len({indices[d].ndim for d in at}) > 1):
        return NotImplemented
    whole = {d: _whole_along(indices[d], partition.mesh_dims, layout.mesh) for d in at}
    if any(not w.is_replicated for d, (w, _) in whole.items() if len(at) > 1):
        return NotImplemented
    of_x = {d: d if d < at[0] else d - len(at) + rank for d in range(x.ndim) if d not in at}
    placed = _place(layout, partition, len(shape), of_x, whole[dim][0], {d: at[0] + d for d in range(rank)})
    if placed is None:
        return NotImplemented
    rows = padded(x._local_tensor, [dim], 0)
    mine, local = _own(whole[dim][1], partition, layout, dim, wraps=op is aten.index.Tensor)
    by_dim = {**{d: i for d, (_, i) in whole.items()}, dim: local}
    values = aten.index.Tensor(rows, [by_dim.get(d) for d in range(at[-1] + 1)])
    mine = mine.reshape([*mine.shape, *[1] * (x.ndim - 1 - at[-1])])
    return _finish(x, partition, values, mine, placed, shape, stride)


def gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """``aten.gather`` along a sharded dim of a tensor that is not sharded otherwise."""
    if not isinstance(x, Sharded) or not x.ndim or index.ndim != x.ndim:
        return NotImplemented
    dim, layout = dim % x.ndim, x._spec.layout
    partition = layout.partitions[dim]
    if partition is None or layout.is_partial:
        return NotImplemented
    meta = global_meta(aten.gather.default, (x, dim, index), {})
    column = column_of(index, dim, x.shape)
    if column is not None and is_linked(column, partition):
        shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
        found = taken(x, dim, column, shape, stride, aten.gather.default)
        if found is not NotImplemented:
            return found
    if sum(c is not None for c in layout.partitions) > 1 or not _is_worth_it(x, index.shape):
        return NotImplemented
    other, whole = _whole_along(index, partition.mesh_dims, layout.mesh)
    if not other.is_replicated:
        return NotImplemented
    rows = padded(x._local_tensor, [dim], 0)
    mine, local = _own(whole, partition, layout, dim, wraps=False)
    values = aten.gather.default(rows, dim, local)
    placements: list[Placement] = [Replicate()] * len(layout.placements)
    partitions: list[Partition | None] = [None] * x.ndim
    return _finish(
        x,
        partition,
        values,
        mine,
        (placements, partitions),
        compat.global_sizes(meta.shape),
        compat.retrace(meta.stride()),
    )


def scatter_value(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """``aten.scatter`` of a number along a sharded dim of a tensor that is not sharded otherwise."""
    return _scatter(x, dim, index, aten.scatter.value, value)


def scatter_src(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``aten.scatter`` of a tensor along a sharded dim of a tensor that is not sharded otherwise."""
    return _scatter(x, dim, index, aten.scatter.src, source)


def _scatter(x: Tensor, dim: int, index: Tensor, op: OpOverload, source: Tensor) -> Tensor:
    """Each rank writes the rows that it has; what belongs to others goes into a row of padding."""
    if not isinstance(x, Sharded) or not x.ndim or index.ndim != x.ndim:
        return NotImplemented
    dim, layout = dim % x.ndim, x._spec.layout
    partition = layout.partitions[dim]
    if partition is None or layout.is_partial:
        return NotImplemented
    meta = global_meta(op, (x, dim, index, source), {})
    column = column_of(index, dim, x.shape)
    if column is not None and is_linked(column, partition):
        if op is aten.scatter.value:
            return filled(x, dim, column, source, compat.retrace(meta.stride()))
        found = combined(x, dim, column, source, op, "any", include_self=False)
        if found is not NotImplemented:
            return found
    if sum(c is not None for c in layout.partitions) > 1:
        return NotImplemented
    given = [index, source] if op is aten.scatter.src else [index]
    whole = [_whole_along(t, partition.mesh_dims, layout.mesh) for t in given]
    if not all(other.is_replicated for other, _ in whole):
        return NotImplemented
    shard = x._local_tensor
    size = shard_size(partition, layout.mesh)
    _, local = _own(whole[0][1], partition, layout, dim, wraps=False, elsewhere=size)
    padding = shard.new_zeros([1 if d == dim else n for d, n in enumerate(shard.shape)])
    longer = op(torch.cat([shard, padding], dim), dim, local, whole[1][1] if len(whole) > 1 else source)
    written = torch.narrow_copy(longer, dim, 0, size)
    return wrap(x, written, layout, compat.retrace(meta.stride()))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Take from the flattened tensor. Torch's decomposition reads the value of an index of 0 dims, which a trace
    cannot.
    """
    return aten.index.Tensor(x.reshape(-1), [index])


state(aten.take.default, sharded=_take)
state(aten.embedding.default, sharded=embedding)
state(aten.index_select.default, sharded=Form(index_select, joined=_index_select_joined))
state(aten.index.Tensor, sharded=Form(index, joined=_index_joined))
state(aten.gather.default, sharded=gather)
state(aten.scatter.src, sharded=scatter_src)
state(aten.scatter.value, sharded=scatter_value)
