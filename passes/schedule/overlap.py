"""Orders a graph so that its collectives overlap with compute.

A collective is started early enough, and awaited late enough, that it has ended when its result is needed; not much
earlier and not much later, because memory is held in between. Several orders are computed by list scheduling and
replayed by the simulator; the fastest within the memory limit is taken. One rank decides for all, see
`shardcompile.passes.plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from shardcompile.passes.cost.model import CostModel, GraphCosts
from shardcompile.passes.graph.collective import collectives
from shardcompile.passes.graph.dependencies import move_into, needed_first, ordered_inputs
from shardcompile.passes.plan import decide_order
from shardcompile.passes.schedule.bounds import lower_bound
from shardcompile.passes.schedule.edges import Edges
from shardcompile.passes.schedule.search import search
from shardcompile.passes.schedule.simulator import Timeline, known_peak, simulate
from shardcompile.passes.schedule.tasks import Tasks, nodes_in_order

MEMORY_LIMIT = 1.1
"""Peak memory of a schedule, relative to that of the input graph."""

SPARE_BYTES = 4 << 20
"""Bytes that a schedule may take beyond the graph's peak memory whatever the limit: for a small graph they do not
matter.
"""


class ScheduleOverlap:
    """Starts collectives early and awaits them late, see the module.

    Legal because every order that respects the graph's edges, the positions of writes and the order of random ops
    computes the same values. `AddControlDependencies` makes Inductor keep the order.

    Args:
        model: the cost model; None for that of the device that the graph runs on.
        memory_limit: allowed peak memory, relative to that of the input graph.
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
        move_into(
            decide_order(graph, self.name, lambda: self._search(graph), lambda starts: self._search(graph, starts))
        )

    def _search(self, graph: Graph, starts: Sequence[Node] = ()) -> list[Node]:
        if starts:
            inputs = ordered_inputs(graph, starts)
            move_into(needed_first(list(inputs), inputs.__getitem__))
        costs = GraphCosts.of(graph, self.model or CostModel.of(graph))
        return best_order(graph, costs, self.memory_limit, starts)[0]


def best_order(
    graph: Graph, costs: GraphCosts, memory_limit: float = MEMORY_LIMIT, starts: Sequence[Node] = ()
) -> tuple[list[Node], Timeline]:
    """Returns the fastest order within the memory limit, and its timeline; the graph's own if none is better.

    Args:
        graph: in a valid order.
        costs: of the graph.
        memory_limit: see `ScheduleOverlap`.
        starts: collectives that keep this order, which is that of the graph, too.
    """
    own_order = list(graph.nodes)
    own_timeline = simulate(own_order, costs)
    limit = byte_limit(graph, costs, memory_limit)
    edges = Edges.of(graph, starts)
    tasks = Tasks.of(edges, costs)
    found = search(tasks, limit, lower_bound(graph, costs) - costs.call)
    order = nodes_in_order(edges, tasks, found.order)
    timeline = simulate(order, costs)
    if (timeline.peak_bytes > limit, timeline.total, timeline.peak_bytes) < (
        own_timeline.peak_bytes > limit,
        own_timeline.total,
        own_timeline.peak_bytes,
    ):
        return order, timeline
    return own_order, own_timeline


def byte_limit(graph: Graph, costs: GraphCosts, memory_limit: float = MEMORY_LIMIT) -> int:
    """Returns the peak memory that is allowed, in bytes.

    Args:
        graph: in a valid order.
        costs: of the graph.
        memory_limit: see `ScheduleOverlap`.
    """
    peak = known_peak(graph, costs)
    return max(int(memory_limit * peak), peak + SPARE_BYTES)
