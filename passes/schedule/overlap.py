"""Orders a graph so that its collectives run while it computes.

A collective is started early enough, and awaited late enough, that it has ended when its result is needed; not much
earlier and not much later, because memory is held in between. Several orders are worked out by list scheduling and
replayed by the simulator; the fastest whose memory stays within the limit is taken. All of it reads `Prices` only,
which are the same on every rank, so that every rank takes the same order.
"""

from __future__ import annotations

import itertools

from torch.fx import Graph, Node

from shardcompile.passes.cost.model import CostModel, Prices
from shardcompile.passes.graph.collective import collectives
from shardcompile.passes.schedule.bounds import lower_bound
from shardcompile.passes.schedule.edges import Edges
from shardcompile.passes.schedule.search import search
from shardcompile.passes.schedule.simulator import Timeline, known_peak, simulate
from shardcompile.passes.schedule.tasks import Tasks, nodes_in_order

MEMORY_LIMIT = 1.1
"""Peak memory of a schedule, relative to that of the graph as it came."""

SPARE_BYTES = 4 << 20
"""What a schedule may take beyond the graph's peak memory whatever the limit: of a small graph that is no matter."""


class ScheduleOverlap:
    """Start collectives early, await them late, see the module.

    Legal because every order that respects the graph's edges, the places of writes and the order of random ops computes
    the same. That Inductor keeps to the order is seen to by `HoldOrder`.

    Args:
        model: the costs; None for those of the device that the graph runs on.
        memory_limit: peak memory that is allowed, relative to that of the graph as it came.
    """

    name = "schedule_overlap"

    def __init__(self, model: CostModel | None = None, memory_limit: float = MEMORY_LIMIT) -> None:
        self.model = model
        self.memory_limit = memory_limit

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model}, memory_limit={self.memory_limit})"

    def __call__(self, graph: Graph) -> None:
        if not collectives(graph):
            return
        prices = Prices.of(graph, self.model or CostModel.of(graph))
        order = best_order(graph, prices, self.memory_limit)[0]
        for earlier, later in itertools.pairwise(order):
            earlier.append(later)


def best_order(graph: Graph, prices: Prices, memory_limit: float = MEMORY_LIMIT) -> tuple[list[Node], Timeline]:
    """The fastest order that was found within the memory limit, and what it comes to; the graph's own if none is.

    Args:
        graph: in a valid order.
        prices: of the graph.
        memory_limit: see `ScheduleOverlap`.
    """
    own = list(graph.nodes)
    came = simulate(own, prices)
    limit = byte_limit(graph, prices, memory_limit)
    edges = Edges.of(graph)
    tasks = Tasks.of(edges, prices)
    found = search(tasks, limit, lower_bound(graph, prices) - prices.call)
    order = nodes_in_order(edges, tasks, found.order)
    timeline = simulate(order, prices)
    if (timeline.peak_bytes > limit, timeline.total, timeline.peak_bytes) < (
        came.peak_bytes > limit,
        came.total,
        came.peak_bytes,
    ):
        return order, timeline
    return own, came


def byte_limit(graph: Graph, prices: Prices, memory_limit: float = MEMORY_LIMIT) -> int:
    """The peak memory that is allowed.

    Args:
        graph: in a valid order.
        prices: of the graph.
        memory_limit: see `ScheduleOverlap`.
    """
    peak = known_peak(graph, prices)
    return max(int(memory_limit * peak), peak + SPARE_BYTES)
