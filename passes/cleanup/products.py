"""Sums over ranks that follow from others by a product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.passes.cleanup.edits import equal
from shardcompile.passes.cleanup.linear_factors import Factors, origin
from shardcompile.passes.cleanup.rewrite import erase, flat, in_shape_of, replace_results, shaped, sums
from shardcompile.passes.graph.collective import Collective, add_node

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.bmm.default)


@dataclass(frozen=True)
class _Product:
    """A product of matrices that was reduced: ``sum_n a[b, i, n] c[b, n, k]``.

    Attributes:
        collective: that reduced it.
        value: it, in its shape before it was made flat.
    """

    collective: Collective
    value: Node


def multiply_sums(graph: Graph) -> None:
    """Take a sum from one that is there, by a product with what all ranks share, instead of reducing it.

        c[i, k] = all_reduce(sum_n p[n, i] v[n, k])
        all_reduce(sum_n p[n, i] (sum_k v[n, k] w[i, k]))   ->   sum_k w[i, k] c[i, k]

    where all ranks have the same w. That is what the backward pass of attention pooling asks for: p is a softmax along
    the rows, c what it pools and w the gradient of c. The order of summation changes, the value does not. A collective
    goes, and what takes its place are a few operations on what is small enough to be reduced: so it always pays.
    """
    known = _products(graph)
    if not known:
        return
    for start in [c.node for c in sums(graph)]:
        c = Collective.of(start)
        result = None if c is None else _multiply(graph, c, known)
        if c is not None and result is not None:
            replace_results(c, result)
            erase(graph, c)


def _products(graph: Graph) -> dict[Any, _Product]:
    """The products that are reduced, by what they are products of and their group."""
    found: dict[Any, _Product] = {}
    for c in sums(graph):
        value = shaped(c.payload)
        product, order = origin(value)
        if product.target in _PRODUCTS and order == tuple(sorted(order)):
            left, right = (_operand(a) for a in product.args)
            found.setdefault((left, right, c.group_name), _Product(c, value))
    return found


def _operand(node: Any) -> tuple[Node, tuple[int, ...]]:
    return origin(node)


def _multiply(graph: Graph, c: Collective, known: dict[Any, _Product]) -> Node | None:
    """The result of a reduction by a product, flat, at the reduction's first wait; or None."""
    value = shaped(c.payload)
    kept = _find_sum(value)
    if kept is None:
        return None
    total, axis = kept
    pair: Any = total.args[0]
    if pair.target is not aten.mul.Tensor or not all(isinstance(a, Node) for a in pair.args) or pair.kwargs:
        return None
    for inner, weights in (pair.args, pair.args[::-1]):
        if equal(inner.meta["val"].shape, weights.meta["val"].shape):
            found = _through(graph, c, (inner, weights), axis, known)
            if found is not None:
                return found
    return None


def _find_sum(value: Node) -> tuple[Node, int] | None:
    """The sum over one dim that a value has the elements of, in their order, and that dim."""
    node, order = origin(value)
    if node.target is not aten.sum.dim_IntList or order != tuple(sorted(order)) or len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    x: Any = node.args[0]
    if node.kwargs.get("dtype") not in (None, x.meta["val"].dtype):
        return None
    return node, node.args[1][0] % x.meta["val"].ndim  # type: ignore[index, operator, return-value]


def _through(
    graph: Graph, c: Collective, factors: tuple[Node, Node], axis: int, known: dict[Any, _Product]
) -> Node | None:
    """See `multiply_sums`, of ``sum over axis of inner * weights``, where `inner` is a product."""
    (product, places), (p, p_order) = map(origin, factors)
    if product.target not in _PRODUCTS or len(product.users) == 0:
        return None
    ndim = product.meta["val"].ndim
    at = places[axis]  # the dim of the product that is summed: a row or a column of it
    if at < ndim - 2:
        return None
    left, right = product.args
    shared, own = (left, right) if at == ndim - 1 else (right, left)
    assert isinstance(shared, Node) and isinstance(own, Node)
    uniform = Factors(lambda n: True, c.group_name)
    if not uniform.is_uniform(shared):
        return None
    # Dims of the product are [batch, i, n] where `shared` is [batch, i, k] and `own` [batch, k, n]; or the other way.
    batch = tuple(range(ndim - 2))
    free = ndim - 2 if at == ndim - 1 else ndim - 1
    to_p = [p_order[places.index(d)] for d in range(ndim)]  # by dim of the product: the dim of p
    own_dims = _dims_of(own, ndim, at)
    for kind, key in _keys(p, tuple(to_p), own_dims, batch, free, at, c.group_name):
        hit = known.get(key)
        if hit is not None and min(hit.collective.waits) < min(c.waits):
            return _emit(graph, c, hit, shared, kind, at == ndim - 1, places, axis)
    return None


def _dims_of(own: Node, ndim: int, at: int) -> tuple[Node, tuple[int, ...], int, int]:
    """What the operand with rows is a copy of, its order, and the places of its batch, rows and columns."""
    source, order = origin(own)
    rows, columns = (order[-1], order[-2]) if at == ndim - 1 else (order[-2], order[-1])
    return source, order[: ndim - 2], rows, columns


def _keys(
    p: Node,
    to_p: tuple[int, ...],
    own: tuple[Node, tuple[int, ...], int, int],
    batch: tuple[int, ...],
    free: int,
    at: int,
    group_name: str,
) -> list[tuple[str, Any]]:
    source, own_batch, rows, columns = own
    weights = tuple(to_p[d] for d in batch)
    i, n = to_p[free], to_p[at]
    return [
        ("ik", ((p, (*weights, i, n)), (source, (*own_batch, rows, columns)), group_name)),
        ("ki", ((source, (*own_batch, columns, rows)), (p, (*weights, n, i)), group_name)),
    ]


def _emit(
    graph: Graph,
    c: Collective,
    hit: _Product,
    shared: Node,
    kind: str,
    is_left: bool,
    places: tuple[int, ...],
    axis: int,
) -> Node:
    with graph.inserting_before(min(c.waits)):
        wait = hit.collective.waits[0]
        whole = in_shape_of(graph, wait, hit.value)
        ndim = whole.meta["val"].ndim
        turn = [*range(ndim - 2), ndim - 1, ndim - 2]
        # Both as [batch, i, k].
        if kind == "ki":
            whole = add_node(graph, aten.permute.default, whole, turn)
        weights = shared if is_left else add_node(graph, aten.permute.default, shared, turn)
        result = add_node(graph, aten.sum.dim_IntList, add_node(graph, aten.mul.Tensor, weights, whole), [ndim - 1])
        left = [d for d in places if d != places[axis]]  # dims of the product in the order of the sum's
        order = [sorted(left).index(d) for d in left]
        if order != sorted(order):
            result = add_node(graph, aten.permute.default, result, order)
        return flat(graph, result, c.payload)
