"""Dispatch and combine: rows are sent to the ranks that data determines, such as tokens to the ranks of their experts.

    rows, route = route_rows(x, destination)          # dispatch: each row of x to its destination rank
    y = route.combine(expert(rows), weights=weights)  # combine: the results return to the ranks of their rows

The shard sizes of `rows` are data-dependent. They form a dynamic partition like any other, so all ops work on `rows`,
and one graph serves every routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from shardcompile import compat
from shardcompile.collectives import (
    HierarchicalRoute,
    add_copies,
    counts_in_range,
    exchange_rows,
    first_rows,
    gather_counts,
    hierarchical_combine,
    hierarchical_dispatch,
    partition_of_sizes,
    plan_hierarchical_route,
    rows_from,
    shard_size,
)
from shardcompile.errors import LayoutError
from shardcompile.sharding import Layout
from shardcompile.tensor.aligned_rows import (
    identically_sharded,
    layout_of_column,
    layout_of_rows,
    mesh_dims_of_rows,
    one_or_all,
    sharded_like_rows,
    wrapped,
)
from shardcompile.tensor.autograd import ToLocal


class Onward(NamedTuple):
    """The second hop of a hierarchical `Route`, over two mesh dims: within a node, along the inner mesh dim.

    A node is the set of ranks that have the same outer coordinate.

    Attributes:
        passing: for each row that the first hop brought to this rank the inner coordinates that its copies go to, -1
            for a copy that is dropped or goes to another node: [p, k], sharded as these rows.
        counts: counts[s, d] copies go from inner coordinate s to d: [inner, inner], int64, on the CPU.
        order: for each copy that the second hop sends its flat index in `passing`: [q], int64, in the order of
            destinations.
        arranged: the permutation that sorts the received copies by their source rank: [m], int64, sharded as the
            received rows.
    """

    passing: Tensor
    counts: Tensor
    order: Tensor
    arranged: Tensor


class Route(NamedTuple):
    """The routing that `route_rows` has carried out.

    It consists of tensors, so it can be stored, passed to compiled functions and returned by them.

    Attributes:
        destination: the destination ranks of each row: [n] or [n, k], sharded as the rows.
        counts: counts[s, d] rows go from rank s of the mesh dim to rank d: [ranks, ranks], int64, on the CPU. Over two
            mesh dims: from outer coordinate s to d, among the ranks of this rank's inner coordinate.
        order: for each copy that a rank sends its flat index among the copies of the rank's rows: [m], int64; a rank's
            local shard lists the copies that it sends, in the order of their destinations. Over two mesh dims there is
            one entry for each row and node.
        source: for each received row the rank that sent it: [m], int64, sharded as the received rows.
        onward: the second hop, within a node, of a route over two mesh dims.
    """

    destination: Tensor
    counts: Tensor
    order: Tensor
    source: Tensor
    onward: Onward | None = None

    def send(self, *rows: Tensor, each: Sequence[Tensor] = ()) -> Any:
        """Dispatches other rows by the same route, in one exchange: row i goes where row i went. Differentiable.

        Args:
            rows: payloads, each [n, ...].
            each: per-copy payloads, each [n, k, ...], with an entry for each copy of a row, such as its expert's index.

        Returns:
            For each of `rows`, then for each of `each`, the received rows: [m, ...]. One tensor if one was given.

        Raises:
            LayoutError: there are not as many rows as destinations, or they lie on another mesh.
        """
        return one_or_all(_send(self._parts(), len(rows), *rows, *each))

    def combine(self, *rows: Tensor, weights: Tensor | None = None) -> Any:
        """Returns rows to the ranks that sent them, and adds up the copies of a row, in one exchange.

        Differentiable; without weights it is the adjoint of `send`.

        Args:
            rows: each [m, ...], one row for each received row, in their order.
            weights: factors of the copies of a row in the sum, in the shape of `destination`; 1 by default.

        Returns:
            For each of `rows` [n, ...], sharded as `destination`. Dropped rows get zeros. One tensor if one was given.

        Raises:
            LayoutError: the number of rows or of weights is not that of the route.
        """
        return one_or_all(_combine(self._parts(), weights, *rows))

    def _parts(self) -> tuple[Tensor, ...]:
        """Returns all tensors, flat, for functions that Dynamo does not trace into."""
        first_hop = self.destination, self.counts, self.order, self.source
        return first_hop if self.onward is None else (*first_hop, *self.onward)


def route_rows(x: Tensor, destination: Tensor, *also: Tensor, each: Sequence[Tensor] = ()) -> tuple[Any, ...]:
    """Dispatches each row to the rank, or the ranks, that `destination` names. Differentiable.

    It takes two collectives: one for the table of how many rows go from each rank to each rank, and one for the rows,
    without padding. In a compiled function one graph serves every routing, also one that sends nothing to a rank, or
    nothing at all.

    Rows that are sharded by two mesh dims are routed hierarchically, along the outer mesh dim first, then along the
    inner one. A row is sent only once to each outer coordinate, for all of its copies there. If an outer coordinate is
    a node of a cluster, this reduces the traffic between nodes.

    Args:
        x: [n, ...], sharded along dim 0 by one or two mesh dims.
        destination: a rank of that mesh dim for each row, or -1 for a row that is dropped: [n], or [n, k] for k copies
            of each row; integers. With two mesh dims the rank is
            ``outer coordinate * inner ranks + inner coordinate``.
        also: more payloads: tensors of n rows, which are sent along with those of `x`.
        each: per-copy payloads: tensors [n, k, ...] with an entry for each copy of a row.

    Returns:
        The received rows, [m, ...], sharded along dim 0 by a dynamic partition, ordered by source rank, then by row,
        then by copy; likewise for each of `also` and `each`; and the route.

    Raises:
        LayoutError: `x` is not sharded along dim 0 by one or two mesh dims, or `destination` does not fit it.
        RowRangeError: on every rank, before any row is sent, if a destination is not a rank.
    """
    parts = _route(x, destination)
    destination, counts, order, source, *onward = parts
    route = Route(destination, counts, order, source, Onward(*onward) if onward else None)
    received = _send(parts, 1 + len(also), x, *also, *each)
    return *received, route


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _route(x: Any, destination: Any) -> tuple[Any, ...]:
    """Returns the fields of a `Route`, and those of its `Onward` if it has one."""
    mesh_dims = mesh_dims_of_rows(x, "route_rows", at_most=2)
    layout = x._spec.layout
    if destination.dtype.is_floating_point or destination.dtype.is_complex or destination.dtype is torch.bool:
        raise LayoutError(f"destinations are ranks, which are integers; got {destination.dtype}")
    if destination.ndim not in (1, 2):
        raise LayoutError(f"destinations are [n] or [n, k], got {tuple(destination.shape)}")
    destination = sharded_like_rows(destination, layout, "destination")
    local = ToLocal.apply(destination, None).long()
    size = compat.size_hint(destination.shape[0])
    flat = layout_of_column(destination._spec.layout)
    if len(mesh_dims) == 2:
        local = local.view([local.shape[0], _num_copies(destination)])
        plan, partitions = plan_hierarchical_route(local, layout.mesh, mesh_dims, size)
        sent, passed, passed_on, received = (layout_of_rows(partition, flat) for partition in partitions)
        copies = Layout.of_partitions(
            flat.mesh, (*passed.shape, local.shape[1]), torch.int64, [passed.partitions[0], None]
        )
        return (
            destination,
            plan.between,
            wrapped(plan.order, sent),
            wrapped(plan.source, received),
            wrapped(plan.passing, copies),
            plan.within,
            wrapped(plan.onward, passed_on),
            wrapped(plan.arranged, received),
        )
    about = size * _num_copies(destination)
    return destination, *_route_along(local.reshape(-1), layout.mesh, mesh_dims[0], about, flat)


def _route_along(destination: Tensor, mesh: DeviceMesh, mesh_dim: int, about: int, flat: Layout) -> tuple[Tensor, ...]:
    """Returns counts, order and source of a route along one mesh dim."""
    ranks, group_name = mesh.shape[mesh_dim], compat.group_name_of(mesh, mesh_dim)
    out_of_range = (destination < -1) | (destination >= ranks)
    # Dropped rows count as those of one rank more, so that they are sorted to the end.
    bins = torch.where((destination < 0) | out_of_range, ranks, destination)
    ones = torch.ones_like(destination)
    histogram = torch.zeros([ranks + 1], dtype=torch.int64, device=destination.device).scatter_add(0, bins, ones)
    rule = f"route_rows: destinations are ranks 0 to {ranks - 1} of the mesh dim, or -1 for rows that are dropped"
    counts = gather_counts(counts_in_range(histogram[:-1], destination, out_of_range), group_name, rule)
    sent = partition_of_sizes(counts.sum(1), mesh, [mesh_dim], about=about)
    received = partition_of_sizes(counts.sum(0), mesh, [mesh_dim], about=about)
    coordinate = compat.coordinate(mesh)
    num_sent, num_received = sent.local_size(coordinate), received.local_size(coordinate)
    order = first_rows(bins.argsort(stable=True), num_sent)
    sources = torch.arange(ranks, device=destination.device)
    counts_by_source = rows_from(counts, group_name).to(destination.device)
    source = torch.repeat_interleave(sources, counts_by_source, output_size=num_received)
    return counts, wrapped(order, layout_of_rows(sent, flat)), wrapped(source, layout_of_rows(received, flat))


def _num_copies(destination: Tensor) -> int:
    return destination.shape[1] if destination.ndim == 2 else 1


@torch.compiler.allow_in_graph
def _send(parts: Sequence[Any], num_shared: int, *xs: Any) -> tuple[Any, ...]:
    """Implements `Route.send`. The first `num_shared` of `xs` are payloads of rows, the others of copies."""
    destination, counts, order, source, *onward = parts
    row_layout, received = destination._spec.layout, source._spec.layout
    num_copies = _num_copies(destination)
    shards, layouts = [], []
    for i, x in enumerate(xs):
        x = identically_sharded(x, row_layout, "Route.send")
        shard, layout = ToLocal.apply(x, None), x._spec.layout
        if i >= num_shared:
            if tuple(x.shape[1 : destination.ndim]) != tuple(destination.shape[1:]):
                raise LayoutError(
                    f"Route.send: {layout.describe()} has no entry for each of {num_copies} copies of a row; "
                    f"destinations are {tuple(destination.shape)}"
                )
            shard = shard.unsqueeze(1) if destination.ndim == 1 else shard
            layout = _without_copies(layout, destination.ndim)
        shards.append(shard)
        layouts.append(layout)
    groups = _groups(row_layout)
    num_received = shard_size(received.partition_of(0), row_layout.mesh)
    if onward:
        plan = _hierarchical_route(parts)
        rows = hierarchical_dispatch(shards[:num_shared], shards[num_shared:], plan, num_received, groups)
    else:
        indices = ToLocal.apply(order, None)
        sent = [b.index_select(0, indices // num_copies) for b in shards[:num_shared]]
        sent += [b.flatten(0, 1).index_select(0, indices) for b in shards[num_shared:]]
        rows = exchange_rows(sent, counts, num_received, groups[0])
    partition = received.partition_of(0)
    return tuple(wrapped(r, layout_of_rows(partition, layout)) for r, layout in zip(rows, layouts, strict=True))


def _groups(layout: Layout) -> list[str]:
    """Returns the process groups along which rows are sent, the outer one first."""
    return [compat.group_name_of(layout.mesh, m) for m in layout.partition_of(0).mesh_dims]


def _hierarchical_route(parts: Sequence[Any]) -> HierarchicalRoute:
    _, between, order, source, passing, within, onward, arranged = parts
    shards = (ToLocal.apply(x, None) for x in (order, passing, onward, arranged, source))
    order, passing, onward, arranged, source = shards
    return HierarchicalRoute(between, order, passing, within, onward, arranged, source)


def _without_copies(layout: Layout, dims: int) -> Layout:
    """Returns the layout of a per-copy payload without the dim that counts the copies, if it has one.

    Args:
        layout: the layout of the payload.
        dims: number of dims of the destinations: 2 if there is a dim that counts the copies.

    Raises:
        LayoutError: that dim is sharded.
    """
    if dims == 1:
        return layout
    if layout.partitions[1] is not None:
        raise LayoutError(
            f"the copies of a row lie on different ranks in {layout.describe()}; redistribute it so that dim 1 is not "
            f"sharded first"
        )
    placements = [Shard(p.dim - 1) if p.is_shard() and p.dim else p for p in layout.placements]  # type: ignore[attr-defined]
    partitions = [layout.partitions[0], *layout.partitions[2:]]
    return Layout.of(layout.mesh, placements, (layout.shape[0], *layout.shape[2:]), layout.dtype, partitions)


@torch.compiler.allow_in_graph
def _combine(parts: Sequence[Any], weights: Any, *ys: Any) -> tuple[Any, ...]:
    destination, counts, order, source, *onward = parts
    row_layout, num_copies = destination._spec.layout, _num_copies(destination)
    num_rows = shard_size(row_layout.partition_of(0), row_layout.mesh)
    given = [identically_sharded(y, source._spec.layout, "Route.combine") for y in ys]
    rows = [ToLocal.apply(y, None) for y in given]
    factors = None
    if weights is not None:
        if tuple(weights.shape[1:]) != tuple(destination.shape[1:]):
            raise LayoutError(
                f"Route.combine: weights have the shape of the destinations, {tuple(destination.shape)}; got "
                f"{tuple(weights.shape)}"
            )
        local_weights = ToLocal.apply(sharded_like_rows(weights, row_layout, "weights"), None)
        factors = local_weights.reshape([num_rows, num_copies])
    groups = _groups(row_layout)
    if onward:
        sums = hierarchical_combine(rows, _hierarchical_route(parts), factors, num_rows, groups)
    else:
        indices = ToLocal.apply(order, None)
        returned = exchange_rows(rows, counts, indices.shape[0], groups[0], back=True)
        sums = [add_copies(r, indices, num_rows, num_copies, factors) for r in returned]
    layouts = [layout_of_rows(row_layout.partition_of(0), y._spec.layout) for y in given]
    return tuple(wrapped(r, layout) for r, layout in zip(sums, layouts, strict=True))
