"""Rules of pointwise ops: every op that torch tags as pointwise, and others that preserve the shape."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from shardcompile.compat import OpOverload, guard_or_false, is_one, size_hint
from shardcompile.ops.record import Facts, Rule
from shardcompile.ops.registry import family, register, state
from shardcompile.ops.strategy import OpCall, Strategy, along, partial
from shardcompile.sharding import IntLike

aten = torch.ops.aten
_PROMOTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
"""The dtypes of partial sums between which torch can promote; it cannot promote others, such as float8."""

_REDUCE_OPS = ("sum", "avg", "product", "max", "min")


def is_stretched(size: IntLike, to: IntLike) -> bool:
    """Whether a dim of size 1 is broadcast to another size.

    A symbolic size is not broadcast to an equal one, whatever its value, so that one graph serves all sizes. It counts
    as 1 if its hint is 1 and the other size differs, as the size of a last chunk may. A guard is installed then.
    """
    if isinstance(size, int):
        return size == 1 and not is_one(to)
    return size_hint(size) == 1 and size_hint(to) not in (1, -1) and guard_or_false(size == 1)


def broadcast_axes(call: OpCall) -> list[list[int | None]]:
    """Returns, for each output dim, the dim of each tensor along it, or None where the tensor is broadcast."""
    ndim = max((t.ndim for t in call.tensors), default=0)
    axes = []
    for dim in range(ndim):
        dims = [dim - (ndim - t.ndim) for t in call.tensors]
        sizes = [t.shape[d] if d >= 0 else 1 for t, d in zip(call.tensors, dims, strict=True)]
        others = [e for e in sizes if not is_one(e)]
        to = next((e for e in others if size_hint(e) != 1), others[0] if others else 1)
        axes.append([None if d < 0 or is_stretched(e, to) else d for d, e in zip(dims, sizes, strict=True)])
    return axes


def pointwise(call: OpCall) -> Iterable[Strategy]:
    """Every output dim may be sharded; the inputs that are not broadcast along it are identically sharded."""
    outputs = len(call.op._schema.returns)
    for dim, dims in enumerate(broadcast_axes(call)):
        yield along(dims, [dim] * outputs)


def _with_partials(*patterns: str) -> Any:
    """Returns the rule of a pointwise op that also commutes with sums and averages of some inputs.

    A pattern has one letter for each tensor: p for partial, r for replicated.
    """

    def rule(call: OpCall) -> Iterable[Strategy]:
        yield from pointwise(call)
        for pattern in patterns:
            if len(pattern) == len(call.tensors):
                for op in ("sum", "avg"):
                    yield partial([op if c == "p" else None for c in pattern], [op])

    return rule


def _scale(call: OpCall) -> Iterable[Strategy]:
    """A product or quotient with a scalar, which commutes with sums and averages if the factor is finite.

    Otherwise partial sums of both signs would become infinities of both signs, whose sum is NaN.
    """
    yield from pointwise(call)
    factor = call.args[1]
    if isinstance(factor, (int, float)):
        inverse = "div" in call.op._schema.name
        if not math.isfinite(factor) or (inverse and factor == 0):
            return
    for op in ("sum", "avg"):
        yield partial([op], [op])


def _product(call: OpCall) -> Iterable[Strategy]:
    if len(call.tensors) == 1:
        yield from _scale(call)
    else:
        yield from _with_partials("pr", "rp")(call)


def _quotient(call: OpCall) -> Iterable[Strategy]:
    """Partial sums are divided by a scalar only: a tensor may hold zeros."""
    yield from _scale(call) if len(call.tensors) == 1 else pointwise(call)


def value_free(call: OpCall) -> Iterable[Strategy]:
    """Ops whose result does not depend on the values of the input, so that a partial input need not be reduced."""
    yield from pointwise(call)
    for op in _REDUCE_OPS:
        yield partial([op], [None])


def _any_partial(call: OpCall) -> Iterable[Strategy]:
    """Ops that only copy, and so commute with every pending reduction."""
    yield from pointwise(call)
    for op in _REDUCE_OPS:
        yield partial([op] * len(call.tensors), [op])


def _to_copy(call: OpCall) -> Iterable[Strategy]:
    """A cast commutes with a sum if it does not round the partial sums, which may be far larger than the sum."""
    yield from pointwise(call)
    now = call.tensors[0].dtype
    dtype = call.kwargs.get("dtype") or now
    if now is dtype or ({now, dtype} <= _PROMOTED and torch.promote_types(now, dtype) is dtype):
        for op in ("sum", "avg"):
            yield partial([op], [op])


_TAGGED = Rule(pointwise, None, "torch.Tag.pointwise")


@family
def tagged_as_pointwise(op: OpOverload) -> Facts | None:
    """Facts of every op that torch tags as pointwise, except `equal`, which returns a bool."""
    returns = all(str(r.type) != "bool" for r in op._schema.returns)
    return {"rule": _TAGGED, "elementwise": True} if torch.Tag.pointwise in op.tags and returns else None


_PRIMS = (
    *("convert_element_type", "where", "clone", "cbrt", "erf_inv", "erfcx", "ndtri", "zeta", "spherical_bessel_j0"),
    *("bessel_i0", "bessel_i0e", "bessel_i1", "bessel_i1e", "bessel_j0", "bessel_j1"),
    *("shift_left", "shift_right_arithmetic"),
)
"""Pointwise prims that do not share their name with an aten op that torch tags as pointwise."""


@family
def elementwise_prims(op: OpOverload) -> Facts | None:
    """Facts of pointwise prims, which torch's references call in forward-mode AD: `x * 2` is ``prims.mul`` there."""
    if op.namespace != "prims" or any(r.alias_info is not None for r in op._schema.returns):
        return None
    name = op._schema.name.removeprefix("prims::")
    packet = getattr(aten, name, None)
    tagged = packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    return {"rule": _TAGGED, "elementwise": True} if tagged or name in _PRIMS else None


