"""Communication that a graph can do without.

Ranks have to drop the same collectives. So each pass decides by what the program does with a collective, never by
which part of it this rank happens to hold; and no pass removes a collective for the sole reason that nobody reads its
result here: on another rank, of which the block is not empty or the constant not known, somebody may.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.collectives.descriptor import rows_of
from shardcompile.collectives.gathers import ALL_GATHER_V, REDUCE_SCATTER_V
from shardcompile.collectives.own_blocks import PLACE_BLOCK, TAKE_BLOCK
from shardcompile.passes.graph.blocks import is_pointwise
from shardcompile.passes.graph.collective import (
    WAIT,
    Collective,
    add_call,
    add_node,
    called,
    collectives,
    inherit,
    kind_of,
    reduction_of,
)
from shardcompile.passes.graph.dependencies import writes
from shardcompile.passes.graph.ops import op_of

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten.alias.default)
_VIEWS = {
    *_RESHAPES,
    operator.getitem,
    WAIT,
    aten.alias.default,
    aten.as_strided.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
}
"""Ops whose result may be their argument's memory."""

_LOCAL = {
    *_RESHAPES,
    *_COPIES,
    aten.permute.default,
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    WAIT,
}
"""Ops that bring a payload into the shape and dtype that is sent."""


class ShareEqualCollectives:
    """Communicate once what is asked for twice.

        wait(all_gather_v(x, ...)); wait(all_gather_v(x, ...))   ->   one gather, awaited twice

    Payloads are equal if they are one node, or made of one by the same views, casts, slices, pads and copies. Slices
    whose ends are numbers are not: here they may both be empty, on another rank different rows.

    Legal because functional collectives of equal payloads and arguments yield equal results. Nothing between the two
    writes to memory, and nothing writes to the first one's result; a second result that leaves the graph, or is
    written to, becomes a copy, so that results stay as separate as they were. All ranks share the same collectives
    because the comparison is of the program's nodes. A payload that is the same constant here (zeros, for a block that
    this rank has not got) may be two different tensors elsewhere: such collectives are not shared. If elsewhere
    they are one tensor, the ranks differ; the comparison of the ranks' collectives finds that out.
    """

    name = "share_equal_collectives"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        if all(kind_of(node) is None for node in graph.nodes):
            return
        constants = _constants(graph)
        first_of: dict[Any, Node] = {}
        same: dict[Node, Node] = {}
        epoch = 0
        for node in list(graph.nodes):
            epoch += writes(node)
            c = Collective.of(node)
            if c is None and (node.op != "call_function" or node.target not in _LOCAL or _is_own_part(node)):
                continue
            key = (epoch, node.target, _frozen((node.args, node.kwargs), same))
            first = same[node] = first_of.setdefault(key, node)
            if c is None or first is node or not c.functional or not constants.isdisjoint(c.payloads):
                continue
            if not _escapes(first, to_output=False):
                _share(graph, c, first)


