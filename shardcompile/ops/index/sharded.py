"""Gathers rows of a sharded dim by index, and writes to them. Every rank gathers the rows that it holds, and the
results are a pending sum.

This looks up rows of a sharded table without an all-gather of the table (as in Shoeybi et al., "Megatron-LM", 2019,
for the vocabulary). Where the index is sharded over the same ranks as the rows, a gather plan is used instead
(`planned_gathers`). An index that is out of range for the global dim is out of range for every shard: inside a graph
the kernel raises, on all ranks that gather.
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
from shardcompile.ops import NotServed, ShardedDecomposition, state
from shardcompile.ops.index.flat_index import planned_flat_index
from shardcompile.ops.index.planned_gathers import (
    column_of,
    combined,
    filled,
    has_gather_plan,
    no_gather_plan,
    on_device_of,
    taken,
)
from shardcompile.ops.index.rule import neighbours
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.local_shards import padded
from shardcompile.ops.support.sharded_rows import first_row, local_shard_in, reduced, wrap
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Partition, transfer_dtype_of

aten = torch.ops.aten


def _replicate_over(x: Tensor, mesh_dims: Sequence[int], mesh: DeviceMesh) -> tuple[Layout, Tensor]:
    """Replicates a tensor over some mesh dims, and carries out its pending reductions; returns its layout and shard."""
    if not isinstance(x, Sharded):
        return Layout.whole(mesh, x.shape, x.dtype), x
    now = x._spec.layout.reduced()
    affected = {d for d, c in enumerate(now.partitions) if c is not None and set(c.mesh_dims) & set(mesh_dims)}
    kept = [Replicate() if isinstance(p, Shard) and p.dim in affected else p for p in now.placements]
    layout = Layout.of(
        mesh, kept, now.shape, now.dtype, [None if d in affected else c for d, c in enumerate(now.partitions)]
    )
    return layout, local_shard_in(x, layout)


def _local_indices(
    index: Tensor, partition: Partition, layout: Layout, dim: int, wraps: bool, elsewhere: Any = 0
) -> tuple[Tensor, Tensor]:
    """Returns which indices name rows of this rank's local shard, and the indices within it.

    An index that is out of range stays so, even though kernels count negative indices from the end of the shard, and
    the shard may have a row of padding.

    Args:
        index: the indices.
        partition: partition of the dim that they index.
        layout: layout of the tensor.
        dim: the dim.
        wraps: whether negative indices count from its end.
        elsewhere: the index that replaces those of rows on other ranks.
    """
    size: Any = layout.shape[dim]
    first: Any = first_row(partition, layout)
    row = torch.where(index < 0, index + size if wraps else index, index)
    is_local = (row >= first) & (row < first + shard_size(partition, layout.mesh))
    in_range = (row >= 0) & (row < size)
    out_of_range = torch.where(index < 0, index - size - 1, index + 1)
    return is_local, torch.where(is_local, row - first, torch.where(in_range, elsewhere, out_of_range))


def _masked_term(values: Tensor, is_local: Tensor) -> tuple[Tensor, str]:
    """Returns this rank's term of a reduction, with the neutral element where rows are on other ranks, and its op."""
    if values.dtype is torch.bool:
        return values & is_local, "max"
    as_sent = transfer_dtype_of(values.dtype)
    if as_sent is values.dtype:
        return torch.where(is_local, values, 0), "sum"
    return torch.where(is_local, values.view(as_sent), 0).view(values.dtype), "sum"  # 2.11 has no `where` of uint16


