"""Rows that go to ranks over two mesh dims: between nodes first, then within the node.

A rank is numbered ``node * inner + place``. A row goes once to each node that is to have a copy of it: to the rank with
the place of the sender, and from there to the ranks of that node. So a link between nodes carries one row for all
copies that go to its other end. A rank sends at most ``outer + inner`` messages in place of ``outer * inner``. On the
way back the copies of a row are added up on the node first.

Sending between nodes to the rank of the same place first is the dispatch of DeepSeek-V3 (arXiv:2412.19437, 3.2.2).
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


class Levels(NamedTuple):
    """A route over two mesh dims, as one rank knows it.

    Attributes:
        between: between[s, d] rows go from node s to node d, of those with this rank's place: [outer, outer], int64,
            on the CPU.
        order: of each row that this rank sends to a node its number among the rank's copies: [sent], by node.
        passing: the place of each copy of a row that has come to this node, or -1: [passed, k].
        within: within[s, d] copies go from place s to place d of this node: [inner, inner], int64, on the CPU.
        onward: of each copy that this rank passes on its number in `passing`: [passed on], by place.
        arranged: which of the copies that arrive comes first, next, ...: by the rank that it is from: [arrived].
        source: the number of that rank: [arrived].
    """

    between: Tensor
    order: Tensor
    passing: Tensor
    within: Tensor
    onward: Tensor
    arranged: Tensor
    source: Tensor


class _Tables(NamedTuple):
    """`Levels.between` and `Levels.within`, what comes here from each rank (inner slowest), and the shard sizes."""

    between: Tensor
    within: Tensor
    sources: Tensor
    sizes: list[Tensor]


def find_levels(
    asked: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], size: int, what: str
) -> tuple[Levels, list[Partition]]:
    """Work out a route over two mesh dims: two small tables, and the places of the copies.

    Args:
        asked: the number of a rank, or -1, for each copy of a row: [n, k], int64.
        mesh: the mesh.
        mesh_dims: the outer one and the inner one.
        size: how many rows all ranks have, as a rule.
        what: who asks, for messages.

    Returns:
        The route, and the partitions over both mesh dims of `order`, of `passing`, of `onward`, and of what arrives.

    Raises:
        RowRangeError: on every rank, before any row is moved, if a number is that of no rank.
    """
    outer, inner = (mesh.shape[m] for m in mesh_dims)
    copies = asked.shape[1]
    groups = [compat.group_name_of(mesh, m) for m in mesh_dims]
    bad = (asked < -1) | (asked >= outer * inner)
    goes = (asked >= 0) & ~bad
    node = torch.where(goes, asked // inner, outer)
    to = torch.where(_is_first(node), node, outer)  # a row goes once to each node
    tables = _tables(asked, bad, goes, to, (outer, inner), groups, what)
    # Of k copies that go anywhere, none goes to a given node with the probability (1 - 1 / outer) ** k.
    to_nodes = round(size * outer * (1 - (1 - 1 / outer) ** copies))
    likely = to_nodes, to_nodes, size * copies, size * copies
    partitions = [
        partition_of_sizes(s, mesh, mesh_dims, about=about) for s, about in zip(tables.sizes, likely, strict=True)
    ]
    here = compat.coordinate(mesh)
    sent, passed, passed_on, arriving = (c.local_size(here) for c in partitions)

    order = first_rows(to.flatten().argsort(stable=True), sent)
    rows = order // copies
    same_node = node.index_select(0, rows) == to.flatten().index_select(0, order).unsqueeze(1)
    places = torch.where(same_node, asked.index_select(0, rows).remainder(inner), -1)
    (passing,) = exchange_rows([places], tables.between, passed, groups[0])
    onward = first_rows(torch.where(passing < 0, inner, passing).flatten().argsort(stable=True), passed_on)

    numbers = torch.arange(outer * inner, device=asked.device).view(outer, inner).t().flatten()
    received = tables.sources.flatten().to(asked.device)
    source = torch.repeat_interleave(numbers, received, output_size=arriving)
    arranged = source.argsort(stable=True)
    source = source.index_select(0, arranged)
    return Levels(tables.between, order, passing, tables.within, onward, arranged, source), partitions


def send_by_levels(
    shared: Sequence[Tensor], each: Sequence[Tensor], levels: Levels, arriving: IntLike, groups: Sequence[str]
) -> list[Tensor]:
    """Rows by a route: one exchange between nodes, one within. Differentiable.

    Args:
        shared: each [n, ...], rows of which all copies are equal.
        each: each [n, k, ...], with an entry for each copy. All entries of a row go to each node that the row goes to.
        levels: the route.
        arriving: how many copies arrive.
        groups: the ranks between nodes, and within.

    Returns:
        Each [arriving, ...], in the order of the source.
    """
    passed, copies = levels.passing.shape
    rows = levels.order // copies
    came = exchange_rows([x.index_select(0, rows) for x in (*shared, *each)], levels.between, passed, groups[0])
    rows = levels.onward // copies
    sent = [x.index_select(0, rows) for x in came[: len(shared)]]
    sent += [x.flatten(0, 1).index_select(0, levels.onward) for x in came[len(shared) :]]
    return [x.index_select(0, levels.arranged) for x in exchange_rows(sent, levels.within, arriving, groups[1])]


def return_by_levels(
    rows: Sequence[Tensor], levels: Levels, weights: Tensor | None, n: IntLike, groups: Sequence[str]
) -> list[Tensor]:
    """Rows go home: one exchange within nodes, one between. Copies are added up on each node, then at home.

    Args:
        rows: each [arrived, ...].
        levels: the route.
        weights: of the copies: [n, k]. They travel to the nodes.
        n: how many rows this rank has.
        groups: the ranks between nodes, and within.

    Returns:
        Each [n, ...], with zeros for rows that went nowhere.
    """
    passed, copies = levels.passing.shape
    numbers = levels.order // copies
    factors = None
    if weights is not None:
        (factors,) = exchange_rows([weights.index_select(0, numbers)], levels.between, passed, groups[0])
    arrived = [torch.zeros_like(x).index_copy(0, levels.arranged, x) for x in rows]  # in the order that they came in
    returned = exchange_rows(arrived, levels.within, levels.onward.shape[0], groups[1], back=True)
    if factors is not None:
        shares = factors.flatten().index_select(0, levels.onward)
        returned = [x * shares.view([-1, *[1] * (x.ndim - 1)]) for x in returned]
    rows_here = levels.onward // copies
    sums = [_sums(x, rows_here, passed) for x in returned]
    home = exchange_rows(sums, levels.between, levels.order.shape[0], groups[0], back=True)
    return [add_copies(x, levels.order, n, copies) for x in home]


def _sums(copies: Tensor, numbers: Tensor, n: IntLike) -> Tensor:
    """The sum of those with the same number: [n, ...]. Few of all possible copies are there."""
    precise = torch.float32 if copies.dtype in (torch.bfloat16, torch.float16) else copies.dtype
    sums = copies.new_zeros([n, *copies.shape[1:]], dtype=precise).index_add(0, numbers, copies.to(precise))
    return sums.to(copies.dtype)


def add_copies(rows: Tensor, numbers: Tensor, n: IntLike, copies: int, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of the copies of each row: [n, ...]; zeros for what has not come back.

    Args:
        rows: copies, in any order: [m, ...].
        numbers: of the copies, of n * copies: [m].
        n: how many rows there are.
        copies: how many of each.
        weights: of the copies, 1 if None: [n, copies].
    """
    whole = rows.new_zeros([n * copies, *rows.shape[1:]]).index_copy(0, numbers, rows)
    whole = whole.view([n, copies, *rows.shape[1:]])
    if weights is not None:
        whole = whole * weights.view([n, copies, *[1] * (rows.ndim - 1)])
    return whole.sum(1) if copies > 1 else whole.squeeze(1)


