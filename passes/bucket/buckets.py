"""Bucketing passes: merge many collectives into one.

A small collective costs little but its latency. Reducing the gradients of a model's parameters one by one costs a
multiple of what their bytes do, and so does gathering sharded parameters one by one. The even collectives of torch are
bucketed too, with ours and with each other.

One rank chooses the members of buckets for all ranks: see `shardcompile.passes.bucket.choice`. A bucket is issued where
its last member was, or before the first reader of its first member's result, together with everything that its payloads
need.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.collectives.buckets import ALL_GATHER_BUCKET, ALL_TO_ALL_BUCKET, REDUCE_SCATTER_BUCKET
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.range_bucket import RANGE_BUCKET, is_filled, together
from shardcompile.collectives.ranges import moved
from shardcompile.collectives.reductions import ALL_REDUCE
from shardcompile.collectives.torch_collectives import REDUCE_SCATTER
from shardcompile.collectives.traffic import (
    Load,
    Traffic,
    exchanged_in_a_bucket,
    gathered_in_a_bucket,
    reduced_in_a_bucket,
    scattered_in_a_bucket,
)
from shardcompile.collectives.transport import check_reduction
from shardcompile.errors import CollectiveError
from shardcompile.passes.bucket.choice import BucketSearch
from shardcompile.passes.cost.model import CostModel, computes_nothing
from shardcompile.passes.graph.collective import WAIT, Collective, add_call, add_node, collectives, inherit
from shardcompile.passes.graph.dependencies import move_into, needed_first, ordered_inputs
from shardcompile.passes.plan import decide_buckets
from shardcompile.sharding import GroupPartition

aten = torch.ops.aten


class Bucketing:
    """The base of the bucketing passes: selects the members of buckets and replaces them in the graph.

    A collective states in its descriptor which bucket it can join.

    Args:
        bucket_bytes: the most bytes of a bucket, over all ranks; None for as many as make the graph faster.
        model: the cost model by which members are chosen, see `BucketSearch`; None for that of the device that the
            graph runs on.
    """

    name = ""
    bucket = ""
    """The kind of the bucket that members join, see `shardcompile.collectives.descriptor.Joins`."""
    divides = True
    """Whether a group of candidates may become several buckets, see `BucketSearch`."""

    def __init__(self, bucket_bytes: int | None = None, model: CostModel | None = None) -> None:
        self.bucket_bytes = bucket_bytes
        self.model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bucket_bytes={self.bucket_bytes}, model={self.model})"

    def __call__(self, graph: Graph) -> None:
        groups: dict[Any, list[Collective]] = {}
        for c in collectives(graph):
            joins = c.descriptor.joins
            key = self._key(c) if joins is not None and joins.bucket == self.bucket and self._may_join(c) else None
            if key is not None:
                groups.setdefault((key, c.group_name, c.backward), []).append(c)
        groups = {key: group for key, group in groups.items() if len(group) > 1}
        if groups:
            self._replace(graph, decide_buckets(graph, self.name, lambda: self._search(graph, groups)))

    def _search(self, graph: Graph, groups: Mapping[Any, Sequence[Collective]]) -> list[list[Node]]:
        model = self.model or CostModel.of(graph)
        return BucketSearch(graph, groups, model, self._traffic, self.bucket_bytes, self.divides).buckets()

    def _may_join(self, c: Collective) -> bool:
        """Whether it is functional, has one payload, and only its waits read its result."""
        return c.functional and len(c.payloads) == 1 and 0 < len(c.waits) == len(c.node.users)

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        """Returns what a bucket moves, given the kinds of its members and the load of each rank."""
        raise NotImplementedError

    def _key(self, c: Collective) -> Hashable:
        """Returns what the members of a bucket share besides their group, or None if it cannot join a bucket."""
        raise NotImplementedError

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        """Adds one collective for all members at the insertion point.

        Returns:
            Its start, the lengths of the members' parts in its result, and the dtype of its result.
        """
        raise NotImplementedError

    def _replace(self, graph: Graph, buckets: Sequence[Sequence[Node]]) -> None:
        if not buckets:
            return
        position = {node: float(i) for i, node in enumerate(graph.nodes)}
        for bucket in buckets:
            # Read them anew: other buckets may have replaced their payloads.
            members = map(Collective.of, sorted(bucket, key=position.__getitem__))
            self._replace_one(graph, [c for c in members if c is not None], position)
        _sort(graph)

    def _replace_one(self, graph: Graph, ordered: Sequence[Collective], position: Mapping[Node, float]) -> None:
        """Replaces members, given in graph order, by a bucket; may leave the graph in an invalid order."""
        # By item size, so that every part is aligned to its own dtype.
        members = sorted(ordered, key=lambda m: -m.value.dtype.itemsize)
        with graph.inserting_before(ordered[-1].node):
            start, lengths, dtype = self._merge(graph, members)
        inherit(start, ordered)
        with graph.inserting_before(min(ordered[-1].waits, key=position.__getitem__)):
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
    """Reduces many tensors in one collective, where none depends on the result of another.

        all_reduce(a); all_reduce(b)   ->   all_reduce(cat(a, b)), split

    Legal because an all-reduce works element by element. Members have one group, one reduction and one dtype. The order
    of summation of a backend may depend on the length of the message, so floats can differ in their last bit from those
    without the bucket (seen with three and more ranks; the sum of two terms does not depend on their order).
    """

    name = "bucket_all_reduces"
    bucket = ALL_REDUCE.kind

    def _key(self, c: Collective) -> Any:
        if c.value.ndim > 1 and not (_is_static(c) and c.value.is_contiguous()):
            return None
        return c.arguments.reduce_op, c.value.dtype, c.value.device

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return reduced_in_a_bucket(load, passes=2)

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        flat = [_flat(graph, m.payload) for m in members]
        lengths = [_numel(graph, f) for f in flat]
        packed = add_node(graph, aten.cat.default, flat, 0)
        last = members[-1]
        start = add_node(graph, last.node.target, *last.arguments._replace(input=packed))
        return start, lengths, members[-1].value.dtype


class BucketAllGathers(Bucketing):
    """Gathers the shards of many tensors, of any sizes and dtypes, in one collective.

        all_gather_v(a, ...); all_gather_v(b, ...)   ->   all_gather_bucket([a, b], ...), split

    Legal because a gather moves elements and computes nothing. Each rank sends its shards of all members one after the
    other, so that the bytes on the wire are those of the shards. Even gathers of torch join as well.
    """

    name = "bucket_all_gathers"
    bucket = ALL_GATHER_BUCKET.kind

    def _key(self, c: Collective) -> Hashable:
        if _is_even(c) and not (c.value.ndim and _is_static(c)):
            return None
        # Byte offsets of symbolic parts would have to be provably aligned for a view to their dtype.
        return c.value.device, None if _is_static(c) else c.value.dtype

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return gathered_in_a_bucket(load)

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        return _with_lengths(graph, _add_bucket(graph, ALL_GATHER_BUCKET, members), members)


class BucketReduceScatters(Bucketing):
    """Reduces many tensors in one collective that leaves each rank its shards.

        reduce_scatter_v(a, ...); reduce_scatter_v(b, ...)           ->   reduce_scatter_bucket([a, b], ...), split
        reduce_scatter_tensor(a); reduce_scatter_tensor(b)           ->   reduce_scatter_tensor(cat(a, b)), split
        reduce_scatter_v(a, ...); reduce_scatter_tensor(b)           ->   reduce_scatter_bucket([a, b], ...), split

    Legal because the reduction works element by element. Members have one group, one reduction and one dtype. Ours
    reduce in rank order, in a bucket as alone, so that results are bitwise the same. Even ones of torch stay torch's
    unless they share a bucket with ours. The order of summation of a backend may depend on the length of the message,
    so floats of torch's collectives can differ in their last bit from those without the bucket, also where an even one
    joins uneven ones. The sum of two terms does not depend on their order.
    """

    name = "bucket_reduce_scatters"
    bucket = REDUCE_SCATTER_BUCKET.kind

    def _key(self, c: Collective) -> Any:
        reduce_op = c.arguments.reduce_op
        if not _is_even(c):
            return reduce_op, c.value.dtype, c.value.device, True
        if not c.value.ndim or not _is_static(c):
            return None
        return reduce_op, c.value.dtype, c.value.device, _is_supported(reduce_op, c.value.dtype)

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        even = kinds == {REDUCE_SCATTER.kind}
        return reduced_in_a_bucket(load, passes=1) if even else scattered_in_a_bucket(load)

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        if all(map(_is_even, members)):
            start = _even_scatter(graph, members)
        else:
            start = _add_bucket(graph, REDUCE_SCATTER_BUCKET, members, members[-1].arguments.reduce_op)
        return _with_lengths(graph, start, members)


class BucketAllToAlls(Bucketing):
    """Exchanges the shards of many tensors in one all-to-all.

        all_to_all_v(a, ...); all_to_all_v(b, ...)   ->   all_to_all_bucket([a, b], ...), split

    Legal because an all-to-all moves elements and computes nothing. Members have one group and one dtype.
    """

    name = "bucket_all_to_alls"
    bucket = ALL_TO_ALL_BUCKET.kind

    def _key(self, c: Collective) -> Hashable:
        return c.value.dtype, c.value.device

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return exchanged_in_a_bucket(load)

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        return _with_lengths(graph, _add_bucket(graph, ALL_TO_ALL_BUCKET, members), members)


class BucketRanges(Bucketing):
    """Fetches the rows of many tensors in one exchange: halos, slices and rolls.

        fetch_ranges(a, ...); fetch_around(b, ...)   ->   range_bucket([a, b], "fetch_ranges fetch_around", ...), split

    Legal because each member's messages, and its sums, are those that it has alone. Members have one group and one
    dtype. The bucket adds no copies.
    """

    name = "bucket_ranges"
    bucket = RANGE_BUCKET.kind

    def _key(self, c: Collective) -> Hashable:
        return c.value.dtype, c.value.device, is_filled(c.arguments)

    def _traffic(self, kinds: Set[str], load: Load) -> Traffic:
        return moved(load)

    def _merge(self, graph: Graph, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
        arguments = together([m.kind for m in members], [m.arguments for m in members])
        return _with_lengths(graph, add_call(graph, RANGE_BUCKET, **arguments._asdict()), members)


def _is_static(c: Collective) -> bool:
    return all(isinstance(s, int) for v in (c.value, c.node.meta["val"]) for s in v.shape)


def _is_even(c: Collective) -> bool:
    """Whether it is a collective of torch, whose shards are all of one size."""
    return c.descriptor.run is None


def _add_bucket(graph: Graph, bucket: Descriptor[Any], members: Sequence[Collective], *options: object) -> Node:
    """Adds a bucket, whose arguments are the payloads, dims and sizes of the members, `options`, and the partitions."""
    dims: list[int] = []
    sizes: list[Any] = []
    partitions: list[GroupPartition] = []
    for m in members:
        joins, result = m.descriptor.joins, _result_sizes(m)
        assert joins is not None and joins.partitions is not None
        dims += list(result)
        sizes += list(result.values())
        partitions += joins.partitions(m.parts)
    payloads = [m.payload for m in members]
    arguments = bucket.arguments(payloads, dims, sizes, *options, partitions, members[-1].group_name)
    return add_call(graph, bucket, **arguments._asdict())


def _with_lengths(graph: Graph, start: Node, members: Sequence[Collective]) -> tuple[Node, list[Any], torch.dtype]:
    """Returns what `Bucketing._merge` returns."""
    dtype = start.meta["val"].dtype
    return start, [_length(graph, m, dtype) for m in members], dtype


def _result_sizes(c: Collective) -> dict[int, Any]:
    """Returns the sizes of the result, by dim, where they are not the payload's, as integers and nodes."""
    assert c.descriptor.sizes is not None, f"{c.kind} joins a bucket"
    return c.descriptor.sizes(c.parts)


