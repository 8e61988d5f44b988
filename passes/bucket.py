"""Buckets: many collectives in one.

A small collective costs its latency, so that the gradients of a model's parameters, reduced one by one, cost a
multiple of what their bytes do; the same holds for the gathers of parameters that are kept in blocks. Torch's own even
collectives meet as ours do, and each other.

What meets in a bucket follows from the program and from sizes that all ranks of a group share, never from the bytes of
this rank's block: see `shardcompile.passes.choice`. A bucket is issued where its last member was, or before what reads
the first member's result, together with all that its payloads need.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.collectives import flat_cuts
from shardcompile.collectives.transport import check_reduction
from shardcompile.errors import CollectiveError
from shardcompile.passes.choice import Choice
from shardcompile.passes.collective import WAIT, Collective, add_node, collectives, inherit
from shardcompile.passes.cost import CostModel, computes_nothing
from shardcompile.passes.dependencies import needed_first, ordered_inputs
from shardcompile.passes.traffic import (
    Load,
    Traffic,
    exchanged_in_a_bucket,
    gathered_in_a_bucket,
    reduced_in_a_bucket,
    scattered_in_a_bucket,
)

aten = torch.ops.aten
_ours = torch.ops.shardcompile
_c10d = torch.ops._c10d_functional


class Bucketing:
    """What the bucketing passes share: which collectives meet, and how a graph is put in order again.

    Args:
        bucket_bytes: no bucket holds more, over all ranks; None for as much as makes the graph faster.
        model: the costs, by which members are chosen, see `Choice`; None for those of the device that the graph runs
            on.
    """

    name = ""

    def __init__(self, bucket_bytes: int | None = None, model: CostModel | None = None) -> None:
        self.bucket_bytes = bucket_bytes
        self.model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bucket_bytes={self.bucket_bytes}, model={self.model})"

    def __call__(self, graph: Graph) -> None:
        groups: dict[Any, list[Collective]] = {}
        for c in collectives(graph):
            key = self._key(c) if _is_simple(c) else None
            if key is not None:
                groups.setdefault((key, c.group_name, c.backward), []).append(c)
        groups = {key: group for key, group in groups.items() if len(group) > 1}
        if groups:
            model = self.model or CostModel.of(graph)
            self._replace(graph, Choice(graph, groups, model, self._traffic, self.bucket_bytes).buckets())

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        """What a bucket moves, by the kinds of its members and by what each rank has of all of them."""
        raise NotImplementedError

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
        _sort(graph)

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
        if c.kind != "all_reduce" or (c.value.ndim > 1 and not (_is_static(c) and c.value.is_contiguous())):
            return None
        return c.node.args[1], c.value.dtype, c.value.device

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return reduced_in_a_bucket(load, passes=2)

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

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return gathered_in_a_bucket(load)

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

        reduce_scatter_v(a, ...); reduce_scatter_v(b, ...)           ->   reduce_scatter_bucket([a, b], ...), split
        reduce_scatter_tensor(a); reduce_scatter_tensor(b)           ->   reduce_scatter_tensor(cat(a, b)), split
        reduce_scatter_v(a, ...); reduce_scatter_tensor(b)           ->   reduce_scatter_bucket([a, b], ...), split

    Legal because the reduction works element by element. Members have one group, one reduction and one dtype. Ours
    reduce in rank order, in a bucket as alone: the results are the same bit for bit. Even ones of torch's stay torch's
    as long as they meet no others; the order in which a backend adds up the ranks' terms may depend on the length of
    the message, so floats can differ in their last bit from those without the bucket, and from those of torch's where
    an even one meets uneven ones. Two terms add up the same in either order.
    """

    name = "bucket_reduce_scatters"

    def _key(self, c: Collective) -> Any:
        if c.kind == "reduce_scatter_v":
            return c.node.args[3], c.value.dtype, c.value.device, True
        if c.kind != "reduce_scatter" or not c.value.ndim or not _is_static(c):
            return None
        return c.node.args[1], c.value.dtype, c.value.device, _is_known(str(c.node.args[1]), c.value.dtype)

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return reduced_in_a_bucket(load, passes=1) if kinds == {"reduce_scatter"} else scattered_in_a_bucket(load)

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        if all(m.kind == "reduce_scatter" for m in members):
            start = _even_scatter(graph, members)
        else:
            arguments, inputs = [_scatter_of(m) for m in members], [m.payload for m in members]
            cuts = flat_cuts([a[2:] for a in arguments])
            dims, blocks, op = [a[0] for a in arguments], [a[1] for a in arguments], _reduction_of(members[-1])
            target, group_name = _ours.reduce_scatter_bucket.default, members[-1].group_name
            start = add_node(graph, target, inputs, dims, blocks, op, *cuts, group_name)
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

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return exchanged_in_a_bucket(load)

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        inputs, args = [m.payload for m in members], [m.node.args for m in members]
        cuts = flat_cuts([cut for a in args for cut in (a[5:8], a[8:11])])  # type: ignore[misc]
        dims, extents = [d for a in args for d in a[1:3]], [e for a in args for e in a[3:5]]
        start = add_node(graph, _ours.all_to_all_bucket.default, inputs, dims, extents, *cuts, members[-1].group_name)
        dtype = start.meta["val"].dtype
        return start, [_length(graph, m, dtype) for m in members], dtype


