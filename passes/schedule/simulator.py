"""Replays a schedule on one stream for compute and one stream for the collectives of each group.

Nodes run in the given order. A collective starts when the compute stream has reached it and the stream of its group is
free; a wait blocks the compute stream until its collective has ended. Packing and unpacking of a collective is compute.
Groups that use the same link take turns on it, in the order in which they start: while one transfers, the latency of
another passes, but not its transfer. Two that would share a link's bandwidth end together when the second of these
does. Not modelled: the slowdown of kernels by a running collective, and ranks that arrive late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph, Node

from shardcompile.passes.cost.model import GraphCosts

COMPUTE = "compute"
"""The stream of everything but collectives."""


class Event(NamedTuple):
    """A node on a stream. Times in seconds from the start; nodes that take no time have no event."""

    node: Node
    stream: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of a replay. Times in seconds, memory in bytes.

    Attributes:
        total: until everything has ended, collectives that are never awaited included.
        compute: work on the compute stream, and the time before the first node.
        communication: by group: work on its stream.
        exposed: idle time of the compute stream.
        stalls: by collective: how long the compute stream waits for it.
        peak_bytes: peak memory, inputs included, which are never freed.
        events: in the order in which nodes are reached.
    """

    total: float
    compute: float
    communication: Mapping[str, float]
    exposed: float
    stalls: Mapping[Node, float]
    peak_bytes: int
    events: Sequence[Event]


def simulate(order: Sequence[Node], costs: GraphCosts) -> Timeline:
    """Replays a schedule.

    Args:
        order: all nodes of a graph, each after its inputs.
        costs: of that graph.
    """
    _check_order(order, costs)
    seconds, group, awaits, packing = costs.seconds, costs.group, costs.awaits, costs.packing
    events: list[Event] = []
    streams = Streams(costs.link)
    communication: dict[str, float] = {}
    ended: dict[Node, float] = {}
    stalls: dict[Node, float] = {}
    now = compute = costs.call
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
            start, ended[node] = streams.run(stream, now, costs.latency.get(node, 0.0), took)
            communication[stream] = communication.get(stream, 0.0) + took
            events.append(Event(node, stream, start, ended[node]))
    total = max([now, *ended.values()])
    return Timeline(total, compute, communication, total - compute, stalls, peak_memory(order, costs), events)


class Streams:
    """Times of collectives: one at a time for each group, and one transfer at a time on each link.

    Args:
        link: by group: the name of its link; a group that is left out has a link of its own.
    """

    def __init__(self, link: Mapping[str, str]) -> None:
        self._link = link
        self._free_at: dict[str, float] = {}
        self._link_free_at: dict[str, float] = {}

    def free_at(self, group: str) -> float:
        """Returns when a group can start its next collective."""
        return self._free_at.get(group, 0.0)

    def transfers_at(self, group: str, now: float, latency: float) -> float:
        """Returns when a collective would begin to transfer; for the arguments see `run`."""
        start = max(now, self._free_at.get(group, 0.0))
        return max(start + latency, self._link_free_at.get(self._link.get(group, ""), 0.0))

    def run(self, group: str, now: float, latency: float, seconds: float) -> tuple[float, float]:
        """Runs a collective; returns its start and its end.

        Args:
            group: that it runs on.
            now: before which it does not start.
            latency: the part of its seconds in which it does not use the link.
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


def _check_order(order: Sequence[Node], costs: GraphCosts) -> None:
    seen: set[Node] = set()
    for node in order:
        assert seen.issuperset(costs.inputs[node]), f"{node} is placed before one of its inputs"
        seen.add(node)
    assert len(seen) == len(order) == len(costs.inputs), "the order has to hold each node of the graph once"


def peak_memory(order: Sequence[Node], costs: GraphCosts) -> int:
    """Returns the peak memory in bytes.

    A tensor is held from the node that allocates it to the last node that reads it or one of its views. A collective's
    payload is held until the collective is first awaited (to the last node, if it never is). Inputs are held
    throughout, except those that the forward pass has saved for the backward pass (`GraphCosts.freed`).

    Args:
        order: all nodes of a graph, each after its inputs.
        costs: of that graph.
    """
    last = _last_uses(order, costs)
    freed = [0] * (len(order) + 1)
    held = peak = 0
    for i, node in enumerate(order):
        nbytes = costs.nbytes[node]
        if nbytes:
            held += nbytes
            if node.op != "placeholder" or node in costs.freed:
                freed[last[node]] += nbytes
        peak = max(peak, held)
        held -= freed[i]
    return peak


def known_peak(graph: Graph, costs: GraphCosts) -> int:
    """Returns the `peak_memory` of a graph when it was first asked for. Later passes are limited by the same number.

    Args:
        graph: in a valid order.
        costs: of the graph.
    """
    (output,) = (n for n in reversed(graph.nodes) if n.op == "output")
    return int(output.meta.setdefault(_PEAK, peak_memory(list(graph.nodes), costs)))


_PEAK = "shardcompile_peak_bytes"


def _last_uses(order: Sequence[Node], costs: GraphCosts) -> dict[Node, int]:
    """Returns, for each allocating node, the position in the order of the last use of its memory."""
    storage, awaits, group = costs.storage, costs.awaits, costs.group
    last: dict[Node, int] = {}
    running = {node: len(order) - 1 for node in group}
    for i in range(len(order) - 1, -1, -1):  # from the end: the first wait is the last one seen
        if order[i] in awaits:
            running[awaits[order[i]]] = i
    for i, node in enumerate(order):
        last[storage[node]] = max(i, last.get(storage[node], 0))
        until = running.get(node, i)
        for x in costs.inputs[node]:
            base = storage[x]
            last[base] = max(until, last.get(base, 0))
    return last
