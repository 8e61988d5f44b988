"""Rows that go to the ranks that data says: experts' tokens, nodes of a graph, particles that cross a border.

    rows, route = route_rows(x, destination)       # each row of x to the rank that destination says
    y = route.back(expert(rows), weights=weights)  # and home again

The shard sizes of `rows` are known only when it runs. They are a partition like any other, so that all ops work on
`rows`, and one graph serves every routing.
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
    Levels,
    add_copies,
    counts_in_range,
    exchange_rows,
    find_levels,
    first_rows,
    gather_counts,
    partition_of_sizes,
    return_by_levels,
    rows_from,
    send_by_levels,
    shard_size,
)
from shardcompile.errors import LayoutError
from shardcompile.sharding import Layout
from shardcompile.tensor.aligned_rows import (
    beside,
    identically_sharded,
    layout_of_column,
    layout_of_rows,
    mesh_dims_of_rows,
    one_or_all,
    wrapped,
)
from shardcompile.tensor.autograd import ToLocal


class Onward(NamedTuple):
    """Where rows go within a node, of a `Route` over two mesh dims. Of the ranks that have the same outer coordinate.

    Attributes:
        passing: of each row that has come to this node the inner coordinates that its copies go to, -1 for those that
            do not pass here: [p, k], sharded as the rows that have come.
        counts: counts[s, d] copies go from inner coordinate s to d: [inner, inner], int64, on the CPU.
        order: of each copy that is passed on its number in `passing`: [q], int64, in the order of destinations.
        arranged: the order of the copies that arrive by the rank that they came from: [m], int64, sharded as these are.
    """

    passing: Tensor
    counts: Tensor
    order: Tensor
    arranged: Tensor


class Route(NamedTuple):
    """Where rows have gone. Made of tensors, so that it can be kept, and given to and returned by compiled functions.

    Attributes:
        destination: where each row goes: [n] or [n, k], sharded as the rows were.
        counts: counts[s, d] rows go from rank s of the mesh dim to rank d: [ranks, ranks], int64, on the CPU. Over two
            mesh dims from outer coordinate s to d, of rows of this rank's inner coordinate.
        order: of each copy that a rank sends its number among the copies of the rank's rows: [m], int64; a rank's
            local shard holds those that it sends, in the order of their destinations. Over two mesh dims one for each
            node.
        source: of each row that has arrived the rank that it came from: [m], int64, sharded as the rows that arrive.
        onward: the way within a node, of a route over two mesh dims.
    """

    destination: Tensor
    counts: Tensor
    order: Tensor
    source: Tensor
    onward: Onward | None = None

    def send(self, *rows: Tensor, each: Sequence[Tensor] = ()) -> Any:
        """Other rows by the same route: x[i] goes where row i went. All of them in one exchange. Differentiable.

        Args:
            rows: each [n, ...].
            each: each [n, k, ...], where each copy of a row has an entry of its own, as the number of its expert.

        Returns:
            For each of `rows`, then for each of `each`, what has arrived: [m, ...]. One tensor if one was given.

        Raises:
            LayoutError: there are not as many rows as destinations, or they lie on another mesh.
        """
        return one_or_all(_send(self._parts(), len(rows), *rows, *each))

    def back(self, *rows: Tensor, weights: Tensor | None = None) -> Any:
        """Rows go back to where they came from. Differentiable, and the adjoint of `send` where there are no weights.

        Args:
            rows: each [m, ...], one for each row that has arrived, in their order. All of them in one exchange.
            weights: what the copies of a row are multiplied by before they are added up, in the shape of `destination`;
                1 by default.

        Returns:
            For each of `rows` [n, ...], sharded as `destination`. Rows that were dropped get zeros. One tensor if one
            was given.

        Raises:
            LayoutError: the rows or weights are not as many as the route has.
        """
        return one_or_all(_back(self._parts(), weights, *rows))

    def _parts(self) -> tuple[Tensor, ...]:
        """All tensors, for functions that Dynamo does not enter."""
        here = self.destination, self.counts, self.order, self.source
        return here if self.onward is None else (*here, *self.onward)


def route_rows(x: Tensor, destination: Tensor, *also: Tensor, each: Sequence[Tensor] = ()) -> tuple[Any, ...]:
    """Send each row to the rank, or the ranks, that data says. Differentiable.

    Two collectives: a table of how many rows go from where to where, and the rows themselves, exactly. In a compiled
    function one graph serves every routing, also one that sends nothing to a rank, or nothing at all.

    Rows that two mesh dims sharded go along the outer one first, then along the inner one. A row goes once to an outer
    coordinate, for all of its copies there. If that is a node of a cluster, fewer rows go from node to node.

    Args:
        x: [n, ...], sharded along dim 0 by one or two mesh dims.
        destination: a rank of that mesh dim for each row, or -1 for a row that is dropped: [n], or [n, k] for k copies
            of each row; whole numbers. Of two mesh dims, rank ``outer coordinate * inner ranks + inner coordinate``.
        also: other tensors of n rows, which travel with those of `x`.
        each: tensors [n, k, ...] with an entry for each copy of a row, which travel with them, too.

    Returns:
        The rows that arrive, [m, ...], sharded along dim 0 by what arrives where. They are in the order of the rank
        that they come from, of its rows, and of their copies; the same of each of `also` and `each`; and the route.

    Raises:
        LayoutError: `x` is not sharded along dim 0 by one or two mesh dims, or `destination` does not fit to it.
        RowRangeError: on every rank, before any row is moved, if a destination is no rank.
    """
    parts = _route(x, destination)
    home, counts, order, source, *onward = parts
    route = Route(home, counts, order, source, Onward(*onward) if onward else None)
    sent = _send(parts, 1 + len(also), x, *also, *each)
    return *sent, route


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _route(x: Any, destination: Any) -> tuple[Any, ...]:
    """The tensors of a `Route`, and those of its `Onward` if it has one."""
    mesh_dims = mesh_dims_of_rows(x, "route_rows", at_most=2)
    layout = x._spec.layout
    if destination.dtype.is_floating_point or destination.dtype.is_complex or destination.dtype is torch.bool:
        raise LayoutError(f"destinations are ranks, which are whole numbers; got {destination.dtype}")
    if destination.ndim not in (1, 2):
        raise LayoutError(f"destinations are [n] or [n, k], got {tuple(destination.shape)}")
    destination = beside(destination, layout, "destination")
    asked = ToLocal.apply(destination, None).long()
    size = compat.size_hint(destination.shape[0])
    flat = layout_of_column(destination._spec.layout)
    if len(mesh_dims) == 2:
        asked = asked.view([asked.shape[0], _copies(destination)])
        levels, partitions = find_levels(asked, layout.mesh, mesh_dims, size, "route_rows")
        sent, passed, passed_on, came = (layout_of_rows(partition, flat) for partition in partitions)
        copies = Layout.of_partitions(
            flat.mesh, (*passed.shape, asked.shape[1]), torch.int64, [passed.partitions[0], None]
        )
        return (
            destination,
            levels.between,
            wrapped(levels.order, sent),
            wrapped(levels.source, came),
            wrapped(levels.passing, copies),
            levels.within,
            wrapped(levels.onward, passed_on),
            wrapped(levels.arranged, came),
        )
    about = size * _copies(destination)
    return destination, *_straight(asked.reshape(-1), layout.mesh, mesh_dims[0], about, flat)


def _straight(asked: Tensor, mesh: DeviceMesh, mesh_dim: int, about: int, flat: Layout) -> tuple[Tensor, ...]:
    """Counts, order and source of a route along one mesh dim."""
    ranks, group_name = mesh.shape[mesh_dim], compat.group_name_of(mesh, mesh_dim)
    bad = (asked < -1) | (asked >= ranks)
    last = torch.where((asked < 0) | bad, ranks, asked)
    mine = torch.zeros([ranks + 1], dtype=torch.int64, device=asked.device).scatter_add(0, last, torch.ones_like(asked))
    wanted = f"route_rows: destinations are ranks 0 to {ranks - 1} of the mesh dim, or -1 for rows that are dropped"
    counts = gather_counts(counts_in_range(mine[:-1], asked, bad), group_name, wanted)
    sent = partition_of_sizes(counts.sum(1), mesh, [mesh_dim], about=about)
    came = partition_of_sizes(counts.sum(0), mesh, [mesh_dim], about=about)
    place = compat.coordinate(mesh)
    leaving, arriving = sent.local_size(place), came.local_size(place)
    order = first_rows(last.argsort(stable=True), leaving)
    numbers = torch.arange(ranks, device=asked.device)
    received = rows_from(counts, group_name).to(asked.device)
    source = torch.repeat_interleave(numbers, received, output_size=arriving)
    return counts, wrapped(order, layout_of_rows(sent, flat)), wrapped(source, layout_of_rows(came, flat))


def _copies(destination: Tensor) -> int:
    return destination.shape[1] if destination.ndim == 2 else 1


@torch.compiler.allow_in_graph
def _send(parts: Sequence[Any], shared: int, *xs: Any) -> tuple[Any, ...]:
    """`Route.send`; of the tensors `xs` the first `shared` have one entry for all copies of a row."""
    destination, counts, order, source, *onward = parts
    home, came = destination._spec.layout, source._spec.layout
    copies = _copies(destination)
    shards, layouts = [], []
    for i, x in enumerate(xs):
        x = identically_sharded(x, home, "Route.send")
        shard, layout = ToLocal.apply(x, None), x._spec.layout
        if i >= shared:
            if tuple(x.shape[1 : destination.ndim]) != tuple(destination.shape[1:]):
                raise LayoutError(
                    f"Route.send: {layout.describe()} has no entry for each of {copies} copies of a row; destinations "
                    f"are {tuple(destination.shape)}"
                )
            shard = shard.unsqueeze(1) if destination.ndim == 1 else shard
            layout = _of_entries(layout, destination.ndim)
        shards.append(shard)
        layouts.append(layout)
    groups = _groups(home)
    arriving = shard_size(came.partition_of(0), home.mesh)
    if onward:
        levels = _levels(parts)
        rows = send_by_levels(shards[:shared], shards[shared:], levels, arriving, groups)
    else:
        numbers = ToLocal.apply(order, None)
        given = [b.index_select(0, numbers // copies) for b in shards[:shared]]
        given += [b.flatten(0, 1).index_select(0, numbers) for b in shards[shared:]]
        rows = exchange_rows(given, counts, arriving, groups[0])
    return tuple(wrapped(r, layout_of_rows(came.partition_of(0), of)) for r, of in zip(rows, layouts, strict=True))


def _groups(layout: Layout) -> list[str]:
    """The process groups along which rows go, the outer one first."""
    return [compat.group_name_of(layout.mesh, m) for m in layout.partition_of(0).mesh_dims]


def _levels(parts: Sequence[Any]) -> Levels:
    _, between, order, source, passing, within, onward, arranged = parts
    shards = (ToLocal.apply(x, None) for x in (order, passing, onward, arranged, source))
    order, passing, onward, arranged, source = shards
    return Levels(between, order, passing, within, onward, arranged, source)


def _of_entries(layout: Layout, dims: int) -> Layout:
    """The layout of the entries that lie in the first dims of a tensor, of which the first alone is sharded.

    Raises:
        LayoutError: another one is.
    """
    if dims == 1:
        return layout
    if layout.partitions[1] is not None:
        raise LayoutError(f"the copies of a row lie on different ranks in {layout.describe()}; make dim 1 whole first")
    placements = [Shard(p.dim - 1) if p.is_shard() and p.dim else p for p in layout.placements]  # type: ignore[attr-defined]
    partitions = [layout.partitions[0], *layout.partitions[2:]]
    return Layout.of(layout.mesh, placements, (layout.shape[0], *layout.shape[2:]), layout.dtype, partitions)


@torch.compiler.allow_in_graph
def _back(parts: Sequence[Any], weights: Any, *ys: Any) -> tuple[Any, ...]:
    destination, counts, order, source, *onward = parts
    home, copies = destination._spec.layout, _copies(destination)
    n = shard_size(home.partition_of(0), home.mesh)
    given = [identically_sharded(y, source._spec.layout, "Route.back") for y in ys]
    rows = [ToLocal.apply(y, None) for y in given]
    factors = None
    if weights is not None:
        if tuple(weights.shape[1:]) != tuple(destination.shape[1:]):
            raise LayoutError(
                f"Route.back: weights have the shape of the destinations, {tuple(destination.shape)}; got "
                f"{tuple(weights.shape)}"
            )
        factors = ToLocal.apply(beside(weights, home, "weights"), None).reshape([n, copies])
    groups = _groups(home)
    if onward:
        home_rows = return_by_levels(rows, _levels(parts), factors, n, groups)
    else:
        numbers = ToLocal.apply(order, None)
        returned = exchange_rows(rows, counts, numbers.shape[0], groups[0], back=True)
        home_rows = [add_copies(r, numbers, n, copies, factors) for r in returned]
    layouts = [layout_of_rows(home.partition_of(0), y._spec.layout) for y in given]
    return tuple(wrapped(r, of) for r, of in zip(home_rows, layouts, strict=True))
