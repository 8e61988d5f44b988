"""Hierarchical dispatch and combine: rows go to ranks over two mesh dims, between nodes first, then within the node.

A rank has the index ``node * inner + place``. A row is sent once to each node that needs a copy of it, to the rank with
the same place as the sender, which forwards it to the ranks of its node. So a link between nodes carries one row for
all copies on the node. A rank sends at most ``outer + inner`` messages in place of ``outer * inner``. Combine takes the
reverse route and adds up the copies of a row on each node first.

The dispatch of DeepSeek-V3 also sends to the rank with the same place on the other node (arXiv:2412.19437, 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives.routes import (
    counts_in_range,
    exchange_rows,
    first_rows,
    gather_counts,
    partition_of_sizes,
    rows_from,
)
from shardcompile.sharding import IntLike, Partition


class HierarchicalRoute(NamedTuple):
    """A dispatch route over two mesh dims, as one rank holds it.

    Attributes:
        between: between[s, d] rows go from node s to node d, among the ranks with this rank's place: [outer, outer],
            int64, on the CPU.
        order: flat index in the local copies [n, k] of each row that this rank sends to a node: [sent], ordered by
            node.
        passing: destination place of each copy of a row that this rank received from a node, or -1: [passed, k].
        within: within[s, d] copies go from place s to place d of this node: [inner, inner], int64, on the CPU.
        onward: flat index in `passing` of each copy that this rank forwards: [passed on], ordered by place.
        arranged: permutation that orders the arriving copies by their source rank: [arrived].
        source: source rank of each copy in that order: [arrived].
    """

    between: Tensor
    order: Tensor
    passing: Tensor
    within: Tensor
    onward: Tensor
    arranged: Tensor
    source: Tensor


class _Tables(NamedTuple):
    """The count tables of a route: `between` and `within` of `HierarchicalRoute`, the number of copies that this rank
    receives from each rank (inner slowest), and the shard sizes of the four partitions.
    """

    between: Tensor
    within: Tensor
    sources: Tensor
    sizes: list[Tensor]


def plan_hierarchical_route(
    asked: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], size: int
) -> tuple[HierarchicalRoute, list[Partition]]:
    """Computes a route over two mesh dims. Collectives: two count tables, and the destination places of the copies.

    Args:
        asked: destination rank of each copy of a row, or -1: [n, k], int64.
        mesh: the mesh.
        mesh_dims: the outer and the inner mesh dim.
        size: hint of the global number of rows.

    Returns:
        The route, and the partitions over both mesh dims of `order`, `passing`, `onward`, and the arriving copies.

    Raises:
        RowRangeError: on every rank, before any row is moved, if a destination is out of range on some rank.
    """
    outer, inner = (mesh.shape[m] for m in mesh_dims)
    copies = asked.shape[1]
    groups = [compat.group_name_of(mesh, m) for m in mesh_dims]
    out_of_range = (asked < -1) | (asked >= outer * inner)
    is_sent = (asked >= 0) & ~out_of_range
    node = torch.where(is_sent, asked // inner, outer)
    to_node = torch.where(_is_first(node), node, outer)  # a row goes once to each node
    tables = _tables(asked, out_of_range, is_sent, to_node, (outer, inner), groups)
    # With uniform destinations, a row has no copy on a given node with probability (1 - 1 / outer) ** k.
    to_nodes = round(size * outer * (1 - (1 - 1 / outer) ** copies))
    hints = to_nodes, to_nodes, size * copies, size * copies
    partitions = [
        partition_of_sizes(s, mesh, mesh_dims, about=about) for s, about in zip(tables.sizes, hints, strict=True)
    ]
    coordinate = compat.coordinate(mesh)
    sent, passed, passed_on, arriving = (c.local_size(coordinate) for c in partitions)

    order = first_rows(to_node.flatten().argsort(stable=True), sent)
    rows = order // copies
    same_node = node.index_select(0, rows) == to_node.flatten().index_select(0, order).unsqueeze(1)
    places = torch.where(same_node, asked.index_select(0, rows).remainder(inner), -1)
    (passing,) = exchange_rows([places], tables.between, passed, groups[0])
    onward = first_rows(torch.where(passing < 0, inner, passing).flatten().argsort(stable=True), passed_on)

    ranks_by_place = torch.arange(outer * inner, device=asked.device).view(outer, inner).t().flatten()
    received = tables.sources.flatten().to(asked.device)
    source = torch.repeat_interleave(ranks_by_place, received, output_size=arriving)
    arranged = source.argsort(stable=True)
    source = source.index_select(0, arranged)
    return HierarchicalRoute(tables.between, order, passing, tables.within, onward, arranged, source), partitions


def hierarchical_dispatch(
    shared: Sequence[Tensor], each: Sequence[Tensor], route: HierarchicalRoute, arriving: IntLike, groups: Sequence[str]
) -> list[Tensor]:
    """Dispatches rows along a route by one exchange between nodes and one within nodes. Differentiable.

    Args:
        shared: payloads with the same value for all copies of a row, each [n, ...].
        each: per-copy payloads, each [n, k, ...]. All entries of a row are sent to each node that the row is sent to.
        route: the route.
        arriving: number of copies that arrive at this rank.
        groups: the process groups between nodes and within the node.

    Returns:
        The arriving copies of each payload, ordered by source rank: [arriving, ...].
    """
    passed, copies = route.passing.shape
    rows = route.order // copies
    received = exchange_rows([x.index_select(0, rows) for x in (*shared, *each)], route.between, passed, groups[0])
    rows = route.onward // copies
    sent = [x.index_select(0, rows) for x in received[: len(shared)]]
    sent += [x.flatten(0, 1).index_select(0, route.onward) for x in received[len(shared) :]]
    return [x.index_select(0, route.arranged) for x in exchange_rows(sent, route.within, arriving, groups[1])]


def hierarchical_combine(
    rows: Sequence[Tensor], route: HierarchicalRoute, weights: Tensor | None, n: IntLike, groups: Sequence[str]
) -> list[Tensor]:
    """Combines dispatched copies by one exchange within nodes and one between nodes. Copies of a row are summed on each
    node, then on the owner of the row.

    Args:
        rows: the copies that this rank has, each [arrived, ...].
        route: the route.
        weights: weights of the copies: [n, k]; sent to the nodes, where the copies are scaled.
        n: local number of rows.
        groups: the process groups between nodes and within the node.

    Returns:
        The weighted sums for each payload: [n, ...], zeros for rows without copies.
    """
    passed, copies = route.passing.shape
    row_index = route.order // copies
    factors = None
    if weights is not None:
        (factors,) = exchange_rows([weights.index_select(0, row_index)], route.between, passed, groups[0])
    arrived = [torch.zeros_like(x).index_copy(0, route.arranged, x) for x in rows]  # in the order of arrival
    returned = exchange_rows(arrived, route.within, route.onward.shape[0], groups[1], back=True)
    if factors is not None:
        copy_weights = factors.flatten().index_select(0, route.onward)
        returned = [x * copy_weights.view([-1, *[1] * (x.ndim - 1)]) for x in returned]
    node_rows = route.onward // copies
    sums = [_sums(x, node_rows, passed) for x in returned]
    returned_sums = exchange_rows(sums, route.between, route.order.shape[0], groups[0], back=True)
    return [add_copies(x, route.order, n, copies) for x in returned_sums]


def _sums(copies: Tensor, row_index: Tensor, n: IntLike) -> Tensor:
    """Sums the copies with the same row index: [n, ...]. An index_add, since few of the n * k possible copies exist."""
    acc_dtype = torch.float32 if copies.dtype in (torch.bfloat16, torch.float16) else copies.dtype
    sums = copies.new_zeros([n, *copies.shape[1:]], dtype=acc_dtype).index_add(0, row_index, copies.to(acc_dtype))
    return sums.to(copies.dtype)


def add_copies(rows: Tensor, numbers: Tensor, n: IntLike, copies: int, weights: Tensor | None = None) -> Tensor:
    """Returns the weighted sum of the copies of each row: [n, ...]; missing copies count as zeros.

    Args:
        rows: copies in any order: [m, ...].
        numbers: flat index in [n, copies] of each copy: [m].
        n: number of rows.
        copies: number of copies of each row.
        weights: weights of the copies, 1 if None: [n, copies].
    """
    all_copies = rows.new_zeros([n * copies, *rows.shape[1:]]).index_copy(0, numbers, rows)
    all_copies = all_copies.view([n, copies, *rows.shape[1:]])
    if weights is not None:
        all_copies = all_copies * weights.view([n, copies, *[1] * (rows.ndim - 1)])
    return all_copies.sum(1) if copies > 1 else all_copies.squeeze(1)


def _is_first(node: Tensor) -> Tensor:
    """Returns whether each copy is the first of its row for its node: [n, k], given the nodes of the copies [n, k]."""
    same = node.unsqueeze(2) == node.unsqueeze(1)
    return ~same.tril(-1).any(2)


def _tables(
    asked: Tensor,
    out_of_range: Tensor,
    is_sent: Tensor,
    to_node: Tensor,
    parts: tuple[int, int],
    groups: Sequence[str],
) -> _Tables:
    """Gathers the count tables between nodes, then within, so that a rank receives only the entries that it needs."""
    outer, inner = parts
    ranks = outer * inner
    counts = [_bincount(to_node, outer), _bincount(torch.where(is_sent, asked, ranks), ranks)]
    # An out-of-range destination is encoded in the last column, so that the first gather does not raise: ranks with the
    # same place learn of it there, all others by the second gather, which raises on every rank.
    error_code = counts_in_range(counts[0].new_zeros([1]), asked.flatten(), out_of_range.flatten())
    gathered = gather_counts(torch.cat([*counts, error_code]), groups[0])
    between, to_ranks, error_code = gathered.split([outer, ranks, 1], 1)
    to_ranks = to_ranks.view(outer, outer, inner)
    local_tables = [rows_from(to_ranks, groups[0]), to_ranks.sum(0), between.sum(1), between.sum(0)]
    worst = error_code.amin()
    to_gather = torch.where(worst < 0, worst, torch.cat([h.flatten() for h in local_tables]))
    wanted = f"route_rows: destinations are ranks 0 to {ranks - 1} of the mesh dims, or -1 for rows that are dropped"
    gathered = gather_counts(to_gather.to(asked.device), groups[1], wanted)
    pairs, totals, leaving, passing = gathered.split([ranks, ranks, outer, outer], 1)
    pairs, totals = (t.view(inner, outer, inner) for t in (pairs, totals))
    sizes = leaving.t(), passing.t(), totals.sum(2).t(), totals.sum(0)
    sources = rows_from(pairs.transpose(1, 2), groups[1])
    return _Tables(between, pairs.sum(1), sources, [s.flatten() for s in sizes])


def _bincount(values: Tensor, count: int) -> Tensor:
    """Counts the occurrences of 0 to `count` - 1; the value `count` marks entries that are not counted."""
    values = values.flatten()
    return values.new_zeros([count + 1]).scatter_add(0, values, torch.ones_like(values))[:count]
