"""Recognizes maxima over ranks in graphs: of floats, or of floats encoded as integers of the same order.

The collectives of this library reduce floats as integers, so that NaN propagates: see
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
from shardcompile.passes.graph.ops import op_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Maximum:
    """A maximum over ranks.

    Attributes:
        collective: the all-reduce.
        largest: the local maximum, as floats.
        results: the nodes that hold the maximum over all ranks as floats, in the shape of `largest` or flat.
        source: the tensor whose maximum it is, without the rows of -inf that pad an empty shard.
        order: of the dims of `source`.
    """

    collective: Collective
    largest: Node
    results: tuple[Node, ...]
    source: Node
    order: tuple[int, ...]

    @staticmethod
    def found(c: Collective) -> Maximum | None:
        """Returns the maximum that a collective computes, or None if it is none of one tensor along kept dims."""
        if reduction_of(c) != "max" or len(c.waits) != len(c.node.users):
            return None
        payload = _flatten(c.payload)
        largest = payload if payload.meta["val"].is_floating_point() else _find_floats(payload)
        if largest is None or largest.target is not aten.amax.default or largest.args[2:3] != (True,):
            return None
        results = tuple(c.waits) if largest is payload else _find_decoded(c, largest.meta["val"].dtype)
        source, order = origin(largest.args[0])  # type: ignore[arg-type]
        if source.target is aten.constant_pad_nd.default and order == tuple(sorted(order)):
            padded_with = source.args[2] if len(source.args) > 2 else 0
            if padded_with != -math.inf or any(n < 0 for n in source.args[1]):  # type: ignore[union-attr, operator]
                return None
            source, order = origin(source.args[0])  # type: ignore[arg-type]
        return Maximum(c, largest, results, source, order) if results else None

    def follows(self, node: Node) -> bool:
        """Whether a value is computed from the maximum element by element, in its shape."""
        if node in self.results:
            return True
        if node.target in RESHAPES:
            source = node.args[0]
            return source in self.results and equal(node.meta["val"].shape, self.largest.meta["val"].shape)
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        has_shape = equal(node.meta["val"].shape, self.largest.meta["val"].shape)
        return (
            op_of(node).pointwise
            and bool(tensors)
            and has_shape
            and all(self.follows(n) or _is_full(n) for n in tensors)
        )


def _is_full(node: Node) -> bool:
    return node.target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)


def _flatten(node: Node) -> Node:
    while node.target in RESHAPES or node.target is aten.clone.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _find_floats(ordered: Node) -> Node | None:
    """Returns the floats that `ordered_ints.encode` has encoded as integers, for a maximum, or None."""
    match _arguments_if(ordered, aten.where.self):
        case (is_nan, limit, encoded):
            pass
        case _:
            return None
    bits = _bits(encoded)
    floats = None if bits is None or bits.target is not aten.view.dtype else bits.args[0]
    nan_propagates = isinstance(limit, Node) and limit.args[:1] == (torch.iinfo(ordered.meta["val"].dtype).max,)
    if not isinstance(floats, Node) or not nan_propagates or _arguments_if(is_nan, aten.isnan.default) != (floats,):
        return None
    return floats


def _find_decoded(c: Collective, dtype: torch.dtype) -> tuple[Node, ...]:
    """Returns the floats that `ordered_ints.decode` has decoded; none if the integers are read otherwise."""
    found: list[Node] = []
    for value in _in_shape(c):
        decoded = {u for user in value.users for u in (user, *user.users) if u.target is aten.where.self}
        for t in decoded:
            if _bits(t) is not value:
                return ()
            found += [u for u in t.users if u.target is aten.view.dtype and u.args[1] is dtype]
            if len(found) < len(t.users):
                return ()
    return tuple(dict.fromkeys(found))


def _in_shape(c: Collective) -> Iterator[Node]:
    """Yields the results of a collective, through reshapes."""
    for wait in c.waits:
        views = [u for u in wait.users if u.target in RESHAPES]
        yield from views or [wait]


def _bits(encoded: object) -> Node | None:
    """Returns the ``bits`` of ``where(bits < 0, bits ^ max, bits)``, or None."""
    match _arguments_if(encoded, aten.where.self):
        case (negative, flipped, Node() as bits):
            flip = (bits, torch.iinfo(bits.meta["val"].dtype).max)
            matches = (
                _arguments_if(negative, aten.lt.Scalar) == (bits, 0)
                and _arguments_if(flipped, aten.bitwise_xor.Scalar) == flip
            )
            return bits if matches else None
        case _:
            return None


def _arguments_if(node: object, target: object) -> tuple[object, ...] | None:
    """Returns the arguments of a node if it calls the target."""
    return node.args if isinstance(node, Node) and node.target is target else None
