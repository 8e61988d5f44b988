"""Helpers of the passes that rewrite reductions: which are eligible, what they reduce, how they are replaced."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from shardcompile.collectives.torch_collectives import ALL_GATHER
from shardcompile.passes.cleanup.linear_factors import RESHAPES, sizes_of
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.graph.collective import (
    NOTES,
    WAIT,
    Collective,
    add_call,
    add_node,
    collectives,
    inherit,
    reduction_of,
)
from shardcompile.passes.graph.dependencies import ordered_inputs, reorder, writes

aten = torch.ops.aten


def eligible_reductions(graph: Graph) -> list[Collective]:
    """Returns the all-reduces that may be rewritten: those that are awaited before the graph writes to memory.

    Values from before the first write may be computed again, or later, with the same result. Later writes, such as
    those of running statistics, do not matter; but they must not be to a result, since two results may become one.
    """
    first = next((n for n in graph.nodes if writes(n)), None)
    return [
        c
        for c in collectives(graph)
        if reduction_of(c) is not None
        and 0 < len(c.waits) == len(c.node.users)
        and (first is None or (max(c.waits) < first and not _is_written_to(c)))
    ]


def eligible_sums(graph: Graph) -> list[Collective]:
    """Returns those of `eligible_reductions` whose reduction is a sum."""
    return [c for c in eligible_reductions(graph) if reduction_of(c) == "sum"]


def _is_written_to(c: Collective) -> bool:
    """Whether a write may reach a result, through any value that may share its memory."""
    stack: list[Node] = list(c.waits)
    while stack:
        for user in stack.pop().users:
            if writes(user):
                return True
            if _may_share_memory(user):
                stack.append(user)
    return False


def _may_share_memory(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    return any(r.alias_info is not None for r in schema.returns) or node.target in RESHAPES


def users_of(start: Node) -> set[Node]:
    """Returns a node and all nodes that depend on it."""
    found = {start}
    stack = [start]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def shaped(payload: Node) -> Node:
    """Returns a payload in its shape before it was flattened."""
    while payload.meta["val"].ndim <= 1 and (payload.target in RESHAPES or payload.target is aten.clone.default):
        payload = payload.args[0]  # type: ignore[assignment]
    return payload


def cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """Casts a value to a dtype; returns the value itself if it has that dtype."""
    if node.meta["val"].dtype == dtype:
        return node
    return add_node(graph, torch.ops.prims.convert_element_type.default, node, dtype)


def flat(graph: Graph, node: Node, like: Node | None) -> Node:
    """Flattens a value, or gives a flat one the shape of `like`."""
    if node.meta["val"].ndim == (1 if like is None else like.meta["val"].ndim):
        return node
    sizes = sizes_of(graph, like) if like is not None else [-1]
    value = node.meta["val"]
    if value.ndim > 1 and not (all(isinstance(s, int) for s in value.shape) and value.is_contiguous()):
        node = add_node(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return add_node(graph, aten.view.default, node, sizes)


def in_shape_of(graph: Graph, flat: Node, value: Node) -> Node:
    """Views a flat value in the shape of another value."""
    return flat if value.meta["val"].ndim == 1 else add_node(graph, aten.view.default, flat, sizes_of(graph, value))


def gather_partials(graph: Graph, parts: Sequence[Node], members: Sequence[Collective]) -> list[Node]:
    """Gathers some values of every rank, in one all-gather at the insertion point; returns each as [ranks, ...].

    Args:
        graph: it is added to.
        parts: this rank's values.
        members: the reductions that the gather replaces, in graph order.
    """
    ranks = members[0].group_size
    dtype = functools.reduce(torch.promote_types, (p.meta["val"].dtype for p in parts))
    pieces = [flat(graph, cast(graph, p, dtype), None) for p in parts]
    packed = add_node(graph, aten.cat.default, pieces, 0)
    start = add_call(graph, ALL_GATHER, input=packed, group_size=ranks, group_name=members[0].group_name)
    inherit(start, members)
    _annotate(start, members)
    (total,) = sizes_of(graph, packed)
    rows = add_node(graph, aten.view.default, add_node(graph, WAIT, start), [ranks, total])
    lengths = [sizes_of(graph, piece)[0] for piece in pieces]
    columns = add_node(graph, aten.split_with_sizes.default, rows, lengths, 1)
    gathered: list[Node] = []
    for i, part in enumerate(parts):
        column = add_node(graph, operator.getitem, columns, i)  # its rows are strided, which a view may keep
        gathered.append(add_node(graph, aten.view.default, column, [ranks, *sizes_of(graph, part)]))
    return gathered


def _annotate(start: Node, members: Sequence[Collective]) -> None:
    """Records, for reports, which reductions a gather replaces."""
    c = Collective.of(start)
    assert c is not None
    side = f"{NOTES}_backward" if c.backward else NOTES
    recorded = [m.notes.get("redistribution", "") for m in members]
    reasons = ", ".join(dict.fromkeys(r for r in recorded if r)) or f"{len(members)} reductions"
    custom = start.meta.get("custom") or {}
    notes = {**custom.get(side, {}), "redistribution": f"{reasons} (merge_reductions)"}
    start.meta["custom"] = {**custom, side: notes}


def replace_results(c: Collective, by: Node) -> None:
    """Replaces the flat result of a reduction by another value, cast to the dtype of the result.

    A factor of another dtype, or partial results that were gathered together, may have given the value a wider dtype.
    """
    with by.graph.inserting_after(by):
        by = cast(by.graph, by, c.payload.meta["val"].dtype)
    for wait in c.waits:
        wait.replace_all_uses_with(by)


def erase(graph: Graph, c: Collective) -> None:
    """Erases a dead collective, what was computed from its result, and what was only computed for it."""
    collective_nodes = {c.node, *c.waits}
    inputs: list[Node] = list(c.payloads)
    for node in sorted(users_of(c.node), reverse=True):
        if node in collective_nodes or _is_removable(node):
            _erase_unused(graph, node)
    while inputs:
        node = inputs.pop()
        if node not in collective_nodes and not node.users and _is_removable(node):
            collective_nodes.add(node)
            inputs += node.all_input_nodes
            graph.erase_node(node)


def _erase_unused(graph: Graph, node: Node) -> None:
    if not node.users:
        graph.erase_node(node)


def _is_removable(node: Node) -> bool:
    communicates = node.target is WAIT or Collective.of(node) is not None
    return node.op == "call_function" and not communicates and not writes(node)


def positions(graph: Graph) -> dict[Node, float]:
    """Returns the positions of the nodes, for `sort`."""
    return {node: float(i) for i, node in enumerate(graph.nodes)}


def sort(graph: Graph, position: dict[Node, float]) -> None:
    """Restores a valid order: new nodes stay where they were added, their readers follow."""
    priority: dict[Node, float] = {}
    current = -1.0
    for node in graph.nodes:
        current = priority[node] = position.get(node, current)
    reorder(graph, ordered_inputs(graph), priority.__getitem__)


class GatherCosts:
    """Compares the cost of one gather of partial results with that of reductions that wait for one another.

    All ranks of a group reduce as many bytes, so that they have the same answer.

    Args:
        model: the cost model.
    """

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def pays(self, first: Sequence[Collective], then: Sequence[Collective], more: int = 0) -> bool:
        """Whether one gather of what two dependent steps reduce takes less time than the two steps.

        Args:
            first: the reductions of the first step, in one collective.
            then: those that wait for it, in another one.
            more: bytes that a rank sends besides what is reduced.
        """
        model, group_name = self._model, first[0].group_name
        ranks = model.group_size(group_name)
        if ranks is None:
            return False
        link = model.link(group_name)
        steps = [sum(c.global_bytes for c in step) for step in (first, then)]
        share = 2 * (ranks - 1) / ranks
        reductions = sum(link.seconds(share * nbytes, ranks) for nbytes in steps)
        sent = sum(steps) + more
        copied = 3 * ranks * sent / (model.device.memory * model.device.share)
        return link.seconds((ranks - 1) * sent, ranks) + copied < reductions
