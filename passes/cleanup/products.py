"""Derives sums over ranks from other sums by a matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.passes.cleanup.edits import equal
from shardcompile.passes.cleanup.linear_factors import Factors, origin
from shardcompile.passes.cleanup.rewrite import eligible_sums, erase, flat, in_shape_of, replace_results, shaped
from shardcompile.passes.graph.collective import Collective, add_node

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.bmm.default)


@dataclass(frozen=True)
class _Product:
    """A matrix product that is reduced: ``sum_n a[b, i, n] c[b, n, k]``.

    Attributes:
        collective: the all-reduce.
        value: the product, in its shape before it is flattened.
    """

    collective: Collective
    value: Node


def multiply_sums(graph: Graph) -> None:
    """Replaces a reduction by the product of an earlier one with a rank-invariant value.

        c[i, k] = all_reduce(sum_n p[n, i] v[n, k])
        all_reduce(sum_n p[n, i] (sum_k v[n, k] w[i, k]))   ->   sum_k w[i, k] c[i, k]

    where w is the same on all ranks. The backward pass of attention pooling has this form: p is a softmax along the
    rows, c the pooled values and w the gradient of c. The order of summation changes, the value does not. It removes a
    collective and adds a few operations on a tensor that is small enough to be reduced, so it always pays.
    """
    products = _products(graph)
    if not products:
        return
    for start in [c.node for c in eligible_sums(graph)]:
        c = Collective.of(start)
        result = None if c is None else _multiply(graph, c, products)
        if c is not None and result is not None:
            replace_results(c, result)
            erase(graph, c)


def _products(graph: Graph) -> dict[Any, _Product]:
    """Returns the matrix products that are reduced, by their operands and group."""
    found: dict[Any, _Product] = {}
    for c in eligible_sums(graph):
        value = shaped(c.payload)
        product, order = origin(value)
        if product.target in _PRODUCTS and order == tuple(sorted(order)):
            left, right = (_operand(a) for a in product.args)
            found.setdefault((left, right, c.group_name), _Product(c, value))
    return found


def _operand(node: Any) -> tuple[Node, tuple[int, ...]]:
    return origin(node)


def _multiply(graph: Graph, c: Collective, products: dict[Any, _Product]) -> Node | None:
    """Adds the product that replaces a reduction, flat, at the reduction's first wait; returns None without one."""
    value = shaped(c.payload)
    found_sum = _find_sum(value)
    if found_sum is None:
        return None
    total, axis = found_sum
    pair: Any = total.args[0]
    if pair.target is not aten.mul.Tensor or not all(isinstance(a, Node) for a in pair.args) or pair.kwargs:
        return None
    for inner, weights in (pair.args, pair.args[::-1]):
        if equal(inner.meta["val"].shape, weights.meta["val"].shape):
            found = _match_product(graph, c, (inner, weights), axis, products)
            if found is not None:
                return found
    return None


def _find_sum(value: Node) -> tuple[Node, int] | None:
    """Returns the sum over one dim whose elements a value holds in order, and that dim."""
    node, order = origin(value)
    if node.target is not aten.sum.dim_IntList or order != tuple(sorted(order)) or len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    x: Any = node.args[0]
    if node.kwargs.get("dtype") not in (None, x.meta["val"].dtype):
        return None
    return node, node.args[1][0] % x.meta["val"].ndim  # type: ignore[index, operator, return-value]


def _match_product(
    graph: Graph, c: Collective, factors: tuple[Node, Node], axis: int, products: dict[Any, _Product]
) -> Node | None:
    """Adds the replacement of ``sum over axis of inner * weights`` where `inner` is a product, see `multiply_sums`."""
    (product, product_order), (p, p_order) = map(origin, factors)
    if product.target not in _PRODUCTS or len(product.users) == 0:
        return None
    ndim = product.meta["val"].ndim
    summed = product_order[axis]  # the dim of the product that is summed: its rows or its columns
    if summed < ndim - 2:
        return None
    left, right = product.args
    shared, local = (left, right) if summed == ndim - 1 else (right, left)
    assert isinstance(shared, Node) and isinstance(local, Node)
    uniform = Factors(lambda n: True, c.group_name)
    if not uniform.is_uniform(shared):
        return None
    # The product is [batch, i, n] where `shared` is [batch, i, k] and `local` [batch, k, n]; or the other way round.
    batch = tuple(range(ndim - 2))
    free = ndim - 2 if summed == ndim - 1 else ndim - 1
    to_p = [p_order[product_order.index(d)] for d in range(ndim)]  # by dim of the product: the dim of p
    local_dims = _dims_of(local, ndim, summed)
    for kind, key in _keys(p, tuple(to_p), local_dims, batch, free, summed, c.group_name):
        hit = products.get(key)
        if hit is not None and min(hit.collective.waits) < min(c.waits):
            return _emit(graph, c, hit, shared, kind, summed == ndim - 1, product_order, axis)
    return None


def _dims_of(operand: Node, ndim: int, summed: int) -> tuple[Node, tuple[int, ...], int, int]:
    """Returns the origin of the operand with rows, and its batch dims, rows and columns."""
    source, order = origin(operand)
    rows, columns = (order[-1], order[-2]) if summed == ndim - 1 else (order[-2], order[-1])
    return source, order[: ndim - 2], rows, columns


def _keys(
    p: Node,
    to_p: tuple[int, ...],
    local: tuple[Node, tuple[int, ...], int, int],
    batch: tuple[int, ...],
    free: int,
    summed: int,
    group_name: str,
) -> list[tuple[str, Any]]:
    """Returns the keys of the products that the sum may be derived from, in both orders of the operands."""
    source, local_batch, rows, columns = local
    weights = tuple(to_p[d] for d in batch)
    i, n = to_p[free], to_p[summed]
    return [
        ("ik", ((p, (*weights, i, n)), (source, (*local_batch, rows, columns)), group_name)),
        ("ki", ((source, (*local_batch, columns, rows)), (p, (*weights, n, i)), group_name)),
    ]


def _emit(
    graph: Graph,
    c: Collective,
    hit: _Product,
    shared: Node,
    kind: str,
    is_left: bool,
    product_order: tuple[int, ...],
    axis: int,
) -> Node:
    """Adds the product of the reduced product and the shared operand, in the layout of the sum."""
    with graph.inserting_before(min(c.waits)):
        wait = hit.collective.waits[0]
        reduced = in_shape_of(graph, wait, hit.value)
        ndim = reduced.meta["val"].ndim
        transpose = [*range(ndim - 2), ndim - 1, ndim - 2]
        # Both as [batch, i, k].
        if kind == "ki":
            reduced = add_node(graph, aten.permute.default, reduced, transpose)
        weights = shared if is_left else add_node(graph, aten.permute.default, shared, transpose)
        result = add_node(graph, aten.sum.dim_IntList, add_node(graph, aten.mul.Tensor, weights, reduced), [ndim - 1])
        # The remaining dims of the product, in the order of those of the sum.
        remaining = [d for d in product_order if d != product_order[axis]]
        order = [sorted(remaining).index(d) for d in remaining]
        if order != sorted(order):
            result = add_node(graph, aten.permute.default, result, order)
        return flat(graph, result, c.payload)
