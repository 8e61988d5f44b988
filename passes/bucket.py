"""Buckets: many collectives in one.

A small collective costs its latency, so that the gradients of a model's parameters, reduced one by one, cost a
multiple of what their bytes do; the same holds for the gathers of parameters that are kept in blocks.

What meets in a bucket follows from the program and from sizes that all ranks of a group share:
`Collective.global_bytes`, never the bytes of this rank's block. The buckets are put into a copy of the graph first, and
kept if that is faster when it is ordered for overlap, within the memory that it may take. A bucket is issued where its
last member was; what reads the first member's result moves behind it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.collectives import flat_cuts
from shardcompile.passes.benefit import SATURATIONS, Benefit
from shardcompile.passes.collective import WAIT, Collective, add_node, collectives, inherit
from shardcompile.passes.cost import CostModel, Prices
from shardcompile.passes.dependencies import Dependencies, ordered_inputs, reorder
from shardcompile.passes.overlap import best_order, byte_limit

aten = torch.ops.aten
_ours = torch.ops.shardcompile

DEFAULT_BYTES = 25 << 20
"""DDP's default for the same trade of latency against overlap."""


THOROUGH_NODES = 2000
"""Up to so many nodes several ways to choose buckets are compared, beyond only one and none at all."""

CONTENTION = 0.01
"""How much a running collective slows the compute down that hides it, an estimate: less of them is better."""

Outlook = tuple[bool, float]
"""Whether a graph is beyond the memory limit however it is ordered, and its seconds, `CONTENTION` included."""


class Bucketing:
    """What the bucketing passes share: which collectives meet, and how a graph is put in order again.

    Args:
        bucket_bytes: no bucket holds more, over all ranks.
        model: the costs, by which members are chosen, see `Benefit`; None for those of the device that the graph runs
            on.
    """

    name = ""

    def __init__(self, bucket_bytes: int = DEFAULT_BYTES, model: CostModel | None = None) -> None:
        self.bucket_bytes = bucket_bytes
        self.model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bucket_bytes={self.bucket_bytes}, model={self.model})"

    def __call__(self, graph: Graph) -> None:
        candidates = [c for c in collectives(graph) if _is_simple(c) and self._key(c) is not None]
        if len(candidates) < 2:
            return
        model = self.model or CostModel.of(graph)
        benefit = Benefit(graph, model, self.bucket_bytes)
        best = _outlook(graph, model)
        buckets: list[list[Node]] = []
        tried: list[list[list[Node]]] = []
        for saturation in SATURATIONS if len(graph.nodes) <= THOROUGH_NODES else SATURATIONS[:1]:
            benefit.saturation = saturation
            chosen = self._chosen(graph, candidates, benefit)
            if not chosen or chosen in tried:
                continue
            tried.append(chosen)
            outlook = self._outlook_with(graph, chosen, model)
            if outlook < best or (outlook == best and not buckets):
                best, buckets = outlook, chosen
        self._replace(graph, buckets)

    def _chosen(self, graph: Graph, candidates: Sequence[Collective], benefit: Benefit) -> list[list[Node]]:
        """The buckets by what each member saves and delays."""
        dependencies = Dependencies(graph)
        open_buckets: dict[Any, list[Collective]] = {}
        full: list[list[Node]] = []
        for c in candidates:
            bucket = open_buckets.setdefault((self._key(c), c.group_name, c.backward), [])
            free = dependencies.independent(c.node, [b.node for b in bucket])
            pays = not bucket or benefit.pays(bucket, c)
            if not pays and c.global_bytes > sum(b.global_bytes for b in bucket):
                continue  # it is too large for any bucket; the small ones wait for the next small one
            if bucket and not (pays and free and benefit.joins(bucket, c)):
                full.append(_tied(bucket, dependencies))
                bucket.clear()
            bucket.append(c)
        full += [_tied(bucket, dependencies) for bucket in open_buckets.values()]
        return [bucket for bucket in full if len(bucket) > 1]

    def _outlook_with(self, graph: Graph, buckets: Sequence[Sequence[Node]], model: CostModel) -> Outlook:
        copy = Graph()
        copies: dict[Node, Node] = {}
        output = copy.output(copy.graph_copy(graph, copies))
        output.meta = dict(next(n for n in reversed(graph.nodes) if n.op == "output").meta)
        self._replace(copy, [[copies[node] for node in bucket] for bucket in buckets])
        return _outlook(copy, model)

    def _key(self, c: Collective) -> Any:
        """What members of a bucket have in common besides their group, or None for what cannot join one."""
        raise NotImplementedError

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        """One collective for all members, at the graph's insertion point: its start, lengths of their parts, dtype."""
        raise NotImplementedError

    def _replace(self, graph: Graph, buckets: Sequence[Sequence[Node]]) -> None:
        if not buckets:
            return
        place = {node: float(i) for i, node in enumerate(graph.nodes)}
        for bucket in buckets:
            self._replace_one(graph, sorted(bucket, key=place.__getitem__), place)
        _sort(graph, place)

    def _replace_one(self, graph: Graph, bucket: Sequence[Node], place: dict[Node, float]) -> None:
        # As they are now: other buckets may have replaced their payloads.
        ordered = [c for c in map(Collective.of, bucket) if c is not None]
        # By size, so that in bytes every part starts at its own width.
        members = sorted(ordered, key=lambda m: -m.value.dtype.itemsize)
        with graph.inserting_before(ordered[-1].node):
            start, lengths, dtype = self._merge(graph, members)
        inherit(start, ordered)
        with graph.inserting_before(min(ordered[-1].waits, key=place.__getitem__)):
            parts = add_node(graph, aten.split_with_sizes.default, add_node(graph, WAIT, start), lengths, 0)
            for i, m in enumerate(members):
                part = add_node(graph, operator.getitem, parts, i)
                result = m.node.meta["val"]
                if dtype != result.dtype:
                    part = add_node(graph, aten.view.dtype, part, result.dtype)
                if result.ndim != 1:
                    part = add_node(graph, aten.view.default, part, list(result.shape))
                for wait in m.waits:
                    wait.replace_all_uses_with(part)
        for m in members:
            for node in (*m.waits, m.node):
                graph.erase_node(node)


