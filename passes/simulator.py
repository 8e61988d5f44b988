"""Replays a schedule: one stream for compute, one for each group's collectives.

Nodes run in the order given. A collective starts when the compute stream has reached it and its group's stream is
free; a wait holds up the compute stream until its collective has ended. What a collective packs and unpacks is compute.
Groups that use the same link take turns on it, in the order in which they start: while one transfers, the latency of
another passes, but not its transfer. Two that would share a link's bandwidth end together when the second of these
does. What is not modelled: kernels that a running collective slows down, and ranks that arrive late.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from shardcompile.passes.cost import Prices

COMPUTE = "compute"
"""The stream of everything but collectives."""


class Event(NamedTuple):
    """A node at work. Times in seconds since the start; nodes that take no time have no event."""

    node: Node
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a schedule comes to. Times in seconds, memory in bytes.

    Attributes:
        total: until everything has ended, collectives that nobody waits for included.
        compute: the compute stream's work.
        communication: by group, its stream's work.
        exposed: how long the compute stream has nothing to do.
        stalls: by collective, how long the compute stream waits for it.
        peak_bytes: the most memory at any time, inputs included, which are never freed.
        events: in the order in which nodes are reached.
    """

    total: float
    compute: float
    communication: Mapping[str, float]
    exposed: float
    stalls: Mapping[Node, float]
    peak_bytes: int
    events: Sequence[Event]


def simulate(order: Sequence[Node], prices: Prices) -> Timeline:
    """Replay a schedule.

    Args:
        order: all nodes of a graph, each after its inputs.
        prices: of that graph.
    """
    _check_order(order, prices)
    seconds, group, awaits, packing = prices.seconds, prices.group, prices.awaits, prices.packing
    events: list[Event] = []
    streams = Streams(prices.link)
    communication: dict[str, float] = {}
    ended: dict[Node, float] = {}
    stalls: dict[Node, float] = {}
    now = compute = 0.0
    for node in order:
        took = seconds[node]
        stream = group.get(node)
        copying = took if stream is None else packing.get(node, 0.0)
        if node in awaits:
            until = ended[awaits[node]]
            if until > now:
                stalls[awaits[node]] = until - now
                now = until
        if copying:
            events.append(Event(node, COMPUTE, now, now + copying))
            now, compute = now + copying, compute + copying
        if stream is not None:
            start, ended[node] = streams.run(stream, now, prices.latency.get(node, 0.0), took)
            communication[stream] = communication.get(stream, 0.0) + took
            events.append(Event(node, stream, start, ended[node]))
    total = max([now, *ended.values()])
    return Timeline(total, compute, communication, total - compute, stalls, peak_memory(order, prices), events)


class Streams:
    """When collectives run: one at a time of each group, and one transfer at a time on each link.

    Args:
        link: by group, the name of its link; a group that is left out has one for itself.
    """

    def __init__(self, link: Mapping[str, str]) -> None:
        self._link = link
        self._free_at: dict[str, float] = {}
        self._link_free_at: dict[str, float] = {}

    def free_at(self, group: str) -> float:
        """When a group could start its next collective."""
        return self._free_at.get(group, 0.0)

    def run(self, group: str, now: float, latency: float, seconds: float) -> tuple[float, float]:
        """Start a collective; returns its start and its end.

        Args:
            group: that it runs on.
            now: before which it does not start.
            latency: the part of its seconds in which it uses no link.
            seconds: that it takes alone.
        """
        link = self._link.get(group, "")
        start = max(now, self._free_at.get(group, 0.0))
        end = start + seconds
        if link:
            busy = self._link_free_at.get(link, 0.0)
            if start + latency < busy:
                end = busy + seconds - latency
            self._link_free_at[link] = max(end, busy)
        self._free_at[group] = end
        return start, end


def _check_order(order: Sequence[Node], prices: Prices) -> None:
    seen: set[Node] = set()
    for node in order:
        assert seen.issuperset(prices.inputs[node]), f"{node} stands before one of its inputs"
        seen.add(node)
    assert len(seen) == len(order) == len(prices.inputs), "the order has to hold each node of the graph once"


def peak_memory(order: Sequence[Node], prices: Prices) -> int:
    """The most bytes that are held at any time.

    A tensor is held from the node that makes it to the last node that reads it or one of its views, a collective's
    payload also until the collective is first awaited (the last node, if it never is), inputs throughout.

    Args:
        order: all nodes of a graph, each after its inputs.
        prices: of that graph.
    """
    last = _last_uses(order, prices)
    freed = [0] * (len(order) + 1)
    held = peak = 0
    for i, node in enumerate(order):
        nbytes = prices.nbytes[node]
        if nbytes:
            held += nbytes
            if node.op != "placeholder":
                freed[last[node]] += nbytes
        peak = max(peak, held)
        held -= freed[i]
    return peak


def known_peak(graph: Graph, prices: Prices) -> int:
    """`peak_memory` of a graph as it came to the first pass that asked, which later ones are measured by as well.

    Args:
        graph: in a valid order.
        prices: of the graph.
    """
    (output,) = (n for n in reversed(graph.nodes) if n.op == "output")
    return int(output.meta.setdefault(_PEAK, peak_memory(list(graph.nodes), prices)))


