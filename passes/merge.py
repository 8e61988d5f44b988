"""Reductions that wait for one another become one.

A softmax along a cut dim, and what is weighted by it, are three collectives: the maximum, the sum of exponentials, the
weighted sum. None of them can hide behind the other, and no order helps.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from shardcompile.passes.blocks import labels
from shardcompile.passes.collective import NOTES, WAIT, Collective, add_node, collectives, inherit
from shardcompile.passes.cost import CostModel
from shardcompile.passes.dependencies import ordered_inputs, reorder, writes
from shardcompile.passes.factors import (
    RESHAPES,
    Call,
    Factor,
    Factors,
    Term,
    applied,
    emit,
    equal,
    extents,
    laid_out,
    origin,
)
from shardcompile.passes.maxima import Maximum

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


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

    For rows ``x[n]`` in blocks, weights ``p = softmax(x)`` along ``n`` and values ``v``:

        max = all_reduce(max x); s = all_reduce(sum exp(x - max)); y = all_reduce(sum exp(x - max) / s * v)

    In three steps, each of which is kept for itself:

    1. *The same terms once.* Sums of the same terms in another order of dims, and equal maxima, are reduced once.
    2. *Factors behind the sum.* What is the same on all ranks and along what is summed moves behind the sum:
       ``y = all_reduce(sum exp(x - max) v) / s``. Now ``s`` and ``y`` wait for the maximum only, and share a bucket.
    3. *Partial results travel together.* Each rank subtracts its own maximum ``m_r`` and sends
       ``m_r, s_r = sum exp(x - m_r), y_r = sum exp(x - m_r) v`` in one gather. Then each rank has

           max = max_r m_r,   s = sum_r exp(m_r - max) s_r,   y = sum_r exp(m_r - max) y_r

       which is the way of the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax",
       2018, arXiv:1805.02867). The same holds for what else is subtracted, such as the finite part of the maximum in
       ``logsumexp``. A rank whose block is empty, or -inf, has ``m_r = -inf``: it subtracts 0, so that its terms are 0
       and no NaN, and has the weight ``exp(-inf - max)``, which is 0 where any rank has more; where none has, it is
       NaN, as in plain PyTorch. A NaN or inf on any rank passes through its weight.

    A gather moves the partial results once for each rank, a reduction about twice in all; so step 3 is done where the
    gather takes less time than the maximum and a reduction of all sums together. That is told by the prices of the
    group's link and by sizes that all ranks share; where a size may differ between ranks, the steps are kept.

    Legal because each step computes the same value. Terms are added up in another order and rounded at other places, so
    that floats differ in their last bits.

    To be run on the graph of forward and backward together, where the backward pass finds what the forward pass has,
    and again on what is compiled.

    Args:
        model: the costs, the same on every rank; None for those of the device that a graph runs on.
    """

    name = "merge_reductions"

    def __init__(self, model: CostModel | None = None) -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model})"

    def __call__(self, graph: Graph) -> None:
        if sum(_is_usual(c) for c in collectives(graph)) < 2 or any(writes(n) for n in graph.nodes):
            return
        _share_equal_terms(graph)
        _delay_factors(graph)
        _send_together(graph, self.model or CostModel.of(graph))


def _is_usual(c: Collective) -> bool:
    return c.kind == "all_reduce" and c.functional and len(c.payloads) == 1 and 0 < len(c.waits) == len(c.node.users)


def _sums(graph: Graph) -> list[Collective]:
    return [c for c in collectives(graph) if _is_usual(c) and c.node.args[1] == "sum"]


# --------------------------------------------------------------------------------------- the same terms once