def _is_first(node: Tensor) -> Tensor:
    """Whether no copy before it goes to the same node: [n, k], of the nodes of copies [n, k]."""
    same = node.unsqueeze(2) == node.unsqueeze(1)
    return ~same.tril(-1).any(2)


def _tables(
    asked: Tensor,
    bad: Tensor,
    goes: Tensor,
    to: Tensor,
    parts: tuple[int, int],
    groups: Sequence[str],
    what: str,
) -> _Tables:
    """Gathered between nodes, then within: what a rank does not need of the others' tables does not come to it."""
    outer, inner = parts
    ranks = outer * inner
    counts = [_counted(to, outer), _counted(torch.where(goes, asked, ranks), ranks)]
    # A number out of range is told in the last column, so that the first gather raises nothing: the ranks of one place
    # hear of it there, all others by the second.
    told = counts_in_range(counts[0].new_zeros([1]), asked.flatten(), bad.flatten())
    gathered = gather_counts(torch.cat([*counts, told]), groups[0])
    between, to_ranks, told = gathered.split([outer, ranks, 1], 1)
    to_ranks = to_ranks.view(outer, outer, inner)
    here = [rows_from(to_ranks, groups[0]), to_ranks.sum(0), between.sum(1), between.sum(0)]
    worst = told.amin()
    mine = torch.where(worst < 0, worst, torch.cat([h.flatten() for h in here]))
    wanted = f"{what}: destinations are ranks 0 to {ranks - 1} of the mesh dims, or -1 for rows that are dropped"
    gathered = gather_counts(mine.to(asked.device), groups[1], wanted)
    pairs, totals, leaving, passing = gathered.split([ranks, ranks, outer, outer], 1)
    pairs, totals = (t.view(inner, outer, inner) for t in (pairs, totals))
    sizes = leaving.t(), passing.t(), totals.sum(2).t(), totals.sum(0)
    sources = rows_from(pairs.transpose(1, 2), groups[1])
    return _Tables(between, pairs.sum(1), sources, [s.flatten() for s in sizes])


def _counted(numbers: Tensor, count: int) -> Tensor:
    """How often each of the first `count` numbers occurs; `count` itself stands for what is not counted."""
    numbers = numbers.flatten()
    return numbers.new_zeros([count + 1]).scatter_add(0, numbers, torch.ones_like(numbers))[:count]
