"""Moves linear factors out of sums over ranks.

A value is decomposed into ``factor * base``, where the factor is constant along all summed dims. The walk goes back
from the payload of a reduction to the values that must not be waited for, and keeps the base and the factors of each
value. Nothing is added to the graph until the walk has succeeded.

It is correct because sums, matrix products, casts and reshapes are linear in each argument. So a factor that does not
vary along the summed dims moves in front of them: ``sum_n f[i] b[n, i] = f[i] sum_n b[n, i]``. The order of roundings
changes, the value does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile import compat
from shardcompile.collectives.reductions import ALL_REDUCE
from shardcompile.collectives.torch_collectives import ALL_GATHER
from shardcompile.compat import is_one
from shardcompile.passes.cleanup.edits import equal
from shardcompile.passes.graph.collective import WAIT, Collective, add_node
from shardcompile.passes.graph.dependencies import writes
from shardcompile.passes.graph.ops import op_of

aten = torch.ops.aten

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SAME = (aten.alias.default, aten.clone.default, aten.detach.default)
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_RANK_INVARIANT_NUMBERS = (0, 1, 2, -1, 0.5, math.inf, -math.inf)
"""Constants of formulas rather than of shards: the static size of a local shard may be a constant of its graph."""

DEPTH = 100
"""The most ops that a walk follows in a row; Python's own recursion limit is a few times as much."""

Axes = tuple[tuple[int, ...], ...]
"""For each dim of a value, the dims of a factor that run along it, outer first; empty where the factor is broadcast."""


