"""Computes only this rank's local shard where a full tensor would be made and then sliced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.collectives.gathers import REDUCE_SCATTER_V
from shardcompile.collectives.local_shards import TAKE_SHARD
from shardcompile.compat import is_one
from shardcompile.passes.cleanup.edits import RESHAPES, aten, clone, equal, erase_unused, replace
from shardcompile.passes.graph.collective import (
    WAIT,
    Collective,
    add_call,
    add_node,
    called,
    collectives,
    inherit,
    reduction_of,
)
from shardcompile.passes.graph.dependencies import writes
from shardcompile.passes.graph.ops import op_of


class ReduceThenSlice:
    """Replaces an all-reduce of which only the local shard is read by a reduce-scatter.

        take_shard(wait(all_reduce(x, sum)), partition)   ->   wait(reduce_scatter_v(x, sum, partition))

    Legal because shard `r` of a sum is the sum of the shards `r`, for sum and avg. Nothing else may read the sum, and
    all readers take the same shard, which `take_shard` states for every rank. The terms are added in rank order, where
    a backend may use another order for an all-reduce: floats can differ in their last bit.
    """

    name = "reduce_then_slice"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        writers = [n for n in graph.nodes if writes(n)]
        for c in collectives(graph):
            if reduction_of(c) in ("sum", "avg"):
                _to_reduce_scatter(graph, c, writers)


class SpreadLocalShard:
    """Broadcasts a value to this rank's local shard instead of to all rows, of which the shard is then taken.

        take_shard(expand(x, [rows, ...]) / n, partition)   ->   expand(x, [rows of the shard, ...]) / n

    The backward pass of a mean has this form: the gradient of each row is the same. Legal because all rows are computed
    from one row, element by element. They are equal, so it does not matter which of them a rank takes. It saves the
    memory of the full tensor. Values that are written to meanwhile are left alone.
    """

    name = "spread_own_shard"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        taken = graph.find_nodes(op="call_function", target=TAKE_SHARD.target)
        if not taken:
            return
        writers = [n for n in graph.nodes if writes(n)]
        for node in taken:
            _broadcast_to_shard(graph, node, writers)


def _broadcast_to_shard(graph: Graph, taken: Node, writers: Sequence[Node]) -> None:
    """Replaces the shard of a broadcast value by a broadcast to the shard's rows."""
    arguments = called(taken, TAKE_SHARD)
    x, dim, shard = arguments.input, arguments.dim, arguments.shard
    assert isinstance(x, Node) and isinstance(dim, int)
    path: list[Node] = []
    if not _is_broadcast(x, dim % x.meta["val"].ndim, path) or any(min(path) < w < taken for w in writers):
        return
    local: dict[Node, Node] = {}
    with graph.inserting_before(taken):
        for node in path:  # inputs first
            if node.target is aten.expand.default:
                sizes = [shard if d == dim % len(node.args[1]) else s for d, s in enumerate(node.args[1])]  # type: ignore
                local[node] = add_node(graph, aten.expand.default, node.args[0], sizes)
            else:
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: local.get(n, n))
                local[node] = add_node(graph, node.target, *args, **kwargs)
        result = clone(graph, local[x])
    replace(graph, taken, result)
    for node in reversed(path):
        if not node.users:
            graph.erase_node(node)


def _is_broadcast(node: Node, dim: int, path: list[Node]) -> bool:
    """Whether all rows of a value are equal and computed from a single row.

    Args:
        node: the value.
        dim: the dim of its rows.
        path: the nodes that hold many rows are appended to it, inputs first.
    """
    if node in path:
        return True
    ndim = node.meta["val"].ndim
    if node.op != "call_function" or writes(node) or is_one(node.meta["val"].shape[dim]):
        return False  # a single row is not broadcast: the shard holds it, or is empty
    if node.target is aten.expand.default:
        source: Any = node.args[0]
        source_dim = dim - (ndim - source.meta["val"].ndim)
        is_broadcast = len(node.args[1]) == ndim and (source_dim < 0 or is_one(source.meta["val"].shape[source_dim]))  # type: ignore[arg-type]
    else:
        is_random = op_of(node).random
        inputs = [i for i in node.all_input_nodes if isinstance(i.meta.get("val"), torch.Tensor)]
        is_broadcast = op_of(node).pointwise and not is_random and bool(inputs)
        is_broadcast = is_broadcast and all(
            _has_one_row(i, ndim - dim) or _is_broadcast(i, dim - ndim + i.meta["val"].ndim, path) for i in inputs
        )
    if is_broadcast:
        path.append(node)
    return is_broadcast


def _has_one_row(node: Node, from_last: int) -> bool:
    """Whether a value is broadcast along the dim at this distance from the last one."""
    shape = node.meta["val"].shape
    return len(shape) < from_last or is_one(shape[len(shape) - from_last])


def _to_reduce_scatter(graph: Graph, c: Collective, writers: list[Node]) -> None:
    """Replaces an all-reduce all of whose readers take this rank's local shard, by the same arguments."""
    sums = dict.fromkeys(u if u.target in RESHAPES else wait for wait in c.waits for u in wait.users)
    takers = [reader for value in sums for reader in value.users]
    taken = [called(t, TAKE_SHARD) for t in takers]
    if not taken or taken[0] is None or taken[0].group_name != c.group_name:
        return
    shapes = [value.meta["val"].shape for value in sums]
    size = _size_arguments(next(iter(sums)))
    if size is None or len(c.waits) != len(c.node.users) or not all(equal(s, shapes[0]) for s in shapes):
        return
    first = min(takers)
    a = called(first, TAKE_SHARD)
    if any(t is None or t._replace(input=a.input) != a for t in taken):
        return
    dim, shard = a.dim % len(size), a.shard
    is_available = all(n < c.node for n in (*first.all_input_nodes[1:], *size) if isinstance(n, Node))
    position = c.node if is_available else first
    if any(c.node < w < position for w in writers):
        return
    with graph.inserting_before(position):
        payload = add_node(graph, aten.view.default, c.payload, size)
        start = add_call(
            graph,
            REDUCE_SCATTER_V,
            input=payload,
            dim=dim,
            shard=shard,
            reduce_op=c.arguments.reduce_op,
            partition=a.partition,
            group_name=a.group_name,
        )
        inherit(start, [c])
    with graph.inserting_before(first):
        rows = [shard, *size[:dim], *size[dim + 1 :]]
        result = add_node(graph, aten.view.default, add_node(graph, WAIT, start), rows)
        if dim:
            dims = [*range(1, dim + 1), 0, *range(dim + 1, len(rows))]
            result = clone(graph, add_node(graph, aten.permute.default, result, dims))
    for node in takers:
        replace(graph, node, result)
    erase_unused(graph, c.node)


def _size_arguments(node: Node) -> list[Any] | None:
    """Returns a tensor's shape as integers and nodes, as arguments of a view; None if a node is missing."""
    size = list(node.meta["val"].shape)
    if node.target in RESHAPES and any(isinstance(s, torch.SymInt) for s in size):
        size = [given if isinstance(s, torch.SymInt) else s for s, given in zip(size, node.args[1], strict=True)]  # type: ignore[arg-type]
    usable = all(isinstance(s, Node) or (type(s) is int and s >= 0) for s in size)
    return size if usable else None
