"""Removes dead and repeated communication.

Ranks have to remove the same collectives. So each pass decides by what the program does with a collective, never by
which part of it this rank holds; and no pass removes a collective only because nobody reads its result here: it may be
read on another rank, whose shard is not empty or whose value is not a constant.
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

_PAYLOAD_OPS = {
    *RESHAPES,
    *COPIES,
    aten.permute.default,
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    WAIT,
}
"""Ops that convert a payload to the shape and dtype that is sent."""


class ShareEqualCollectives:
    """Communicates once where equal collectives are repeated.

        wait(all_gather_v(x, ...)); wait(all_gather_v(x, ...))   ->   one gather, awaited twice

    Payloads are equal if they are the same node, or computed from the same node by the same views, casts, slices, pads
    and copies. Slices with constant bounds do not count as equal: they may both be empty here, and take different rows
    on another rank.

    Legal because functional collectives of equal payloads and arguments yield equal results. No node between the two
    writes to memory, and none writes to the first result; a second result that leaves the graph, or is written to,
    becomes a copy, so that results share no more memory than before. All ranks share the same collectives because the
    program's nodes are compared. A payload that is the same constant here (zeros, for an empty shard) may be two
    different tensors elsewhere: such collectives are not shared. If they are one tensor elsewhere, the ranks differ,
    which the comparison of their collectives finds.
    """

    name = "share_equal_collectives"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        if all(kind_of(node) is None for node in graph.nodes):
            return
        constants = _constants(graph)
        first_by_key: dict[Any, Node] = {}
        canonical: dict[Node, Node] = {}
        epoch = 0
        for node in list(graph.nodes):
            epoch += writes(node)
            c = Collective.of(node)
            if c is None and (
                node.op != "call_function" or node.target not in _PAYLOAD_OPS or _is_constant_slice(node)
            ):
                continue
            key = (epoch, node.target, _hashable((node.args, node.kwargs), canonical))
            first = canonical[node] = first_by_key.setdefault(key, node)
            if c is None or first is node or not c.functional or not constants.isdisjoint(c.payloads):
                continue
            if not escapes(first, to_output=False):
                _share(graph, c, first)


class DropDeadCollectives:
    """Removes exchanges of rows that a later lookup has made dead.

        wait(exchange_rows(...))   ->   nothing, if it is marked as dead and nobody reads it

    Rows that a program gathers in one partition, and needs in another, are gathered in the latter: see
    `shardcompile.tensor.grouped`, which marks the first lookup as dead. Legal because the mark is set while the
    program is traced, and so rank-invariant. Torch by itself keeps a wait that nobody reads.
    """

    name = "drop_dead_collectives"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        if any(map(_is_marked_dead, graph.nodes)):
            graph.eliminate_dead_code(lambda node: node.is_impure() and not _is_marked_dead(node))


class DropRepeatedWaits:
    """Waits for each collective once.

        wait(start); wait(start)   ->   wait(start)
        wait(wait(start))          ->   wait(start)

    Torch 2.15 repeats the wait for a result that the backward pass needs. Legal because `wait_tensor` returns its
    argument, and the second wait has nothing left to wait for. The collectives do not change.
    """

    name = "drop_repeated_waits"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        first_wait: dict[Any, Node] = {}
        for node in list(graph.nodes):
            if node.target is not WAIT:
                continue
            source = node.args[0]
            earlier = source if source.target is WAIT else first_wait.setdefault(source, node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


def _is_marked_dead(node: Node) -> bool:
    return node.target is WAIT and compat.DEAD_EXCHANGE in node.meta


def _constants(graph: Graph) -> set[Node]:
    """Returns the nodes that depend on no input of the graph."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _is_constant_slice(node: Node) -> bool:
    """Whether a node slices by constant bounds, which may be those of this rank's local shard."""
    args: Any = node.args
    if node.target is aten.slice.Tensor:
        return any(isinstance(n, int) and n not in (0, sys.maxsize) for n in args[2:4]) or 0 in args[3:4]
    return node.target is aten.constant_pad_nd.default and any(isinstance(n, int) and n < 0 for n in args[1])


def _hashable(value: object, canonical: dict[Node, Node]) -> Hashable:
    """Converts arguments to a key in which each node is replaced by the first node that equals it."""
    if isinstance(value, Node):
        # Ranks may have one node for a size, or several: its expression, which they share, identifies it.
        size = value.meta.get("val")
        return size.node.expr if isinstance(size, torch.SymInt) else canonical.get(value, value)
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v, canonical) for v in value)
    if isinstance(value, dict):
        return tuple((k, _hashable(v, canonical)) for k, v in sorted(value.items()))
    return type(value), value


def _share(graph: Graph, c: Collective, first: Node) -> None:
    """Lets the readers of a collective read the first one that equals it."""
    c.node.replace_all_uses_with(first)
    for wait in c.waits:
        if escapes(wait, to_output=True):
            _keep_separate(graph, wait)
    graph.erase_node(c.node)


def _keep_separate(graph: Graph, node: Node) -> None:
    """Gives the readers of a node a copy.

    The copy takes over the node's fake tensor, whose views the readers are: torch drops a copy if no result is a view
    of it.
    """
    with graph.inserting_after(node):
        copy = clone(graph, node)
    node.meta["val"], copy.meta["val"] = copy.meta["val"], node.meta["val"]
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
