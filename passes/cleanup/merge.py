"""Reductions that wait for one another become one.

A softmax along a sharded dim, and what is weighted by it, are three collectives: the maximum, the sum of exponentials,
the weighted sum. None of them can hide behind the other, and no order helps.
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
    applied,
    broadcast_axes,
    emit,
    laid_out,
    origin,
)
from shardcompile.passes.cleanup.maximum import Maximum
from shardcompile.passes.cleanup.products import multiply_sums
from shardcompile.passes.cleanup.rewrite import (
    GatherPrices,
    cast,
    erase,
    exchanged,
    flat,
    in_shape_of,
    places,
    replace_results,
    shaped,
    sort,
    sums,
    usual,
)
from shardcompile.passes.cleanup.variance import merge_moments, scaled_sum
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.graph.collective import WAIT, Collective, add_node, inherit, kind_of, reduction_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Sum:
    """A sum over ranks that is looked at.

    Attributes:
        collective: that reduces.
        value: what is summed, in its shape before it was made flat.
        term: its base and factors.
    """

    collective: Collective
    value: Node
    term: Term


class MergeReductions:
    """Make one collective of reductions that wait for one another.

    For rows ``x[n]`` sharded, weights ``p = softmax(x)`` along ``n`` and values ``v``:

        max = all_reduce(max x); s = all_reduce(sum exp(x - max)); y = all_reduce(sum exp(x - max) / s * v)

    In five steps, each of which is kept for itself:

    1. *The same terms once.* Sums of the same terms in another order of dims, and equal maxima, are reduced once.
    2. *Sums by products.* What the backward pass of a softmax sums up follows from what was weighted by it, see
       `shardcompile.passes.cleanup.products`.
    3. *Factors behind the sum.* What is the same on all ranks and along what is summed moves behind the sum:
       ``y = all_reduce(sum exp(x - max) v) / s``. Now ``s`` and ``y`` wait for the maximum only, and share a bucket.
    4. *Partial results travel together.* Each rank subtracts its own maximum ``m_r`` and sends
       ``m_r, s_r = sum exp(x - m_r), y_r = sum exp(x - m_r) v`` in one gather. Then each rank has

           max = max_r m_r,   s = sum_r exp(m_r - max) s_r,   y = sum_r exp(m_r - max) y_r

       which is the way of the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax",
       2018, arXiv:1805.02867). The same holds for what else is subtracted, such as the finite part of the maximum in
       ``logsumexp``. A rank whose shard is empty, or -inf, has ``m_r = -inf``: it subtracts 0, so that its terms are 0
       and no NaN, and has the weight ``exp(-inf - max)``, which is 0 where any rank has more; where none has, it is
       NaN, as in plain PyTorch. A NaN or inf on any rank passes through its weight.
    5. *Mean and variance* travel in one gather as well, see `shardcompile.passes.cleanup.variance`.

    A gather moves the partial results once for each rank, a reduction about twice in all; so steps 4 and 5 are done
    where the gather takes less time than the reductions one after the other. That is told by the prices of the group's
    link and by sizes that all ranks share; where a size may differ between ranks, the steps are kept.

    Legal because each step computes the same value. Terms are added up in another order and rounded at other places, so
    that floats differ in their last bits. What is awaited only after the graph has written to memory is left alone, see
    `shardcompile.passes.cleanup.rewrite.usual`.

    It runs on the graph of forward and backward together, where the backward pass finds what the forward pass has. It
    runs again on what is compiled.

    Args:
        model: the costs, the same on every rank; None for those of the device that a graph runs on.
    """

    name = "merge_reductions"

    def __init__(self, model: CostModel | None = None) -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model})"

    def __call__(self, graph: Graph) -> None:
        if len(usual(graph)) < 2:
            return
        _share_equal_terms(graph)
        multiply_sums(graph)
        _delay_factors(graph)
        prices = GatherPrices(graph, self.model or CostModel.of(graph))
        _send_together(graph, prices)
        merge_moments(graph, prices)


# --------------------------------------------------------------------------------------- the same terms once


def _share_equal_terms(graph: Graph) -> None:
    """Reduce once what is the same but for the order of its dims."""
    first_of: dict[Any, tuple[Node, Any]] = {}
    for c in usual(graph):
        most = Maximum.found(c)
        if most is not None:
            first = first_of.setdefault((most.largest, c.group_name), (c.node, most))
            if first[1] is not most and len(first[1].results) and _shapes_agree(most, first[1]):
                for result in most.results:
                    result.replace_all_uses_with(first[1].results[0])
                erase(graph, c)
            continue
        value, how = shaped(c.payload), (reduction_of(c), c.group_name)
        source, order = origin(value)
        content = scaled_sum(value) if c.payload.meta["val"].ndim == 1 else None
        if content is not None:
            same, _ = first_of.setdefault((content, how, value.meta["val"].dtype), (c.node, None))
            if same is not c.node and _wait_of(same) < min(c.waits):
                replace_results(c, _wait_of(same))
                erase(graph, c)
            continue
        key = (source, how, value.meta["val"].dtype)
        start, (before, its_order) = first_of.setdefault(key, (c.node, (value, order)))
        if start is not c.node:
            _replace_permuted(graph, c, start, before, [its_order.index(d) for d in order])


def _wait_of(start: Node) -> Node:
    return min(u for u in start.users if u.target is WAIT)


def _shapes_agree(a: Maximum, b: Maximum) -> bool:
    return all(equal(r.meta["val"].shape, b.results[0].meta["val"].shape) for r in a.results)


def _replace_permuted(graph: Graph, c: Collective, start: Node, first: Node, dims: list[int]) -> None:
    """Take a reduction's result from that of the same elements in another order."""
    wait = _wait_of(start)
    if not wait < min(c.waits):
        return
    with graph.inserting_before(min(c.waits)):
        whole = in_shape_of(graph, wait, first)
        turned = add_node(graph, aten.permute.default, whole, dims)
        again = flat(graph, turned, c.payload)
    replace_results(c, again)
    erase(graph, c)


