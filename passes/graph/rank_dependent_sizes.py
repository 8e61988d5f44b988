"""Finds the nodes whose sizes may differ between ranks.

A collective's partitions are among its arguments: see `shardcompile.collectives.traffic` for what follows from them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from shardcompile import compat
from shardcompile.collectives import traffic
from shardcompile.collectives.arguments import map_arguments
from shardcompile.collectives.local_shards import PLACE_SHARD, TAKE_SHARD
from shardcompile.collectives.traffic import Member
from shardcompile.passes.graph.collective import WAIT, Collective, called, value_of
from shardcompile.passes.graph.ops import op_of

aten = torch.ops.aten


def members(c: Collective, group_size: int | None) -> list[Member]:
    """Returns what the ranks contribute and get, for each payload of a collective.

    Args:
        c: any.
        group_size: of its group; None if it is unknown, and with it the partitions of torch.chunk.
    """
    return c.descriptor.members_of(c.values, group_size)


def nbytes_of(node: Node) -> int:
    """Returns the bytes of a node's tensors, by hints."""
    value = node.meta.get("val")
    return traffic.nbytes_of(value) if isinstance(value, torch.Tensor) else sum(map(traffic.nbytes_of, tensors(node)))


def tensors(node: Node) -> list[torch.Tensor]:
    """Returns a node's fake tensors."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else []


# Nodes whose sizes may differ between ranks.

_KEEPS_SIZES = {
    WAIT,
    operator.getitem,
    *(aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int, aten.t.default),
    *(aten.alias.default, aten.detach.default, aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
}
"""Ops whose results have the sizes of their inputs, besides pointwise ones."""


def labels(graph: Graph, group_sizes: Mapping[str, int] | None = None) -> dict[Node, set[str]]:
    """Returns, for the nodes whose sizes may differ between ranks, the names of the groups along which they may.

    Only the graph's structure is read, so the answer is rank-invariant. The search starts from the uneven sides of
    collectives. It adds all nodes that are connected with these through ops, in either direction. It ends at the
    collectives of the group in question, whose arguments state whether their other side is uneven. A tensor without
    dims connects nothing, nor does one that has its sizes from a collective whose results have rank-invariant sizes.

    It overestimates: a weight that is multiplied with shards that are gathered afterwards counts as well. It cannot
    find nodes that are connected with no collective of a known partition: static inputs of different sizes, which do
    not show in the graph. The library gives its shards symbols with common hints when they enter a graph, so its own
    inputs are none of these.

    Args:
        graph: any.
        group_sizes: numbers of ranks by group name, where there are no such process groups.
    """
    edges = _boundaries(graph, group_sizes or {})
    seeds: dict[str, list[Node]] = {}
    for node, boundary in edges.items():
        for label, nodes in boundary.seeds(node):
            seeds.setdefault(label, []).extend(nodes)
    found: dict[Node, set[str]] = {}
    for label, start in seeds.items():
        for node in _connect(graph, label, start, edges):
            found.setdefault(node, set()).add(label)
    return found


_COPIES = {
    *(WAIT, operator.getitem, aten.clone.default, aten.copy.default, aten.cat.default, aten.constant_pad_nd.default),
}

_WINDOWS = {
    *(aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten.max_pool2d_with_indices, aten.max_pool3d_with_indices),
    *(aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten.upsample_bilinear2d),
}


def ranks_may_differ(graph: Graph, group_sizes: Mapping[str, int] | None = None) -> bool:
    """Whether other ranks may have graphs of other nodes, on which decisions differ.

    Torch traces and partitions a program by static sizes: it does not copy a shard without rows, concatenates no empty
    part, broadcasts one row, and saves what is smallest. So the graphs may differ if some ranks have a shard of no row
    or one row, and others of more. They do where all of these are static and something is computed with them. Products,
    windows and pointwise ops are not counted: every rank has them. Nor are copies and allocations.
    """
    if not have_few_rows(graph, group_sizes):
        return False
    boundaries = _boundaries(graph, group_sizes or {})
    return any(
        n.op == "call_function"
        and n not in boundaries
        and tensors(n)
        and _has_static_sizes(n)
        and not _is_on_all_ranks(n)
        for n in labels(graph, group_sizes)
    )


def have_few_rows(graph: Graph, group_sizes: Mapping[str, int] | None = None) -> bool:
    """Whether the graph has shards of static sizes of which some have no row or one row, and others have more.

    It is derived from the arguments of collectives and local shards, and so rank-invariant.
    """
    if not graph.find_nodes(op="call_function", target=WAIT):
        return False
    for boundary in _boundaries(graph, group_sizes or {}).values():
        for m in boundary.members:
            for side in (m.put, m.get):
                if side is not None and side.sizes is not None and len({min(n, 2) for n in side.sizes}) > 1:
                    return True
    return False


_MARK = "shardcompile_few_rows"


def mark(graph: Graph) -> None:
    """Records on a joint graph that `have_few_rows` holds, for its forward and backward graphs.

    On some ranks one of these graphs may have no shard that shows it, and on others the other one: AOTAutograd
    partitions the joint graph by static sizes. Ranks compare the marked graphs, so that all of them do.
    """
    for node in graph.find_nodes(op="call_function", target=WAIT):
        node.meta[_MARK] = True


def are_marked(graph: Graph) -> bool:
    """Whether `mark` was called on the joint graph that this graph is a part of."""
    return any(_MARK in node.meta for node in graph.find_nodes(op="call_function", target=WAIT))


def _has_static_sizes(node: Node) -> bool:
    return all(isinstance(n, int) for t in tensors(node) for n in t.shape)


def _is_on_all_ranks(node: Node) -> bool:
    """Whether the graphs of all ranks have a node, or do not depend on it."""
    op, packet = op_of(node), getattr(node.target, "overloadpacket", None)
    known = op.pointwise or op.shares is not None or op.allocates
    return known or node.target in _COPIES or packet in _WINDOWS or packet in flop_registry


@dataclass(frozen=True)
class _Boundary:
    """An op that changes the partition along a group, so that its result's sizes do not follow from its payloads'."""

    group_name: str
    payloads: tuple[Node, ...]
    members: tuple[Member, ...]

    def seeds(self, node: Node) -> Iterator[tuple[str, list[Node]]]:
        for payload, m in zip(self.payloads, self.members, strict=True):
            for side, end in ((m.put, payload), (m.get, node)):
                for label in () if side is None else side.labels(self.group_name):
                    yield label, [end]

    @property
    def uneven_result(self) -> bool:
        return any(m.get is not None and m.get.uneven for m in self.members)


def _boundaries(graph: Graph, group_sizes: Mapping[str, int]) -> dict[Node, _Boundary]:
    found: dict[Node, _Boundary] = {}
    for node in graph.nodes:
        c = Collective.of(node)
        if c is not None:
            n = size_of_group(c.group_name, group_sizes)
            found[node] = _Boundary(c.group_name, c.payloads, tuple(members(c, n)))
            continue
        for local in (TAKE_SHARD, PLACE_SHARD):
            arguments = called(node, local)
            if arguments is not None:
                n = size_of_group(arguments.group_name, group_sizes)
                of_values = local.members_of(map_arguments(value_of, arguments), n)
                found[node] = _Boundary(arguments.group_name, (arguments.input,), tuple(of_values))
    return found


def size_of_group(name: str, group_sizes: Mapping[str, int]) -> int | None:
    """Returns the number of ranks of a group; None if it is neither given nor a process group of this process."""
    if name in group_sizes:
        return group_sizes[name]
    try:
        return compat.process_group(name).size()
    except (RuntimeError, ValueError, LookupError):
        return None


def ranks_of_group(name: str) -> list[int] | None:
    """Returns the global ranks of a group; None if it is no process group of this process."""
    try:
        return dist.get_process_group_ranks(compat.process_group(name))
    except (RuntimeError, ValueError, LookupError):
        return None


def _connect(graph: Graph, label: str, seeds: Sequence[Node], edges: Mapping[Node, _Boundary]) -> set[Node]:
    """Returns the nodes whose sizes may differ along a group, starting from `seeds`."""

    def is_boundary(node: Node) -> bool:
        return node in edges and edges[node].group_name == label

    invariant = _rank_invariant(
        graph, boundaries={n: not b.uneven_result for n, b in edges.items() if b.group_name == label}
    )
    found = set(seeds)
    todo = list(found)
    while todo:
        node = todo.pop()
        neighbours = [u for u in node.users if not is_boundary(u)]
        if not is_boundary(node):
            neighbours += [i for i in node.all_input_nodes if not is_boundary(i)]
        for n in neighbours:
            if n not in found and n not in invariant and any(t.ndim for t in tensors(n)):
                found.add(n)
                todo.append(n)
    return found


def _rank_invariant(graph: Graph, boundaries: Mapping[Node, bool]) -> set[Node]:
    """Returns the nodes that have their sizes from collectives whose results have rank-invariant sizes."""
    invariant: set[Node] = set()
    for node in graph.nodes:
        if node in boundaries:
            found = boundaries[node]
        else:
            sources = [i for i in node.all_input_nodes if tensors(i)]
            found = _keeps_sizes(node) and bool(sources) and invariant.issuperset(sources)
        if found:
            invariant.add(node)
    return invariant


def _keeps_sizes(node: Node) -> bool:
    return node.target in _KEEPS_SIZES or is_pointwise(node)


def is_pointwise(node: Node) -> bool:
    """Whether a node calls a pointwise op."""
    return op_of(node).pointwise
