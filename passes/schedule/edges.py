"""A graph's order, edges and ideal times, as the scheduling passes read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from shardcompile.passes.cost.model import Prices
from shardcompile.passes.graph.dependencies import ordered_inputs


@dataclass(frozen=True)
class Edges:
    """What must come before what.

    Attributes:
        order: the graph's own.
        place: by node.
        before: by node: those that it must follow.
        after: by node: those that must follow it.
    """

    order: list[Node]
    place: dict[Node, int]
    before: dict[Node, list[Node]]
    after: dict[Node, list[Node]]

    @staticmethod
    def of(graph: Graph) -> Edges:
        """The edges of a graph, those between writes and between random ops included."""
        before = {node: list(dict.fromkeys(inputs)) for node, inputs in ordered_inputs(graph).items()}
        after: dict[Node, list[Node]] = {node: [] for node in before}
        for node, inputs in before.items():
            for i in inputs:
                after[i].append(node)
        order = list(before)
        return Edges(order, {node: i for i, node in enumerate(order)}, before, after)


def first_uses(edges: Edges, prices: Prices) -> dict[Node, float]:
    """By collective: the place of the first node at work that needs its result; the end if none does."""
    end = float(len(edges.order))
    first: dict[Node, float] = {}
    uses: dict[Node, float] = {}
    for node in reversed(edges.order):
        idle = not prices.seconds[node] and node not in prices.group and node.op != "output"
        users = (uses[u] for u in edges.after[node])
        uses[node] = min(users, default=end) if idle else float(edges.place[node])
        if node in prices.awaits:
            start = prices.awaits[node]
            first[start] = min(uses[node], first.get(start, end))
    return {start: first.get(start, end) for start in prices.group}


def clock_of(edges: Edges, prices: Prices) -> list[float]:
    """By place: when its node would start if compute were never held up; at last, when all would have ended."""
    clock = [0.0]
    for node in edges.order:
        clock.append(clock[-1] + (0.0 if node in prices.group else prices.seconds[node]))
    return clock
