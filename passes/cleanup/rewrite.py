"""What the rewriting of reductions is made of: which may be looked at, what they reduce, how they go."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

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
from shardcompile.passes.graph.rank_dependent_sizes import labels

aten = torch.ops.aten


def usual(graph: Graph) -> list[Collective]:
    """The all-reduces that may be rewritten: those that are awaited before the graph writes to memory.

    What is made of older values may then be computed again, or later, and gives the same. Writes that come behind, such
    as those that keep running statistics, do not matter; but they must not be to a result, since two results may become
    one.
    """
    first = next((n for n in graph.nodes if writes(n)), None)
    return [
        c
        for c in collectives(graph)
        if reduction_of(c) is not None
        and 0 < len(c.waits) == len(c.node.users)
        and (first is None or (max(c.waits) < first and not _is_written_to(c)))
    ]


def sums(graph: Graph) -> list[Collective]:
    """Those of them that add up."""
    return [c for c in usual(graph) if reduction_of(c) == "sum"]


def _is_written_to(c: Collective) -> bool:
    """Whether a write may reach a result, through whatever has its memory: told by the ops that read it."""
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
    """A node and all that depends on it."""
    found = {start}
    stack = [start]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def shaped(payload: Node) -> Node:
    """A payload before it was made flat."""
    while payload.meta["val"].ndim <= 1 and (payload.target in RESHAPES or payload.target is aten.clone.default):
        payload = payload.args[0]  # type: ignore[assignment]
    return payload


def cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """A value in another dtype, or itself."""
    if node.meta["val"].dtype == dtype:
        return node
    return add_node(graph, torch.ops.prims.convert_element_type.default, node, dtype)


def flat(graph: Graph, node: Node, like: Node | None) -> Node:
    """A value with one dim, or in the shape of a flat one."""
    if node.meta["val"].ndim == (1 if like is None else like.meta["val"].ndim):
        return node
    sizes = sizes_of(graph, like) if like is not None else [-1]
    value = node.meta["val"]
    if value.ndim > 1 and not (all(isinstance(s, int) for s in value.shape) and value.is_contiguous()):
        node = add_node(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return add_node(graph, aten.view.default, node, sizes)


def in_shape_of(graph: Graph, flat: Node, value: Node) -> Node:
    """A flat value in the shape of another."""
    return flat if value.meta["val"].ndim == 1 else add_node(graph, aten.view.default, flat, sizes_of(graph, value))


def exchanged(graph: Graph, parts: Sequence[Node], members: Sequence[Collective]) -> list[Node]:
    """What every rank has of some values, in one gather at the insertion point: each as [ranks, ...].

    Args:
        graph: it is added to.
        parts: this rank's values.
        members: the reductions that the gather stands for, the last one last.
    """
    ranks = members[0].group_size
    dtype = functools.reduce(torch.promote_types, (p.meta["val"].dtype for p in parts))
    pieces = [flat(graph, cast(graph, p, dtype), None) for p in parts]
    packed = add_node(graph, aten.cat.default, pieces, 0)
    start = add_call(graph, ALL_GATHER, input=packed, group_size=ranks, group_name=members[0].group_name)
    inherit(start, members)
    _tell(start, members)
    (total,) = sizes_of(graph, packed)
    rows = add_node(graph, aten.view.default, add_node(graph, WAIT, start), [ranks, total])
    lengths = [sizes_of(graph, piece)[0] for piece in pieces]
    columns = add_node(graph, aten.split_with_sizes.default, rows, lengths, 1)
    found: list[Node] = []
    for i, part in enumerate(parts):
        column = add_node(graph, operator.getitem, columns, i)  # its rows lie apart, which their views may keep
        found.append(add_node(graph, aten.view.default, column, [ranks, *sizes_of(graph, part)]))
    return found


def _tell(start: Node, members: Sequence[Collective]) -> None:
    """Write down for reports what a gather stands for."""
    c = Collective.of(start)
    assert c is not None
    side = f"{NOTES}_backward" if c.backward else NOTES
    known = [m.notes.get("redistribution", "") for m in members]
    reasons = ", ".join(dict.fromkeys(r for r in known if r)) or f"{len(members)} reductions"
    custom = start.meta.get("custom") or {}
    notes = {**custom.get(side, {}), "redistribution": f"{reasons} (merge_reductions)"}
    start.meta["custom"] = {**custom, side: notes}


def replace_results(c: Collective, by: Node) -> None:
    """Give those who read a reduction's result, which is flat, another value, in the dtype of the result.

    A factor in another dtype, or partial results that travelled together, may have given the value a wider one.
    """
    with by.graph.inserting_after(by):
        by = cast(by.graph, by, c.payload.meta["val"].dtype)
    for wait in c.waits:
        wait.replace_all_uses_with(by)


def erase(graph: Graph, c: Collective) -> None:
    """Erase a collective that nobody needs any more, what was made of its result, and what was only there for it."""
    own = {c.node, *c.waits}
    inputs: list[Node] = list(c.payloads)
    for node in sorted(users_of(c.node), reverse=True):
        if node in own or _may_go(node):
            _erase_unused(graph, node)
    while inputs:
        node = inputs.pop()
        if node not in own and not node.users and _may_go(node):
            own.add(node)
            inputs += node.all_input_nodes
            graph.erase_node(node)


def _erase_unused(graph: Graph, node: Node) -> None:
    if not node.users:
        graph.erase_node(node)


def _may_go(node: Node) -> bool:
    communicates = node.target is WAIT or Collective.of(node) is not None
    return node.op == "call_function" and not communicates and not writes(node)


def places(graph: Graph) -> dict[Node, float]:
    """Where nodes are, for `sort`."""
    return {node: float(i) for i, node in enumerate(graph.nodes)}


def sort(graph: Graph, place: dict[Node, float]) -> None:
    """Restore a valid order: new nodes where they were put, what reads them behind."""
    priority: dict[Node, float] = {}
    here = -1.0
    for node in graph.nodes:
        here = priority[node] = place.get(node, here)
    reorder(graph, ordered_inputs(graph), priority.__getitem__)


class GatherPrices:
    """Tells where a gather of partial results takes less time than reductions that wait for one another.

    Args:
        graph: as it came.
        model: the costs.
    """

    def __init__(self, graph: Graph, model: CostModel) -> None:
        self._graph, self._model = graph, model
        self._uneven: Mapping[Node, set[str]] | None = None

    def pays(
        self, first: Sequence[Collective], then: Sequence[Collective], parts: Iterable[Node], more: int = 0
    ) -> bool:
        """Whether one gather of what two steps reduce takes less time than these.

        Args:
            first: what is reduced in the first step, in one collective.
            then: what waits for it, in another one.
            parts: nodes of the graph as it came, of the sizes that are sent: if one may differ between ranks, it is not
                known.
            more: bytes that a rank sends besides what is reduced.
        """
        model, group_name = self._model, first[0].group_name
        ranks = model.group_size(group_name)
        if self._uneven is None:
            self._uneven = labels(self._graph, model.group_sizes)
        if ranks is None or not self._uneven.keys().isdisjoint(parts):
            return False
        link = model.link(group_name)
        steps = [sum(c.global_bytes for c in step) for step in (first, then)]
        share = 2 * (ranks - 1) / ranks
        apart = sum(link.seconds(share * nbytes, ranks) for nbytes in steps)
        sent = sum(steps) + more
        copied = 3 * ranks * sent / (model.device.memory * model.device.share)
        return link.seconds((ranks - 1) * sent, ranks) + copied < apart
