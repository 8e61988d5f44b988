"""Cancels inverse pairs: tensors that are exchanged or gathered and then brought back stay where they are."""

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
    clone_payload,
    equal,
    erase_unused,
    replace,
    shards_of,
)
from shardcompile.passes.graph.collective import Collective, called, collectives


class DropOwnSlice:
    """Keeps the local shard instead of gathering all shards and slicing this rank's out of them.

        take_shard(wait(all_gather_v(x, partition)), partition)   ->   clone(x)

    Legal because this rank's shard of the gathered tensor is its payload: same dim, same partition, same group. The
    clone is made where the gather starts, before `x` can be written to; `take_shard` copies as well. The gather is
    removed if nothing else reads it. `take_shard` states that every rank takes its local shard, so all ranks drop the
    same gathers; a slice with constant bounds does not state that, and is left alone.
    """

    name = "drop_own_slice"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        for start in [c.node for c in collectives(graph) if c.descriptor is ALL_GATHER_V]:
            c = at(start)
            taken = [t for result in _results(c) for t in _readers(result) if _takes_local_shard(t, start)]
            for node in taken:
                replace(graph, node, clone_payload(graph, c))
            if taken:
                erase_unused(graph, start)


class CancelInversePairs:
    """Leaves a tensor where it is instead of moving it and moving it back.

        all_to_all_v from partition a to partition b, then from b to a   ->   clone
        fetch_ranges from partition a to partition b, then from b to a   ->   clone, if there are no halos
        reflect_shards twice                                             ->   clone
        fetch_around of a roll, then of the inverse roll                 ->   clone
        take_shard of place_shard, with the same partition               ->   clone

    Legal because each of the second ones is the inverse of the first, element by element, in the same group. The second
    collective is removed, and so is the first if nothing else reads it. The clone is made where the first starts,
    before its payload can be written to. Pairs are found by arguments that are the same on every rank.
    """

    name = "cancel_inverse_pairs"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __call__(self, graph: Graph) -> None:
        erased: set[Node] = set()
        for start in [c.node for c in collectives(graph) if c.descriptor.inverse is not None]:
            inverses = [] if start in erased else _inverses(at(start))
            for inverse in inverses:
                for result in _results(inverse):
                    replace(graph, result, clone_payload(graph, at(start)))
                erase_unused(graph, inverse.node)
                erased.add(inverse.node)
            if inverses:
                erase_unused(graph, start)
        for taken in graph.find_nodes(op="call_function", target=TAKE_SHARD.target):
            _cancel_placed(graph, taken)


def _takes_local_shard(node: Node, gather: Node) -> bool:
    """Whether a node takes this rank's local shard by the partition of an all-gather."""
    taken, gathered = called(node, TAKE_SHARD), called(gather, ALL_GATHER_V)
    return taken is not None and shards_of(taken) == shards_of(gathered)


def _flat_layout(c: Collective) -> tuple[int, list[Any]]:
    """Returns the dim that comes first in the flat result of one of our collectives, and the shape with it first."""
    assert c.descriptor.sizes is not None, f"{c.kind} returns rows"
    shape, dim = rows_of(c.value.shape, c.descriptor.sizes(c.values))
    return dim, list(shape)


def _results(c: Collective) -> list[Node]:
    """Returns the nodes that hold the result of one of our collectives in its shape; none if it is read otherwise."""
    dim, shape = _flat_layout(c)
    found: list[Node] = []
    for wait in c.waits:
        views = [u for u in wait.users if u.target in RESHAPES and equal(u.meta["val"].shape, shape)]
        if len(shape) == 1:
            found += [wait, *views]
        elif len(views) < len(wait.users):
            return []
        elif not dim:
            found += views
        else:
            readers = [r for view in views for r in view.users]
            if not all(_moves_first_dim(r, dim) for r in readers):
                return []
            found += readers
    return found if len(c.waits) == len(c.node.users) else []


def _moves_first_dim(node: Node, dim: int) -> bool:
    """Whether a node moves the first dim of its input to position `dim`."""
    if node.target is not aten.permute.default:
        return False
    return list(node.args[1]) == [*range(1, dim + 1), 0, *range(dim + 1, node.meta["val"].ndim)]  # type: ignore[arg-type]


def _readers(node: Node, order: Sequence[int] | None = None) -> Iterator[Node]:
    """Yields the readers of a value, also through copies and through permutations that are undone again.

    Args:
        node: the value, or a permutation of it.
        order: the dim of the value at each position; None if they are in order.
    """
    for user in list(node.users):
        if user.target in COPIES:
            yield from _readers(user, order)
        elif user.target is aten.permute.default:
            dims: Any = user.args[1]
            new_order = [order[d] if order else d % len(dims) for d in dims]
            yield from _readers(user, None if new_order == sorted(new_order) else new_order)
        elif order is None:
            yield user


def _inverses(c: Collective) -> list[Collective]:
    """Returns the collectives that undo this one and whose results are read in their shape."""
    found = [Collective.of(reader) for result in _results(c) for reader in _readers(result)]
    inverse = c.descriptor.inverse
    assert inverse is not None, f"{c.kind} has an inverse"
    inverses = [
        b
        for b in found
        if b is not None and b.descriptor is c.descriptor and b.arguments == inverse(c.arguments, b.arguments)
    ]
    return [b for b in inverses if _results(b)]


def _cancel_placed(graph: Graph, taken: Node) -> None:
    """Replaces a `take_shard` of a `place_shard` with the same partition by a clone of the shard."""
    placed: Any = taken.args[0]
    while isinstance(placed, Node) and placed.target in COPIES:
        placed = placed.args[0]
    placement = called(placed, PLACE_SHARD) if isinstance(placed, Node) else None
    if placement is None or not isinstance(placement.input, Node):
        return
    shard = placement.input
    if shards_of(called(taken, TAKE_SHARD)) == shards_of(placement):
        with graph.inserting_before(placed):
            copy = clone(graph, shard)
        replace(graph, taken, copy)
        if not placed.users:
            graph.erase_node(placed)