def _result_placements(
    layout: Layout, partition: Partition, ndim: int, of_x: dict[int, int], other: Layout, of_index: dict[int, int]
) -> tuple[list[Placement], list[Partition | None]] | None:
    """Placements and partitions of the result; None if one mesh dim shards both inputs.

    Args:
        layout: layout of the tensor that is indexed.
        partition: partition of the dim that is indexed.
        ndim: number of dims of the result.
        of_x: result dim for each dim of the tensor that the result has.
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


def _wrap_term(
    x: Sharded,
    partition: Partition,
    values: Tensor,
    is_local: Tensor,
    placed: tuple[list[Placement], list[Partition | None]],
    shape: Sequence[IntLike],
    stride: Sequence[IntLike],
) -> Tensor:
    """Wraps the values that this rank gathered as a term of a pending reduction."""
    placements, partitions = placed
    term, reduce_op = _masked_term(values, is_local)
    layout = x._spec.layout
    for m in partition.mesh_dims:
        placements[m] = Partial(reduce_op)
    return wrap(x, term, Layout.of(layout.mesh, placements, shape, values.dtype, partitions), stride)


def embedding(weight: Sharded, indices: Tensor, *options: object) -> Tensor | NotServed:
    """``aten.embedding`` with a table whose rows are sharded."""
    partition = weight._spec.layout.partitions[0] if isinstance(weight, Sharded) else None
    if partition is None:
        return NotServed("the rows of the table are not sharded")
    weight = reduced(weight)
    meta = global_meta(aten.embedding.default, (weight, indices, *options), {})
    if has_gather_plan(indices, partition):
        shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
        found = taken(weight, 0, indices, shape, stride, aten.embedding.default)
        if not isinstance(found, NotServed):
            return found
    layout = weight._spec.layout
    other, index = _replicate_over(indices, partition.mesh_dims, layout.mesh)
    ndim = indices.ndim
    placed = _result_placements(layout, partition, ndim + 1, {1: ndim}, other, {d: d for d in range(ndim)})
    if placed is None:
        return NotServed("one mesh dim would shard two dims of the result")
    table = padded(weight._local_tensor, [0], 0)
    is_local, local = _local_indices(index, partition, layout, 0, wraps=False)
    values = aten.embedding.default(table, local)
    shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
    return _wrap_term(weight, partition, values, is_local.unsqueeze(-1), placed, shape, stride)


def _is_worth_it(x: Tensor, shape: Sequence[IntLike]) -> bool:
    """Whether reducing the results, which moves each twice, takes no more bytes than gathering the tensor."""
    out, full = 2, 1
    for n in shape:
        out *= compat.size_hint(n)
    for n in x.shape:
        full *= compat.size_hint(n)
    return out <= full


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor | NotServed:
    """``aten.index_select`` along a sharded dim."""
    if not isinstance(x, Sharded) or not x.ndim:
        return NotServed("the input is not sharded along a dim")
    if index.ndim != 1:
        return NotServed("the index is not 1-d")
    dim = dim % x.ndim
    return _index(x, [index if d == dim else None for d in range(x.ndim)], aten.index_select.default, (x, dim, index))


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | NotServed:
    """``aten.index`` along a sharded dim."""
    if not isinstance(x, Sharded):
        return NotServed("the input is not sharded")
    indices = on_device_of(indices, x)
    return _index(x, indices, aten.index.Tensor, (x, indices))


def _index_segments(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | NotServed:
    """``aten.index`` along a dim into which others were flattened."""
    indices = on_device_of(indices, x)
    at = [d for d, i in enumerate(indices) if i is not None]
    if len(at) != 1:
        return NotServed("several dims are indexed")
    return _gather_from_segments(x, at[0], indices[at[0]], aten.index.Tensor, (x, indices))


def _index_select_segments(x: Tensor, dim: int, index: Tensor) -> Tensor | NotServed:
    """``aten.index_select`` along a dim into which others were flattened."""
    return _gather_from_segments(x, dim % max(x.ndim, 1), index, aten.index_select.default, (x, dim, index))


def _gather_by_plan(
    x: Sharded,
    indices: Sequence[Any],
    at: Sequence[int],
    partition: Partition,
    shape: Sequence[IntLike],
    stride: Sequence[IntLike],
    op: OpOverload,
) -> Tensor | NotServed:
    """Gathers elements by a gather plan; NotServed where none fits."""
    rows: Any = x
    flat_index = indices[at[0]]
    if len(at) > 1:
        flat_index = planned_flat_index(partition, [x.shape[d] for d in at], [indices[d] for d in at])
        if isinstance(flat_index, NotServed):
            return flat_index
        rows = x.flatten(at[0], at[-1])
    row_partition = rows._spec.layout.partitions[at[0]]
    if not has_gather_plan(flat_index, row_partition):
        return no_gather_plan(flat_index, row_partition)
    return taken(rows, at[0], flat_index, shape, stride, op)


def _gather_from_segments(
    x: Tensor, dim: int, index: Any, op: OpOverload, args: tuple[object, ...]
) -> Tensor | NotServed:
    """Gathers rows of a dim into which others were flattened by a gather plan; NotServed where none fits."""
    if not isinstance(x, Sharded):
        return NotServed("the input is not sharded")
    if x._spec.layout.is_partial:
        return NotServed("the input has a pending reduction")
    partition = x._spec.layout.partitions[dim]
    if not has_gather_plan(index, partition):
        return no_gather_plan(index, partition)
    if any(
        c is not None and not compat.is_one(c.num_segments) for d, c in enumerate(x._spec.layout.partitions) if d != dim
    ):
        return NotServed("another dim than the indexed one was flattened with others")
    meta = global_meta(op, args, {})
    return taken(x, dim, index, compat.global_sizes(meta.shape), compat.retrace(meta.stride()), op)


def _index(x: Sharded, indices: Sequence[Any], op: OpOverload, args: tuple[object, ...]) -> Tensor | NotServed:
    layout = x._spec.layout
    at = neighbours(indices)
    if not at:
        return NotServed("the indexed dims are not adjacent, or an index is a mask")
    sharded_dims = [d for d in at if layout.partitions[d] is not None]
    if len(sharded_dims) != 1:
        return NotServed("not exactly one indexed dim is sharded")
    if layout.is_partial:
        return NotServed("the input has a pending reduction")
    (dim,) = sharded_dims
    partition = layout.partition_of(dim)
    meta = global_meta(op, args, {})
    shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
    found = _gather_by_plan(x, indices, at, partition, shape, stride, op)
    if not isinstance(found, NotServed):
        return found
    rank = len(shape) - (x.ndim - len(at))
    if not _is_worth_it(x, shape):
        return NotServed("reducing the result moves more than gathering the input")
    if len(at) > 1 and len({indices[d].ndim for d in at}) > 1:
        return NotServed("the indices differ in number of dims")
    replicated = {d: _replicate_over(indices[d], partition.mesh_dims, layout.mesh) for d in at}
    if any(not w.is_replicated for d, (w, _) in replicated.items() if len(at) > 1):
        return NotServed("an index is sharded over another mesh dim than the rows")
    of_x = {d: d if d < at[0] else d - len(at) + rank for d in range(x.ndim) if d not in at}
    placed = _result_placements(
        layout, partition, len(shape), of_x, replicated[dim][0], {d: at[0] + d for d in range(rank)}
    )
    if placed is None:
        return NotServed("one mesh dim would shard two dims of the result")
    rows = padded(x._local_tensor, [dim], 0)
    is_local, local = _local_indices(replicated[dim][1], partition, layout, dim, wraps=op is aten.index.Tensor)
    by_dim = {**{d: i for d, (_, i) in replicated.items()}, dim: local}
    values = aten.index.Tensor(rows, [by_dim.get(d) for d in range(at[-1] + 1)])
    is_local = is_local.reshape([*is_local.shape, *[1] * (x.ndim - 1 - at[-1])])
    return _wrap_term(x, partition, values, is_local, placed, shape, stride)


def gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor | NotServed:
    """``aten.gather`` along a sharded dim of a tensor that is not sharded otherwise."""
    if not isinstance(x, Sharded) or not x.ndim:
        return NotServed("the input is not sharded along a dim")
    if index.ndim != x.ndim:
        return NotServed("index and input differ in number of dims")
    dim, layout = dim % x.ndim, x._spec.layout
    partition = layout.partitions[dim]
    if partition is None:
        return NotServed("the indexed dim is not sharded")
    if layout.is_partial:
        return NotServed("the input has a pending reduction")
    meta = global_meta(aten.gather.default, (x, dim, index), {})
    column = column_of(index, dim, x.shape)
    if column is not None and has_gather_plan(column, partition):
        shape, stride = compat.global_sizes(meta.shape), compat.retrace(meta.stride())
        found = taken(x, dim, column, shape, stride, aten.gather.default)
        if not isinstance(found, NotServed):
            return found
    if sum(c is not None for c in layout.partitions) > 1:
        return NotServed("another dim than the indexed one is sharded, too")
    if not _is_worth_it(x, index.shape):
        return NotServed("reducing the result moves more than gathering the input")
    other, replicated = _replicate_over(index, partition.mesh_dims, layout.mesh)
    if not other.is_replicated:
        return NotServed("the index is sharded over another mesh dim than the rows")
    rows = padded(x._local_tensor, [dim], 0)
    is_local, local = _local_indices(replicated, partition, layout, dim, wraps=False)
    values = aten.gather.default(rows, dim, local)
    placements: list[Placement] = [Replicate()] * len(layout.placements)
    partitions: list[Partition | None] = [None] * x.ndim
    return _wrap_term(
        x,
        partition,
        values,
        is_local,
        (placements, partitions),
        compat.global_sizes(meta.shape),
        compat.retrace(meta.stride()),
    )


def scatter_value(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor | NotServed:
    """``aten.scatter`` of a scalar along a sharded dim of a tensor that is not sharded otherwise."""
    return _scatter(x, dim, index, aten.scatter.value, value)


def scatter_src(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | NotServed:
    """``aten.scatter`` of a tensor along a sharded dim of a tensor that is not sharded otherwise."""
    return _scatter(x, dim, index, aten.scatter.src, source)


def _scatter(x: Tensor, dim: int, index: Tensor, op: OpOverload, source: Tensor) -> Tensor | NotServed:
    """Each rank writes the rows that it holds; writes to rows of other ranks go into a row of padding."""
    if not isinstance(x, Sharded) or not x.ndim:
        return NotServed("the input is not sharded along a dim")
    if index.ndim != x.ndim:
        return NotServed("index and input differ in number of dims")
    dim, layout = dim % x.ndim, x._spec.layout
    partition = layout.partitions[dim]
    if partition is None:
        return NotServed("the indexed dim is not sharded")
    if layout.is_partial:
        return NotServed("the input has a pending reduction")
    meta = global_meta(op, (x, dim, index, source), {})
    column = column_of(index, dim, x.shape)
    if column is not None and has_gather_plan(column, partition):
        if op is aten.scatter.value:
            return filled(x, dim, column, source, compat.retrace(meta.stride()))
        found = combined(x, dim, column, source, op, "any", include_self=False)
        if not isinstance(found, NotServed):
            return found
    if sum(c is not None for c in layout.partitions) > 1:
        return NotServed("another dim than the indexed one is sharded, too")
    given = [index, source] if op is aten.scatter.src else [index]
    replicated = [_replicate_over(t, partition.mesh_dims, layout.mesh) for t in given]
    if not all(other.is_replicated for other, _ in replicated):
        return NotServed("index or source is sharded over another mesh dim")
    shard = x._local_tensor
    size = shard_size(partition, layout.mesh)
    _, local = _local_indices(replicated[0][1], partition, layout, dim, wraps=False, elsewhere=size)
    padding = shard.new_zeros([1 if d == dim else n for d, n in enumerate(shard.shape)])
    padded_rows = op(torch.cat([shard, padding], dim), dim, local, replicated[1][1] if len(replicated) > 1 else source)
    written = torch.narrow_copy(padded_rows, dim, 0, size)
    return wrap(x, written, layout, compat.retrace(meta.stride()))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Indexes the flattened tensor. Torch's decomposition reads the value of a 0-dim index, which a trace cannot."""
    return aten.index.Tensor(x.reshape(-1), [index])


state(aten.take.default, sharded=_take)
state(aten.embedding.default, sharded=embedding)
state(aten.index_select.default, sharded=ShardedDecomposition(index_select, segmented=_index_select_segments))
state(aten.index.Tensor, sharded=ShardedDecomposition(index, segmented=_index_segments))
state(aten.gather.default, sharded=gather)
state(aten.scatter.src, sharded=scatter_src)
state(aten.scatter.value, sharded=scatter_value)