def _zero_(call: OpCall) -> Iterable[Strategy]:
    """Any pending reduction of zeros is zero."""
    yield from pointwise(call)
    for op in _REDUCE_OPS:
        yield partial([op], [op])


register([aten.neg.default, aten.positive], _with_partials("p"))
register([aten.mul.Scalar, aten.div.Scalar], _scale)
register([aten.mul.Tensor], _product)
register([aten.div.Tensor], _quotient)
register([aten.zero_.default], _zero_)
register([aten.copy_.default], _with_partials("pp"))
register([aten.copy.default], pointwise)
register([aten.add.Tensor, aten.sub.Tensor], _with_partials("pp"))
register([aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default], _any_partial)
register([aten._to_copy.default], _to_copy)
register(
    [
        *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default),
    ],
    value_free,
)
_POINTWISE = (
    *(aten.fill_.Scalar, aten.fill_.Tensor, aten.fill.Scalar, aten.fill.Tensor),
    *(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor),
    *(aten.where.self, aten.gelu_backward.default, aten.threshold_backward.default),
    *(aten.silu_backward.default, aten.sigmoid_backward.default, aten.tanh_backward.default),
    *(aten.elu_backward.default, aten.leaky_relu_backward.default, aten.softplus_backward.default),
    *(aten.hardswish.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default),
    *(aten.hardtanh_backward.default, aten.mish_backward.default, aten.logit_backward.default),
    *(aten.hardshrink_backward.default, aten.softshrink_backward.default),
    *(aten._prelu_kernel.default, aten._prelu_kernel_backward.default),
    *(aten.complex.default, aten.polar.default, aten.floor_divide.default),
    *(aten._conj.default, aten._neg_view.default, aten.resolve_conj.default, aten.resolve_neg.default),
)
"""Pointwise ops, not all of which torch tags as pointwise."""

register(_POINTWISE, pointwise)
state(_POINTWISE, elementwise=True)
state([aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default], one_value=True)