class DropRepeatedWaits:
    """Wait for a collective once.

        wait(start); wait(start)   ->   wait(start)
        wait(wait(start))          ->   wait(start)

    Torch 2.15 repeats the wait for a result that the backward pass needs. Legal because `wait_tensor` returns its
    argument, and finds nothing left to wait for the second time. Changes no collective.
    """

    name = "drop_repeated_waits"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        done: dict[Any, Node] = {}
        for node in list(graph.nodes):
            if node.target is not WAIT:
                continue
            source = node.args[0]
            earlier = source if source.target is WAIT else done.setdefault(source, node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


class DropOwnSlice:
    """Keep the block instead of gathering all of them and taking it.

        take_block(wait(all_gather_v(x, cut)), cut)   ->   clone(x)

    Legal because a rank's block of the gathered tensor, along the same dim, by the same cut, in the same group, is what
    it put in. The clone is made where the gather starts, before anything can write to `x`; `take_block` makes one,
    too. The gather goes if nothing else reads it. `take_block` says that every rank takes its own block, so all ranks
    drop the same gathers; a slice with numbers does not say so, and is left alone.
    """

    name = "drop_own_slice"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        for start in [c.node for c in collectives(graph) if c.descriptor is ALL_GATHER_V]:
            c = _at(start)
            taken = [t for result in _results(c) for t in _readers(result) if _takes(t, start)]
            for node in taken:
                _replace(graph, node, _copied(graph, c))
            if taken:
                _erase_unused(graph, start)


class CancelRoundTrips:
    """Leave a tensor where it is instead of moving it away and back.

        all_to_all_v from cut a to cut b, then from b to a   ->   clone
        fetch_ranges from cut a to cut b, then from b to a   ->   clone, if there are no halos
        mirror_blocks twice                                  ->   clone
        take_block of place_block, of one cut                ->   clone

    Legal because each of the second ones is the inverse of the first, element by element, in the same group. The second
    collective goes, and so does the first if nothing else reads it. The clone is made where the first starts, before
    anything can write to its payload. That a pair is one follows from arguments that are the same on every rank.
    """

    name = "cancel_round_trips"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        gone: set[Node] = set()
        for start in [c.node for c in collectives(graph) if c.descriptor.inverse is not None]:
            inverses = [] if start in gone else _inverses(_at(start))
            for back in inverses:
                for result in _results(back):
                    _replace(graph, result, _copied(graph, _at(start)))
                _erase_unused(graph, back.node)
                gone.add(back.node)
            if inverses:
                _erase_unused(graph, start)
        for taken in graph.find_nodes(op="call_function", target=TAKE_BLOCK.target):
            _cancel_placed(graph, taken)


class ReduceThenSlice:
    """Give every rank the sum of its block only, where it takes nothing else of the whole sum.

        take_block(wait(all_reduce(x, sum)), cut)   ->   wait(reduce_scatter_v(x, sum, cut))

    Legal because block `r` of a sum is the sum of blocks `r`, for sum and avg. Nothing else may read the sum, and all
    that take a block take the same one, which `take_block` says of every rank alike. The terms are added up in rank
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


class SpreadOwnBlock:
    """Spread a value over this rank's block, instead of over all rows of which the block is then taken.

        take_block(expand(x, [rows, ...]) / n, cut)   ->   expand(x, [rows of the block, ...]) / n

    That is what the backward pass of a mean asks for: the gradient of each row is the same. Legal because rows that are
    made of one row element by element are all alike, so that it does not matter which of them a rank takes. Saves the
    memory of the whole tensor. What is written to meanwhile is left alone.
    """

    name = "spread_own_block"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        taken = graph.find_nodes(op="call_function", target=TAKE_BLOCK.target)
        if not taken:
            return
        writers = [n for n in graph.nodes if writes(n)]
        for node in taken:
            _spread(graph, node, writers)


def _at(start: Node) -> Collective:
    """The collective that starts at a node, as it is now: its payload may have been replaced."""
    c = Collective.of(start)
    assert c is not None, f"{start} is a collective"
    return c


def _constants(graph: Graph) -> set[Node]:
    """Nodes that depend on no input of the graph."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _is_own_part(node: Node) -> bool:
    """Whether a node takes a part by numbers, which may be those of this rank's block."""
    args: Any = node.args
    if node.target is aten.slice.Tensor:
        return any(isinstance(n, int) and n not in (0, sys.maxsize) for n in args[2:4]) or 0 in args[3:4]
    return node.target is aten.constant_pad_nd.default and any(isinstance(n, int) and n < 0 for n in args[1])


def _frozen(value: Any, same: dict[Node, Node]) -> Any:
    """Arguments as a key, with one node in place of all that are the same."""
    if isinstance(value, Node):
        return same.get(value, value)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v, same) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v, same)) for k, v in sorted(value.items()))
    return type(value), value


def _escapes(node: Node, to_output: bool) -> bool:
    """Whether a node's memory may be written to, or, if asked for, leave the graph."""
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if writes(user) or (to_output and user.op == "output"):
                return True
            if user.target in _VIEWS and user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _share(graph: Graph, c: Collective, first: Node) -> None:
    c.node.replace_all_uses_with(first)
    for wait in c.waits:
        if _escapes(wait, to_output=True):
            _keep_separate(graph, wait)
    graph.erase_node(c.node)


