"""Computes mean and variance over ranks in one collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.passes.cleanup.edits import equal
from shardcompile.passes.cleanup.linear_factors import RESHAPES, origin, sizes_of
from shardcompile.passes.cleanup.rewrite import (
    GatherCosts,
    eligible_sums,
    erase,
    flat,
    gather_partials,
    positions,
    replace_results,
    shaped,
    sort,
)
from shardcompile.passes.graph.collective import WAIT, Collective, add_node, add_number, reduction_of

aten = torch.ops.aten
_SCALES = (aten.mul.Tensor, aten.div.Tensor)
_RESHAPES = (*RESHAPES, aten.clone.default, aten.alias.default, aten.unsqueeze.default, aten.squeeze.dims)
"""Ops that keep the elements in their order."""


@dataclass(frozen=True)
class _Sum:
    """A sum over dims of one tensor, scaled by scalars.

    Attributes:
        source: the summed tensor.
        dims: the summed dims, in order.
        scales: ops and scalars, as nodes or numbers, the first one applied first.
        path: the ops from the sum to the value, the first one applied first.
    """

    source: Node
    dims: tuple[int, ...]
    scales: tuple[tuple[Any, Any], ...]
    path: tuple[Node, ...]

    @staticmethod
    def found(value: Node) -> _Sum | None:
        """Returns the scaled sum that a value is, or None."""
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
    """Whether a node multiplies or divides a tensor by a scalar."""
    if node.target not in _SCALES or len(node.args) != 2 or node.kwargs or not isinstance(node.args[0], Node):
        return False
    scalar = node.args[1]
    is_scalar = not isinstance(scalar.meta.get("val"), torch.Tensor) if isinstance(scalar, Node) else True
    return is_scalar and isinstance(node.args[0].meta.get("val"), torch.Tensor)


def scaled_sum(value: Node) -> tuple[object, ...] | None:
    """Returns a key that identifies the elements of a scaled sum over dims, in order, whatever its shape.

    Args:
        value: any. For values that are no such sum, the key is None.
    """
    found = _Sum.found(value)
    return None if found is None else (found.source, found.dims, found.scales)


@dataclass(frozen=True)
class _Variance:
    """A sum of squares of a tensor after something was subtracted that follows from its sum.

    Attributes:
        first: the reduction of the sum.
        second: the reduction of the squares.
        mean: what is subtracted.
        total: the sum that `first` reduces.
        squares: the sum that `second` reduces.
    """

    first: Collective
    second: Collective
    mean: Node
    total: _Sum
    squares: _Sum


def merge_variance(graph: Graph, costs: GatherCosts) -> None:
    """Reduces a sum, and a sum of squares that waits for it, by one gather.

        s = all_reduce(sum x); q = all_reduce(sum (x - m)^2), where m follows from s

    Each rank subtracts the mean of its own rows, ``m_r = sum x / n_r``, and sends ``s_r``, ``q_r = sum (x - m_r)^2``,
    ``e_r = sum (x - m_r)`` and its number of rows. Then each rank computes

        s = sum_r s_r,   q = sum_r q_r + 2 (m_r - m) e_r + n_r (m_r - m)^2

    which is the parallel variance of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing
    sample variances", 1979), plus the term of ``e_r``, the rounding error of ``m_r``. With it the result is as exact as
    that of two passes, also where the mean is much larger than the deviation. It holds for any m. A rank without rows
    has ``m_r = 0`` and the weight 0. Scales of the sums apply to the partial results as well, such as a division by the
    number of all rows. A rank then sends two more numbers: the first turns its sum into a mean; the second scales a
    square to the sum of as many equal squares as it has rows.
    """
    position: dict[Node, float] | None = None
    for start in [c.node for c in eligible_sums(graph)]:
        c = Collective.of(start)
        found = None if c is None else _find(c)
        if found is None:
            continue
        steps = [found.first], [found.second]
        if costs.pays(*steps, found.second.global_bytes):
            position = positions(graph) if position is None else position
            _merge(graph, found)
    if position is not None:
        sort(graph, position)


def _find(c: Collective) -> _Variance | None:
    squares = _Sum.found(shaped(c.payload))
    centered = None if squares is None else _square_root_of(squares.source)
    if (
        squares is None
        or centered is None
        or centered.target is not aten.sub.Tensor
        or len(centered.args) != 2
        or centered.kwargs
    ):
        return None
    x, mean = centered.args
    if not (isinstance(x, Node) and isinstance(mean, Node)) or not equal(
        x.meta["val"].shape, centered.meta["val"].shape
    ):
        return None
    first = _source_reduction(mean)
    total = None if first is None else _Sum.found(shaped(first.payload))
    if first is None or total is None or first.group_name != c.group_name or total.dims != squares.dims:
        return None
    is_centered = origin(total.source) == origin(x) and _has_kept_dims(x, squares.dims, mean)
    dtypes = {n.meta["val"].dtype for n in (x, mean, first.payload, c.payload)}
    if (
        not is_centered
        or len(dtypes) != 1
        or not dtypes <= {torch.float32, torch.float64}
        or first.payload.meta["val"].ndim != 1
    ):
        return None
    return _Variance(first, c, mean, total, squares) if c.payload.meta["val"].ndim == 1 else None


def _square_root_of(node: Node) -> Node | None:
    """Returns the node whose square a node is, or None."""
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        return node.args[0]  # type: ignore[return-value]
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
        return node.args[0]  # type: ignore[return-value]
    return None


def _source_reduction(mean: Node) -> Collective | None:
    """Returns the sum over ranks that a value is computed from, element by element in order, or None."""
    node = mean
    while node.target in _RESHAPES or _is_scaled(node):
        node = node.args[0]  # type: ignore[assignment]
    c = Collective.of(node.args[0]) if node.target is WAIT else None  # type: ignore[arg-type]
    return c if c is not None and reduction_of(c) == "sum" and len(c.waits) == len(c.node.users) else None


def _has_kept_dims(x: Node, dims: tuple[int, ...], mean: Node) -> bool:
    """Whether a value has one element for each sum over `dims` of `x`, and broadcasts along these."""
    shape = [1 if d in dims else s for d, s in enumerate(x.meta["val"].shape)]
    mean_shape = list(mean.meta["val"].shape)
    mean_shape = [1] * (len(shape) - len(mean_shape)) + mean_shape
    return all(isinstance(o, int) and o == 1 for d, o in enumerate(mean_shape) if d in dims) and equal(
        mean_shape, shape
    )


def _merge(graph: Graph, m: _Variance) -> None:
    sum_, square = m.first, m.second
    with graph.inserting_before(sum_.node):
        count = _count(graph, m.total.source, m.total.dims)
        to_mean = _to_mean(graph, m.total, count)
        to_square = _scale(graph, m.squares, count)
        local_mean = add_node(graph, aten.mul.Tensor, sum_.payload, to_mean)
        x: Any = _square_root_of(m.squares.source).args[0]  # type: ignore[union-attr]
        sizes = sizes_of(graph, x)  # not those of the mean: it waits for the sum
        local_mean = add_node(
            graph, aten.view.default, local_mean, [1 if d in m.total.dims else n for d, n in enumerate(sizes)]
        )
        centered = add_node(graph, aten.sub.Tensor, x, local_mean)
        residual, squares = (
            _summand(graph, m, centered),
            _summand(graph, m, add_node(graph, aten.mul.Tensor, centered, centered)),
        )
        parts = [sum_.payload, squares, residual, to_mean, to_square]
        total, squares, residual, to_mean, to_square = gather_partials(graph, parts, [sum_, square])
        reduced = add_node(graph, aten.sum.dim_IntList, total, [0])
    replace_results(sum_, reduced)
    with graph.inserting_before(min(square.waits)):
        mean = add_node(graph, aten.clone.default, m.mean, memory_format=torch.contiguous_format)
        mean = add_node(graph, aten.view.default, mean, [-1])
        delta = add_node(graph, aten.sub.Tensor, add_node(graph, aten.mul.Tensor, total, to_mean), mean)
        twice = add_node(graph, aten.mul.Tensor, residual, 2)
        slope = add_node(graph, aten.add.Tensor, twice, add_node(graph, aten.mul.Tensor, delta, to_square))
        shifted = add_node(graph, aten.add.Tensor, squares, add_node(graph, aten.mul.Tensor, delta, slope))
        result = add_node(graph, aten.sum.dim_IntList, shifted, [0])
    replace_results(square, result)
    erase(graph, square)
    erase(graph, sum_)


def _count(graph: Graph, x: Node, dims: tuple[int, ...]) -> Node:
    """Returns how many local elements each sum has, as a tensor of one element."""
    count = add_number(graph, 1.0, x)
    sizes = sizes_of(graph, x)
    for d in dims:
        count = add_node(graph, aten.mul.Tensor, count, sizes[d])
    return count


def _scale(graph: Graph, sum_: _Sum, value: Node) -> Node:
    for op, scalar in sum_.scales:
        value = add_node(graph, op, value, scalar)
    return value


def _to_mean(graph: Graph, total: _Sum, count: Node) -> Node:
    """Returns the factor that turns a scaled local sum into its mean: 0 for a rank without rows."""
    inverse = add_node(graph, aten.reciprocal.default, _scale(graph, total, count))
    return add_node(graph, aten.where.ScalarOther, add_node(graph, aten.gt.Scalar, count, 0), inverse, 0.0)


def _summand(graph: Graph, m: _Variance, value: Node) -> Node:
    """Computes the payload of the second sum for another value than the squares."""
    path = m.squares.path
    total: Any = path[0].args[0] if path else shaped(m.second.payload)
    for step in (total, *path):
        value = add_node(graph, step.target, value, *step.args[1:], **step.kwargs)
    return flat(graph, value, None)