class BucketAllReduces(Bucketing):
    """Reduce many tensors in one collective, where none waits for the result of another.

        all_reduce(a); all_reduce(b)   ->   all_reduce(cat(a, b)), split

    Legal because an all-reduce works element by element. Members have one group, one reduction and one dtype. The
    order in which a backend adds up the ranks' terms may depend on the length of the message, so floats can differ in
    their last bit from those without the bucket (seen with three and more ranks; two terms add up the same in either
    order).
    """

    name = "bucket_all_reduces"

    def _key(self, c: Collective) -> Any:
        if c.kind != "all_reduce" or c.value.ndim > 1:
            return None
        return c.node.args[1], c.value.dtype, c.value.device

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        flat = [_flat(graph, m.payload) for m in members]
        lengths = [_numel(graph, f) for f in flat]
        packed = add_node(graph, aten.cat.default, flat, 0)
        start = add_node(graph, members[-1].node.target, packed, *members[-1].node.args[1:])
        return start, lengths, members[-1].value.dtype


class BucketAllGathers(Bucketing):
    """Gather the blocks of many tensors in one collective, of any sizes and dtypes.

        all_gather_v(a, ...); all_gather_v(b, ...)   ->   all_gather_bucket([a, b], ...), split

    Legal because a gather moves elements and computes nothing. Each rank sends its blocks of all members one after the
    other: the bytes on the wire are those of the blocks. Even gathers of torch's own join.
    """

    name = "bucket_all_gathers"

    def _key(self, c: Collective) -> Any:
        if c.kind == "all_gather_v":
            # In bytes the parts' places are multiples of symbols, of which a view to a dtype would have to be sure.
            return c.value.device, None if _is_static(c) else c.value.dtype
        if c.kind == "all_gather" and c.value.ndim and _is_static(c):
            return c.value.device, None
        return None

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        arguments = [_gather_of(m) for m in members]
        inputs = [m.payload for m in members]
        dims, totals = [a[0] for a in arguments], [a[1] for a in arguments]
        cuts = flat_cuts([a[2:] for a in arguments])
        start = add_node(graph, _ours.all_gather_bucket.default, inputs, dims, totals, *cuts, members[-1].group_name)
        dtype = start.meta["val"].dtype
        return start, [_length(graph, m, dtype) for m in members], dtype


class BucketReduceScatters(Bucketing):
    """Reduce many tensors, and leave each rank its blocks, in one collective.

        reduce_scatter_v(a, ...); reduce_scatter_v(b, ...)   ->   reduce_scatter_bucket([a, b], ...), split

    Legal because the reduction works element by element, and in rank order as that of a single one does: the results
    are the same bit for bit. Members have one group, one reduction and one dtype.
    """

    name = "bucket_reduce_scatters"

    def _key(self, c: Collective) -> Any:
        return (c.node.args[3], c.value.dtype, c.value.device) if c.kind == "reduce_scatter_v" else None

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        inputs, args = [m.payload for m in members], [m.node.args for m in members]
        cuts = flat_cuts([a[4:7] for a in args])  # type: ignore[misc]
        target = _ours.reduce_scatter_bucket.default
        dims, blocks = [a[1] for a in args], [a[2] for a in args]
        start = add_node(graph, target, inputs, dims, blocks, args[-1][3], *cuts, members[-1].group_name)
        dtype = start.meta["val"].dtype
        return start, [_length(graph, m, dtype) for m in members], dtype


