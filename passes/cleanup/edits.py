"""Graph edits, and queries about memory, that several cleanup passes share."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.passes.graph.collective import WAIT, Collective
from shardcompile.passes.graph.dependencies import writes

aten = torch.ops.aten

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)

COPIES = (aten.clone.default, aten.alias.default)

_VIEWS = {
    *RESHAPES,
    operator.getitem,
    WAIT,
    aten.alias.default,
    aten.as_strided.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
}
"""Ops whose result may share the memory of their argument."""


def at(start: Node) -> Collective:
    """Returns the collective that starts at a node, in its current state: its payload may have been replaced."""
    c = Collective.of(start)
    assert c is not None, f"{start} is a collective"
    return c


def escapes(node: Node, to_output: bool) -> bool:
    """Whether a node's memory may be written to or, if `to_output`, may leave the graph."""
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if writes(user) or (to_output and user.op == "output"):
                return True
            if user.target in _VIEWS and user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def clone(graph: Graph, node: Node) -> Node:
    """Adds a contiguous clone of a node at the insertion point."""
    copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = node.meta["val"].clone(memory_format=torch.contiguous_format)
    return copy


def clone_payload(graph: Graph, c: Collective) -> Node:
    """Adds a clone of a collective's payload where the collective starts."""
    with graph.inserting_before(c.node):
        return clone(graph, c.payload)


def replace(graph: Graph, node: Node, by: Node) -> None:
    """Replaces a node by another one and erases it."""
    node.replace_all_uses_with(by)
    graph.erase_node(node)


def erase_unused(graph: Graph, node: Node) -> None:
    """Erases a node, with its views and copies, if nothing else reads any of them."""
    for user in list(node.users):
        if user.target in _VIEWS or user.target in COPIES:
            erase_unused(graph, user)
    if not node.users:
        graph.erase_node(node)


def shards_of(arguments: Any) -> tuple[Any, ...]:
    """Returns what identifies the shards that an op takes, places or gathers: dim, partition and group."""
    return arguments.dim, arguments.partition, arguments.group_name


def equal(a: Any, b: Any) -> bool:
    """Whether two shapes are equal for all values of their symbols."""
    return len(a) == len(b) and all(compat.statically_known_true(m == n) for m, n in zip(a, b, strict=True))
