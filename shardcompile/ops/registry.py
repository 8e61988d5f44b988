"""The registry of ops: one record for each op, and facts that hold for whole families of ops.

Facts about an op are stated in the module that implements them. They are collected in the record of the op, which the
engine looks up. `record` documents each fact.
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
from shardcompile.ops.record import Facts, LocalArgs, OpRecord, Rule, Run, ShardedDecomposition, Strategies

Ops = OpOverload | OpOverloadPacket | Sequence[OpOverload | OpOverloadPacket]
"""An overload, a packet (which stands for all of its overloads), or a sequence of these."""

Family = Callable[[OpOverload], Facts | None]
"""Returns the facts that hold for an op by its name, tags or schema; None if the op is not of the family."""

_RECORDS: dict[OpOverload, OpRecord] = {}
_FAMILIES: list[Family] = []

FUNCTIONS: dict[object, Run] = {}
"""Overrides of Python functions of torch above autograd. The compiler reads this dict, so it holds functions only."""

NAMED_FUNCTIONS: dict[str, Run] = {}
"""Overrides above autograd of ops that other packages define, by qualified name."""

CONDITIONS: dict[object, Callable[[Sequence[Any]], bool]] = {}
"""For functions whose override in `FUNCTIONS` does not take every call: whether it takes these arguments."""


def overloads(op: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    """Returns the overload itself, or all overloads of a packet."""
    if isinstance(op, OpOverload):
        return [op]
    return [getattr(op, name) for name in op.overloads()]


def register(op: Ops, rule: str | Strategies, local_args: LocalArgs | None = None) -> None:
    """Registers the rule of one or several ops.

    Args:
        op: an overload, a packet (all of its overloads), or several.
        rule: a notation such as ``"m k, k n -> m n"``, or a function from an `OpCall` to strategies.
        local_args: how arguments that state global sizes are converted to local ones.

    Raises:
        RuleError: the notation is malformed or does not fit the op, or the op has a rule already.
    """
    origin = _caller()
    for overload in _all(op):
        strategies = parse_notation(rule, overload) if isinstance(rule, str) else rule
        _state(overload, {"rule": Rule(strategies, local_args, origin)}, origin)


def state(op: Ops, **facts: Unpack[Facts]) -> None:
    """States facts about one or several ops: fields of `OpRecord`.

    Args:
        op: an overload, a packet (all of its overloads), or several.
        facts: the facts; each may be stated once for an op.

    Raises:
        RuleError: a fact was stated before.
    """
    origin = _caller()
    for overload in _all(op):
        _state(overload, facts, origin)


def state_function(
    functions: Sequence[object], run: Run, of: Ops = (), when: Callable[[Sequence[object]], bool] | None = None
) -> None:
    """Overrides Python functions of torch above autograd.

    Args:
        functions: the functions, as `__torch_function__` receives them.
        run: the override; called with the function and its arguments.
        of: the ops that the functions call in the end, if any.
        when: tells from the positional arguments whether `run` takes a call; by default it takes every call.

    Raises:
        RuleError: a function already has an override.
    """
    for function in functions:
        if function in FUNCTIONS:
            raise RuleError(f"{function} already has an override above autograd, {FUNCTIONS[function]}")
        FUNCTIONS[function] = run
        if when is not None:
            CONDITIONS[function] = when
    for overload in _all(of):
        _state(overload, {"functions": tuple(functions)}, _caller())


def state_named_function(name: str, run: Run) -> None:
    """Overrides an op above autograd that exists only once the package that defines it is imported.

    Args:
        name: qualified name of the op, with its namespace and without an overload.
        run: the override; called with the op and its arguments.

    Raises:
        RuleError: the op already has an override.
    """
    if name in NAMED_FUNCTIONS:
        raise RuleError(f"{name} already has an override above autograd, {NAMED_FUNCTIONS[name]}")
    NAMED_FUNCTIONS[name] = run


def family(facts: Family) -> Family:
    """Registers, as a decorator, facts of a family of ops. Facts that are stated for an op itself take precedence."""
    _FAMILIES.append(facts)
    record_of.cache_clear()
    return facts


@functools.cache
def record_of(op: OpOverload) -> OpRecord:
    """Returns the record of an op, whether or not any fact was stated about it."""
    record = _RECORDS.get(op, OpRecord(op))
    for facts_of in _FAMILIES:
        facts = facts_of(op)
        if facts is not None:
            record = _with(record, {k: v for k, v in facts.items() if k not in record.origins}, facts_of.__name__)
    return record


def records() -> Iterator[OpRecord]:
    """Yields the records of all ops about which a fact was stated."""
    return map(record_of, list(_RECORDS))


def find_rule(op: OpOverload) -> Rule | None:
    """Returns the rule that was registered for an op, or None."""
    record = _RECORDS.get(op)
    return None if record is None else record.rule


def replace_rule(op: OpOverload, rule: Rule) -> None:
    """Replaces the rule of an op by one of the user."""
    _RECORDS[op] = _with(_RECORDS.get(op, OpRecord(op)), {"rule": rule}, rule.origin)
    record_of.cache_clear()


def registered_ops() -> list[OpOverload]:
    """Returns all ops that have a rule."""
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
    if sharded is not None and not isinstance(sharded, ShardedDecomposition):
        facts = {**facts, "sharded": ShardedDecomposition(sharded)}
    return replace(record, **facts, origins={**record.origins, **dict.fromkeys(facts, origin)})


def _caller() -> str:
    """Returns file and line of the statement that calls a function of this module."""
    frame = sys._getframe(2)  # inspect.stack would read source files, which takes a second in all
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
