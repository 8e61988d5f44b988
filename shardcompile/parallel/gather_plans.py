"""Gather plans: the communication of ``x[index]`` and its adjoint, planned once and run many times.

An example is a graph, whose edges index its nodes::

    plan = plan_gather(nodes, index)   # once for a graph
    rows = plan.gather(nodes)          # nodes[index]: each row is sent once to each rank that indexes it
    sums = plan.scatter_add(messages)  # zeros.index_add(0, index, messages): each rank sends one sum per row

This is the inspector / executor scheme of parallel sparse solvers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import LocalGatherPlan, make_gather_plan
from shardcompile.errors import LayoutError
from shardcompile.sharding import Layout
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.aligned_rows import (
    identically_sharded,
    layout_of_column,
    layout_of_rows,
    mesh_dim_of_rows,
    on_mesh,
    one_or_all,
    wrapped,
)
from shardcompile.tensor.autograd import ToLocal, redistributed


class GatherPlan(NamedTuple):
    """The plan of the communication that an index needs, made by `plan_gather`.

    It consists of tensors, so it can be stored, passed to compiled functions and returned by them.

    Attributes:
        degree: how many entries of the index name each row: [n], int64, sharded as the rows.
        asked: asked[s, d] is the number of distinct rows that rank s of the mesh dim requests from rank d:
            [ranks, ranks], int64, on the CPU. Rows that a rank holds itself are not counted, as they are not sent.
        wanted: the global indices of the rows that a rank receives, each once: [b], int64, sharded as the received
            rows.
        sent: the indices in the local shard of the rows that a rank sends: [a], int64, sharded as the sent rows.
        place: for each entry of the index the position of its row in the concatenation of the local shard and the
            received rows; int64, in the shape of the index.
    """

    degree: Tensor
    asked: Tensor
    wanted: Tensor
    sent: Tensor
    place: Tensor

    def gather(self, *xs: Tensor) -> Any:
        """Returns ``x[index]`` of each tensor, in one exchange for all of them. Differentiable.

        Args:
            xs: each [n, ...].

        Returns:
            For each of `xs` [*index.shape, ...], sharded along dim 0 as the index. One tensor if one was given.

        Raises:
            LayoutError: there are not as many rows as `degree` has, or they lie on another mesh.
        """
        return one_or_all(_gather(*self, *xs))

    def scatter_add(self, *values: Tensor) -> Any:
        """Returns ``zeros.index_add(0, index, values)``: for each row the sum of the values whose index names it.

        All tensors take one exchange. Differentiable; the adjoint of `gather`.

        Args:
            values: each [*index.shape, ...].

        Returns:
            For each of `values` [n, ...], sharded as the rows. One tensor if one was given.

        Raises:
            LayoutError: there is not one value for each entry of the index.
        """
        return one_or_all(_scatter_add(*self, *values))


def plan_gather(x: Tensor, index: Tensor) -> GatherPlan:
    """Plans which rows are sent for an index. Takes three small collectives; one graph serves every index.

    Args:
        x: the tensor whose rows are indexed: [n, ...], sharded along dim 0 by one mesh dim.
        index: row indices, integers in any shape; negative ones count from the end. It is redistributed to shards
            along dim 0 by the same mesh dim.

    Raises:
        LayoutError: `x` is not sharded along dim 0 by one mesh dim, or `index` does not hold integers.
        RowRangeError: on every rank, before a row is sent, if an entry is out of range.
    """
    return GatherPlan(*_plan_gather(x, index))


def _shard_index(index: Tensor, mesh_dim: int, layout: Layout) -> ShardTensor:
    """Redistributes an index to shards along dim 0 by a mesh dim, and by no other."""
    index = on_mesh(index, layout.mesh)
    current = index._spec.layout
    if current.mesh != layout.mesh:
        raise LayoutError(f"the index {current.describe()} lies on another mesh than the rows, {layout.describe()}")
    partition = current.partitions[0]
    if partition is not None and partition.mesh_dims == (mesh_dim,) and all(c is None for c in current.partitions[1:]):
        return redistributed(index, current.reduced())
    placements = [Shard(0) if m == mesh_dim else Replicate() for m in range(layout.mesh.ndim)]
    return index.redistribute(placements=placements)


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _plan_gather(x: ShardTensor, index: Tensor) -> tuple[Tensor, ...]:
    """Returns the fields of a `GatherPlan`."""
    mesh_dim = mesh_dim_of_rows(x, "plan_gather")
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype is torch.bool or not index.ndim:
        raise LayoutError(
            f"plan_gather: an index is a tensor of integers of at least one dim; got {index.dtype} of shape "
            f"{tuple(index.shape)}"
        )
    layout = layout_of_column(x._spec.layout.reduced())
    partition = layout.partition_of(0)
    layout = Layout.of_partitions(layout.mesh, layout.shape, torch.int64, [partition])
    index = _shard_index(index, mesh_dim, layout)
    entries = index._spec.layout
    flat = ToLocal.apply(index, None)
    about = math.prod(map(compat.size_hint, entries.shape))
    plan = make_gather_plan(flat.reshape(-1), partition, layout.mesh, about, "plan_gather")
    (degree,) = plan.add([torch.ones_like(plan.place)])
    return (
        wrapped(degree, layout),
        plan.asked,
        wrapped(plan.wanted, layout_of_rows(plan.arrived_partition, layout)),
        wrapped(plan.sent, layout_of_rows(plan.sent_partition, layout)),
        wrapped(plan.place.view(flat.shape), entries),
    )


def _with_leading_dims(leading: Layout, source: Layout, num_replaced: int) -> Layout:
    """Returns the layout `source` with its first dims replaced by those of another layout.

    It turns the layout of rows into that of one row for each entry of an index, and back.

    Args:
        leading: the layout whose dims come first, of an index or of rows.
        source: the layout that gives the remaining dims and the dtype.
        num_replaced: how many leading dims of `source` are replaced.
    """
    placements = [
        Shard(p.dim + leading.ndim - num_replaced) if p.is_shard() and p.dim >= num_replaced else p  # type: ignore[attr-defined]
        for p in source.placements
    ]
    (mesh_dim,) = leading.partition_of(0).mesh_dims
    placements[mesh_dim] = Shard(0)
    shape = (*leading.shape, *source.shape[num_replaced:])
    partitions = [*leading.partitions, *source.partitions[num_replaced:]]
    return Layout.of(source.mesh, placements, shape, source.dtype, partitions)


def _local(
    degree: ShardTensor, asked: Tensor, wanted: ShardTensor, sent: ShardTensor, place: ShardTensor
) -> LocalGatherPlan:
    """Returns this rank's part of a `GatherPlan`, given its fields."""
    rows, (of_sent, of_wanted) = degree._spec.layout, (x._spec.layout.partition_of(0) for x in (sent, wanted))
    sent_rows, wanted_rows, places = (ToLocal.apply(x, None) for x in (sent, wanted, place))
    return LocalGatherPlan(
        rows.partition_of(0), rows.mesh, asked, sent_rows, wanted_rows, places.reshape(-1), of_sent, of_wanted
    )


