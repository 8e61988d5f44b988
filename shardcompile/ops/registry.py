"""The table of ops: one record for each, and what is said of whole families of them.

Facts about an op are stated where they are written, and end up in its record, which the engine looks up. What a fact
is for is said in `record`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from shardcompile.compat import OpOverload, OpOverloadPacket
from shardcompile.errors import RuleError
from shardcompile.ops.notation import parse_notation
from shardcompile.ops.record import Facts, Form, LocalArgs, OpRecord, Rule, Run, Strategies

Ops = OpOverload | OpOverloadPacket | Sequence[OpOverload | OpOverloadPacket]
"""An overload, a packet, which stands for all of its overloads, or several."""

Family = Callable[[OpOverload], Facts | None]
"""What holds for an op by its name, its tags or its schema, or None if it is of another family."""

_RECORDS: dict[OpOverload, OpRecord] = {}
_FAMILIES: list[Family] = []

FUNCTIONS: dict[object, Run] = {}
"""By Python function of torch, what it does above autograd. The compiler reads this, so it holds functions only."""

NAMED_FUNCTIONS: dict[str, Run] = {}
"""The same of ops that packages define, by name."""

CONDITIONS: dict[object, Callable[[Sequence[Any]], bool]] = {}
"""By Python function, which calls those of `FUNCTIONS` take that do not take every one."""


def overloads(op: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    """An overload itself, or all overloads of a packet."""
    if isinstance(op, OpOverload):
        return [op]
    return [getattr(op, name) for name in op.overloads()]


def register(op: Ops, rule: str | Strategies, local_args: LocalArgs | None = None) -> None:
    """Register the rule of one or several ops.

    Args:
        op: an overload, a packet (all of its overloads), or several.
        rule: a notation such as ``"m k, k n -> m n"``, or a function from an `OpCall` to strategies.
        local_args: how arguments that speak of global sizes are turned into local ones.

    Raises:
        RuleError: the notation is malformed or does not fit the op, or the op has a rule already.
    """
    origin = _caller()
    for overload in _all(op):
        strategies = parse_notation(rule, overload) if isinstance(rule, str) else rule
        _state(overload, {"rule": Rule(strategies, local_args, origin)}, origin)


def state(op: Ops, **facts: Unpack[Facts]) -> None:
    """State facts about one or several ops, the fields of `OpRecord`.

    Args:
        op: an overload, a packet (all of its overloads), or several.
        facts: each may be stated once for an op.

    Raises:
        RuleError: one was stated before.
    """
    origin = _caller()
    for overload in _all(op):
        _state(overload, facts, origin)


def state_function(
    functions: Sequence[object], run: Run, of: Ops = (), when: Callable[[Sequence[object]], bool] | None = None
) -> None:
    """State what Python functions of torch do above autograd.

    Args:
        functions: as `__torch_function__` gets them.
        run: called with the function and its arguments.
        of: the ops that they call at last, if there are some.
        when: of the positional arguments, whether `run` takes a call; every one if there is none.

    Raises:
        RuleError: one is spoken for already.
    """
    for function in functions:
        if function in FUNCTIONS:
            raise RuleError(f"{function} already does something above autograd, {FUNCTIONS[function]}")
        FUNCTIONS[function] = run
        if when is not None:
            CONDITIONS[function] = when
    for overload in _all(of):
        _state(overload, {"functions": tuple(functions)}, _caller())


def state_named_function(name: str, run: Run) -> None:
    """`state_function` of an op that exists as soon as somebody imports the package that defines it.

    Args:
        name: of the op with its namespace, without an overload.
        run: called with the op and its arguments.

    Raises:
        RuleError: it is spoken for already.
    """
    if name in NAMED_FUNCTIONS:
        raise RuleError(f"{name} already does something above autograd, {NAMED_FUNCTIONS[name]}")
    NAMED_FUNCTIONS[name] = run


def family(facts: Family) -> Family:
    """State, as a decorator, what holds for all ops of a kind where their records say nothing themselves."""
    _FAMILIES.append(facts)
    record_of.cache_clear()
    return facts


@functools.cache
def record_of(op: OpOverload) -> OpRecord:
    """The record of an op, whether or not anything was stated of it."""
    record = _RECORDS.get(op, OpRecord(op))
    for facts_of in _FAMILIES:
        facts = facts_of(op)
        if facts is not None:
            record = _with(record, {k: v for k, v in facts.items() if k not in record.origins}, facts_of.__name__)
    return record


def records() -> Iterator[OpRecord]:
    """The records of all ops of which something was stated."""
    return map(record_of, list(_RECORDS))


def find_rule(op: OpOverload) -> Rule | None:
    """The rule that was registered for an op, or None."""
    record = _RECORDS.get(op)
    return None if record is None else record.rule


def replace_rule(op: OpOverload, rule: Rule) -> None:
    """Put a user's rule in place of ours."""
    _RECORDS[op] = _with(_RECORDS.get(op, OpRecord(op)), {"rule": rule}, rule.origin)
    record_of.cache_clear()


def registered_ops() -> list[OpOverload]:
    """All ops that have a rule."""
    return [op for op, record in _RECORDS.items() if record.rule is not None]


def _all(op: Ops) -> Iterator[OpOverload]:
    for item in [op] if isinstance(op, (OpOverload, OpOverloadPacket)) else op:
        yield from overloads(item)


def _state(op: OpOverload, facts: Mapping[str, object], origin: str) -> None:
    record = _RECORDS.get(op, OpRecord(op))
    for name in facts:
        if name in record.origins:
            raise RuleError(f"{op} already has a {name}, from {record.origins[name]} (again: {origin})")
    _RECORDS[op] = _with(record, facts, origin)
    record_of.cache_clear()


def _with(record: OpRecord, facts: Mapping[str, Any], origin: str) -> OpRecord:
    sharded = facts.get("sharded")
    if sharded is not None and not isinstance(sharded, Form):
        facts = {**facts, "sharded": Form(sharded)}
    return replace(record, **facts, origins={**record.origins, **dict.fromkeys(facts, origin)})


def _caller() -> str:
    """File and line of the statement that calls a function of this module."""
    frame = sys._getframe(2)  # inspect.stack would read source files, a second in all
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