def _share_equal_terms(graph: Graph) -> None:
    """Reduce once what is the same but for the order of its dims."""
    first_of: dict[Any, tuple[Node, Any]] = {}
    for c in [c for c in collectives(graph) if _is_usual(c)]:
        most = Maximum.found(c)
        if most is not None:
            first = first_of.setdefault((most.largest, c.group_name), (c.node, most))
            if first[1] is not most and len(first[1].results) and _shapes_agree(most, first[1]):
                for result in most.results:
                    result.replace_all_uses_with(first[1].results[0])
                _erase(graph, c)
            continue
        value = _shaped(c.payload)
        source, order = origin(value)
        key = (source, c.node.args[1:], value.meta["val"].dtype)
        start, (before, its_order) = first_of.setdefault(key, (c.node, (value, order)))
        if start is not c.node:
            _replace_permuted(graph, c, start, before, [its_order.index(d) for d in order])


def _shapes_agree(a: Maximum, b: Maximum) -> bool:
    return all(equal(r.meta["val"].shape, b.results[0].meta["val"].shape) for r in a.results)


def _replace_permuted(graph: Graph, c: Collective, start: Node, first: Node, dims: list[int]) -> None:
    """Take a reduction's result from that of the same elements in another order."""
    wait = next(u for u in start.users if u.target is WAIT)
    if not wait < min(c.waits):
        return
    with graph.inserting_before(min(c.waits)):
        whole = _in_shape_of(graph, wait, first)
        turned = add_node(graph, aten.permute.default, whole, dims)
        flat = _flat(graph, turned, c.payload)
    for wait in c.waits:
        wait.replace_all_uses_with(flat)
    _erase(graph, c)


# ------------------------------------------------------------------------------------ factors behind the sum


def _delay_factors(graph: Graph) -> None:
    """Take factors that come from other reductions out of sums, as long as a sum then waits for one less."""
    level = _levels(graph)
    for start in [c.node for c in _sums(graph)]:
        found: Node | None = start
        while found is not None:
            found = _delayed(graph, found, level)
            level = _levels(graph) if found is not None else level


def _delayed(graph: Graph, start: Node, level: dict[Node, int]) -> Node | None:
    """The new start of a reduction of which a factor was taken out, or None."""
    c = Collective.of(start)
    assert c is not None
    value = _shaped(c.payload)
    most = level[value]
    if not most:
        return None
    factors = Factors(lambda n: level[n] >= most, c.group_name)
    term = factors.term(value)
    if term is None or not term.factors:
        return None
    with graph.inserting_before(start):
        base = emit(graph, term.base)
        new = add_node(graph, start.target, _flat(graph, base, None), *start.args[1:])
        inherit(new, [c])
    with graph.inserting_before(min(c.waits)):
        result = _in_shape_of(graph, add_node(graph, WAIT, new), base)
        for factor in term.factors:
            result = applied(graph, factor, result)
        flat = _flat(graph, result, c.payload)
    for wait in c.waits:
        wait.replace_all_uses_with(flat)
    _erase(graph, c)
    return new


def _levels(graph: Graph) -> dict[Node, int]:
    """By node how many collectives have to have ended one after the other."""
    level: dict[Node, int] = {}
    for node in graph.nodes:
        level[node] = max((level[i] for i in node.all_input_nodes), default=0) + (Collective.of(node) is not None)
    return level


# --------------------------------------------------------------------------------- partial results together


def _send_together(graph: Graph, model: CostModel) -> None:
    for start in [c.node for c in collectives(graph) if c.node.args[1:2] == ("max",)]:
        c = Collective.of(start)
        most = None if c is None else Maximum.found(c)
        if most is None:
            continue
        sums = _weighted(graph, most)
        if sums and _pays(graph, most, sums, model):
            _gather(graph, most, sums)


