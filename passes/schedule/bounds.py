"""Lower bounds of the time of a schedule.

`lower_bound` holds for a graph as it is, `bucket_bound` for all graphs that its collectives can become in buckets.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

import numpy as np
from torch.fx import Graph, Node

from shardcompile.collectives.traffic import Member, Traffic
from shardcompile.passes.cost.model import CostModel, GraphCosts
from shardcompile.passes.graph import node_sizes
from shardcompile.passes.graph.collective import Collective


def lower_bound(graph: Graph, costs: GraphCosts) -> float:
    """Returns the seconds that no order of a graph can beat in `simulate`.

    It is the largest of these, which do not depend on the order:

    * the longest path through the graph, where a collective's time lies between its start and its waits: a node starts
      after its inputs, and after the collective that it awaits;
    * for the compute stream, for the stream of each group, and for each link that several groups share: its jobs, one
      at a time, none before the longest path to it, and followed by the longest path from it. With preemption (which
      schedules do not have), Jackson's rule solves this exactly (Carlier, "The one-machine sequencing problem", 1982).
      So the bound is at least the total compute, and the total communication of a group.
    """
    heads, tails = _heads(graph, costs), tails_of(graph, costs)
    jobs = _compute_jobs(graph, costs, heads, tails)
    for node, group in costs.group.items():
        if costs.seconds[node]:
            start = heads[node] + costs.packing.get(node, 0.0)
            jobs.setdefault(group, []).append((start, costs.seconds[node], tails[node]))
    path = max((sum(job) for work in jobs.values() for job in work), default=0.0)
    links = _link_jobs(costs, heads, tails)
    return costs.call + max([path, *map(_one_machine_bound, jobs.values()), *map(_one_machine_bound, links.values())])


def bucket_bound(graph: Graph, costs: GraphCosts, model: CostModel) -> float:
    """Returns the seconds that no order of a graph can beat in `simulate`, whichever of its collectives share buckets.

    It is like `lower_bound`, but counts only the latencies that no bucket saves: those along a path, one before the
    first transfer of each link, and one for each kind of collective of a group. Copies into and out of buckets are
    free.

    What all ranks get, or reduce, takes at least as long as shards of one size would. A bucket of other uneven shards
    takes as long as the rank that has most of all its members, which may be less than the members take one by one. So
    links and compute are bounded by what a single rank has of all collectives of one kind and group, since no bucket is
    faster than any of its ranks: the rank that has most.

    Args:
        graph: in a valid order.
        costs: of the graph.
        model: that computed them.
    """
    costs = _even_costs(costs, model)
    heads, tails = _heads(graph, costs), tails_of(graph, costs)
    path = max((sum(job) for work in _compute_jobs(graph, costs, heads, tails).values() for job in work), default=0.0)
    ends = [heads[n] + costs.seconds[n] + tails[n] for n in costs.group]
    single_rank = _single_rank_costs(graph, costs, model)
    work = [*_compute_jobs(graph, single_rank, heads, tails).values(), *_link_jobs(single_rank, heads, tails).values()]
    return costs.call + max([path, *ends, *map(_one_machine_bound, work), *_transfers_with_one_latency(single_rank)])


def _even_costs(costs: GraphCosts, model: CostModel) -> GraphCosts:
    """Returns the costs if what all ranks get, or reduce, were evenly sharded and needed no unpacking."""
    seconds, latency = dict(costs.seconds), dict(costs.latency)
    for node, group in costs.group.items():
        c = Collective.of(node)
        assert c is not None
        traffic = _even_traffic(c, model)
        if traffic is not None:
            price = model.price_of(group, traffic)
            seconds[node], latency[node] = price.seconds, price.latency
            seconds.update(dict.fromkeys(c.waits, 0.0))
    return replace(costs, seconds=seconds, latency=latency)


def _even_traffic(c: Collective, model: CostModel) -> Traffic | None:
    """Returns the traffic of even shards in place of uneven ones that a ring can move; None for other collectives."""
    found = _members(c, model)
    if found is None or c.descriptor.traffic is None:
        return None
    members, n = found
    traffic = c.descriptor.traffic(members, n)
    return None if traffic.ring is None else Traffic(traffic.total / n, traffic.total)


def _members(c: Collective, model: CostModel) -> tuple[list[Member], int] | None:
    """Returns members and group size if uneven ones may share a bucket and each rank has a link of its own."""
    n, joins = model.group_size(c.group_name), c.descriptor.joins
    if joins is None or not joins.uneven or n is None or model.link(c.group_name).medium != "ports":
        return None
    return node_sizes.members(c, n), n


def _single_rank_costs(graph: Graph, costs: GraphCosts, model: CostModel) -> GraphCosts:
    """Returns the costs of what one rank moves and unpacks: for each kind and group the rank that has most in total.

    Even collectives cost every rank the same, and so do those whose sizes are not in the graph.
    """
    loads: dict[Hashable, dict[Node, np.ndarray]] = {}
    for node, group in costs.group.items():
        c = Collective.of(node)
        assert c is not None
        found = _relative_load(c, model)
        if found is not None:
            loads.setdefault((group, c.kind), {})[node] = found
    seconds = dict(costs.seconds)
    for by_node in loads.values():
        transfers = {n: costs.seconds[n] - costs.latency.get(n, 0.0) for n in by_node}
        rank = int(np.argmax(sum(load * transfers[n] for n, load in by_node.items())))
        for node, load in by_node.items():
            seconds[node] -= transfers[node] * (1 - float(load[rank]))
        for wait, start in costs.awaits.items():
            if start in by_node:
                seconds[wait] *= float(by_node[start][rank])
    return replace(costs, seconds=seconds)


def _relative_load(c: Collective, model: CostModel) -> np.ndarray | None:
    """Returns what each rank moves relative to the rank that moves most; None if all move the same."""
    found, joins = _members(c, model), c.descriptor.joins
    if found is None or joins is None or _even_traffic(c, model) is not None:
        return None
    nbytes = joins.load(*found).nbytes.ravel()
    return nbytes / nbytes.max() if nbytes.any() else None


def _transfers_with_one_latency(costs: GraphCosts) -> list[float]:
    """Returns, for each group, its transfers plus one latency for each kind of collective."""
    transfers: dict[str, float] = {}
    latencies: dict[tuple[str, str], float] = {}
    for node, group in costs.group.items():
        latency = costs.latency.get(node, 0.0)
        transfers[group] = transfers.get(group, 0.0) + costs.seconds[node] - latency
        c = Collective.of(node)
        assert c is not None
        joins = c.descriptor.joins
        kind = (group, c.kind if joins is None else f"what joins {joins.bucket}")
        latencies[kind] = min(latency, latencies.get(kind, math.inf))
    return [seconds + sum(least for (g, _), least in latencies.items() if g == of) for of, seconds in transfers.items()]


_Job = tuple[float, float, float]
"""The least time before a job (head), its time, and the least time after it (tail)."""


def _compute_jobs(
    graph: Graph, costs: GraphCosts, heads: Mapping[Node, float], tails: Mapping[Node, float]
) -> dict[str, list[_Job]]:
    """Returns the jobs of the compute stream."""
    jobs: list[_Job] = []
    for node in graph.nodes:
        if node in costs.group:
            if node in costs.packing:
                jobs.append((heads[node], costs.packing[node], costs.seconds[node] + tails[node]))
        elif costs.seconds[node]:
            jobs.append((heads[node], costs.seconds[node], tails[node]))
    return {"": jobs} if jobs else {}  # no group has an empty name


def _link_jobs(costs: GraphCosts, heads: Mapping[Node, float], tails: Mapping[Node, float]) -> dict[str, list[_Job]]:
    """Returns, for each link, the transfers on it, each after the latency of its collective."""
    jobs: dict[str, list[_Job]] = {}
    for node, group in costs.group.items():
        latency = costs.latency.get(node, 0.0)
        start = heads[node] + costs.packing.get(node, 0.0) + latency
        # A group without a shared link has one of its own.
        jobs.setdefault(costs.link.get(group, f"of {group}"), []).append(
            (start, costs.seconds[node] - latency, tails[node])
        )
    return jobs


def _heads(graph: Graph, costs: GraphCosts) -> dict[Node, float]:
    """Returns the least time before each node."""
    heads: dict[Node, float] = {}
    for node in graph.nodes:
        earliest = 0.0
        for x in costs.inputs[node]:
            # Only the wait is delayed by a collective; other users of its unfinished result are not.
            took = costs.packing.get(x, 0.0) if x in costs.group else costs.seconds[x]
            earliest = max(earliest, heads[x] + took)
        if node in costs.awaits:
            start = costs.awaits[node]
            earliest = max(earliest, heads[start] + costs.packing.get(start, 0.0) + costs.seconds[start])
        heads[node] = earliest
    return heads


def tails_of(graph: Graph, costs: GraphCosts) -> dict[Node, float]:
    """Returns the least time after the end of each node."""
    tails: dict[Node, float] = dict.fromkeys(graph.nodes, 0.0)
    from_start = dict(tails)  # the least time from a node's start to the end of everything
    for node in reversed(graph.nodes):
        if node in costs.group:
            from_start[node] = max(from_start[node], costs.seconds[node] + tails[node])
            from_start[node] += costs.packing.get(node, 0.0)
        else:
            from_start[node] = costs.seconds[node] + tails[node]
        if node in costs.awaits:
            start = costs.awaits[node]
            tails[start] = max(tails[start], from_start[node])
        for x in costs.inputs[node]:
            after = from_start if x in costs.group else tails
            after[x] = max(after[x], from_start[node])
    return tails


def _one_machine_bound(jobs: Iterable[tuple[float, float, float]]) -> float:
    """Returns the length of Jackson's preemptive schedule: at any time the ready job with the longest tail runs."""
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