class BucketAllToAlls(Bucketing):
    """Exchange the blocks of many tensors between the same ranks in one collective.

        all_to_all_v(a, ...); all_to_all_v(b, ...)   ->   all_to_all_bucket([a, b], ...), split

    Legal because an exchange moves elements and computes nothing. Members have one group and one dtype.
    """

    name = "bucket_all_to_alls"

    def _key(self, c: Collective) -> Any:
        return (c.value.dtype, c.value.device) if c.kind == "all_to_all_v" else None

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        inputs, args = [m.payload for m in members], [m.node.args for m in members]
        cuts = flat_cuts([cut for a in args for cut in (a[5:8], a[8:11])])  # type: ignore[misc]
        dims, extents = [d for a in args for d in a[1:3]], [e for a in args for e in a[3:5]]
        start = add_node(graph, _ours.all_to_all_bucket.default, inputs, dims, extents, *cuts, members[-1].group_name)
        dtype = start.meta["val"].dtype
        return start, [_length(graph, m, dtype) for m in members], dtype


def _outlook(graph: Graph, model: CostModel) -> Outlook:
    """What comes of a graph when it is ordered for overlap."""
    prices = Prices.of(graph, model)
    timeline = best_order(graph, prices, quick=True)[1]
    seconds = timeline.total + CONTENTION * sum(timeline.communication.values())
    return timeline.peak_bytes > byte_limit(graph, prices), seconds


def _is_simple(c: Collective) -> bool:
    """Whether it writes to nothing, has one payload, and only its waits read its result."""
    return c.functional and len(c.payloads) == 1 and 0 < len(c.waits) == len(c.node.users)


def _tied(bucket: Sequence[Collective], dependencies: Dependencies) -> list[Node]:
    """The members of a bucket, as far as they still are independent, from now on as one.

    They were when they were chosen, but other buckets that were filled at the same time may have tied them together.
    """
    free: list[Node] = []
    for c in bucket:
        if dependencies.independent(c.node, free):
            free.append(c.node)
    if len(free) > 1:
        dependencies.tie(free)
    return free


def _is_static(c: Collective) -> bool:
    return all(isinstance(s, int) for v in (c.value, c.node.meta["val"]) for s in v.shape)


def _gather_of(c: Collective) -> tuple[Any, ...]:
    """Dim, extent, sizes, key and nest of a gather, ours or torch's."""
    if c.kind == "all_gather_v":
        return c.node.args[1:6]
    ranks, rows = c.node.args[1], c.value.shape[0]
    return 0, ranks * rows, [rows] * ranks, 0, []  # type: ignore[operator, list-item]


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


def _length(graph: Graph, c: Collective, dtype: torch.dtype) -> Any:
    """Elements of `dtype` in a collective's result, as a number or a node."""
    result = c.node.meta["val"]
    if all(isinstance(s, int) for s in result.shape):
        return math.prod(result.shape) * result.dtype.itemsize // dtype.itemsize
    return _product(graph, _factors(graph, c))


def _factors(graph: Graph, c: Collective) -> list[Any]:
    """Numbers and nodes whose product is the length of a flat result of ours."""
    args = c.node.args
    moved = {args[1]: args[2]} if c.kind != "all_to_all_v" else {args[1]: args[3], args[2]: args[4]}
    return [moved[d] if d in moved else _extent(graph, c.payload, d) for d in range(c.value.ndim)]


def _extent(graph: Graph, node: Node, dim: int) -> Any:
    size = node.meta["val"].shape[dim]
    return add_node(graph, aten.sym_size.int, node, dim) if isinstance(size, torch.SymInt) else size


def _product(graph: Graph, factors: Sequence[Any]) -> Any:
    product: Any = math.prod(f for f in factors if isinstance(f, int))
    for factor in factors:
        if isinstance(factor, Node):
            product = factor if isinstance(product, int) and product == 1 else _times(graph, product, factor)
    return product


def _times(graph: Graph, a: Any, b: Node) -> Node:
    node = graph.call_function(operator.mul, (a, b))
    node.meta["val"] = (a.meta["val"] if isinstance(a, Node) else a) * b.meta["val"]
    return node