def _keep_separate(graph: Graph, node: Node) -> None:
    """Give those who read a node a copy."""
    with graph.inserting_after(node):
        copy = _clone(graph, node)
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _clone(graph: Graph, node: Node) -> Node:
    copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = node.meta["val"].clone(memory_format=torch.contiguous_format)
    return copy


def _copied(graph: Graph, c: Collective) -> Node:
    """A copy of a collective's payload as it is when the collective starts."""
    with graph.inserting_before(c.node):
        return _clone(graph, c.payload)


def _replace(graph: Graph, node: Node, by: Node) -> None:
    node.replace_all_uses_with(by)
    graph.erase_node(node)


def _erase_unused(graph: Graph, node: Node) -> None:
    """Erase a node that nobody reads, nor what views and copies make of it."""
    for user in list(node.users):
        if user.target in _VIEWS or user.target in _COPIES:
            _erase_unused(graph, user)
    if not node.users:
        graph.erase_node(node)


def _takes(node: Node, gather: Node) -> bool:
    """Whether a node takes this rank's block by the cut of an all-gather."""
    taken, whole = called(node, TAKE_BLOCK), called(gather, ALL_GATHER_V)
    return taken is not None and _blocks_of(taken) == _blocks_of(whole)


def _blocks_of(arguments: Any) -> tuple[Any, ...]:
    """Which blocks of which dim an op takes, places or gathers."""
    return arguments.dim, arguments.cut, arguments.group_name


def _equal(a: Any, b: Any) -> bool:
    """Whether two shapes are equal whatever the symbols in them are."""
    return len(a) == len(b) and all(compat.surely(m == n) for m, n in zip(a, b, strict=True))


def _rows(c: Collective) -> tuple[int, list[Any]]:
    """Of one of our collectives the dim whose rows come first in its flat result, and the shape with that dim first."""
    assert c.descriptor.extents is not None, f"{c.kind} gives rows"
    shape, dim = rows_of(c.value.shape, c.descriptor.extents(c.values))
    return dim, list(shape)


def _results(c: Collective) -> list[Node]:
    """The nodes that hold the result of one of our collectives in its shape; none if it is read in another way."""
    dim, rows = _rows(c)
    found: list[Node] = []
    for wait in c.waits:
        views = [u for u in wait.users if u.target in _RESHAPES and _equal(u.meta["val"].shape, rows)]
        if len(rows) == 1:
            found += [wait, *views]
        elif len(views) < len(wait.users):
            return []
        elif not dim:
            found += views
        else:
            readers = [r for view in views for r in view.users]
            if not all(_moves_first(r, dim) for r in readers):
                return []
            found += readers
    return found if len(c.waits) == len(c.node.users) else []


def _moves_first(node: Node, dim: int) -> bool:
    """Whether a node moves the first dim of its input to a place."""
    if node.target is not aten.permute.default:
        return False
    return list(node.args[1]) == [*range(1, dim + 1), 0, *range(dim + 1, node.meta["val"].ndim)]  # type: ignore[arg-type]


def _readers(node: Node, order: Sequence[int] | None = None) -> Iterator[Node]:
    """Who reads a value, or a copy of it, also one with the dims in another order that is undone again.

    Args:
        node: the value, or one with its dims in another order.
        order: which dim of the value comes where; None where all are in their places.
    """
    for user in list(node.users):
        if user.target in _COPIES:
            yield from _readers(user, order)
        elif user.target is aten.permute.default:
            dims: Any = user.args[1]
            now = [order[d] if order else d % len(dims) for d in dims]
            yield from _readers(user, None if now == sorted(now) else now)
        elif order is None:
            yield user


def _inverses(c: Collective) -> list[Collective]:
    """Collectives that undo this one, and whose results are read in their shape."""
    found = [Collective.of(reader) for result in _results(c) for reader in _readers(result)]
    undo = c.descriptor.inverse
    assert undo is not None, f"{c.kind} has an inverse"
    pairs = [
        b
        for b in found
        if b is not None and b.descriptor is c.descriptor and b.arguments == undo(c.arguments, b.arguments)
    ]
    return [b for b in pairs if _results(b)]


