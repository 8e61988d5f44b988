"""Sorting along a sharded dim: rows are sent to their sorted positions, and the result is sharded like the input."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate

from shardcompile import compat
from shardcompile.collectives import sort_rows, top_rows
from shardcompile.ops import NotServed, ShardedDecomposition, state
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.sharded_rows import local_shard_in, reduced, wrap
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, contiguous_stride, is_sharded_once, with_one_segment

aten = torch.ops.aten


def sort(x: Sharded, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor] | NotServed:
    """``aten.sort`` of a 1-d tensor that is sharded over one mesh dim."""
    if not isinstance(x, Sharded):
        return NotServed("the input is not sharded")
    if x.ndim != 1:
        return NotServed("the input is not 1-d")
    if x.dtype.is_complex:
        return NotServed("the dtype is complex")
    x = reduced(x)
    layout = x._spec.layout
    partition = layout.partitions[0]
    if partition is None or len(partition.mesh_dims) != 1:
        return NotServed("the input is not sharded over exactly one mesh dim")
    with compat.unrecorded_symbols(x._local_tensor):
        rows, indices, found = sort_rows(x._local_tensor, partition, layout.mesh, descending)
        source = Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, [found])
        target = Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, [with_one_segment(partition)])
        parts = [_redistributed(x, part, source, target) for part in (rows, indices)]
    return parts[0], parts[1]


def _redistributed(x: Sharded, part: Tensor, source: Layout, target: Layout) -> Tensor:
    """Redistributes sorted values or indices to the shard sizes of the input."""
    stride = contiguous_stride(target.shape)
    column = wrap(x, part, source.with_dtype(part.dtype), stride)
    wanted = target.with_dtype(part.dtype)
    return wrap(x, local_shard_in(column, wanted), wanted, stride)


def stable_sort(
    x: Sharded, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor] | NotServed:
    """``aten.sort.stable``: the distributed sort is always stable."""
    return sort(x, dim, descending)


def topk(
    x: Sharded, k: IntLike, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor] | NotServed:
    """``aten.topk`` along a dim sharded over one mesh dim: the candidates of all ranks are gathered on each of them."""
    if not isinstance(x, Sharded) or x.ndim == 0:
        return NotServed("the input is not sharded along a dim")
    if x.dtype.is_complex:
        return NotServed("the dtype is complex")
    if not isinstance(k, int):
        return NotServed("k is symbolic")
    dim = dim % x.ndim
    partition = x._spec.layout.partitions[dim]
    if not is_sharded_once(partition):
        return NotServed("the dim is not sharded into ranges over one mesh dim")
    x = reduced(x)
    layout = x._spec.layout
    (mesh_dim,) = partition.mesh_dims
    # Candidates have two columns, values and indices.
    if 2 * k * layout.mesh.shape[mesh_dim] > compat.size_hint(x.shape[dim]):
        return NotServed("gathering all candidates moves more than gathering the dim")
    meta = global_meta(aten.topk.default, (x, k, dim, largest, sorted), {})
    with compat.unrecorded_symbols(x._local_tensor):
        parts = top_rows(x._local_tensor, dim, k, partition, layout.mesh, largest)
    placements = [Replicate() if m == mesh_dim else p for m, p in enumerate(layout.placements)]
    shape = [k if d == dim else n for d, n in enumerate(layout.shape)]
    partitions = [None if d == dim else c for d, c in enumerate(layout.partitions)]
    values, indices = (
        wrap(x, part, Layout.of(layout.mesh, placements, shape, part.dtype, partitions), compat.retrace(m.stride()))
        for part, m in zip(parts, meta, strict=True)
    )
    return values, indices


state(aten.sort.default, sharded=ShardedDecomposition(sort, segmented=sort))
state(aten.topk.default, sharded=topk)
state(aten.sort.stable, sharded=ShardedDecomposition(stable_sort, segmented=stable_sort))
