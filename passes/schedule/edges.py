"""The order and the dependencies of a graph, as the scheduling passes read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from shardcompile.passes.graph.dependencies import ordered_inputs


@dataclass(frozen=True)
class Edges:
    """The dependencies between nodes.

    Attributes:
        order: that of the graph.
        place: position of each node in it.
        before: by node: the nodes that it must follow.
        after: by node: the nodes that must follow it.
    """

    order: list[Node]
    place: dict[Node, int]
    before: dict[Node, list[Node]]
    after: dict[Node, list[Node]]

    @staticmethod
    def of(graph: Graph, chain: Sequence[Node] = ()) -> Edges:
        """Returns the edges of a graph, those between writes and between random ops included.

        Args:
            graph: in a valid order.
            chain: nodes that have to keep this order.
        """
        before = {node: list(dict.fromkeys(inputs)) for node, inputs in ordered_inputs(graph, chain).items()}
        after: dict[Node, list[Node]] = {node: [] for node in before}
        for node, inputs in before.items():
            for i in inputs:
                after[i].append(node)
        order = list(before)
        return Edges(order, {node: i for i, node in enumerate(order)}, before, after)
