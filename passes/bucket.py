"""Buckets: many collectives in one."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.passes.collective import WAIT, Collective, add_node, collectives
from shardcompile.passes.dependencies import Dependencies, ordered_inputs, reorder

aten = torch.ops.aten


class BucketAllReduces:
    """Reduce many tensors in one collective, where none waits for the result of another.

    A small collective costs its latency, so that the gradients of a model's parameters, reduced one by one, cost a
    multiple of what their bytes do.

        all_reduce(a); all_reduce(b)   ->   all_reduce(cat(a, b)), split

    Legal because an all-reduce works element by element. Members have one group, one reduction and one dtype, and a
    bucket is issued where its last member was. The order in which a backend adds up the ranks' terms may depend on the
    length of the message, so floats can differ in their last bit from those without the bucket (seen with three and
    more ranks; two terms add up the same in either order).

    Which collectives meet in a bucket follows from the program and from sizes that all ranks of a group share.

    Args:
        bucket_bytes: a bucket is full when it holds so many bytes. DDP's default for the same trade of latency against
            overlap.
    """

    name = "bucket_all_reduces"

    def __init__(self, bucket_bytes: int = 25 << 20) -> None:
        self.bucket_bytes = bucket_bytes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bucket_bytes={self.bucket_bytes})"

    def __call__(self, graph: Graph) -> None:
        dependencies = Dependencies(graph)
        open_buckets: dict[Any, list[Collective]] = {}
        for candidate in filter(_can_join, collectives(graph)):
            bucket = open_buckets.setdefault(_key(candidate), [])
            if bucket and not self._fits(bucket, candidate, dependencies):
                dependencies = _merge(graph, bucket, dependencies)
                bucket.clear()
            bucket.append(candidate)
        for bucket in open_buckets.values():
            dependencies = _merge(graph, bucket, dependencies)

    def _fits(self, bucket: Sequence[Collective], candidate: Collective, dependencies: Dependencies) -> bool:
        nbytes = sum(c.nbytes for c in (*bucket, candidate))
        return nbytes <= self.bucket_bytes and dependencies.independent(candidate.node, [c.node for c in bucket])


def _key(c: Collective) -> Any:
    return c.group_name, c.node.args[1], c.value.dtype, c.value.device


def _can_join(c: Collective) -> bool:
    return (
        c.kind == "all_reduce"
        and c.functional
        and len(c.payloads) == 1
        and 0 < len(c.waits) == len(c.node.users)
        and c.value.ndim <= 1
    )


def _merge(graph: Graph, bucket: Sequence[Collective], dependencies: Dependencies) -> Dependencies:
    """Replace all-reduces by one, as far as they are independent; returns the dependencies in the graph afterwards.

    They were when they were chosen, but other buckets that were filled at the same time may have tied them together.
    """
    free: list[Node] = []
    for c in bucket:
        if dependencies.independent(c.node, free):
            free.append(c.node)
    if len(free) < 2:
        return dependencies
    place = {node: float(i) for i, node in enumerate(graph.nodes)}
    free.sort(key=place.__getitem__)
    # As they are now: other buckets may have replaced their payloads.
    members = [c for c in map(Collective.of, free) if c is not None]
    last = members[-1]
    reduce_op, group_name = last.node.args[1:]
    with graph.inserting_before(last.node):
        flat = [_flat(graph, m.payload) for m in members]
        sizes = [_numel(graph, f) for f in flat]
        packed = add_node(graph, aten.cat.default, flat, 0)
        start = add_node(graph, last.node.target, packed, reduce_op, group_name)
        start.meta["stack_trace"] = last.node.meta.get("stack_trace")
    with graph.inserting_before(min(last.waits, key=place.__getitem__)):
        parts = add_node(graph, aten.split_with_sizes.default, add_node(graph, WAIT, start), sizes, 0)
        for i, m in enumerate(members):
            part = add_node(graph, operator.getitem, parts, i)
            if m.value.ndim == 0:
                part = add_node(graph, aten.view.default, part, [])
            for wait in m.waits:
                wait.replace_all_uses_with(part)
    for m in members:
        for wait in m.waits:
            graph.erase_node(wait)
        graph.erase_node(m.node)
    _sort(graph, place)
    return Dependencies(graph)


def _sort(graph: Graph, place: dict[Node, float]) -> None:
    """Restore a valid order: new nodes where they were put, early users of the members' results after them."""
    priority: dict[Node, float] = {}
    here = -1.0
    for node in graph.nodes:
        here = place.get(node, here)
        priority[node] = here
    reorder(graph, ordered_inputs(graph), priority.__getitem__)


def _flat(graph: Graph, payload: Node) -> Node:
    return payload if payload.meta["val"].ndim == 1 else add_node(graph, aten.view.default, payload, [1])


def _numel(graph: Graph, flat: Node) -> Any:
    size = flat.meta["val"].shape[0]
    return add_node(graph, aten.sym_size.int, flat, 0) if isinstance(size, torch.SymInt) else size