def _cancel_placed(graph: Graph, taken: Node) -> None:
    placed: Any = taken.args[0]
    while isinstance(placed, Node) and placed.target in _COPIES:
        placed = placed.args[0]
    whole = called(placed, PLACE_BLOCK) if isinstance(placed, Node) else None
    if whole is None or not isinstance(whole.input, Node):
        return
    block = whole.input
    if _blocks_of(called(taken, TAKE_BLOCK)) == _blocks_of(whole):
        with graph.inserting_before(placed):
            copy = _clone(graph, block)
        _replace(graph, taken, copy)
        if not placed.users:
            graph.erase_node(placed)


def _spread(graph: Graph, taken: Node, writers: Sequence[Node]) -> None:
    """Take a block of what is the same in all rows, by making no other rows."""
    arguments = called(taken, TAKE_BLOCK)
    x, dim, block = arguments.input, arguments.dim, arguments.block
    assert isinstance(x, Node) and isinstance(dim, int)
    path: list[Node] = []
    if not _is_spread(x, dim % x.meta["val"].ndim, path) or any(min(path) < w < taken for w in writers):
        return
    narrow: dict[Node, Node] = {}
    with graph.inserting_before(taken):
        for node in path:  # inputs first
            if node.target is aten.expand.default:
                sizes = [block if d == dim % len(node.args[1]) else s for d, s in enumerate(node.args[1])]  # type: ignore
                narrow[node] = add_node(graph, aten.expand.default, node.args[0], sizes)
            else:
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: narrow.get(n, n))
                narrow[node] = add_node(graph, node.target, *args, **kwargs)
        own = _clone(graph, narrow[x])
    _replace(graph, taken, own)
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
    if node.op != "call_function" or writes(node):
        return False
    if node.target is aten.expand.default:
        source: Any = node.args[0]
        at = dim - (ndim - source.meta["val"].ndim)
        fits = len(node.args[1]) == ndim and (at < 0 or _is_one(source.meta["val"].shape[at]))  # type: ignore[arg-type]
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
    return len(shape) < from_last or _is_one(shape[len(shape) - from_last])


def _is_one(extent: Any) -> bool:
    return isinstance(extent, int) and extent == 1


def _scatter(graph: Graph, c: Collective, writers: list[Node]) -> None:
    """Replace an all-reduce of which all that is read is this rank's block, each time by the same call."""
    wholes = dict.fromkeys(u if u.target in _RESHAPES else wait for wait in c.waits for u in wait.users)
    takers = [reader for whole in wholes for reader in whole.users]
    taken = [called(t, TAKE_BLOCK) for t in takers]
    if not taken or taken[0] is None or taken[0].group_name != c.group_name:
        return
    shapes = [whole.meta["val"].shape for whole in wholes]
    size = _size_arguments(next(iter(wholes)))
    if size is None or len(c.waits) != len(c.node.users) or not all(_equal(s, shapes[0]) for s in shapes):
        return
    first = min(takers)
    a = called(first, TAKE_BLOCK)
    if any(t is None or t._replace(input=a.input) != a for t in taken):
        return
    dim, block = a.dim % len(size), a.block
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
            block=block,
            reduce_op=c.arguments.reduce_op,
            cut=a.cut,
            group_name=a.group_name,
        )
        inherit(start, [c])
    with graph.inserting_before(first):
        rows = [block, *size[:dim], *size[dim + 1 :]]
        result = add_node(graph, aten.view.default, add_node(graph, WAIT, start), rows)
        if dim:
            dims = [*range(1, dim + 1), 0, *range(dim + 1, len(rows))]
            result = _clone(graph, add_node(graph, aten.permute.default, result, dims))
    for node in takers:
        _replace(graph, node, result)
    _erase_unused(graph, c.node)


def _size_arguments(node: Node) -> list[Any] | None:
    """A tensor's shape as numbers and nodes, as they are arguments of a view; None if it is not to be had."""
    size = list(node.meta["val"].shape)
    if node.target in _RESHAPES and any(isinstance(s, torch.SymInt) for s in size):
        size = [given if isinstance(s, torch.SymInt) else s for s, given in zip(size, node.args[1], strict=True)]  # type: ignore[arg-type]
    usable = all(isinstance(s, Node) or (type(s) is int and s >= 0) for s in size)
    return size if usable else None