def _is_simple(c: Collective) -> bool:
    """Whether it writes to nothing, has one payload, and only its waits read its result."""
    return c.functional and len(c.payloads) == 1 and 0 < len(c.waits) == len(c.node.users)


def _is_static(c: Collective) -> bool:
    return all(isinstance(s, int) for v in (c.value, c.node.meta["val"]) for s in v.shape)


def _gather_of(c: Collective) -> tuple[Any, ...]:
    """Dim, extent, sizes, key and nest of a gather, ours or torch's."""
    if c.kind == "all_gather_v":
        return c.node.args[1:6]
    ranks, rows = c.node.args[1], c.value.shape[0]
    return 0, ranks * rows, [rows] * ranks, 0, []  # type: ignore[operator, list-item]


def _scatter_of(c: Collective) -> tuple[Any, ...]:
    """Dim, extent of a block, sizes, key and nest of a reduce-scatter, ours or torch's."""
    args = c.node.args
    if c.kind == "reduce_scatter_v":
        return args[1], args[2], *args[4:7]  # type: ignore[misc]
    ranks = args[2]
    rows = c.value.shape[0] // ranks  # type: ignore[operator]
    return 0, rows, [rows] * ranks, 0, []  # type: ignore[operator, list-item]


def _reduction_of(c: Collective) -> Any:
    return c.node.args[3 if c.kind == "reduce_scatter_v" else 1]


def _is_known(reduce_op: str, dtype: torch.dtype) -> bool:
    """Whether a reduction is one of ours."""
    try:
        check_reduction(reduce_op, dtype)
    except CollectiveError:
        return False
    return True


def _even_scatter(graph: Graph, members: Sequence[Collective]) -> Node:
    """Torch's collective of even members: what belongs to a rank, of all members, lies together."""
    target, ranks = members[-1].node.target, members[-1].node.args[2]
    rows = [_rows_of(graph, m.payload, ranks) for m in members]
    packed = add_node(graph, aten.cat.default, rows, 1)
    flat = add_node(graph, aten.view.default, packed, [packed.meta["val"].numel()])
    return add_node(graph, target, flat, *members[-1].node.args[1:])


def _rows_of(graph: Graph, payload: Node, ranks: Any) -> Node:
    """A payload as a matrix of one row for each rank."""
    if not payload.meta["val"].is_contiguous():
        copied = graph.call_function(aten.clone.default, (payload,), {"memory_format": torch.contiguous_format})
        copied.meta["val"] = payload.meta["val"].clone(memory_format=torch.contiguous_format)
        payload = copied
    return add_node(graph, aten.view.default, payload, [ranks, payload.meta["val"].numel() // ranks])


def _sort(graph: Graph) -> None:
    """Restore a valid order: each node keeps its place, and what it needs of a bucket comes before it.

    Views and allocations come when something reads them: they are not what a bucket has to come early for.
    """
    inputs = ordered_inputs(graph)
    order = needed_first(list(inputs), inputs.__getitem__, on_demand=computes_nothing)
    for earlier, later in itertools.pairwise(order):
        earlier.append(later)


def _flat(graph: Graph, payload: Node) -> Node:
    value = payload.meta["val"]
    return payload if value.ndim == 1 else add_node(graph, aten.view.default, payload, [value.numel()])


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
