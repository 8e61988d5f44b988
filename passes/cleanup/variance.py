"""Mean and variance over ranks in one collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.passes.cleanup.edits import equal
from shardcompile.passes.cleanup.linear_factors import RESHAPES, origin, sizes_of
from shardcompile.passes.cleanup.rewrite import (
    GatherPrices,
    erase,
    exchanged,
    flat,
    places,
    replace_results,
    shaped,
    sort,
    sums,
)
from shardcompile.passes.graph.collective import WAIT, Collective, add_node, add_number, reduction_of

aten = torch.ops.aten
_SCALES = (aten.mul.Tensor, aten.div.Tensor)
_RESHAPES = (*RESHAPES, aten.clone.default, aten.alias.default, aten.unsqueeze.default, aten.squeeze.dims)
"""Ops that keep the elements in their order."""


@dataclass(frozen=True)
class _Sum:
    """A sum over dims of one tensor, scaled by index.

    Attributes:
        of: what is summed.
        dims: over which, in order.
        scales: ops and numbers, as nodes or themselves, the first one applied first.
        path: the ops from the sum to the value, the first one applied first.
    """

    of: Node
    dims: tuple[int, ...]
    scales: tuple[tuple[Any, Any], ...]
    path: tuple[Node, ...]

    @staticmethod
    def found(value: Node) -> _Sum | None:
        """What a value is, or None."""
        path: list[Node] = []
        node = value
        while node.target in _RESHAPES or _is_scaled(node):
            path.append(node)
            node = node.args[0]  # type: ignore[assignment]
        if node.target is not aten.sum.dim_IntList or not node.args[1]:
            return None
        x: Any = node.args[0]
        dtype = x.meta["val"].dtype
        if not dtype.is_floating_point or node.kwargs.get("dtype") not in (None, dtype):
            return None
        dims = tuple(sorted(d % x.meta["val"].ndim for d in node.args[1]))  # type: ignore[union-attr, operator]
        path.reverse()
        scales = tuple((n.target, n.args[1]) for n in path if n.target in _SCALES)
        return _Sum(x, dims, scales, tuple(path))


def _is_scaled(node: Node) -> bool:
    if node.target not in _SCALES or len(node.args) != 2 or node.kwargs or not isinstance(node.args[0], Node):
        return False
    number = node.args[1]
    is_number = not isinstance(number.meta.get("val"), torch.Tensor) if isinstance(number, Node) else True
    return is_number and isinstance(node.args[0].meta.get("val"), torch.Tensor)


def scaled_sum(value: Node) -> tuple[object, ...] | None:
    """What tells the elements of a sum over dims, scaled by index, in their order: whatever its shape.

    Args:
        value: any.
    """
    found = _Sum.found(value)
    return None if found is None else (found.of, found.dims, found.scales)


@dataclass(frozen=True)
class _Moments:
    """A sum of squares of what is left of a tensor when something is subtracted that comes from its sum.

    Attributes:
        first: the sum.
        second: the sum of squares.
        mean: what is subtracted.
        total: the first one, as what it sums.
        squares: the second one, as what it sums.
    """

    first: Collective
    second: Collective
    mean: Node
    total: _Sum
    squares: _Sum


def merge_moments(graph: Graph, prices: GatherPrices) -> None:
    """Send a sum, and a sum of squares that waits for it, in one gather.

        s = all_reduce(sum x); q = all_reduce(sum (x - m)^2), where m comes from s

    Each rank subtracts the mean of its own rows, ``m_r = sum x / n_r``, and sends ``s_r``, ``q_r = sum (x - m_r)^2``,
    ``e_r = sum (x - m_r)`` and its number of rows. Then each rank has

        s = sum_r s_r,   q = sum_r q_r + 2 (m_r - m) e_r + n_r (m_r - m)^2

    which is how Chan, Golub and LeVeque add up variances ("Updating formulae and a pairwise algorithm for computing
    sample variances", 1979), but for ``e_r``, which is what the rounding of ``m_r`` leaves. With it the result is as
    exact as by two passes, also where the mean is much larger than the deviation. It holds for any m. A rank without
    rows has ``m_r = 0`` and the weight 0. What scales the sums goes with them, such as a division by the number of all
    rows. A rank then sends two numbers more: the first makes a mean of its sum; the second scales a square to the sum
    of as many equal squares as it has rows.
    """
    place: dict[Node, float] | None = None
    for start in [c.node for c in sums(graph)]:
        c = Collective.of(start)
        found = None if c is None else _find(c)
        if found is None:
            continue
        steps = [found.first], [found.second]
        if prices.pays(*steps, [found.first.payload, found.second.payload], found.second.global_bytes):
            place = places(graph) if place is None else place
            _merge(graph, found)
    if place is not None:
        sort(graph, place)


def _find(c: Collective) -> _Moments | None:
    squares = _Sum.found(shaped(c.payload))
    left = None if squares is None else _square_root_of(squares.of)
    if squares is None or left is None or left.target is not aten.sub.Tensor or len(left.args) != 2 or left.kwargs:
        return None
    x, mean = left.args
    if not (isinstance(x, Node) and isinstance(mean, Node)) or not equal(x.meta["val"].shape, left.meta["val"].shape):
        return None
    first = _reduction_behind(mean)
    total = None if first is None else _Sum.found(shaped(first.payload))
    if first is None or total is None or first.group_name != c.group_name or total.dims != squares.dims:
        return None
    same = origin(total.of) == origin(x) and _is_mean_kept(x, squares.dims, mean)
    dtypes = {n.meta["val"].dtype for n in (x, mean, first.payload, c.payload)}
    if (
        not same
        or len(dtypes) != 1
        or not dtypes <= {torch.float32, torch.float64}
        or first.payload.meta["val"].ndim != 1
    ):
        return None
    return _Moments(first, c, mean, total, squares) if c.payload.meta["val"].ndim == 1 else None


def _square_root_of(node: Node) -> Node | None:
    """What a node is the square of."""
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return node.args[0]  # type: ignore[return-value]
    return None


def _reduction_behind(mean: Node) -> Collective | None:
    """The sum over ranks that a value is made of, element by element in their order."""
    node = mean
    while node.target in _RESHAPES or _is_scaled(node):
        node = node.args[0]  # type: ignore[assignment]
    c = Collective.of(node.args[0]) if node.target is WAIT else None  # type: ignore[arg-type]
    return c if c is not None and reduction_of(c) == "sum" and len(c.waits) == len(c.node.users) else None


def _is_mean_kept(x: Node, dims: tuple[int, ...], mean: Node) -> bool:
    """Whether a value has one element for each sum over `dims` of `x`, and is broadcast along these."""
    shape = [1 if d in dims else s for d, s in enumerate(x.meta["val"].shape)]
    own = list(mean.meta["val"].shape)
    own = [1] * (len(shape) - len(own)) + own
    return all(isinstance(o, int) and o == 1 for d, o in enumerate(own) if d in dims) and equal(own, shape)


def _merge(graph: Graph, m: _Moments) -> None:
    sum_, square = m.first, m.second
    with graph.inserting_before(sum_.node):
        count = _count(graph, m.total.of, m.total.dims)
        to_mean = _to_mean(graph, m.total, count)
        to_square = _scale(graph, m.squares, count)
        own = add_node(graph, aten.mul.Tensor, sum_.payload, to_mean)
        x: Any = _square_root_of(m.squares.of).args[0]  # type: ignore[union-attr]
        sizes = sizes_of(graph, x)  # not the mean's: it comes from the sum
        own = add_node(graph, aten.view.default, own, [1 if d in m.total.dims else n for d, n in enumerate(sizes)])
        mine = add_node(graph, aten.sub.Tensor, x, own)
        rest, squares = _summand(graph, m, mine), _summand(graph, m, add_node(graph, aten.mul.Tensor, mine, mine))
        parts = [sum_.payload, squares, rest, to_mean, to_square]
        total, squares, rest, to_mean, to_square = exchanged(graph, parts, [sum_, square])
        whole = add_node(graph, aten.sum.dim_IntList, total, [0])
    replace_results(sum_, whole)
    with graph.inserting_before(min(square.waits)):
        mean = add_node(graph, aten.clone.default, m.mean, memory_format=torch.contiguous_format)
        mean = add_node(graph, aten.view.default, mean, [-1])
        apart = add_node(graph, aten.sub.Tensor, add_node(graph, aten.mul.Tensor, total, to_mean), mean)
        twice = add_node(graph, aten.mul.Tensor, rest, 2)
        slope = add_node(graph, aten.add.Tensor, twice, add_node(graph, aten.mul.Tensor, apart, to_square))
        shifted = add_node(graph, aten.add.Tensor, squares, add_node(graph, aten.mul.Tensor, apart, slope))
        result = add_node(graph, aten.sum.dim_IntList, shifted, [0])
    replace_results(square, result)
    erase(graph, square)
    erase(graph, sum_)


def _count(graph: Graph, x: Node, dims: tuple[int, ...]) -> Node:
    """How many elements of this rank each sum has, as a tensor of one element."""
    count = add_number(graph, 1.0, x)
    sizes = sizes_of(graph, x)
    for d in dims:
        count = add_node(graph, aten.mul.Tensor, count, sizes[d])
    return count


def _scale(graph: Graph, sum_: _Sum, value: Node) -> Node:
    for op, number in sum_.scales:
        value = add_node(graph, op, value, number)
    return value


def _to_mean(graph: Graph, total: _Sum, count: Node) -> Node:
    """By what a scaled sum of this rank becomes its mean: 0 where it has no rows."""
    inverse = add_node(graph, aten.reciprocal.default, _scale(graph, total, count))
    return add_node(graph, aten.where.ScalarOther, add_node(graph, aten.gt.Scalar, count, 0), inverse, 0.0)


def _summand(graph: Graph, m: _Moments, value: Node) -> Node:
    """The payload of the second sum, of another value than the squares."""
    path = m.squares.path
    total: Any = path[0].args[0] if path else shaped(m.second.payload)
    for step in (total, *path):
        value = add_node(graph, step.target, value, *step.args[1:], **step.kwargs)
    return flat(graph, value, None)
