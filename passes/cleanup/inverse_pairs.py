"""Tensors that are moved, or gathered, and then put back where they were: they stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node

from shardcompile.collectives.descriptor import rows_of
from shardcompile.collectives.gathers import ALL_GATHER_V
from shardcompile.collectives.local_shards import PLACE_SHARD, TAKE_SHARD
from shardcompile.passes.cleanup.edits import (
    COPIES,
    RESHAPES,
    at,
    aten,
    clone,
    copied,
    equal,
    erase_unused,
    replace,
    shards_of,
)
from shardcompile.passes.graph.collective import Collective, called, collectives


class DropOwnSlice:
    """Keep the shard instead of gathering all of them and taking it.

        take_shard(wait(all_gather_v(x, sharded)), sharded)   ->   clone(x)

    Legal because a rank's local shard of the gathered tensor is what it put in: same dim, same partition, same group.
    The clone is made where the gather starts, before anything can write to `x`; `take_shard` makes one, too. The
    gather goes if nothing else reads it. `take_shard` says that every rank takes its local shard, so all ranks drop
    the same gathers; a slice with numbers does not say so, and is left alone.
    """

    name = "drop_own_slice"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        for start in [c.node for c in collectives(graph) if c.descriptor is ALL_GATHER_V]:
            c = at(start)
            taken = [t for result in _results(c) for t in _readers(result) if _takes(t, start)]
            for node in taken:
                replace(graph, node, copied(graph, c))
            if taken:
                erase_unused(graph, start)


class CancelRoundTrips:
    """Leave a tensor where it is instead of moving it away and back.

        all_to_all_v from sharded a to shard b, then from b to a   ->   clone
        fetch_ranges from sharded a to shard b, then from b to a   ->   clone, if there are no halos
        mirror_shards twice                                  ->   clone
        fetch_around of a roll, then of the roll back        ->   clone
        take_shard of place_shard, of one partition                ->   clone

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
            inverses = [] if start in gone else _inverses(at(start))
            for back in inverses:
                for result in _results(back):
                    replace(graph, result, copied(graph, at(start)))
                erase_unused(graph, back.node)
                gone.add(back.node)
            if inverses:
                erase_unused(graph, start)
        for taken in graph.find_nodes(op="call_function", target=TAKE_SHARD.target):
            _cancel_placed(graph, taken)


def _takes(node: Node, gather: Node) -> bool:
    """Whether a node takes this rank's local shard by the partition of an all-gather."""
    taken, whole = called(node, TAKE_SHARD), called(gather, ALL_GATHER_V)
    return taken is not None and shards_of(taken) == shards_of(whole)


def _rows(c: Collective) -> tuple[int, list[Any]]:
    """The dim whose rows come first in the flat result of one of our collectives, and the shape with that dim first."""
    assert c.descriptor.sizes is not None, f"{c.kind} gives rows"
    shape, dim = rows_of(c.value.shape, c.descriptor.sizes(c.values))
    return dim, list(shape)


def _results(c: Collective) -> list[Node]:
    """The nodes that hold the result of one of our collectives in its shape; none if it is read in another way."""
    dim, rows = _rows(c)
    found: list[Node] = []
    for wait in c.waits:
        views = [u for u in wait.users if u.target in RESHAPES and equal(u.meta["val"].shape, rows)]
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
        if user.target in COPIES:
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
    while isinstance(placed, Node) and placed.target in COPIES:
        placed = placed.args[0]
    whole = called(placed, PLACE_SHARD) if isinstance(placed, Node) else None
    if whole is None or not isinstance(whole.input, Node):
        return
    shard = whole.input
    if shards_of(called(taken, TAKE_SHARD)) == shards_of(whole):
        with graph.inserting_before(placed):
            copy = clone(graph, shard)
        replace(graph, taken, copy)
        if not placed.users:
            graph.erase_node(placed)