def _weighted(graph: Graph, most: Maximum) -> list[Sum]:
    """The sums whose terms have exponentials as factors, of which a maximum was subtracted."""
    after = _users_of(most.collective.node)
    name = most.collective.group_name

    def exponential(node: Node) -> Term | None:
        shifted: Any = node.args[0]
        if shifted.target is not aten.sub.Tensor or len(shifted.args) != 2 or shifted.kwargs:
            return None
        x, shift = shifted.args
        if not isinstance(x, Node) or not isinstance(shift, Node) or x in after or origin(x) != (most.of, most.order):
            return None
        if not most.follows(shift) or not equal(shift.meta["val"].shape, most.largest.meta["val"].shape):
            return None
        own = Call(aten.exp.default, (Call(aten.sub.Tensor, (x, _finite(most.largest))),))
        ndim = node.meta["val"].ndim
        axes = tuple(() if shift.meta["val"].shape[d] == 1 else (d,) for d in range(ndim))
        return Term(own, (Factor(aten.mul.Tensor, shift, axes, most.largest),))

    factors = Factors(after.__contains__, name, exponential)
    found: list[Sum] = []
    for c in _sums(graph):
        if c.group_name != name or c.node not in after:
            continue
        value = _shaped(c.payload)
        term = factors.term(value)
        if term is not None and [f.largest for f in term.factors] == [most.largest]:
            found.append(Sum(c, value, term))
    return found


def _finite(largest: Node) -> Call:
    """What a rank subtracts: its maximum, or 0 where that is not finite."""
    infinite = Call(aten.eq.Scalar, (Call(aten.abs.default, (largest,)), math.inf))
    return Call(aten.where.ScalarSelf, (infinite, 0.0, largest))


def _pays(graph: Graph, most: Maximum, sums: Sequence[Sum], model: CostModel) -> bool:
    """Whether one gather takes less time than the maximum and then all sums in one."""
    c = most.collective
    ranks = model.group_size(c.group_name)
    uneven = labels(graph, model.group_sizes)
    if ranks is None or any(n in uneven for n in (most.largest, *(s.value for s in sums))):
        return False
    link = model.link(c.group_name)
    reduced = sum(s.collective.global_bytes for s in sums)
    share = 2 * (ranks - 1) / ranks
    apart = link.seconds(share * c.global_bytes, ranks) + link.seconds(share * reduced, ranks)
    gathered = c.global_bytes + reduced
    copied = 3 * ranks * gathered / (model.device.memory * model.device.share)
    return link.seconds((ranks - 1) * gathered, ranks) + copied < apart


def _gather(graph: Graph, most: Maximum, sums: Sequence[Sum]) -> None:
    c = most.collective
    place = {node: float(i) for i, node in enumerate(graph.nodes)}
    last = max((c.node, *(s.collective.node for s in sums)), key=place.__getitem__)
    ranks = c.group_size
    with graph.inserting_before(last):
        parts = [most.largest, *(emit(graph, s.term.base) for s in sums)]
        dtype = functools.reduce(torch.promote_types, (p.meta["val"].dtype for p in parts))
        flat = [_flat(graph, _cast(graph, p, dtype), None) for p in parts]
        packed = add_node(graph, aten.cat.default, flat, 0)
        start = add_node(graph, _c10d.all_gather_into_tensor.default, packed, ranks, c.group_name)
        inherit(start, [c, *(s.collective for s in sums)])
        _tell(start, [c, *(s.collective for s in sums)])
        (total,) = extents(graph, packed)
        rows = add_node(graph, aten.view.default, add_node(graph, WAIT, start), [ranks, total])
        lengths = [extents(graph, f)[0] for f in flat]
        columns = _columns(graph, rows, lengths, parts)
        largest = columns[0]
        whole = add_node(graph, aten.amax.default, largest, [0], False)
        whole = _cast(graph, whole, most.largest.meta["val"].dtype)
        in_shape = {r: equal(r.meta["val"].shape, whole.meta["val"].shape) for r in most.results}
        results = {r: whole if same else _flat(graph, whole, None) for r, same in in_shape.items()}
    for result, node in results.items():
        result.replace_all_uses_with(node)
    for s, column in zip(sums, columns[1:], strict=True):
        with graph.inserting_before(min(s.collective.waits)):
            (factor,) = s.term.factors
            merged = _merged(graph, factor, results.get(factor.source, factor.source), largest, column)
            flat_sum = _flat(graph, _cast(graph, merged, s.value.meta["val"].dtype), s.collective.payload)
        for wait in s.collective.waits:
            wait.replace_all_uses_with(flat_sum)
    for each in (*(s.collective for s in sums), c):
        _erase(graph, each)
    _sort(graph, place)