# ------------------------------------------------------------------------------------ factors behind the sum


def _delay_factors(graph: Graph) -> None:
    """Take factors that come from other reductions out of sums, as long as a sum then waits for one less."""
    starts = [c.node for c in sums(graph)]
    level = _Levels(graph)
    for start in starts:
        found: Node | None = start
        while found is not None:
            found = _delay(graph, found, level)


def _delay(graph: Graph, start: Node, level: _Levels) -> Node | None:
    """The new start of a reduction of which a factor was taken out, or None."""
    c = Collective.of(start)
    assert c is not None
    value = shaped(c.payload)
    level.reach(start)
    most = level.of[value]
    if not most:
        return None
    factors = Factors(lambda n: level.of[n] >= most, c.group_name)
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
            result = applied(graph, factor, result)
        whole = flat(graph, result, c.payload)
    level.go_on_from(before, new)
    replace_results(c, whole)
    erase(graph, c)
    return new


class _Levels:
    """How many collectives have to have ended one after the other before nodes.

    They are told in the order of the graph, and no further than asked for: what a factor that is taken out changes lies
    behind, so that no node is told twice.

    Attributes:
        of: the level, by node.
    """

    def __init__(self, graph: Graph) -> None:
        self.of: dict[Node, int] = {}
        self._last = self._tell(next(iter(graph.nodes)))  # and not going to be erased

    def reach(self, start: Node) -> None:
        """Tell all up to the start of a collective."""
        while self._last is not start:
            self._last = self._tell(self._last.next)

    def go_on_from(self, before: Node, start: Node) -> None:
        """Tell the nodes behind one, up to a new start: it stands for the one that was reached last."""
        self._last = before
        self.reach(start)

    def _tell(self, node: Node) -> Node:
        before = max((self.of[i] for i in node.all_input_nodes), default=0)
        self.of[node] = before + (kind_of(node) is not None)
        return node


# --------------------------------------------------------------------------------- partial results together


def _send_together(graph: Graph, prices: GatherPrices) -> None:
    starts = [c.node for c in usual(graph) if reduction_of(c) == "max"]
    if not starts:
        return
    place, summed, after = places(graph), {c.node for c in sums(graph)}, _After(graph, starts)
    left = len(summed)
    for start in starts:
        c = Collective.of(start)
        most = None if c is None else Maximum.found(c)
        if c is None or most is None:
            continue
        found = _find_weighted(most, summed, place, after)
        parts = [most.largest, *(s.value for s in found)]
        if found and prices.pays([c], [s.collective for s in found], parts):
            _gather(graph, most, found, place, after)
            summed.difference_update(s.collective.node for s in found)
    if len(summed) < left:
        sort(graph, place)