@torch.compiler.allow_in_graph
def _gather(
    degree: ShardTensor, asked: Tensor, wanted: ShardTensor, sent: ShardTensor, place: ShardTensor, *xs: Tensor
) -> tuple[Tensor, ...]:
    row_layout, index_layout = degree._spec.layout, place._spec.layout
    given = [identically_sharded(x, row_layout, "GatherPlan.gather") for x in xs]
    rows = _local(degree, asked, wanted, sent, place).take([ToLocal.apply(x, None) for x in given])
    shape = place._local_tensor.shape
    return tuple(
        wrapped(r.view([*shape, *r.shape[1:]]), _with_leading_dims(index_layout, x._spec.layout, 1))
        for r, x in zip(rows, given, strict=True)
    )


@torch.compiler.allow_in_graph
def _scatter_add(
    degree: ShardTensor, asked: Tensor, wanted: ShardTensor, sent: ShardTensor, place: ShardTensor, *values: Tensor
) -> tuple[Tensor, ...]:
    row_layout, index_layout = degree._spec.layout, place._spec.layout
    dims, given = index_layout.ndim, []
    for v in values:
        if v.ndim < dims or not all(map(compat.guard_equal, v.shape[1:dims], index_layout.shape[1:])):
            raise LayoutError(
                f"GatherPlan.scatter_add: there is one value for each entry of the index, "
                f"{tuple(index_layout.shape)}; got {tuple(v.shape)}"
            )
        v = identically_sharded(v, index_layout, "GatherPlan.scatter_add")
        layout = v._spec.layout
        for d in range(1, dims):
            layout = layout if layout.partitions[d] is None else layout.gathered(d)
        given.append(redistributed(v, layout))
    shards = [ToLocal.apply(v, None) for v in given]
    flat = [b.flatten(0, dims - 1) if dims > 1 else b for b in shards]
    sums = _local(degree, asked, wanted, sent, place).add(flat)
    return tuple(
        wrapped(s, _with_leading_dims(row_layout, v._spec.layout, dims)) for s, v in zip(sums, given, strict=True)
    )
