"""Makes Inductor keep the order of a scheduled graph, and what is being sent.

Inductor orders kernels by their data alone: a collective that is started early sinks to its wait, and a wait rises to
its start. Edges that carry no data hold them in their places (`control_deps`, which Inductor has for its own overlap
scheduling, down to the generated code).

It also has ops that put values into a tensor, such as ``index_fill``, write to the tensor itself where nothing reads
that any more. What a collective has been given is read until the wait.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence, Set

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.passes.graph.collective import WAIT, collectives, kind_of
from shardcompile.passes.graph.dependencies import ordered_inputs
from shardcompile.passes.graph.ops import IN_FLIGHT, op_of

aten = torch.ops.aten

ANCHORS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    torch.ops.shardcompile.convolution.default,
    torch.ops.shardcompile.convolution_backward.default,
    torch.ops.shardcompile.attend.default,
    torch.ops.shardcompile.attend_backward.default,
}
"""Ops that Inductor calls as kernels of their own. An edge at another op would keep it from being fused."""


class HoldOrder:
    """Hold starts before, and waits behind, the matrix products, convolutions and attentions that they stand next to.

    Legal because the graph stands in this order already: an edge that follows it closes no circle. What is being sent
    is held as well, see `hold_payloads`.
    """

    name = "hold_order"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        if graph.owning_module is None or all(kind_of(node) is None for node in graph.nodes):
            return
        hold_payloads(graph)
        edges = held_edges(graph)
        if edges:
            compat.preserve_node_ordering(graph, edges)


def hold_payloads(graph: Graph) -> None:
    """Have what a collective sends read behind its wait, where something stands between that might write to it."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    others = [i for node, i in place.items() if _may_write(node)]
    for c in collectives(graph):
        last = max(c.waits, key=place.__getitem__, default=c.node)
        first = bisect.bisect(others, place[c.node])
        if first == len(others) or others[first] > place[last]:
            continue
        with graph.inserting_after(last):
            for payload in dict.fromkeys(c.payloads):
                graph.call_function(IN_FLIGHT, (payload,))


def _may_write(node: Node) -> bool:
    """Whether it could be done in place: Inductor does so with some of the ops that are no loops over all elements."""
    op = op_of(node)
    if op.target is None or op.pointwise or op.reduces or op.allocates or op.shares is not None:
        return False
    if isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymBool)):  # arithmetic of sizes
        return False
    return op.target not in ANCHORS and kind_of(node) is None


def held_edges(graph: Graph) -> dict[Node, list[Node]]:
    """By node: the nodes that Inductor has to run before it, besides those that it reads.

    A start is held before the next anchor, and a wait behind the last one, unless they depend on each other as it is.
    """
    edges: dict[Node, list[Node]] = {}
    started: list[Node] = []
    last: Node | None = None
    inputs = ordered_inputs(graph)
    since: set[Node] = set()  # nodes behind the last anchor
    for node in inputs:
        if kind_of(node) is not None:
            started.append(node)
        elif node.target is WAIT and last is not None:
            edges[node] = [last]
        elif node.op == "call_function" and node.target in ANCHORS:
            needed = _inputs_among(node, inputs, since) if started else set()
            held = [s for s in started if s not in needed]
            if held:
                edges[node] = held
            started.clear()
            since.clear()
            last = node
        since.add(node)
    return edges


def _inputs_among(node: Node, inputs: Mapping[Node, Sequence[Node]], among: Set[Node]) -> set[Node]:
    """Which of some neighbouring nodes a node needs, directly or through others of them."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        for i in inputs[pending.pop()]:
            if i in among and i not in found:
                found.add(i)
                pending.append(i)
    return found