def _is_supported(reduce_op: str, dtype: torch.dtype) -> bool:
    """Whether our collectives implement a reduction."""
    try:
        check_reduction(reduce_op, dtype)
    except CollectiveError:
        return False
    return True


def _even_scatter(graph: Graph, members: Sequence[Collective]) -> Node:
    """Adds torch's collective for even members: for each rank, the parts of all members are contiguous."""
    target, last = members[-1].node.target, members[-1].arguments
    matrices = [_one_row_per_rank(graph, m.payload, last.group_size) for m in members]
    packed = add_node(graph, aten.cat.default, matrices, 1)
    flat = add_node(graph, aten.view.default, packed, [packed.meta["val"].numel()])
    return add_node(graph, target, *last._replace(input=flat))


def _one_row_per_rank(graph: Graph, payload: Node, ranks: object) -> Node:
    """Views a payload as a matrix with one row for each rank."""
    if not payload.meta["val"].is_contiguous():
        copied = graph.call_function(aten.clone.default, (payload,), {"memory_format": torch.contiguous_format})
        copied.meta["val"] = payload.meta["val"].clone(memory_format=torch.contiguous_format)
        payload = copied
    return add_node(graph, aten.view.default, payload, [ranks, payload.meta["val"].numel() // ranks])


def _sort(graph: Graph) -> None:
    """Restores a valid order: each node keeps its position, and what a bucket needs is moved before it.

    Views and allocations are placed where they are read, since a bucket need not be issued early for their sake.
    """
    inputs = ordered_inputs(graph)
    move_into(needed_first(list(inputs), inputs.__getitem__, on_demand=computes_nothing))


def _flat(graph: Graph, payload: Node) -> Node:
    value = payload.meta["val"]
    return payload if value.ndim == 1 else add_node(graph, aten.view.default, payload, [value.numel()])


def _numel(graph: Graph, flat: Node) -> Any:
    size = flat.meta["val"].shape[0]
    return add_node(graph, aten.sym_size.int, flat, 0) if isinstance(size, torch.SymInt) else size


def _length(graph: Graph, c: Collective, dtype: torch.dtype) -> Any:
    """Returns the number of elements of `dtype` in a collective's result, as an integer or a node."""
    result = c.node.meta["val"]
    if all(isinstance(s, int) for s in result.shape):
        return math.prod(result.shape) * result.dtype.itemsize // dtype.itemsize
    return _product(graph, _factors(graph, c))


def _factors(graph: Graph, c: Collective) -> list[Any]:
    """Returns integers and nodes whose product is the length of the flat result of one of our collectives."""
    changed = _result_sizes(c)
    return [changed[d] if d in changed else _size(graph, c.payload, d) for d in range(c.value.ndim)]


def _size(graph: Graph, node: Node, dim: int) -> object:
    size = node.meta["val"].shape[dim]
    return add_node(graph, aten.sym_size.int, node, dim) if isinstance(size, torch.SymInt) else size


def _product(graph: Graph, factors: Sequence[object]) -> Any:
    product: Any = math.prod(f for f in factors if isinstance(f, int))
    for factor in factors:
        if isinstance(factor, Node):
            product = factor if isinstance(product, int) and product == 1 else _times(graph, product, factor)
    return product


def _times(graph: Graph, a: Any, b: Node) -> Node:
    node = graph.call_function(operator.mul, (a, b))
    node.meta["val"] = (a.meta["val"] if isinstance(a, Node) else a) * b.meta["val"]
    return node
