"""Adds control dependencies, so that Inductor keeps the order of a scheduled graph, and protects payloads in flight.

Inductor orders kernels by data dependencies alone: a collective that is started early sinks to its wait, and a wait
rises to its start. Control dependencies, edges that carry no data, keep them in place (`control_deps`, which Inductor
has for its own overlap scheduling, down to the generated code).

Random ops would be reordered as well, to lower the peak of memory, and then draw other values than in eager mode
(https://github.com/pytorch/pytorch/issues/181136).

Inductor also lets ops that put values into a tensor, such as ``index_fill``, write in place where nothing reads the
tensor any more. But the payload of a collective is read until its wait.
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
"""Ops that Inductor calls as kernels of their own. A control dependency of another op would prevent its fusion."""


class AddControlDependencies:
    """Keeps starts before, and waits after, the neighbouring matrix products, convolutions and attentions; keeps random
    ops in order.

    Legal because the graph is already in this order: a dependency that follows it adds no cycle. Payloads in flight are
    protected as well, see `hold_payloads`.
    """

    name = "add_control_dependencies"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        if graph.owning_module is None or not any(kind_of(node) or op_of(node).random for node in graph.nodes):
            return
        hold_payloads(graph)
        dependencies = control_dependencies(graph)
        if dependencies:
            compat.preserve_node_ordering(graph, dependencies)


def hold_payloads(graph: Graph) -> None:
    """Keeps the payload of a collective alive until its wait, where a node in between might write to it."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    writers = [i for node, i in position.items() if _may_write(node)]
    for c in collectives(graph):
        last = max(c.waits, key=position.__getitem__, default=c.node)
        first = bisect.bisect(writers, position[c.node])
        if first == len(writers) or writers[first] > position[last]:
            continue
        with graph.inserting_after(last):
            for payload in dict.fromkeys(c.payloads):
                graph.call_function(IN_FLIGHT, (payload,))


def _may_write(node: Node) -> bool:
    """Whether Inductor may run a node in place, as it does with some ops that are no elementwise loops."""
    op = op_of(node)
    if op.target is None or op.pointwise or op.reduces or op.allocates or op.shares is not None:
        return False
    if isinstance(node.meta.get("val"), (int, torch.SymInt, torch.SymBool)):  # arithmetic of sizes
        return False
    return op.target not in ANCHORS and kind_of(node) is None


def control_dependencies(graph: Graph) -> dict[Node, list[Node]]:
    """Returns, for each node, the nodes that Inductor has to run before it besides its inputs.

    A start has to run before the next anchor, and a wait after the last one, unless data dependencies imply it. A
    random op has to run after the last one, unless Inductor computes both from seeds that it has drawn before.
    """
    dependencies: dict[Node, list[Node]] = {}
    started: list[Node] = []
    last: Node | None = None
    drawn: Node | None = None
    inputs = ordered_inputs(graph)
    since: set[Node] = set()  # nodes after the last anchor
    for node in inputs:
        if kind_of(node) is not None:
            started.append(node)
        elif node.target is WAIT and last is not None:
            dependencies[node] = [last]
        elif node.op == "call_function" and node.target in ANCHORS:
            needed = _inputs_among(node, inputs, since) if started else set()
            held = [s for s in started if s not in needed]
            if held:
                dependencies[node] = held
            started.clear()
            since.clear()
            last = node
        if op_of(node).random and getattr(node.target, "namespace", None) != "prims":
            if drawn is not None:
                dependencies.setdefault(node, []).append(drawn)
            drawn = node
        since.add(node)
    return dependencies


def _inputs_among(node: Node, inputs: Mapping[Node, Sequence[Node]], among: Set[Node]) -> set[Node]:
    """Returns the nodes of a set that a node needs, directly or through others of the set."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        for i in inputs[pending.pop()]:
            if i in among and i not in found:
                found.add(i)
                pending.append(i)
    return found
