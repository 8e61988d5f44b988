"""What no schedule can beat.

`lower_bound` is of a graph as it is, `bucket_bound` of what its collectives could become in buckets.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

import numpy as np
from torch.fx import Graph, Node

from shardcompile.collectives.traffic import Member, Traffic
from shardcompile.passes.cost.model import CostModel, Prices, readable
from shardcompile.passes.graph import rank_dependent_sizes
from shardcompile.passes.graph.collective import Collective


def lower_bound(graph: Graph, prices: Prices) -> float:
    """Seconds that no order of a graph can beat in `simulate`.

    The largest of four, none of which an order has a say in:

    * the longest path through the graph, where a collective's time lies between its start and its waits: a node starts
      after its inputs, and after the collective that it awaits;
    * of the compute stream, of each group's, and of each link that several groups share: its work, one piece at a time,
      none before the longest path to it and the last one before the longest path from it. With preemption allowed
      (which it is not), Jackson's rule solves this exactly (Carlier, "The one-machine sequencing problem", 1982). So it
      is at least the whole compute, and a group's whole communication.
    """
    heads, tails = _heads(graph, prices), tails_of(graph, prices)
    jobs = _compute_jobs(graph, prices, heads, tails)
    for node, group in prices.group.items():
        if prices.seconds[node]:
            start = heads[node] + prices.packing.get(node, 0.0)
            jobs.setdefault(group, []).append((start, prices.seconds[node], tails[node]))
    path = max((sum(job) for work in jobs.values() for job in work), default=0.0)
    links = _link_jobs(prices, heads, tails)
    return prices.call + max([path, *map(_one_machine_bound, jobs.values()), *map(_one_machine_bound, links.values())])


def bucket_bound(graph: Graph, prices: Prices, model: CostModel) -> float:
    """Seconds that no order of a graph can beat in `simulate`, whichever of its collectives share buckets.

    As `lower_bound`, but of latencies only those count that no bucket saves: those along a path, one before the first
    transfer of each link, and one for each kind of collective of a group. What buckets copy is free.

    What all ranks get, or reduce, takes at least as long as shards of one size would. A bucket of other uneven shards
    takes as long as the rank that has most of all its members. That may be less than they take one by one. So links and
    compute are bounded by what a single rank has of all collectives of one kind and group: no bucket is faster than any
    of its ranks. It is the rank that has most.

    Args:
        graph: in a valid order.
        prices: of the graph.
        model: that made them.
    """
    prices = _of_even_shards(prices, model)
    heads, tails = _heads(graph, prices), tails_of(graph, prices)
    path = max((sum(job) for work in _compute_jobs(graph, prices, heads, tails).values() for job in work), default=0.0)
    ends = [heads[n] + prices.seconds[n] + tails[n] for n in prices.group]
    fewest = _of_one_rank(graph, prices, model)
    work = [*_compute_jobs(graph, fewest, heads, tails).values(), *_link_jobs(fewest, heads, tails).values()]
    return prices.call + max([path, *ends, *map(_one_machine_bound, work), *_once_each(fewest)])


def _of_even_shards(prices: Prices, model: CostModel) -> Prices:
    """Prices with which what all ranks get, or reduce, is sharded of one size; nobody unpacks it."""
    seconds, latency = dict(prices.seconds), dict(prices.latency)
    for node, group in prices.group.items():
        c = Collective.of(node)
        assert c is not None
        moved = _moved_to_all(c, model, prices.labels)
        if moved is not None:
            price = model.price_of(group, moved)
            seconds[node], latency[node] = price.seconds, price.latency
            seconds.update(dict.fromkeys(c.waits, 0.0))
    return replace(prices, seconds=seconds, latency=latency)


def _moved_to_all(c: Collective, model: CostModel, labels: Mapping[Node, set[str]]) -> Traffic | None:
    """What shards of one size would move in place of uneven ones that a ring can move; None of other collectives."""
    found = _members(c, model, labels)
    if found is None or c.descriptor.traffic is None:
        return None
    members, n = found
    traffic = c.descriptor.traffic(members, n)
    return None if traffic.ring is None else Traffic(traffic.total / n, traffic.total)


def _members(c: Collective, model: CostModel, labels: Mapping[Node, set[str]]) -> tuple[list[Member], int] | None:
    """The members and the number of ranks, if uneven ones may share a bucket and each rank has a link of its own."""
    n, joins = model.group_size(c.group_name), c.descriptor.joins
    if joins is None or not joins.uneven or n is None or model.link(c.group_name).medium != "ports":
        return None
    members = rank_dependent_sizes.members(c, n)
    return (members, n) if readable(c, members, labels) else None


def _of_one_rank(graph: Graph, prices: Prices, model: CostModel) -> Prices:
    """Prices of what one rank moves and unpacks, of each kind and group that which has most in all.

    Even collectives cost every rank the same, and so do those of which ranks do not know what others have.
    """
    parts: dict[Hashable, dict[Node, np.ndarray]] = {}
    for node, group in prices.group.items():
        c = Collective.of(node)
        assert c is not None
        found = _parts(c, model, prices.labels)
        if found is not None:
            parts.setdefault((group, c.kind), {})[node] = found
    seconds = dict(prices.seconds)
    for by_node in parts.values():
        transfers = {n: prices.seconds[n] - prices.latency.get(n, 0.0) for n in by_node}
        rank = int(np.argmax(sum(part * transfers[n] for n, part in by_node.items())))
        for node, part in by_node.items():
            seconds[node] -= transfers[node] * (1 - float(part[rank]))
        for wait, start in prices.awaits.items():
            if start in by_node:
                seconds[wait] *= float(by_node[start][rank])
    return replace(prices, seconds=seconds)


def _parts(c: Collective, model: CostModel, labels: Mapping[Node, set[str]]) -> np.ndarray | None:
    """What each rank moves, or sends and receives, relative to the rank that moves most; None if all move the same."""
    found, joins = _members(c, model, labels), c.descriptor.joins
    if found is None or joins is None or _moved_to_all(c, model, labels) is not None:
        return None
    nbytes = joins.load(*found).nbytes.ravel()
    return nbytes / nbytes.max() if nbytes.any() else None


def _once_each(prices: Prices) -> list[float]:
    """By group: its transfers, and one latency for each kind of collective."""
    transfers: dict[str, float] = {}
    latencies: dict[tuple[str, str], float] = {}
    for node, group in prices.group.items():
        latency = prices.latency.get(node, 0.0)
        transfers[group] = transfers.get(group, 0.0) + prices.seconds[node] - latency
        c = Collective.of(node)
        assert c is not None
        joins = c.descriptor.joins
        kind = (group, c.kind if joins is None else f"what joins {joins.bucket}")
        latencies[kind] = min(latency, latencies.get(kind, math.inf))
    return [seconds + sum(least for (g, _), least in latencies.items() if g == of) for of, seconds in transfers.items()]


_Job = tuple[float, float, float]
"""The least time before a piece of work, its time, and the least time after it."""


def _compute_jobs(
    graph: Graph, prices: Prices, heads: Mapping[Node, float], tails: Mapping[Node, float]
) -> dict[str, list[_Job]]:
    jobs: list[_Job] = []
    for node in graph.nodes:
        if node in prices.group:
            if node in prices.packing:
                jobs.append((heads[node], prices.packing[node], prices.seconds[node] + tails[node]))
        elif prices.seconds[node]:
            jobs.append((heads[node], prices.seconds[node], tails[node]))
    return {"": jobs} if jobs else {}  # no group has an empty name


def _link_jobs(prices: Prices, heads: Mapping[Node, float], tails: Mapping[Node, float]) -> dict[str, list[_Job]]:
    """By link: the transfers on it, each after the latency of its collective."""
    jobs: dict[str, list[_Job]] = {}
    for node, group in prices.group.items():
        latency = prices.latency.get(node, 0.0)
        start = heads[node] + prices.packing.get(node, 0.0) + latency
        # A group without a link of that name has one for itself.
        jobs.setdefault(prices.link.get(group, f"of {group}"), []).append(
            (start, prices.seconds[node] - latency, tails[node])
        )
    return jobs


def _heads(graph: Graph, prices: Prices) -> dict[Node, float]:
    """The least time before each node."""
    heads: dict[Node, float] = {}
    for node in graph.nodes:
        earliest = 0.0
        for x in prices.inputs[node]:
            # Only the wait is held up by a collective; other users of its unfinished result are not.
            took = prices.packing.get(x, 0.0) if x in prices.group else prices.seconds[x]
            earliest = max(earliest, heads[x] + took)
        if node in prices.awaits:
            start = prices.awaits[node]
            earliest = max(earliest, heads[start] + prices.packing.get(start, 0.0) + prices.seconds[start])
        heads[node] = earliest
    return heads


def tails_of(graph: Graph, prices: Prices) -> dict[Node, float]:
    """The least time after each node has ended."""
    tails: dict[Node, float] = dict.fromkeys(graph.nodes, 0.0)
    from_start = dict(tails)  # the least time from a node's start to the end of everything
    for node in reversed(graph.nodes):
        if node in prices.group:
            from_start[node] = max(from_start[node], prices.seconds[node] + tails[node])
            from_start[node] += prices.packing.get(node, 0.0)
        else:
            from_start[node] = prices.seconds[node] + tails[node]
        if node in prices.awaits:
            start = prices.awaits[node]
            tails[start] = max(tails[start], from_start[node])
        for x in prices.inputs[node]:
            after = from_start if x in prices.group else tails
            after[x] = max(after[x], from_start[node])
    return tails


def _one_machine_bound(jobs: Iterable[tuple[float, float, float]]) -> float:
    """Jackson's preemptive schedule: at any time the piece at hand with the longest tail. Jobs: (head, work, tail)."""
    waiting = sorted(jobs)
    ready: list[list[float]] = []  # (-tail, work left)
    now = end = 0.0
    i = 0
    while i < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[i][0])
        while i < len(waiting) and waiting[i][0] <= now:
            heapq.heappush(ready, [-waiting[i][2], waiting[i][1]])
            i += 1
        tail, work = ready[0]
        until = waiting[i][0] if i < len(waiting) else float("inf")
        if now + work <= until:
            now += work
            end = max(end, now - tail)
            heapq.heappop(ready)
        else:
            ready[0][1] = work - (until - now)
            now = until
    return end
