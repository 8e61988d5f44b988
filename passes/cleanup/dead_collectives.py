"""Communication that a graph can do without.

Ranks have to drop the same collectives. So each pass decides by what the program does with a collective, never by
which part of it this rank happens to hold; and no pass removes a collective for the sole reason that nobody reads its
result here: on another rank, of which the shard is not empty or the constant not known, somebody may.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.passes.cleanup.edits import COPIES, RESHAPES, aten, clone, escapes
from shardcompile.passes.graph.collective import WAIT, Collective, kind_of
from shardcompile.passes.graph.dependencies import writes

_LOCAL = {
    *RESHAPES,
    *COPIES,
    aten.permute.default,
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    WAIT,
}
"""Ops that bring a payload into the shape and dtype that is sent."""


class ShareEqualCollectives:
    """Communicate once what is asked for twice.

        wait(all_gather_v(x, ...)); wait(all_gather_v(x, ...))   ->   one gather, awaited twice

    Payloads are equal if they are one node, or made of one by the same views, casts, slices, pads and copies. Slices
    whose ends are numbers are not: here they may both be empty, on another rank different rows.

    Legal because functional collectives of equal payloads and arguments yield equal results. Nothing between the two
    writes to memory, and nothing writes to the first one's result; a second result that leaves the graph, or is
    written to, becomes a copy, so that results stay as separate as they were. All ranks share the same collectives
    because the comparison is of the program's nodes. A payload that is the same constant here (zeros, for a shard that
    this rank has not got) may be two different tensors elsewhere: such collectives are not shared. If elsewhere
    they are one tensor, the ranks differ; the comparison of the ranks' collectives finds that out.
    """

    name = "share_equal_collectives"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        if all(kind_of(node) is None for node in graph.nodes):
            return
        constants = _constants(graph)
        first_of: dict[Any, Node] = {}
        same: dict[Node, Node] = {}
        epoch = 0
        for node in list(graph.nodes):
            epoch += writes(node)
            c = Collective.of(node)
            if c is None and (node.op != "call_function" or node.target not in _LOCAL or _is_own_part(node)):
                continue
            key = (epoch, node.target, _frozen((node.args, node.kwargs), same))
            first = same[node] = first_of.setdefault(key, node)
            if c is None or first is node or not c.functional or not constants.isdisjoint(c.payloads):
                continue
            if not escapes(first, to_output=False):
                _share(graph, c, first)


class DropSuperseded:
    """Do not fetch rows that are fetched elsewhere.

        wait(exchange_rows(...))   ->   nothing, if it is superseded and nobody reads it

    Rows that a program looks up in one partition, and needs in another, are looked up in that one: see
    `shardcompile.tensor.grouped`, which notes that the first lookup is superseded. Legal because the note is made
    where the program is traced, alike on all ranks. Torch keeps a wait that nobody reads.
    """

    name = "drop_superseded"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        if any(map(_is_superseded, graph.nodes)):
            graph.eliminate_dead_code(lambda node: node.is_impure() and not _is_superseded(node))


class DropRepeatedWaits:
    """Wait for a collective once.

        wait(start); wait(start)   ->   wait(start)
        wait(wait(start))          ->   wait(start)

    Torch 2.15 repeats the wait for a result that the backward pass needs. Legal because `wait_tensor` returns its
    argument, and finds nothing left to wait for the second time. Changes no collective.
    """

    name = "drop_repeated_waits"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        done: dict[Any, Node] = {}
        for node in list(graph.nodes):
            if node.target is not WAIT:
                continue
            source = node.args[0]
            earlier = source if source.target is WAIT else done.setdefault(source, node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


def _is_superseded(node: Node) -> bool:
    return node.target is WAIT and compat.SUPERSEDED in node.meta


def _constants(graph: Graph) -> set[Node]:
    """Nodes that depend on no input of the graph."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _is_own_part(node: Node) -> bool:
    """Whether a node takes a part by index, which may be those of this rank's local shard."""
    args: Any = node.args
    if node.target is aten.slice.Tensor:
        return any(isinstance(n, int) and n not in (0, sys.maxsize) for n in args[2:4]) or 0 in args[3:4]
    return node.target is aten.constant_pad_nd.default and any(isinstance(n, int) and n < 0 for n in args[1])


def _frozen(value: object, same: dict[Node, Node]) -> Hashable:
    """Arguments as a key, with one node in place of all that are the same."""
    if isinstance(value, Node):
        # Ranks may have several nodes for a size, or one: it is known by its expression, which they share.
        size = value.meta.get("val")
        return size.node.expr if isinstance(size, torch.SymInt) else same.get(value, value)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v, same) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v, same)) for k, v in sorted(value.items()))
    return type(value), value


def _share(graph: Graph, c: Collective, first: Node) -> None:
    c.node.replace_all_uses_with(first)
    for wait in c.waits:
        if escapes(wait, to_output=True):
            _keep_separate(graph, wait)
    graph.erase_node(c.node)


def _keep_separate(graph: Graph, node: Node) -> None:
    """Give those who read a node a copy.

    The copy takes over the node's fake tensor, of which readers are views: torch drops a copy of which it finds no view
    among the results.
    """
    with graph.inserting_after(node):
        copy = clone(graph, node)
    node.meta["val"], copy.meta["val"] = copy.meta["val"], node.meta["val"]
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
