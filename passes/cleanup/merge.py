"""Merges reductions that wait for one another into one collective.

A softmax along a sharded dim, and a sum weighted by it, take three collectives: the maximum, the sum of exponentials,
the weighted sum. None of them can overlap with another, and no schedule helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.passes.cleanup.edits import equal
from shardcompile.passes.cleanup.linear_factors import (
    DEPTH,
    RESHAPES,
    Call,
    Factor,
    Factors,
    Term,
    align_factor,
    apply_factor,
    broadcast_axes,
    emit,
    origin,
)
from shardcompile.passes.cleanup.maximum import Maximum
from shardcompile.passes.cleanup.products import multiply_sums
from shardcompile.passes.cleanup.rewrite import (
    GatherCosts,
    cast,
    eligible_reductions,
    eligible_sums,
    erase,
    flat,
    gather_partials,
    in_shape_of,
    positions,
    replace_results,
    shaped,
    sort,
)
from shardcompile.passes.cleanup.variance import merge_variance, scaled_sum
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.graph.collective import WAIT, Collective, add_node, inherit, kind_of, reduction_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Sum:
    """A sum over ranks that may be merged.

    Attributes:
        collective: the all-reduce.
        value: its payload, in the shape before it was flattened.
        term: the base and factors of the payload.
    """

    collective: Collective
    value: Node
    term: Term


class MergeReductions:
    """Merges reductions that wait for one another into one collective.

    For rows ``x[n]``, sharded along ``n``, weights ``p = softmax(x)`` along ``n`` and values ``v``:

        max = all_reduce(max x); s = all_reduce(sum exp(x - max)); y = all_reduce(sum exp(x - max) / s * v)

    It takes five steps, each of which is useful alone:

    1. *Equal terms once.* Sums of the same terms in another order of dims, and equal maxima, are reduced once.
    2. *Sums by products.* What the backward pass of a softmax sums up follows from what was weighted by it, see
       `shardcompile.passes.cleanup.products`.
    3. *Linear factors after the sum.* A factor that is the same on all ranks and along the summed dims moves behind the
       sum: ``y = all_reduce(sum exp(x - max) v) / s``. Now ``s`` and ``y`` wait for the maximum only, and share a
       bucket.
    4. *Online softmax.* Each rank subtracts its local maximum ``m_r`` and sends ``m_r, s_r = sum exp(x - m_r), y_r =
       sum exp(x - m_r) v`` in one gather. Then each rank computes

           max = max_r m_r,   s = sum_r exp(m_r - max) s_r,   y = sum_r exp(m_r - max) y_r

       (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867). The same holds if
       something else is subtracted, such as the finite part of the maximum in ``logsumexp``. A rank whose shard is
       empty, or -inf, has ``m_r = -inf``: it subtracts 0, so that its terms are 0 and not NaN, and has the weight
       ``exp(-inf - max)``, which is 0 if any rank has a larger value; if none has, it is NaN, as in plain PyTorch. A
       NaN or inf on any rank propagates through its weight.
    5. *Mean and variance* are reduced by one gather as well, see `shardcompile.passes.cleanup.variance`.

    A gather moves the partial results once for each rank, a reduction about twice in total; so steps 4 and 5 are taken
    where the gather takes less time than the reductions one after the other. That follows from the cost of the group's
    link and from sizes that all ranks share; where a size may differ between ranks, the reductions stay.

    Legal because each step computes the same value. Terms are added in another order and rounded at other points, so
    floats differ in their last bits. Reductions that are awaited only after the graph has written to memory are left
    alone, see `shardcompile.passes.cleanup.rewrite.eligible_reductions`.

    It runs on the joint graph, where the backward pass can reuse results of the forward pass, and again on the
    partitioned graphs.

    Args:
        model: the cost model, rank-invariant; None for that of the device that a graph runs on.
    """

    name = "merge_reductions"

    def __init__(self, model: CostModel | None = None) -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model})"

    def __call__(self, graph: Graph) -> None:
        if len(eligible_reductions(graph)) < 2:
            return
        _share_equal_terms(graph)
        multiply_sums(graph)
        _delay_factors(graph)
        costs = GatherCosts(self.model or CostModel.of(graph))
        _gather_partial_results(graph, costs)
        merge_variance(graph, costs)


# --------------------------------------------------------------------------------------- equal terms once


def _share_equal_terms(graph: Graph) -> None:
    """Reduces sums and maxima that are equal up to the order of their dims once."""
    first_by_key: dict[Any, tuple[Node, Any]] = {}
    for c in eligible_reductions(graph):
        maximum = Maximum.found(c)
        if maximum is not None:
            first = first_by_key.setdefault((maximum.largest, c.group_name), (c.node, maximum))
            if first[1] is not maximum and len(first[1].results) and _shapes_agree(maximum, first[1]):
                for result in maximum.results:
                    result.replace_all_uses_with(first[1].results[0])
                erase(graph, c)
            continue
        value, reduction = shaped(c.payload), (reduction_of(c), c.group_name)
        source, order = origin(value)
        content = scaled_sum(value) if c.payload.meta["val"].ndim == 1 else None
        if content is not None:
            first_start, _ = first_by_key.setdefault((content, reduction, value.meta["val"].dtype), (c.node, None))
            if first_start is not c.node and _wait_of(first_start) < min(c.waits):
                replace_results(c, _wait_of(first_start))
                erase(graph, c)
            continue
        key = (source, reduction, value.meta["val"].dtype)
        start, (first_value, first_order) = first_by_key.setdefault(key, (c.node, (value, order)))
        if start is not c.node:
            _replace_permuted(graph, c, start, first_value, [first_order.index(d) for d in order])


def _wait_of(start: Node) -> Node:
    return min(u for u in start.users if u.target is WAIT)


def _shapes_agree(a: Maximum, b: Maximum) -> bool:
    return all(equal(r.meta["val"].shape, b.results[0].meta["val"].shape) for r in a.results)


def _replace_permuted(graph: Graph, c: Collective, start: Node, first: Node, dims: list[int]) -> None:
    """Replaces a reduction by a permutation of the result of another one with the same elements."""
    wait = _wait_of(start)
    if not wait < min(c.waits):
        return
    with graph.inserting_before(min(c.waits)):
        result = in_shape_of(graph, wait, first)
        permuted = add_node(graph, aten.permute.default, result, dims)
        flattened = flat(graph, permuted, c.payload)
    replace_results(c, flattened)
    erase(graph, c)


# ----------------------------------------------------------------------------------- linear factors after the sum


def _delay_factors(graph: Graph) -> None:
    """Moves factors that follow from other reductions out of sums, as long as a sum then waits for one fewer."""
    starts = [c.node for c in eligible_sums(graph)]
    levels = _Levels(graph)
    for start in starts:
        found: Node | None = start
        while found is not None:
            found = _delay(graph, found, levels)


def _delay(graph: Graph, start: Node, levels: _Levels) -> Node | None:
    """Moves the factors out of a reduction; returns its new start, or None if there are none."""
    c = Collective.of(start)
    assert c is not None
    value = shaped(c.payload)
    levels.reach(start)
    deepest = levels.of[value]
    if not deepest:
        return None
    factors = Factors(lambda n: levels.of[n] >= deepest, c.group_name)
    term = factors.term(value)
    if term is None or not term.factors:
        return None
    before = start.prev
    with graph.inserting_before(start):
        base = emit(graph, term.base)
        new = add_node(graph, start.target, *c.arguments._replace(input=flat(graph, base, None)))
        inherit(new, [c])
    with graph.inserting_before(min(c.waits)):
        result = in_shape_of(graph, add_node(graph, WAIT, new), base)
        for factor in term.factors:
            result = apply_factor(graph, factor, result)
        flattened = flat(graph, result, c.payload)
    levels.continue_from(before, new)
    replace_results(c, flattened)
    erase(graph, c)
    return new


class _Levels:
    """Counts the collectives on the longest dependency chain before each node.

    Levels are computed in graph order, and only as far as they are asked for: moving a factor changes later nodes only,
    so that no level is computed twice.

    Attributes:
        of: the level, by node.
    """

    def __init__(self, graph: Graph) -> None:
        self.of: dict[Node, int] = {}
        self._last = self._compute(next(iter(graph.nodes)))  # which is never erased

    def reach(self, start: Node) -> None:
        """Computes the levels of all nodes up to the start of a collective."""
        while self._last is not start:
            self._last = self._compute(self._last.next)

    def continue_from(self, before: Node, start: Node) -> None:
        """Computes the levels after a node, up to a new start that replaces the last one that was reached."""
        self._last = before
        self.reach(start)

    def _compute(self, node: Node) -> Node:
        before = max((self.of[i] for i in node.all_input_nodes), default=0)
        self.of[node] = before + (kind_of(node) is not None)
        return node


# -------------------------------------------------------------------------------------- gather of partials


def _gather_partial_results(graph: Graph, costs: GatherCosts) -> None:
    """Replaces maxima, and the sums of exponentials that wait for them, by gathers of partial results."""
    starts = [c.node for c in eligible_reductions(graph) if reduction_of(c) == "max"]
    if not starts:
        return
    position, summed, depends = positions(graph), {c.node for c in eligible_sums(graph)}, _Dependents(graph, starts)
    num_sums = len(summed)
    for start in starts:
        c = Collective.of(start)
        maximum = None if c is None else Maximum.found(c)
        if c is None or maximum is None:
            continue
        found = _find_exponential_sums(maximum, summed, position, depends)
        if found and costs.pays([c], [s.collective for s in found]):
            _gather(graph, maximum, found, position, depends)
            summed.difference_update(s.collective.node for s in found)
    if len(summed) < num_sums:
        sort(graph, position)


class _Dependents:
    """Tracks which nodes depend on which of some starts, as bit sets.

    Args:
        graph: in a valid order.
        starts: the nodes.
    """

    def __init__(self, graph: Graph, starts: Iterable[Node]) -> None:
        self._bit = {start: 1 << i for i, start in enumerate(starts)}
        self._bits: dict[Node, int] = {}
        for node in graph.nodes:
            self._bits[node] = self._of(node)

    def _of(self, node: Node) -> int:
        bits = self._bit.get(node, 0)
        for i in node.all_input_nodes:
            bits |= self._bits[i]
        return bits

    def __call__(self, start: Node, node: Node) -> bool:
        """Whether a node depends on one of `starts`, or is that start."""
        return bool(self._bits[node] & self._bit[start])

    def update(self, node: Node) -> None:
        """Updates a new or changed node and the nodes that depend on it."""
        stack = [node]
        while stack:
            new = [i for i in stack[-1].all_input_nodes if i not in self._bits]
            if new:
                stack += new
                continue
            node = stack.pop()
            old, bits = self._bits.get(node), self._of(node)
            self._bits[node] = bits if old is None else old | bits
            if old is None or bits & ~old:
                stack += [u for u in node.users if u in self._bits]


def _find_exponential_sums(
    maximum: Maximum, summed: Set[Node], position: Mapping[Node, float], depends: _Dependents
) -> list[Sum]:
    """Returns the sums whose terms have exponentials as factors, from whose argument the maximum was subtracted."""
    start, name = maximum.collective.node, maximum.collective.group_name

    def exponential(node: Node) -> Term | None:
        shifted: Any = node.args[0]
        if shifted.target is not aten.sub.Tensor or len(shifted.args) != 2 or shifted.kwargs:
            return None
        x, shift = shifted.args
        if (
            not isinstance(x, Node)
            or not isinstance(shift, Node)
            or depends(start, x)
            or origin(x) != (maximum.source, maximum.order)
        ):
            return None
        local, other = maximum.largest.meta["val"], shift.meta["val"]
        if not maximum.follows(shift) or other.dtype != local.dtype or not equal(other.shape, local.shape):
            return None
        base = Call(aten.exp.default, (Call(aten.sub.Tensor, (x, _finite(maximum.largest))),))
        return Term(base, (Factor(aten.mul.Tensor, shift, broadcast_axes(shift, node), maximum.largest),))

    factors = Factors(lambda node: depends(start, node), name, exponential)
    found: list[Sum] = []
    for node in sorted(_find_candidates(maximum) & summed, key=position.__getitem__):
        c = Collective.of(node)
        if c is None or c.group_name != name:
            continue
        value = shaped(c.payload)
        term = factors.term(value)
        if term is not None and [f.largest for f in term.factors] == [maximum.largest]:
            found.append(Sum(c, value, term))
    return found


def _find_candidates(maximum: Maximum) -> set[Node]:
    """Returns the collectives that may reduce exponentials after a maximum: `Factors` walk no further."""
    shifts, exponentials = list(maximum.results), set[Node]()
    for shift in shifts:  # it grows meanwhile
        for user in shift.users:
            if user.target is aten.sub.Tensor:
                exponentials.update(u for u in user.users if u.target is aten.exp.default)
            if user not in shifts and user.op == "call_function" and maximum.follows(user):
                shifts.append(user)
    seen, found, frontier = set(exponentials), set[Node](), exponentials
    for _ in range(DEPTH + len(RESHAPES)):
        frontier = {u for node in frontier for u in node.users} - seen
        seen |= frontier
        starts = {node for node in frontier if kind_of(node) is not None}
        found |= starts
        frontier -= starts
    return found


def _finite(largest: Node) -> Call:
    """Returns what a rank subtracts: its maximum, or 0 where that is not finite. (Inductor does not lower `clamp`.)"""
    infinite = Call(aten.eq.Scalar, (Call(aten.abs.default, (largest,)), math.inf))
    return Call(aten.where.ScalarSelf, (infinite, 0.0, largest))


def _gather(
    graph: Graph, maximum: Maximum, sums: Sequence[Sum], position: Mapping[Node, float], depends: _Dependents
) -> None:
    """Replaces a maximum and the sums that wait for it by one gather of partial results."""
    c = maximum.collective
    replaced: list[Node] = []
    members = sorted((c, *(s.collective for s in sums)), key=lambda m: position[m.node])
    with graph.inserting_before(members[-1].node):
        parts = [maximum.largest, *(emit(graph, s.term.base) for s in sums)]
        largest, *columns = gather_partials(graph, parts, members)
        reduced = add_node(graph, aten.amax.default, largest, [0], False)
        reduced = cast(graph, reduced, maximum.largest.meta["val"].dtype)
        in_shape = {r: equal(r.meta["val"].shape, reduced.meta["val"].shape) for r in maximum.results}
        results = {r: reduced if same else flat(graph, reduced, None) for r, same in in_shape.items()}
    for result, node in results.items():
        result.replace_all_uses_with(node)
        replaced.append(node)
    for s, column in zip(sums, columns, strict=True):
        with graph.inserting_before(min(s.collective.waits)):
            (factor,) = s.term.factors
            merged = _merge(graph, factor, results.get(factor.source, factor.source), largest, column)
            flat_sum = flat(graph, cast(graph, merged, s.value.meta["val"].dtype), s.collective.payload)
        replace_results(s.collective, flat_sum)
        replaced.append(flat_sum)
    for each in (*(s.collective for s in sums), c):
        erase(graph, each)
    for node in replaced:
        depends.update(node)


def _merge(graph: Graph, factor: Factor, shift: Node, largest: Node, column: Node) -> Node:
    """Returns the sum over ranks of the gathered partial sums, each scaled by its weight."""
    weight = add_node(graph, aten.exp.default, add_node(graph, aten.sub.Tensor, largest, shift))
    weight = align_factor(graph, weight, factor.axes, column, leading=1)
    return add_node(graph, aten.sum.dim_IntList, add_node(graph, aten.mul.Tensor, column, weight), [0])
