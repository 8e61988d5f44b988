"""Grouped matrix products, as in mixtures of experts, where the matrices of the groups are sharded.

Rows are sent to the ranks that hold the matrices of their groups, along any mesh dim, and the results stay there: a
layer of experts redistributes its rows once, and the next product with the same groups communicates nothing. The shard
sizes of the results are data-dependent. While tracing, an op below autograd could not return a tensor of such shards,
so this is done above autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import partition_of_sizes, shard_size, shard_starts
from shardcompile.ops.index.planned_gathers import fits, rows_taken
from shardcompile.ops.matmul.grouped import ends_in_shard, in_rows
from shardcompile.ops.support.sharded_rows import first_row
from shardcompile.sharded import Sharded, shard_of
from shardcompile.sharding import Layout, Partition, is_sharded_once
from shardcompile.tensor.aligned_rows import on_mesh, wrapped
from shardcompile.tensor.autograd import ToLocal, redistributed

aten = torch.ops.aten


def grouped_mm(
    func: Callable[..., object],
    x: Tensor,
    mats: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> object:
    """Implements ``torch.nn.functional.grouped_mm``: rows [s, k] times the matrix of each row's group, of [e, k, n]."""
    if bias is not None or offs is None or not _is_supported(mats, x):
        return func(x, mats, offs=offs, bias=bias, out_dtype=out_dtype)
    return _aten_grouped_mm(x, mats, offs, out_dtype)


def grouped_mm_fallback(func: Callable[..., object], x: Tensor, mats: Tensor, offs: Tensor) -> object:
    """Implements the op that `transformers` calls instead in compiled functions, for all dtypes but bfloat16."""
    return _transformers_grouped_mm(x, mats, offs) if _is_supported(mats, x) else func(x, mats, offs)


def _is_supported(mats: Tensor, x: Tensor) -> TypeGuard[Sharded]:
    """Returns whether the matrices are sharded over the groups by one mesh dim."""
    if x.ndim != 2 or mats.ndim != 3 or not isinstance(mats, Sharded):
        return False
    return is_sharded_once(mats._spec.layout.partitions[0])


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _aten_grouped_mm(x: Tensor, mats: Sharded, offs: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return _grouped_product(lambda *args: aten._grouped_mm.default(*args, None, out_dtype), x, mats, offs)


@torch.compiler.allow_in_graph
def _transformers_grouped_mm(x: Tensor, mats: Sharded, offs: Tensor) -> Tensor:
    return _grouped_product(torch.ops.transformers.grouped_mm_fallback.default, x, mats, offs)


def _grouped_product(product: Callable[..., Tensor], x: Tensor, mats: Sharded, offs: Tensor) -> Tensor:
    mats_layout = mats._spec.layout
    mesh, experts = mats_layout.mesh, mats_layout.partition_of(0)
    x, groups = on_mesh(x, mesh), on_mesh(offs, mesh)
    ends = ToLocal.apply(redistributed(groups, Layout.whole(mesh, offs.shape, offs.dtype)), None)
    x_layout = x._spec.layout
    rows = _partition_by_experts(offs, ends, experts, x_layout)
    with compat.unrecorded_symbols(ends):
        x = _redistribute_rows(x, rows)
        mats = redistributed(
            mats, Layout.of_partitions(mesh, mats_layout.shape, mats_layout.dtype, [experts, None, None])
        )
        first: Any = first_row(experts, mats_layout)
        local_ends = ends_in_shard(ends.narrow(0, first, shard_size(experts, mesh)), rows, x_layout)
        out = product(in_rows(ToLocal.apply(x, None)), ToLocal.apply(mats, None), local_ends)
    if out.requires_grad:
        out.register_hook(in_rows)
    shape = (x_layout.shape[0], mats_layout.shape[2])
    return wrapped(out, Layout.of_partitions(mesh, shape, out.dtype, [rows, None]))


def _redistribute_rows(x: Sharded, rows: Partition) -> Sharded:
    """Redistributes rows to another partition.

    If `x` was gathered from a table while tracing, its indices are redistributed and the gather is repeated in the new
    partition: the rows are sent once instead of twice.
    """
    layout = x._spec.layout
    gather = rows_taken(x)
    if gather is not None:
        table, indices = gather
        target = Layout.of_partitions(layout.mesh, indices.shape, indices.dtype, [rows])
        row_bytes = x.element_size() * compat.size_hint(x.shape[1])
        if row_bytes > indices.element_size() and fits(table._spec.layout.partitions[0], target):
            compat.mark_dead(shard_of(x), [shard_of(table), shard_of(indices)])
            x = aten.index.Tensor(table, [redistributed(indices, target)])
    return redistributed(x, Layout.of_partitions(layout.mesh, layout.shape, layout.dtype, [rows, None]))


def _partition_by_experts(offs: Tensor, ends: Tensor, experts: Partition, x_layout: Layout) -> Partition:
    """Returns the partition of rows, sorted by group, in which each row is on the rank of the matrix of its group.

    Rows after the last group, which belong to no group, are placed with those of the last group. While tracing,
    several products with the same groups share one partition, so the second one finds its rows in place.

    Args:
        offs: the ends of the groups, as the argument was passed.
        ends: the end of each group: [e], the same on every rank.
        experts: the partition of the matrices.
        x_layout: the layout of the rows.
    """

    def make() -> Partition:
        mesh = x_layout.mesh
        starts = shard_starts(experts, mesh)[1:]
        inner = torch.cat([ends.new_zeros([1]), ends]).cpu().long().index_select(0, starts)
        total: Any = x_layout.shape[0]
        boundaries = torch.cat([inner.new_zeros([1]), inner, inner.new_full([1], total)])
        return partition_of_sizes(boundaries[1:] - boundaries[:-1], mesh, experts.mesh_dims, dim_size=x_layout.shape[0])

    if not compat.is_fake(ends):
        return make()
    key = ("rows of experts", x_layout.mesh, compat.expression_of(x_layout.shape[0]))
    cached: list[tuple[Partition, Partition]] = compat.once_for_tensor(offs, key, list)
    for of_matrices, rows in cached:
        if of_matrices.guard_same_shards(experts):
            return rows
    cached.append((experts, make()))
    return cached[-1][1]
