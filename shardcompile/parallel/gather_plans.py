"""Rows that other rows name: the nodes of a graph, named by its edges.

links = link_rows(nodes, index)   # once for a graph
rows = links.take(nodes)          # nodes[index]: each row travels once to each rank that names it
sums = links.add(messages)        # zeros.index_add(0, index, messages): sums travel the same way home
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import add_rows, find_links, rows_travel, shard_size, take_rows
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


class RowLinks(NamedTuple):
    """Which rows an index names. Made of tensors: it can be kept, and given to and returned by compiled functions.

    Attributes:
        degree: how often each row is named: [n], int64, sharded as the rows are.
        asked: asked[s, d] distinct rows are named on rank s of the mesh dim and held by rank d: [ranks, ranks], int64,
            on the CPU. What a rank names of its own rows is not counted: it does not travel.
        wanted: the row indices that come to a rank, each once: [b], int64, sharded over what comes.
        sent: of the rows that a rank sends their numbers in its shard: [a], int64, sharded over what is sent.
        place: where the row of each entry of the index is: among the rank's own rows, then those that come to it.
            int64, in the shape of the index.
    """

    degree: Tensor
    asked: Tensor
    wanted: Tensor
    sent: Tensor
    place: Tensor

    def take(self, *xs: Tensor) -> Any:
        """``x[index]`` of each tensor, all of them by one exchange. Differentiable.

        Args:
            xs: each [n, ...].

        Returns:
            Of each [*index.shape, ...], sharded along dim 0 as the index. One tensor if one was given.

        Raises:
            LayoutError: there are not as many rows as `degree` has, or they lie on another mesh.
        """
        return one_or_all(_take(*self, *xs))

    def add(self, *values: Tensor) -> Any:
        """The sum of the values of all entries that name a row, for each row. Differentiable; the adjoint of `take`.

        Args:
            values: each [*index.shape, ...]. All of them by one exchange.

        Returns:
            Of each [n, ...], sharded as the rows. One tensor if one was given.

        Raises:
            LayoutError: there is not one value for each entry of the index.
        """
        return one_or_all(_add(*self, *values))


def link_rows(x: Tensor, index: Tensor) -> RowLinks:
    """Work out which rows have to travel for an index. Three small collectives; one graph serves every index.

    Args:
        x: whose rows are named: [n, ...], sharded along dim 0 by one mesh dim.
        index: row indices, negative ones from the end: whole numbers in any shape, brought to shards along dim 0 of
            the same mesh dim.

    Raises:
        LayoutError: `x` is not sharded along dim 0 by one mesh dim, or `index` holds no whole numbers.
        RowRangeError: on every rank, before a row is moved, if an entry is out of range.
    """
    return RowLinks(*_link(x, index))


def _partition_along(index: Tensor, mesh_dim: int, layout: Layout) -> ShardTensor:
    """An index sharded along dim 0 by a mesh dim, and by no other."""
    index = on_mesh(index, layout.mesh)
    now = index._spec.layout
    if now.mesh != layout.mesh:
        raise LayoutError(f"the index {now.describe()} lies on another mesh than the rows, {layout.describe()}")
    partition = now.partitions[0]
    if partition is not None and partition.mesh_dims == (mesh_dim,) and all(c is None for c in now.partitions[1:]):
        return redistributed(index, now.reduced())
    placements = [Shard(0) if m == mesh_dim else Replicate() for m in range(layout.mesh.ndim)]
    return index.redistribute(placements=placements)


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _link(x: ShardTensor, index: Tensor) -> tuple[Tensor, ...]:
    """The parts of a `RowLinks`."""
    mesh_dim = mesh_dim_of_rows(x, "link_rows")
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype is torch.bool or not index.ndim:
        raise LayoutError(
            f"link_rows: an index is a tensor of whole numbers of at least one dim; got {index.dtype} of shape "
            f"{tuple(index.shape)}"
        )
    layout = layout_of_column(x._spec.layout.reduced())
    partition = layout.partition_of(0)
    layout = Layout.of_partitions(layout.mesh, layout.shape, torch.int64, [partition])
    index = _partition_along(index, mesh_dim, layout)
    entries = index._spec.layout
    flat = ToLocal.apply(index, None)
    about = math.prod(map(compat.size_hint, entries.shape))
    links = find_links(flat.reshape(-1), partition, layout.mesh, about, "link_rows")
    group_name = compat.group_name_of(layout.mesh, mesh_dim)
    arriving = links.arrived_partition.local_size(compat.coordinate(layout.mesh))
    shard = shard_size(partition, layout.mesh)
    ones = torch.ones_like(links.place)
    ways = (links.asked, links.sent, links.place, shard, arriving, group_name)
    (degree,) = add_rows([ones], *ways, travels=rows_travel(links.arrived_partition))
    return (
        wrapped(degree, layout),
        links.asked,
        wrapped(links.wanted, layout_of_rows(links.arrived_partition, layout)),
        wrapped(links.sent, layout_of_rows(links.sent_partition, layout)),
        wrapped(links.place.view(flat.shape), entries),
    )


def _of_entries(entries: Layout, of: Layout, dims: int) -> Layout:
    """The layout of one value for each of some entries, from that of one for each of others.

    Args:
        entries: the layout of the entries, of an index or of rows.
        of: the layout of the values of the others.
        dims: how many dims of `of` count the others.
    """
    placements = [Shard(p.dim + entries.ndim - dims) if p.is_shard() and p.dim >= dims else p for p in of.placements]  # type: ignore[attr-defined]
    (mesh_dim,) = entries.partition_of(0).mesh_dims
    placements[mesh_dim] = Shard(0)
    shape = (*entries.shape, *of.shape[dims:])
    return Layout.of(of.mesh, placements, shape, of.dtype, [*entries.partitions, *of.partitions[dims:]])


@torch.compiler.allow_in_graph
def _take(
    degree: ShardTensor, asked: Tensor, wanted: ShardTensor, sent: Tensor, place: ShardTensor, *xs: Tensor
) -> tuple[Tensor, ...]:
    home, entries = degree._spec.layout, place._spec.layout
    mesh_dim = mesh_dim_of_rows(degree, "RowLinks.take")
    given = [identically_sharded(x, home, "RowLinks.take") for x in xs]
    numbers, came = ToLocal.apply(place, None), wanted._spec.layout.partition_of(0)
    rows = take_rows(
        [ToLocal.apply(x, None) for x in given],
        asked,
        ToLocal.apply(sent, None),
        numbers.reshape(-1),
        shard_size(came, home.mesh),
        compat.group_name_of(home.mesh, mesh_dim),
        travels=rows_travel(came),
    )
    return tuple(
        wrapped(r.view([*numbers.shape, *r.shape[1:]]), _of_entries(entries, x._spec.layout, 1))
        for r, x in zip(rows, given, strict=True)
    )


@torch.compiler.allow_in_graph
def _add(
    degree: ShardTensor, asked: Tensor, wanted: ShardTensor, sent: Tensor, place: ShardTensor, *values: Tensor
) -> tuple[Tensor, ...]:
    home, entries = degree._spec.layout, place._spec.layout
    mesh_dim, dims = mesh_dim_of_rows(degree, "RowLinks.add"), entries.ndim
    given = []
    for v in values:
        if v.ndim < dims or not all(map(compat.same_symbol, v.shape[1:dims], entries.shape[1:])):
            raise LayoutError(
                f"RowLinks.add: there is one value for each entry of the index, {tuple(entries.shape)}; got "
                f"{tuple(v.shape)}"
            )
        v = identically_sharded(v, entries, "RowLinks.add")
        layout = v._spec.layout
        for d in range(1, dims):
            layout = layout if layout.partitions[d] is None else layout.gathered(d)
        given.append(redistributed(v, layout))
    numbers, came = ToLocal.apply(place, None), wanted._spec.layout.partition_of(0)
    shards = [ToLocal.apply(v, None) for v in given]
    sums = add_rows(
        [b.flatten(0, dims - 1) if dims > 1 else b for b in shards],
        asked,
        ToLocal.apply(sent, None),
        numbers.reshape(-1),
        shard_size(home.partition_of(0), home.mesh),
        shard_size(came, home.mesh),
        compat.group_name_of(home.mesh, mesh_dim),
        travels=rows_travel(came),
    )
    return tuple(wrapped(s, _of_entries(home, v._spec.layout, dims)) for s, v in zip(sums, given, strict=True))
