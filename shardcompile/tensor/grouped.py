"""Rows in groups and the matrix of each group, as experts have them, where the matrices are sharded.

Rows go to the ranks that have the matrices of their groups, along whichever mesh dim, and what they become stays there.
So a layer of experts moves its rows once, and the next product of the same groups moves none. How many rows a rank has
then is known at run time only: these functions return a tensor of such shards, which an op below autograd could not do
in a trace.
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
from shardcompile.ops.view.rows import first_row
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
    """``torch.nn.functional.grouped_mm``: [s, k] times the matrix of each row's group, of [e, k, n]."""
    if bias is not None or offs is None or not _serves(mats, x):
        return func(x, mats, offs=offs, bias=bias, out_dtype=out_dtype)
    return _of_aten(x, mats, offs, out_dtype)


def grouped_mm_fallback(func: Callable[..., object], x: Tensor, mats: Tensor, offs: Tensor) -> object:
    """What `transformers` calls in its place in compiled functions, for all dtypes but bfloat16."""
    return _of_transformers(x, mats, offs) if _serves(mats, x) else func(x, mats, offs)


def _serves(mats: Tensor, x: Tensor) -> TypeGuard[Sharded]:
    if x.ndim != 2 or mats.ndim != 3 or not isinstance(mats, Sharded):
        return False
    return is_sharded_once(mats._spec.layout.partitions[0])


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _of_aten(x: Tensor, mats: Sharded, offs: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    return _multiplied(lambda *given: aten._grouped_mm.default(*given, None, out_dtype), x, mats, offs)


@torch.compiler.allow_in_graph
def _of_transformers(x: Tensor, mats: Sharded, offs: Tensor) -> Tensor:
    return _multiplied(torch.ops.transformers.grouped_mm_fallback.default, x, mats, offs)


def _multiplied(product: Callable[..., Tensor], x: Tensor, mats: Sharded, offs: Tensor) -> Tensor:
    of_mats = mats._spec.layout
    mesh, experts = of_mats.mesh, of_mats.partition_of(0)
    x, groups = on_mesh(x, mesh), on_mesh(offs, mesh)
    ends = ToLocal.apply(redistributed(groups, Layout.whole(mesh, offs.shape, offs.dtype)), None)
    of_x = x._spec.layout
    rows = _rows_of_experts(offs, ends, experts, of_x)
    with compat.unrecorded_symbols(ends):
        x = _at_experts(x, rows)
        mats = redistributed(mats, Layout.of_partitions(mesh, of_mats.shape, of_mats.dtype, [experts, None, None]))
        first: Any = first_row(experts, of_mats)
        own = ends_in_shard(ends.narrow(0, first, shard_size(experts, mesh)), rows, of_x)
        out = product(in_rows(ToLocal.apply(x, None)), ToLocal.apply(mats, None), own)
    if out.requires_grad:
        out.register_hook(in_rows)
    shape = (of_x.shape[0], of_mats.shape[2])
    return wrapped(out, Layout.of_partitions(mesh, shape, out.dtype, [rows, None]))


def _at_experts(x: Sharded, rows: Partition) -> Sharded:
    """Rows in another partition. In a trace rows that were looked up are looked up there: so they travel once, not
    twice.
    """
    layout = x._spec.layout
    taken = rows_taken(x)
    if taken is not None:
        table, numbers = taken
        there = Layout.of_partitions(layout.mesh, numbers.shape, numbers.dtype, [rows])
        width = x.element_size() * compat.size_hint(x.shape[1])
        if width > numbers.element_size() and fits(table._spec.layout.partitions[0], there):
            compat.supersede(shard_of(x), [shard_of(table), shard_of(numbers)])
            x = aten.index.Tensor(table, [redistributed(numbers, there)])
    return redistributed(x, Layout.of_partitions(layout.mesh, layout.shape, layout.dtype, [rows, None]))


def _rows_of_experts(offs: Tensor, ends: Tensor, experts: Partition, of_x: Layout) -> Partition:
    """The partition of rows in order of their groups by which each is where the matrix of its group is.

    Rows behind the last group, which belong to none, are with those of the last one. In a trace several products of
    the same groups get one partition: rows that the first one leaves are where the second one needs them.

    Args:
        offs: where groups end, as they were given.
        ends: where each group ends: [e], the same on every rank.
        experts: how the matrices are sharded.
        of_x: the layout of the rows.
    """

    def make() -> Partition:
        mesh = of_x.mesh
        starts = shard_starts(experts, mesh)[1:]
        inner = torch.cat([ends.new_zeros([1]), ends]).cpu().long().index_select(0, starts)
        total: Any = of_x.shape[0]
        edges = torch.cat([inner.new_zeros([1]), inner, inner.new_full([1], total)])
        return partition_of_sizes(edges[1:] - edges[:-1], mesh, experts.mesh_dims, dim_size=of_x.shape[0])

    if not compat.is_fake(ends):
        return make()
    what = ("rows of experts", of_x.mesh, compat.expression_of(of_x.shape[0]))
    made: list[tuple[Partition, Partition]] = compat.once_for_tensor(offs, what, list)
    for known, rows in made:
        if known.same_shards(experts):
            return rows
    made.append((experts, make()))
    return made[-1][1]
