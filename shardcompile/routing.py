"""Rows that go to the ranks that data says: experts' tokens, nodes of a graph, particles that cross a border.

    rows, route = route_rows(x, destination)       # each row of x to the rank that destination says
    y = route.back(expert(rows), weights=weights)  # and home again

The sizes of the blocks of `rows` are known only when it runs. They are a cut like any other, so that all ops work on
`rows`, and one graph serves every routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from shardcompile import compat
from shardcompile.collectives import (
    counts_in_range,
    cut_of_sizes,
    exchange_rows,
    first_rows,
    gather_counts,
    rows_from,
)
from shardcompile.errors import LayoutError
from shardcompile.layout import Layout
from shardcompile.tensor.autograd import ToLocal
from shardcompile.tensor.of_rows import (
    beside,
    cut_alike,
    layout_of_column,
    layout_of_rows,
    mesh_dim_of_rows,
    one_or_all,
    wrapped,
)


class Route(NamedTuple):
    """Where rows have gone. Made of tensors, so that it can be kept, and given to and returned by compiled functions.

    Attributes:
        destination: where each row goes: [n] or [n, k], cut as the rows were.
        counts: counts[s, d] rows go from rank s of the mesh dim to rank d: [ranks, ranks], int64, on the CPU.
        order: of each copy that a rank sends its number among the copies of the rank's rows: [m], int64; a rank's block
            holds those that it sends, in the order of their destinations.
        source: of each row that has arrived the rank that it came from: [m], int64, cut as the rows that arrive.
    """

    destination: Tensor
    counts: Tensor
    order: Tensor
    source: Tensor

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
        return one_or_all(_send(self.destination, self.counts, self.order, self.source, len(rows), *rows, *each))

    def back(self, *rows: Tensor, weights: Tensor | None = None) -> Any:
        """Rows go back to where they came from. Differentiable, and the adjoint of `send` where there are no weights.

        Args:
            rows: each [m, ...], one for each row that has arrived, in their order. All of them in one exchange.
            weights: what the copies of a row are multiplied by before they are added up, in the shape of `destination`;
                1 by default.

        Returns:
            For each of `rows` [n, ...], cut as `destination`. Rows that were dropped get zeros. One tensor if one was
            given.

        Raises:
            LayoutError: the rows or weights are not as many as the route has.
        """
        return one_or_all(_back(self.destination, self.counts, self.order, self.source, weights, *rows))


def route_rows(x: Tensor, destination: Tensor, *also: Tensor, each: Sequence[Tensor] = ()) -> tuple[Any, ...]:
    """Send each row to the rank, or the ranks, that data says. Differentiable.

    Two collectives: a table of how many rows go from where to where, and the rows themselves, exactly. In a compiled
    function one graph serves every routing, also one that sends nothing to a rank, or nothing at all.

    Args:
        x: [n, ...], cut along dim 0 by one mesh dim.
        destination: a rank of that mesh dim for each row, or -1 for a row that is dropped: [n], or [n, k] for k copies
            of each row; whole numbers.
        also: other tensors of n rows, which travel with those of `x`.
        each: tensors [n, k, ...] with an entry for each copy of a row, which travel with them, too.

    Returns:
        The rows that arrive, [m, ...], cut along dim 0 by what arrives where. They are in the order of the rank that
        they come from, of its rows, and of their copies; the same of each of `also` and `each`; and the route.

    Raises:
        LayoutError: `x` is not cut along dim 0 by one mesh dim, or `destination` does not fit to it.
        RowRangeError: on every rank, before any row is moved, if a destination is no rank of the mesh dim.
    """
    route = Route(*_route(x, destination))
    sent = _send(*route, 1 + len(also), x, *also, *each)
    return *sent, route


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _route(x: Any, destination: Any) -> tuple[Any, ...]:
    """The parts of a `Route`."""
    mesh_dim = mesh_dim_of_rows(x, "route_rows")
    layout = x._spec.layout
    if destination.dtype.is_floating_point or destination.dtype.is_complex or destination.dtype is torch.bool:
        raise LayoutError(f"destinations are ranks, which are whole numbers; got {destination.dtype}")
    if destination.ndim not in (1, 2):
        raise LayoutError(f"destinations are [n] or [n, k], got {tuple(destination.shape)}")
    destination = beside(destination, layout, mesh_dim, "destination")
    ranks, group_name = layout.mesh.shape[mesh_dim], compat.group_name_of(layout.mesh, mesh_dim)
    asked = ToLocal.apply(destination, None).reshape(-1).long()
    bad = (asked < -1) | (asked >= ranks)
    last = torch.where((asked < 0) | bad, ranks, asked)
    mine = torch.zeros([ranks + 1], dtype=torch.int64, device=asked.device).scatter_add(0, last, torch.ones_like(asked))
    wanted = f"route_rows: destinations are ranks 0 to {ranks - 1} of the mesh dim, or -1 for rows that are dropped"
    counts = gather_counts(counts_in_range(mine[:-1], asked, bad), group_name, wanted)
    about = compat.size_hint(destination.shape[0]) * (destination.shape[1] if destination.ndim == 2 else 1)
    sent = cut_of_sizes(counts.sum(1), layout.mesh, [mesh_dim], about=about)
    came = cut_of_sizes(counts.sum(0), layout.mesh, [mesh_dim], about=about)
    place = compat.coordinate(layout.mesh)
    leaving, arriving = sent.local_size(place), came.local_size(place)
    order = first_rows(last.argsort(stable=True), leaving)
    numbers = torch.arange(ranks, device=asked.device)
    received = rows_from(counts, group_name).to(asked.device)
    source = torch.repeat_interleave(numbers, received, output_size=arriving)
    flat = layout_of_column(destination._spec.layout)
    return (
        destination,
        counts,
        wrapped(order, layout_of_rows(flat, mesh_dim, sent, flat)),
        wrapped(source, layout_of_rows(flat, mesh_dim, came, flat)),
    )


@torch.compiler.allow_in_graph
def _send(destination: Any, counts: Tensor, order: Any, source: Any, shared: int, *xs: Any) -> tuple[Any, ...]:
    """`Route.send`; of the tensors `xs` the first `shared` have one entry for all copies of a row."""
    home = destination._spec.layout
    mesh_dim = mesh_dim_of_rows(destination, "Route.send")
    copies = destination.shape[1] if destination.ndim == 2 else 1
    came = source._spec.layout
    numbers = ToLocal.apply(order, None)
    given = []
    for i, x in enumerate(xs):
        x = cut_alike(x, home, mesh_dim, "Route.send")
        block, layout = ToLocal.apply(x, None), x._spec.layout
        if i < shared:
            given.append((block.index_select(0, numbers // copies), layout))
            continue
        if tuple(x.shape[1 : destination.ndim]) != tuple(destination.shape[1:]):
            raise LayoutError(
                f"Route.send: {layout.describe()} has no entry for each of {copies} copies of a row; destinations are "
                f"{tuple(destination.shape)}"
            )
        entries = block.flatten(0, 1) if destination.ndim == 2 else block
        given.append((entries.index_select(0, numbers), _of_entries(layout, destination.ndim)))
    group_name = compat.group_name_of(home.mesh, mesh_dim)
    block = came.local_shape(compat.coordinate(home.mesh))[0]
    rows = exchange_rows([g for g, _ in given], counts, block, group_name)
    return tuple(wrapped(r, layout_of_rows(came, mesh_dim, None, of)) for r, (_, of) in zip(rows, given, strict=True))


def _of_entries(layout: Layout, dims: int) -> Layout:
    """The layout of the entries that lie in the first dims of a tensor, of which the first alone is cut.

    Raises:
        LayoutError: another one is.
    """
    if dims == 1:
        return layout
    if layout.cuts[1] is not None:
        raise LayoutError(f"the copies of a row lie on different ranks in {layout.describe()}; make dim 1 whole first")
    placements = [Shard(p.dim - 1) if p.is_shard() and p.dim else p for p in layout.placements]  # type: ignore[attr-defined]
    cuts = [layout.cuts[0], *layout.cuts[2:]]
    return Layout.of(layout.mesh, placements, (layout.shape[0], *layout.shape[2:]), layout.dtype, cuts)


@torch.compiler.allow_in_graph
def _back(destination: Any, counts: Tensor, order: Any, source: Any, weights: Any, *ys: Any) -> tuple[Any, ...]:
    home = destination._spec.layout
    mesh_dim = mesh_dim_of_rows(destination, "Route.back")
    place = compat.coordinate(home.mesh)
    n, sent = home.local_shape(place)[0], order._spec.layout.local_shape(place)[0]
    copies = destination.shape[1] if destination.ndim == 2 else 1
    given = [cut_alike(y, source._spec.layout, mesh_dim, "Route.back") for y in ys]
    group_name = compat.group_name_of(home.mesh, mesh_dim)
    returned = exchange_rows([ToLocal.apply(y, None) for y in given], counts, sent, group_name, back=True)
    numbers = ToLocal.apply(order, None)
    factors = None
    if weights is not None:
        if tuple(weights.shape[1:]) != tuple(destination.shape[1:]):
            raise LayoutError(
                f"Route.back: weights have the shape of the destinations, {tuple(destination.shape)}; got "
                f"{tuple(weights.shape)}"
            )
        factors = ToLocal.apply(beside(weights, home, mesh_dim, "weights"), None).reshape([n, copies])
    out = []
    for rows, y in zip(returned, given, strict=True):
        whole = rows.new_zeros([n * copies, *rows.shape[1:]]).index_copy(0, numbers, rows)
        whole = whole.view([n, copies, *rows.shape[1:]])
        if factors is not None:
            whole = whole * factors.view([n, copies, *[1] * (rows.ndim - 1)])
        whole = whole.sum(1) if copies > 1 else whole.squeeze(1)
        out.append(wrapped(whole, layout_of_rows(home, mesh_dim, None, y._spec.layout)))
    return tuple(out)