def _tell(start: Node, members: Sequence[Collective]) -> None:
    """Write down for reports what a gather stands for."""
    c = Collective.of(start)
    assert c is not None
    side = f"{NOTES}_backward" if c.backward else NOTES
    known = [m.notes.get("redistribution", "") for m in members]
    reasons = ", ".join(dict.fromkeys(r for r in known if r)) or f"{len(members)} reductions"
    custom = start.meta.get("custom") or {}
    notes = {**custom.get(side, {}), "redistribution": f"{reasons} (merge_reductions)"}
    start.meta["custom"] = {**custom, side: notes}


def _columns(graph: Graph, rows: Node, lengths: Sequence[Any], parts: Sequence[Node]) -> list[Node]:
    """What every rank sent of each part: [ranks, ...]."""
    pieces = add_node(graph, aten.split_with_sizes.default, rows, list(lengths), 1)
    ranks = rows.meta["val"].shape[0]
    found: list[Node] = []
    for i, part in enumerate(parts):
        piece = add_node(graph, operator.getitem, pieces, i)
        piece = add_node(graph, aten.clone.default, piece, memory_format=torch.contiguous_format)
        found.append(add_node(graph, aten.view.default, piece, [ranks, *extents(graph, part)]))
    return found


def _merged(graph: Graph, factor: Factor, shift: Node, largest: Node, column: Node) -> Node:
    """The sum over ranks of what each sent, by its weight."""
    weight = add_node(graph, aten.exp.default, add_node(graph, aten.sub.Tensor, largest, shift))
    weight = laid_out(graph, weight, factor.axes, column, leading=1)
    return add_node(graph, aten.sum.dim_IntList, add_node(graph, aten.mul.Tensor, column, weight), [0])


# ----------------------------------------------------------------------------------------------- the graph


def _users_of(start: Node) -> set[Node]:
    found = {start}
    stack = [start]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


def _shaped(payload: Node) -> Node:
    """A payload before it was made flat."""
    while payload.meta["val"].ndim <= 1 and (payload.target in RESHAPES or payload.target is aten.clone.default):
        payload = payload.args[0]  # type: ignore[assignment]
    return payload


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    if node.meta["val"].dtype == dtype:
        return node
    return add_node(graph, torch.ops.prims.convert_element_type.default, node, dtype)


def _flat(graph: Graph, node: Node, like: Node | None) -> Node:
    """A value with one dim, or in the shape of a flat one."""
    if node.meta["val"].ndim == (1 if like is None else like.meta["val"].ndim):
        return node
    sizes = extents(graph, like) if like is not None else [-1]
    if node.meta["val"].ndim > 1:
        node = add_node(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return add_node(graph, aten.view.default, node, sizes)


def _in_shape_of(graph: Graph, flat: Node, value: Node) -> Node:
    return flat if value.meta["val"].ndim == 1 else add_node(graph, aten.view.default, flat, extents(graph, value))


def _erase(graph: Graph, c: Collective) -> None:
    """Erase a collective that nobody needs any more, what was made of its result, and what was only there for it."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    own = {c.node, *c.waits}
    inputs = list(c.payloads)
    for node in sorted(_users_of(c.node), key=place.__getitem__, reverse=True):
        if not node.users and node.op == "call_function" and (node in own or not _communicates(node)):
            graph.erase_node(node)
    while inputs:
        node = inputs.pop()
        if node not in own and not node.users and node.op == "call_function" and not _communicates(node):
            own.add(node)
            inputs += node.all_input_nodes
            graph.erase_node(node)


def _communicates(node: Node) -> bool:
    return node.target is WAIT or Collective.of(node) is not None


def _sort(graph: Graph, place: dict[Node, float]) -> None:
    """Restore a valid order: new nodes where they were put, what reads them behind."""
    priority: dict[Node, float] = {}
    here = -1.0
    for node in graph.nodes:
        here = priority[node] = place.get(node, here)
    reorder(graph, ordered_inputs(graph), priority.__getitem__)