@dataclass(frozen=True)
class Call:
    """A call that is not in the graph yet. Its arguments may be such calls too."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Factor:
    """A factor of a value.

    Attributes:
        op: ``aten.mul.Tensor`` or ``aten.div.Tensor``.
        source: the rank-invariant factor; for an exponential, what was subtracted from its argument.
        axes: maps the dims of the value to those of the factor.
        largest: the local maximum, only for an exponential, whose factor is ``exp(largest - source)``.
    """

    op: Any
    source: Node
    axes: Axes
    largest: Node | None = None


@dataclass(frozen=True)
class Term:
    """A value as the product of a base and factors. The base has the dtype of the value."""

    base: Node | Call
    factors: tuple[Factor, ...] = ()


class Factors:
    """Decomposes values of one graph into bases and factors.

    Args:
        depends: whether a value depends on what the base must not wait for; such a value cannot be a base.
        group_name: the group over whose ranks the sum runs.
        exponential: returns the term of ``exp(x - shift)``, or None if the local part of it cannot be a base.
    """

    def __init__(
        self, depends: Callable[[Node], bool], group_name: str, exponential: Callable[[Node], Term | None] | None = None
    ) -> None:
        self._depends = depends
        self._group = group_name
        self._exponential = exponential
        self._terms: dict[Node, Term | None] = {}
        self._uniform: dict[Node, bool] = {}
        self._depth = 0

    def term(self, node: Node) -> Term | None:
        """Returns a value's base and factors, or None if it has no independent base."""
        if not self._depends(node):
            return Term(node)
        if node not in self._terms:
            usable = _is_call(node) and _has_wide_range(node) and self._depth < DEPTH
            self._depth += 1
            self._terms[node] = self._decompose(node) if usable else None
            self._depth -= 1
        return self._terms[node]

    def is_uniform(self, node: Node) -> bool:
        """Whether a value is known to be the same on all ranks of the group: computed from results of its reductions
        only.
        """
        if node not in self._uniform:
            self._depth += 1
            self._uniform[node] = self._depth <= DEPTH and self._has_uniform_inputs(node)
            self._depth -= 1
        return self._uniform[node]

    def _has_uniform_inputs(self, node: Node) -> bool:
        if node.target is WAIT:
            c = Collective.of(node.args[0])  # type: ignore[arg-type]
            return c is not None and c.group_name == self._group and c.descriptor in (ALL_REDUCE, ALL_GATHER)
        if not _is_call(node) or not (op_of(node).pointwise or node.target in _VIEWS):
            return False
        if op_of(node).pointwise and not all(_is_rank_invariant_number(a) for a in (*node.args, *node.kwargs.values())):
            return False
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        scalars = [n for n in node.all_input_nodes if n not in tensors]
        all_uniform = all(self.is_uniform(n) or _is_constant(n) for n in tensors)
        return bool(tensors) and all_uniform and (not scalars or not op_of(node).pointwise)

    def _decompose(self, node: Node) -> Term | None:
        target = node.target
        if target in (aten.mul.Tensor, aten.div.Tensor):
            return self._product(node)
        if target is aten.exp.default:
            return None if self._exponential is None else self._exponential(node)
        if target in (aten.add.Tensor, aten.sub.Tensor):
            return self._sum(node)
        if target in _PRODUCTS:
            return self._contraction(node)
        move_axes = _LINEAR_OPS.get(target)
        inner = None if move_axes is None else self.term(node.args[0])  # type: ignore[arg-type]
        if move_axes is None or inner is None:
            return None
        factors = [_move(f, move_axes(node, f.axes), node) for f in inner.factors]
        if any(f is None for f in factors):
            return None
        base = Call(target, (inner.base, *node.args[1:]), tuple(node.kwargs.items()))
        return Term(base, tuple(f for f in factors if f is not None))

    def _product(self, node: Node) -> Term | None:
        """Decomposes a product or quotient, of which one operand may be a factor."""
        left, right = node.args
        if node.target is aten.mul.Tensor and isinstance(right, Node) and self._is_factor(left):
            left, right = right, left
        inner = self.term(left) if isinstance(left, Node) else None
        if inner is None or not _same_shape(left, node):
            return None
        if isinstance(right, Node) and self._depends(right):
            if not self._is_factor(right):
                return None
            if left.meta["val"].dtype != node.meta["val"].dtype:  # type: ignore[union-attr]
                inner = replace(inner, base=Call(_CASTS[1], (inner.base, node.meta["val"].dtype)))
            return replace(inner, factors=(*inner.factors, Factor(node.target, right, broadcast_axes(right, node))))
        return replace(inner, base=Call(node.target, (inner.base, right)))

    def _is_factor(self, node: Any) -> bool:
        is_tensor = isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)
        return is_tensor and self._depends(node) and self.is_uniform(node)

    def _sum(self, node: Node) -> Term | None:
        """Decomposes a sum or difference of two values with the same factors."""
        if len(node.args) != 2 or node.kwargs or not all(_same_shape(a, node) for a in node.args):
            return None
        left, right = (self.term(a) for a in node.args)  # type: ignore[arg-type]
        if left is None or right is None or left.factors != right.factors:
            return None
        return Term(Call(node.target, (left.base, right.base)), left.factors)

    def _contraction(self, node: Node) -> Term | None:
        """Decomposes a matrix product.

        One operand may have factors, but not along the summed dim. The product must have one user, so that it is not
        computed twice.
        """
        if len(node.users) > 1:
            return None
        left, right = (self.term(a) for a in node.args)  # type: ignore[arg-type]
        if left is None or right is None or (left.factors and right.factors):
            return None
        factors: list[Factor] = []
        for f in (*left.factors, *right.factors):
            summed, kept = (f.axes[-1], f.axes[-2]) if left.factors else (f.axes[-2], f.axes[-1])
            if summed:
                return None
            factors.append(replace(f, axes=(*f.axes[:-2], *((kept, ()) if left.factors else ((), kept)))))
        return Term(Call(node.target, (left.base, right.base)), tuple(factors))


def emit(graph: Graph, call: object) -> Any:
    """Adds a call, and the calls among its arguments, at the insertion point."""
    nodes: dict[int, Node] = {}

    def add(value: object) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(add, value))
        if not isinstance(value, Call):
            return value
        if id(value) not in nodes:
            args = add(value.args)
            nodes[id(value)] = add_node(graph, value.target, *args, **dict(value.kwargs))
        return nodes[id(value)]

    return add(call)


