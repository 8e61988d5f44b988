"""Replays a schedule: one stream for compute, one for each group's collectives.

Nodes run in the order given. A collective starts when the compute stream has reached it and its group's stream is
free; a wait holds up the compute stream until its collective has ended. What a collective packs and unpacks is compute.
Groups that use the same link take turns on it, in the order in which they start: while one transfers, the latency of
another passes, but not its transfer. Two that would share a link's bandwidth end together when the second of these
does. What is not modelled: kernels that a running collective slows down, and ranks that arrive late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from shardcompile.passes.cost.model import Prices

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
    """The outcome of a schedule. Times in seconds, memory in bytes.

    Attributes:
        total: until everything has ended, collectives that nobody waits for included.
        compute: the compute stream's work, and what the call of the graph takes before it.
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
    now = compute = prices.call
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

    A tensor is held from the node that makes it to the last node that reads it or one of its views. A collective's
    payload is held until the collective is first awaited (to the last node, if it never is). Inputs are held
    throughout, but for what the forward pass has saved for the backward pass (`Prices.freed`).

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
            if node.op != "placeholder" or node in prices.freed:
                freed[last[node]] += nbytes
        peak = max(peak, held)
        held -= freed[i]
    return peak


def known_peak(graph: Graph, prices: Prices) -> int:
    """`peak_memory` of a graph as the first pass found it. Later passes are measured by the same number.

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

    def said(kind: str, tid: int, **args: object) -> dict[str, object]:
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
