"""A notation for rules, similar to einsum: ``"m k, k n -> m n"``.

Each tensor input and output is a list of axis names. Along an axis that an output has, the output is sharded like the
inputs that have it; along an axis that no output has, the outputs are partial sums. An axis in brackets, ``[k]``, must
not be sharded. A lone ``*`` stands for a replicated input of any shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache

from shardcompile.compat import OpOverload
from shardcompile.errors import RuleError
from shardcompile.ops.strategy import OpCall, Strategy, along, partial

Axes = tuple[tuple[str, ...], ...]
_AXIS = r"(?:[a-z]\w*|\[[a-z]\w*\])"
_TERM = re.compile(rf"\*|{_AXIS}(?: {_AXIS})*|")


def parse_notation(text: str, op: OpOverload) -> Callable[[OpCall], Iterable[Strategy]]:
    """Returns the rule that a notation stands for.

    Raises:
        RuleError: the text is malformed, or has more tensors than the op.
    """
    inputs, outputs = split_notation(text)
    tensors = sum("Tensor" in str(a.type) for a in op._schema.arguments)
    if len(inputs) > tensors or len(outputs) != len(op._schema.returns):
        raise RuleError(f"{op}: {text!r} does not fit the signature {op._schema}")
    table = _strategies(inputs, outputs)

    def rule(call: OpCall) -> Iterable[Strategy]:
        if len(call.tensors) != len(inputs):
            raise RuleError(f"{op}: {text!r} has {len(inputs)} inputs, but the call has {len(call.tensors)} tensors")
        for tensor, axes in zip(call.tensors, inputs, strict=True):
            if axes != ("*",) and tensor.ndim != len(axes):
                raise RuleError(f"{op}: {text!r} expects {len(axes)} dims, got {tensor.layout.describe()}")
        return table

    return rule


@cache
def split_notation(text: str) -> tuple[Axes, Axes]:
    """Returns the axis names of inputs and outputs.

    Raises:
        RuleError: the text is malformed.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise RuleError(f"{text!r} must have one arrow")
    parts = [[term.strip() for term in side.split(",")] for side in sides]
    for term in (t for side in parts for t in side):
        if not _TERM.fullmatch(term):
            raise RuleError(f"{text!r}: cannot read {term!r}")
    inputs, outputs = (tuple(tuple(term.split()) for term in side) for side in parts)
    shardable = [[a for a in axes if not a.startswith("[")] for axes in inputs + outputs]
    if any(len(set(axes)) < len(axes) for axes in shardable):
        raise RuleError(f"{text!r}: one tensor has an axis twice; only one of its dims can run along an axis")
    if ("*",) in outputs:
        raise RuleError(f"{text!r}: only inputs may be *")
    unknown = {a for axes in outputs for a in axes} - {a for axes in inputs for a in axes}
    if any(not a.startswith("[") for a in unknown):
        raise RuleError(f"{text!r}: the axes {sorted(unknown)} of the outputs are in no input; put them in brackets")
    return inputs, outputs


def _strategies(inputs: Axes, outputs: Axes) -> list[Strategy]:
    names = dict.fromkeys(a for axes in inputs for a in axes if not a.startswith("[") and a != "*")
    table = []
    for name in names:
        dims = [axes.index(name) if name in axes else None for axes in inputs]
        results: list[int | str | None] = [axes.index(name) if name in axes else "sum" for axes in outputs]
        table.append(along(dims, results))
    return table


def multilinear(text: str) -> Callable[[OpCall], Iterable[Strategy]]:
    """Returns the rule of an op that is linear in each input, so that one of the inputs may be partial."""
    inputs, outputs = split_notation(text)
    table = _strategies(inputs, outputs)
    count = len(inputs)
    for partial_input in range(count):
        for reduce_op in ("sum", "avg"):
            ins = [reduce_op if i == partial_input else None for i in range(count)]
            table.append(partial(ins, [reduce_op] * len(outputs)))
    return lambda call: table
