"""What is made whole for the sake of this rank's local shard alone: only that is made."""

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
from shardcompile.passes.graph.rank_dependent_sizes import is_pointwise


class ReduceThenSlice:
    """Give every rank the sum of its shard only, where it takes nothing else of the whole sum.

        take_shard(wait(all_reduce(x, sum)), sharded)   ->   wait(reduce_scatter_v(x, sum, sharded))

    Legal because shard `r` of a sum is the sum of shards `r`, for sum and avg. Nothing else may read the sum, and all
    that take a shard take the same one, which `take_shard` says of every rank alike. The terms are added up in rank
    order, where a backend may take another for an all-reduce: floats can differ in their last bit.
    """

    name = "reduce_then_slice"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        writers = [n for n in graph.nodes if writes(n)]
        for c in collectives(graph):
            if reduction_of(c) in ("sum", "avg"):
                _scatter(graph, c, writers)


class SpreadLocalShard:
    """Spread a value over this rank's local shard, instead of over all rows of which the shard is then taken.

        take_shard(expand(x, [rows, ...]) / n, sharded)   ->   expand(x, [rows of the shard, ...]) / n

    That is what the backward pass of a mean asks for: the gradient of each row is the same. Legal because all rows are
    made of one row, element by element. They are equal, so it does not matter which of them a rank takes. Saves the
    memory of the whole tensor. What is written to meanwhile is left alone.
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
            _spread(graph, node, writers)


def _spread(graph: Graph, taken: Node, writers: Sequence[Node]) -> None:
    """Take a shard of what is the same in all rows, by making no other rows."""
    arguments = called(taken, TAKE_SHARD)
    x, dim, shard = arguments.input, arguments.dim, arguments.shard
    assert isinstance(x, Node) and isinstance(dim, int)
    path: list[Node] = []
    if not _is_spread(x, dim % x.meta["val"].ndim, path) or any(min(path) < w < taken for w in writers):
        return
    narrow: dict[Node, Node] = {}
    with graph.inserting_before(taken):
        for node in path:  # inputs first
            if node.target is aten.expand.default:
                sizes = [shard if d == dim % len(node.args[1]) else s for d, s in enumerate(node.args[1])]  # type: ignore
                narrow[node] = add_node(graph, aten.expand.default, node.args[0], sizes)
            else:
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: narrow.get(n, n))
                narrow[node] = add_node(graph, node.target, *args, **kwargs)
        own = clone(graph, narrow[x])
    replace(graph, taken, own)
    for node in reversed(path):
        if not node.users:
            graph.erase_node(node)


def _is_spread(node: Node, dim: int, path: list[Node]) -> bool:
    """Whether a value is the same in all rows, and made of one row; `path` gets the nodes that have many, inputs first.

    Args:
        node: the value.
        dim: along which its rows are counted.
        path: see above.
    """
    if node in path:
        return True
    ndim = node.meta["val"].ndim
    if node.op != "call_function" or writes(node) or is_one(node.meta["val"].shape[dim]):
        return False  # one row is not made of others: the shard has it, or has none
    if node.target is aten.expand.default:
        source: Any = node.args[0]
        at = dim - (ndim - source.meta["val"].ndim)
        fits = len(node.args[1]) == ndim and (at < 0 or is_one(source.meta["val"].shape[at]))  # type: ignore[arg-type]
    else:
        is_random = op_of(node).random
        inputs = [i for i in node.all_input_nodes if isinstance(i.meta.get("val"), torch.Tensor)]
        fits = is_pointwise(node) and not is_random and bool(inputs)
        fits = fits and all(
            _is_row(i, ndim - dim) or _is_spread(i, dim - ndim + i.meta["val"].ndim, path) for i in inputs
        )
    if fits:
        path.append(node)
    return fits


def _is_row(node: Node, from_last: int) -> bool:
    """Whether a value is broadcast along the dim that is so far from the last one."""
    shape = node.meta["val"].shape
    return len(shape) < from_last or is_one(shape[len(shape) - from_last])


def _scatter(graph: Graph, c: Collective, writers: list[Node]) -> None:
    """Replace an all-reduce of which all that is read is this rank's local shard, each time by the same call."""
    wholes = dict.fromkeys(u if u.target in RESHAPES else wait for wait in c.waits for u in wait.users)
    takers = [reader for whole in wholes for reader in whole.users]
    taken = [called(t, TAKE_SHARD) for t in takers]
    if not taken or taken[0] is None or taken[0].group_name != c.group_name:
        return
    shapes = [whole.meta["val"].shape for whole in wholes]
    size = _size_arguments(next(iter(wholes)))
    if size is None or len(c.waits) != len(c.node.users) or not all(equal(s, shapes[0]) for s in shapes):
        return
    first = min(takers)
    a = called(first, TAKE_SHARD)
    if any(t is None or t._replace(input=a.input) != a for t in taken):
        return
    dim, shard = a.dim % len(size), a.shard
    known = all(n < c.node for n in (*first.all_input_nodes[1:], *size) if isinstance(n, Node))
    place = c.node if known else first
    if any(c.node < w < place for w in writers):
        return
    with graph.inserting_before(place):
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
    """A tensor's shape as numbers and nodes, as they are arguments of a view; None if it is not to be had."""
    size = list(node.meta["val"].shape)
    if node.target in RESHAPES and any(isinstance(s, torch.SymInt) for s in size):
        size = [given if isinstance(s, torch.SymInt) else s for s, given in zip(size, node.args[1], strict=True)]  # type: ignore[arg-type]
    usable = all(isinstance(s, Node) or (type(s) is int and s >= 0) for s in size)
    return size if usable else None
