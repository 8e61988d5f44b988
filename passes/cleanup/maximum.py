"""Maxima over ranks, as graphs have them: of floats, or of integers in the order of floats.

The collectives of this library reduce floats as integers, so that a NaN wins: see
`shardcompile.collectives.ordered_ints`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from shardcompile.passes.cleanup.edits import equal
from shardcompile.passes.cleanup.linear_factors import RESHAPES, origin
from shardcompile.passes.graph.collective import Collective, reduction_of
from shardcompile.passes.graph.rank_dependent_sizes import is_pointwise

aten = torch.ops.aten


@dataclass(frozen=True)
class Maximum:
    """A maximum over ranks.

    Attributes:
        collective: that reduces.
        largest: this rank's, as floats.
        results: the nodes that have the maximum of all ranks as floats, in the shape of `largest` or flat.
        of: what it is the largest of, without the rows of -inf that an empty shard is given.
        order: of the dims of `of`.
    """

    collective: Collective
    largest: Node
    results: tuple[Node, ...]
    of: Node
    order: tuple[int, ...]

    @staticmethod
    def found(c: Collective) -> Maximum | None:
        """What a collective is, or None if it is no maximum of one tensor's elements along kept dims."""
        if reduction_of(c) != "max" or len(c.waits) != len(c.node.users):
            return None
        payload = _flatten(c.payload)
        largest = payload if payload.meta["val"].is_floating_point() else _find_floats(payload)
        if largest is None or largest.target is not aten.amax.default or largest.args[2:3] != (True,):
            return None
        results = tuple(c.waits) if largest is payload else _find_decoded(c, largest.meta["val"].dtype)
        of, order = origin(largest.args[0])  # type: ignore[arg-type]
        if of.target is aten.constant_pad_nd.default and order == tuple(sorted(order)):
            padded_with = of.args[2] if len(of.args) > 2 else 0
            if padded_with != -math.inf or any(n < 0 for n in of.args[1]):  # type: ignore[union-attr, operator]
                return None
            of, order = origin(of.args[0])  # type: ignore[arg-type]
        return Maximum(c, largest, results, of, order) if results else None

    def follows(self, node: Node) -> bool:
        """Whether a value is made of the maximum element by element, in its shape."""
        if node in self.results:
            return True
        if node.target in RESHAPES:
            source = node.args[0]
            return source in self.results and equal(node.meta["val"].shape, self.largest.meta["val"].shape)
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        same = equal(node.meta["val"].shape, self.largest.meta["val"].shape)
        return is_pointwise(node) and bool(tensors) and same and all(self.follows(n) or _is_full(n) for n in tensors)


def _is_full(node: Node) -> bool:
    return node.target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)


def _flatten(node: Node) -> Node:
    while node.target in RESHAPES or node.target is aten.clone.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _find_floats(ordered: Node) -> Node | None:
    """The floats that `ordered_ints.encode` has made integers of, for a maximum."""
    match _parts(ordered, aten.where.self):
        case (is_nan, limit, turned):
            pass
        case _:
            return None
    bits = _bits(turned)
    floats = None if bits is None or bits.target is not aten.view.dtype else bits.args[0]
    wins = isinstance(limit, Node) and limit.args[:1] == (torch.iinfo(ordered.meta["val"].dtype).max,)
    if not isinstance(floats, Node) or not wins or _parts(is_nan, aten.isnan.default) != (floats,):
        return None
    return floats


def _find_decoded(c: Collective, dtype: torch.dtype) -> tuple[Node, ...]:
    """Where `ordered_ints.decode` has made floats again; none if the integers are read in another way."""
    found: list[Node] = []
    for value in _in_shape(c):
        turned = {u for user in value.users for u in (user, *user.users) if u.target is aten.where.self}
        for t in turned:
            if _bits(t) is not value:
                return ()
            found += [u for u in t.users if u.target is aten.view.dtype and u.args[1] is dtype]
            if len(found) < len(t.users):
                return ()
    return tuple(dict.fromkeys(found))


def _in_shape(c: Collective) -> Iterator[Node]:
    for wait in c.waits:
        views = [u for u in wait.users if u.target in RESHAPES]
        yield from views or [wait]


def _bits(turned: object) -> Node | None:
    """Of ``where(bits < 0, bits ^ max, bits)`` the bits."""
    match _parts(turned, aten.where.self):
        case (negative, flipped, Node() as bits):
            flip = (bits, torch.iinfo(bits.meta["val"].dtype).max)
            told = _parts(negative, aten.lt.Scalar) == (bits, 0) and _parts(flipped, aten.bitwise_xor.Scalar) == flip
            return bits if told else None
        case _:
            return None


def _parts(node: object, target: object) -> tuple[object, ...] | None:
    return node.args if isinstance(node, Node) and node.target is target else None