def apply_factor(graph: Graph, factor: Factor, value: Node) -> Node:
    """Multiplies or divides a value by its factor."""
    return add_node(graph, factor.op, value, align_factor(graph, factor.source, factor.axes, value))


def align_factor(graph: Graph, source: Node, axes: Axes, value: Node, leading: int = 0) -> Node:
    """Permutes and reshapes a factor so that it broadcasts against the value that it belongs to.

    Args:
        graph: it is added to, at the insertion point.
        source: the factor.
        axes: maps the dims of the value to those of the factor.
        value: has `leading` more dims in front, as `source` has.
        leading: see above.
    """
    used = [d + leading for dims in axes for d in dims]
    unused = [d for d in range(leading, source.meta["val"].ndim) if d not in used]
    if unused:
        source = add_node(graph, aten.squeeze.dims, source, unused)
        used = [d - sum(removed < d for removed in unused) for d in used]
    order = [*range(leading), *used]
    if order != sorted(order):
        source = add_node(graph, aten.permute.default, source, order)
    if any(len(dims) > 1 for dims in axes):
        source = add_node(graph, aten.clone.default, source, memory_format=torch.contiguous_format)
        sizes = sizes_of(graph, value)
        return add_node(
            graph,
            aten.view.default,
            source,
            [*sizes[:leading], *(s if dims else 1 for s, dims in zip(sizes[leading:], axes, strict=True))],
        )
    for d, dims in enumerate(axes):
        if not dims:
            source = add_node(graph, aten.unsqueeze.default, source, d + leading)
    return source


def sizes_of(graph: Graph, node: Node) -> list[Any]:
    """Returns a tensor's sizes as integers and nodes."""
    sizes = node.meta["val"].shape
    return [s if isinstance(s, int) else add_node(graph, aten.sym_size.int, node, d) for d, s in enumerate(sizes)]


def origin(node: Node) -> tuple[Node, tuple[int, ...]]:
    """Returns the tensor that a value is a copy of, and the permutation: ``value = permute(origin, order)``."""
    order = tuple(range(node.meta["val"].ndim))
    while _is_call(node):
        source = node.args[0] if node.args else None
        if node.target is aten.permute.default:
            argument: Any = node.args[1]
            dims = [d % len(order) for d in argument]
            order = tuple(dims[d] for d in order)
        elif node.target not in (*_SAME, *RESHAPES, aten.expand.default) or not _same_shape(source, node):
            break
        node = source  # type: ignore[assignment]
    return node, order


def _is_call(node: Node) -> bool:
    return node.op == "call_function" and not writes(node) and isinstance(node.meta.get("val"), torch.Tensor)


def _has_wide_range(node: Node) -> bool:
    """Whether a value without its factor stays within the range of its dtype: half precision ends at 65504."""
    return node.meta["val"].dtype in (torch.float32, torch.float64, torch.bfloat16)


def _is_rank_invariant_number(argument: object) -> bool:
    is_number = isinstance(argument, (int, float)) and not isinstance(argument, bool)
    return not is_number or argument in _RANK_INVARIANT_NUMBERS


def _is_constant(node: Node) -> bool:
    return node.target in (aten.full.default, aten.scalar_tensor.default) and _is_rank_invariant_number(node.args[-1])


def _same_shape(a: object, b: Node) -> bool:
    if not isinstance(a, Node) or not isinstance(a.meta.get("val"), torch.Tensor):
        return False
    return equal(a.meta["val"].shape, b.meta["val"].shape)


def broadcast_axes(factor: Node, value: Node) -> Axes:
    """Returns the axes of a factor against the value that it is multiplied with."""
    shape = factor.meta["val"].shape
    factor_axes = [() if is_one(s) else (d,) for d, s in enumerate(shape)]
    return ((),) * (value.meta["val"].ndim - len(shape)) + tuple(factor_axes)