class _After:
    """What comes after which of some nodes, as sets of bits.

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
        """Whether a node comes after one of `starts`, or is it."""
        return bool(self._bits[node] & self._bit[start])

    def tell(self, node: Node) -> None:
        """A node is new, or what it reads is: tell that, and what follows from it."""
        stack = [node]
        while stack:
            new = [i for i in stack[-1].all_input_nodes if i not in self._bits]
            if new:
                stack += new
                continue
            node = stack.pop()
            known, bits = self._bits.get(node), self._of(node)
            self._bits[node] = bits if known is None else known | bits
            if known is None or bits & ~known:
                stack += [u for u in node.users if u in self._bits]


def _find_weighted(most: Maximum, summed: Set[Node], place: Mapping[Node, float], after: _After) -> list[Sum]:
    """The sums whose terms have exponentials as factors, of which a maximum was subtracted."""
    start, name = most.collective.node, most.collective.group_name

    def exponential(node: Node) -> Term | None:
        shifted: Any = node.args[0]
        if shifted.target is not aten.sub.Tensor or len(shifted.args) != 2 or shifted.kwargs:
            return None
        x, shift = shifted.args
        if (
            not isinstance(x, Node)
            or not isinstance(shift, Node)
            or after(start, x)
            or origin(x) != (most.of, most.order)
        ):
            return None
        own, other = most.largest.meta["val"], shift.meta["val"]
        if not most.follows(shift) or other.dtype != own.dtype or not equal(other.shape, own.shape):
            return None
        base = Call(aten.exp.default, (Call(aten.sub.Tensor, (x, _finite(most.largest))),))
        return Term(base, (Factor(aten.mul.Tensor, shift, broadcast_axes(shift, node), most.largest),))

    factors = Factors(lambda node: after(start, node), name, exponential)
    found: list[Sum] = []
    for node in sorted(_find_reached(most) & summed, key=place.__getitem__):
        c = Collective.of(node)
        if c is None or c.group_name != name:
            continue
        value = shaped(c.payload)
        term = factors.term(value)
        if term is not None and [f.largest for f in term.factors] == [most.largest]:
            found.append(Sum(c, value, term))
    return found


def _find_reached(most: Maximum) -> set[Node]:
    """The collectives that could reduce exponentials of which a maximum was subtracted: `Factors` walk no further."""
    shifts, exponentials = list(most.results), set[Node]()
    for shift in shifts:  # which gets longer
        for user in shift.users:
            if user.target is aten.sub.Tensor:
                exponentials.update(u for u in user.users if u.target is aten.exp.default)
            if user not in shifts and user.op == "call_function" and most.follows(user):
                shifts.append(user)
    seen, found, edge = set(exponentials), set[Node](), exponentials
    for _ in range(DEPTH + len(RESHAPES)):
        edge = {u for node in edge for u in node.users} - seen
        seen |= edge
        starts = {node for node in edge if kind_of(node) is not None}
        found |= starts
        edge -= starts
    return found


def _finite(largest: Node) -> Call:
    """What a rank subtracts: its maximum, or 0 where that is not finite. (Inductor lowers no `clamp`.)"""
    infinite = Call(aten.eq.Scalar, (Call(aten.abs.default, (largest,)), math.inf))
    return Call(aten.where.ScalarSelf, (infinite, 0.0, largest))


def _gather(graph: Graph, most: Maximum, sums: Sequence[Sum], place: Mapping[Node, float], after: _After) -> None:
    c = most.collective
    replaced: list[Node] = []
    members = sorted((c, *(s.collective for s in sums)), key=lambda m: place[m.node])
    with graph.inserting_before(members[-1].node):
        parts = [most.largest, *(emit(graph, s.term.base) for s in sums)]
        largest, *columns = exchanged(graph, parts, members)
        whole = add_node(graph, aten.amax.default, largest, [0], False)
        whole = cast(graph, whole, most.largest.meta["val"].dtype)
        in_shape = {r: equal(r.meta["val"].shape, whole.meta["val"].shape) for r in most.results}
        results = {r: whole if same else flat(graph, whole, None) for r, same in in_shape.items()}
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
        after.tell(node)


def _merge(graph: Graph, factor: Factor, shift: Node, largest: Node, column: Node) -> Node:
    """The sum over ranks of what each sent, by its weight."""
    weight = add_node(graph, aten.exp.default, add_node(graph, aten.sub.Tensor, largest, shift))
    weight = laid_out(graph, weight, factor.axes, column, leading=1)
    return add_node(graph, aten.sum.dim_IntList, add_node(graph, aten.mul.Tensor, column, weight), [0])
