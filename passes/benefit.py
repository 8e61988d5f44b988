"""Whether it pays to put one more collective into a bucket.

A bucket saves the latency of all its members but one. It costs copies, to pack and to unpack, and overlap: it starts
when the last of its payloads is ready, and what needs its first member waits for all of them. So a member joins where
copying it takes less than the latency, and where the whole bucket is hidden behind compute, or its transfer is short
against the latency that it saves. All of it reads `Prices` only, which are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from shardcompile.passes.collective import Collective
from shardcompile.passes.cost import CostModel, Prices
from shardcompile.passes.edges import Edges, clock_of, first_uses
from shardcompile.passes.simulator import known_peak

SATURATIONS = (4.0, 1.0, 0.0)
"""A bucket may transfer for so many latencies where that is not hidden: of four, latency is a fifth of its time."""

MEMORY_SHARE = 0.05
"""Of the peak memory: what a bucket may hold. One is in use while the next one is on its way."""


class Benefit:
    """Prices what it means to join a bucket, in one graph.

    Args:
        graph: in a valid order.
        model: the costs.
        bucket_bytes: no bucket holds more, over all ranks.

    Attributes:
        saturation: one of `SATURATIONS`.
    """

    def __init__(self, graph: Graph, model: CostModel, bucket_bytes: int) -> None:
        self.saturation = SATURATIONS[0]
        prices = Prices.of(graph, model)
        edges = Edges.of(graph)
        clock = clock_of(edges, prices)
        self._seconds, self._model = prices.seconds, model
        self._needed = {c: clock[int(place)] for c, place in first_uses(edges, prices).items()}
        self._ready = _ready_times(edges, prices, clock)
        budget = MEMORY_SHARE * known_peak(graph, prices)
        self._bucket_bytes, self._budget = bucket_bytes, budget

    def pays(self, bucket: Sequence[Collective], candidate: Collective) -> bool:
        """Whether the latency that one more member saves is longer than the copies that it takes.

        Args:
            bucket: at least one collective of the candidate's group.
            candidate: one more.
        """
        ranks = self._model.group_size(candidate.group_name)
        if ranks is None:
            return True
        packed = [*bucket, candidate] if len(bucket) == 1 else [candidate]  # one alone is not copied
        device = self._model.device
        copied = 2 * (1 + 1 / ranks) * sum(c.global_bytes for c in packed) / (device.memory * device.share)
        return copied < self._model.link(candidate.group_name).latency(ranks)

    def joins(self, bucket: Sequence[Collective], candidate: Collective) -> bool:
        """Whether a bucket is better with one more member.

        Args:
            bucket: at least one collective of the candidate's group, see `Bucketing`.
            candidate: which comes after them. Of a group that is not known the bytes alone decide.
        """
        members = [*bucket, candidate]
        nbytes = sum(c.global_bytes for c in members)
        ranks = self._model.group_size(candidate.group_name)
        if nbytes > self._bucket_bytes or ranks is None:
            return nbytes <= self._bucket_bytes
        latency = self._model.link(candidate.group_name).latency(ranks)
        transfer = sum(max(self._seconds[c.node] - latency, 0.0) for c in members)
        if transfer <= self.saturation * latency:
            return True
        slack = min(self._needed[c.node] for c in members) - max(self._ready[c.node] for c in members)
        return nbytes <= self._budget and latency + transfer <= slack


def _ready_times(edges: Edges, prices: Prices, clock: Sequence[float]) -> dict[Node, float]:
    """By node: when its inputs would be there if compute were never held up."""
    ready: dict[Node, float] = {}
    made: dict[Node, float] = {}
    for place, node in enumerate(edges.order):
        ready[node] = max((made[i] for i in edges.before[node]), default=0.0)
        works = prices.seconds[node] and node not in prices.group
        made[node] = clock[place + 1] if works else clock[place] if node in prices.awaits else ready[node]
    return ready