def _move(factor: Factor, axes: Axes | None, value: Node) -> Factor | None:
    """Moves a factor through an op with these axes, or returns None if it does not fit the result."""
    if axes is None:
        return None
    sizes, factor_sizes = value.meta["val"].shape, factor.source.meta["val"].shape
    fits = all(
        len(dims) != 1 or compat.statically_known_true(factor_sizes[dims[0]] == s)
        for dims, s in zip(axes, sizes, strict=True)
    )
    return replace(factor, axes=axes) if fits else None


def _dims(node: Node, dims: Any) -> list[int]:
    ndim = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
    return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]


def _keep(node: Node, axes: Axes) -> Axes | None:
    return axes


def _permute(node: Node, axes: Axes) -> Axes | None:
    return tuple(axes[d] for d in _dims(node, node.args[1]))


def _expand(node: Node, axes: Axes) -> Axes | None:
    return ((),) * (node.meta["val"].ndim - len(axes)) + axes


def _unsqueeze(node: Node, axes: Axes) -> Axes | None:
    at = node.args[1] % node.meta["val"].ndim  # type: ignore[operator]
    return (*axes[:at], (), *axes[at:])


def _squeeze(node: Node, axes: Axes) -> Axes | None:
    removed = _dims(node, node.args[1])
    if any(axes[d] or not is_one(node.args[0].meta["val"].shape[d]) for d in removed):  # type: ignore[union-attr]
        return None
    return tuple(a for d, a in enumerate(axes) if d not in removed)


def _sum_over(node: Node, axes: Axes) -> Axes | None:
    dims = node.args[1] if len(node.args) > 1 else None
    removed = _dims(node, dims) if dims else list(range(len(axes)))
    if any(axes[d] for d in removed):
        return None
    if len(node.args) > 2 and node.args[2]:
        return axes
    return tuple(a for d, a in enumerate(axes) if d not in removed)


def _reshape(node: Node, axes: Axes) -> Axes | None:
    """Moves axes through merged or split dims: a factor runs along all merged dims, or along none of them."""
    old, new = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    if equal(old, new):
        return axes
    first = 0
    while first < min(len(old), len(new)) and compat.statically_known_true(old[first] == new[first]):
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and compat.statically_known_true(old[-1 - last] == new[-1 - last]):
        last += 1
    middle, sizes = axes[first : len(axes) - last], old[first : len(old) - last]
    new_sizes = new[first : len(new) - last]
    if not any(middle):
        changed: Axes | None = ((),) * len(new_sizes)
    elif all(a or is_one(s) for a, s in zip(middle, sizes, strict=True)):
        changed = _regroup([d for a in middle for d in a], middle, sizes, new_sizes)
    else:
        changed = None
    return None if changed is None else (*axes[:first], *changed, *axes[len(axes) - last :])


def _regroup(dims: list[int], middle: Axes, sizes: Sequence[object], new_sizes: Sequence[object]) -> Axes | None:
    """Regroups the dims of a factor that runs along all merged dims: all in one new dim, or one in each."""
    wide = [i for i, s in enumerate(new_sizes) if not is_one(s)]
    if len(wide) == 1:
        return tuple(tuple(dims) if i == wide[0] else () for i in range(len(new_sizes)))
    if len(wide) == len(dims) and sum(bool(a) for a in middle) == 1:
        return tuple((dims[wide.index(i)],) if i in wide else () for i in range(len(new_sizes)))
    return None


_LINEAR_OPS: dict[Any, Callable[[Node, Axes], Axes | None]] = {
    **dict.fromkeys((*_SAME, *_CASTS, aten.neg.default), _keep),
    **dict.fromkeys(RESHAPES, _reshape),
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.sum.dim_IntList: _sum_over,
    aten.sum.default: _sum_over,
}
"""For each op that is linear in its first argument: moves the axes of a factor through it; returns None if that is
impossible.
"""

_VIEWS = {*RESHAPES, *_SAME, *_LINEAR_OPS} - {aten.sum.dim_IntList, aten.sum.default}
"""Ops that only move or cast elements."""