_PEAK = "shardcompile_peak_bytes"


def _last_uses(order: Sequence[Node], prices: Prices) -> dict[Node, int]:
    """By node that allocates: where in the order its memory is used last."""
    storage, awaits, group = prices.storage, prices.awaits, prices.group
    last: dict[Node, int] = {}
    running = {node: len(order) - 1 for node in group}
    for i in range(len(order) - 1, -1, -1):  # from the end: the first wait is the last one seen
        if order[i] in awaits:
            running[awaits[order[i]]] = i
    for i, node in enumerate(order):
        last[storage[node]] = max(i, last.get(storage[node], 0))
        until = running.get(node, i)
        for x in prices.inputs[node]:
            base = storage[x]
            last[base] = max(until, last.get(base, 0))
    return last


def lower_bound(graph: Graph, prices: Prices) -> float:
    """Seconds that no order of a graph can beat in `simulate`.

    The largest of four, none of which an order has a say in:

    * the longest path through the graph, where a collective's time lies between its start and its waits: a node starts
      after its inputs, and after the collective that it awaits;
    * of the compute stream, of each group's, and of each link that several groups share: its work, one piece at a
      time, none before the longest path to it and the last one before the longest path from it. With preemption allowed
      (and it is not), this is solved exactly by Jackson's rule (Carlier, "The one-machine sequencing problem", 1982),
      so that it is at least the sum of the work, the whole compute and a group's whole communication.
    """
    heads, tails = _heads(graph, prices), tails_of(graph, prices)
    jobs = _compute_jobs(graph, prices, heads, tails)
    for node, group in prices.group.items():
        if prices.seconds[node]:
            start = heads[node] + prices.packing.get(node, 0.0)
            jobs.setdefault(group, []).append((start, prices.seconds[node], tails[node]))
    path = max((sum(job) for work in jobs.values() for job in work), default=0.0)
    links = _link_jobs(prices, heads, tails)
    return max([path, *map(_one_machine_bound, jobs.values()), *map(_one_machine_bound, links.values())])


def bucket_bound(graph: Graph, prices: Prices) -> float:
    """Seconds that no order of a graph can beat in `simulate`, whichever of its collectives share buckets.

    As `lower_bound`, but of latencies only those count that no bucket saves: those along a path, one before the first
    transfer of each link, and one for each kind and dtype of collective of a group. Packing and unpacking are free.
    """
    heads, tails = _heads(graph, prices), tails_of(graph, prices)
    jobs = _compute_jobs(graph, prices, heads, tails)
    path = max((sum(job) for work in jobs.values() for job in work), default=0.0)
    ends = [heads[n] + prices.seconds[n] + tails[n] for n in prices.group]
    links = _link_jobs(prices, heads, tails)
    return max([path, *ends, *map(_one_machine_bound, [*jobs.values(), *links.values()]), *_once_each(prices)])


def _once_each(prices: Prices) -> list[float]:
    """By group: its transfers, and one latency for each kind of collective."""
    transfers: dict[str, float] = {}
    latencies: dict[tuple[str, str], float] = {}
    for node, group in prices.group.items():
        latency = prices.latency.get(node, 0.0)
        transfers[group] = transfers.get(group, 0.0) + prices.seconds[node] - latency
        kind = (group, str(node.target))
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


class Bar(NamedTuple):
    """What a Chrome trace shows as one bar. Times in seconds."""

    name: str
    category: str
    stream: str
    start: float
    end: float
    args: Mapping[str, Any]


def chrome_events(process: int, name: str, streams: Mapping[str, str], bars: Iterable[Bar]) -> list[dict[str, Any]]:
    """The events of one process of a Chrome trace: times in microseconds, rounded to the nanosecond, as it keeps them.

    Args:
        process: its number.
        name: of the process.
        streams: what their threads are called, from top to bottom.
        bars: on these streams.
    """
    thread = {stream: i for i, stream in enumerate(streams)}

    def said(kind: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": process, "tid": tid, "args": args}

    described = [said("process_name", 0, name=name), said("process_sort_index", 0, sort_index=process)]
    for stream, title in streams.items():
        described.append(said("thread_name", thread[stream], name=title))
        described.append(said("thread_sort_index", thread[stream], sort_index=thread[stream]))
    events = []
    for bar in bars:
        start, end = round(bar.start * 1e9), round(bar.end * 1e9)
        event = {"ph": "X", "name": bar.name, "cat": bar.category, "pid": process, "tid": thread[bar.stream]}
        events.append(event | {"ts": start / 1e3, "dur": (end - start) / 1e3, "args": dict(bar.args)})
    return [*described, *events]


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """A timeline as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing show."""
    streams = {COMPUTE: COMPUTE} | {group: f"group {group}" for group in timeline.communication}
    bars = (
        Bar(
            e.node.name,
            "compute" if e.stream == COMPUTE else "communication",
            e.stream,
            e.start,
            e.end,
            {"target": str(e.node.target)},
        )
        for e in timeline.events
    )
    return {"traceEvents": chrome_events(0, "schedule", streams, bars), "displayTimeUnit": "ms"}
