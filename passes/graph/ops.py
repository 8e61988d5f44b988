"""Properties of ops that passes query often, looked up once per op.

Hashing and comparing ops of torch takes Python code, and a pass over a large graph queries every node several times.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from shardcompile.compat.own_ops import define_op

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default

IN_FLIGHT = torch.fx.node.has_side_effect(
    define_op("in_flight(Tensor x) -> ()", lambda x: None, lambda x: None, any_strides=False)
)
"""A no-op that reads a tensor which is being sent until here. It has a side effect, so that it stays in a graph though
nothing uses it.
"""

_ALLOCATIONS = {
    *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
    IN_FLIGHT,
}
"""Ops that run no kernel."""


class Op(NamedTuple):
    """The properties of what a node calls.

    Attributes:
        target: the op, or the function that a node calls; None for nodes that call nothing.
        writes: whether it writes to one of its arguments.
        random: whether it draws random numbers.
        pointwise: whether it works element by element.
        reduces: whether it is a reduction.
        allocates: whether it allocates memory at most, and computes nothing.
        shares: position or keyword of the argument whose memory its result shares, by its schema; None for most ops.
    """

    target: Any
    writes: bool = False
    random: bool = False
    pointwise: bool = False
    reduces: bool = False
    allocates: bool = False
    shares: int | str | None = None


def op_of(node: Node) -> Op:
    """Returns the properties of what a node calls."""
    if node.op != "call_function":
        return _NONE
    target: Any = node.target
    found = _CACHE.get(id(target))
    if found is None:
        found = _CACHE[id(target)] = _look_up(target)  # it keeps the target alive, so that its id stays unique
    return found


_NONE = Op(None)
_CACHE: dict[int, Op] = {}


def _look_up(target: object) -> Op:
    tags, schema = getattr(target, "tags", ()), getattr(target, "_schema", None)
    return Op(
        target,
        schema is not None and schema.is_mutable,
        torch.Tag.nondeterministic_seeded in tags,
        torch.Tag.pointwise in tags,
        torch.Tag.reduction in tags,
        target in _ALLOCATIONS,
        _shared_argument(target, schema),
    )


def _shared_argument(target: object, schema: torch.FunctionSchema | None) -> int | str | None:
    if target in (WAIT, operator.getitem, aten._unsafe_view.default):
        return 0
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return None
    names = schema.returns[0].alias_info.before_set  # empty for a list of views
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and (not names or names & argument.alias_info.before_set):
            return argument.name if argument.kwarg_only else i
    return None
