"""The table of rules: one entry per op."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Shard

from shardcompile.compat import OpOverload, OpOverloadPacket
from shardcompile.errors import RuleError
from shardcompile.layout import Layout
from shardcompile.rules.notation import parse_notation
from shardcompile.rules.strategy import OpCall, Strategy

Strategies = Callable[[OpCall], Iterable[Strategy]]
LocalArgs = Callable[[OpCall, tuple[Any, ...], Sequence[Layout], Callable[[Layout], tuple[Any, ...]]], tuple[Any, ...]]
"""From the call, the local arguments, the output layouts and a function that gives this rank's shape of a layout, to
the positional arguments of the local call."""


@dataclass(frozen=True)
class Rule:
    """How an op runs on blocks.

    Attributes:
        strategies: the legal ways along one mesh dim, besides replicating everything.
        local_args: how arguments that speak of global sizes are turned into local ones.
        origin: where it was registered.
    """

    strategies: Strategies
    local_args: LocalArgs | None = None
    origin: str = ""

    def ways(self, call: OpCall) -> Iterator[Strategy]:
        """The strategies for a call.

        Raises:
            RuleError: one of them does not fit the call.
        """
        for strategy in self.strategies(call):
            self._check(call, strategy)
            yield strategy

    def _check(self, call: OpCall, strategy: Strategy) -> None:
        inputs, outputs = len(call.tensors), len(call.op._schema.returns)
        if (len(strategy.inputs), len(strategy.outputs)) != (inputs, outputs):
            raise RuleError(
                f"{call.op}: the rule from {self.origin} gives placements for {len(strategy.inputs)} inputs and "
                f"{len(strategy.outputs)} outputs; this call has {inputs} tensors, and the op returns {outputs}"
            )
        for tensor, placement in zip(call.tensors, strategy.inputs, strict=True):
            if isinstance(placement, Shard) and not 0 <= placement.dim < tensor.ndim:
                raise RuleError(
                    f"{call.op}: the rule from {self.origin} wants {placement} of a tensor of {tensor.ndim} dims "
                    f"({tensor.layout.describe()})"
                )


_RULES: dict[OpOverload, Rule] = {}


def overloads(op: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    """An overload itself, or all overloads of a packet."""
    if isinstance(op, OpOverload):
        return [op]
    return [getattr(op, name) for name in op.overloads()]


def register(
    op: OpOverload | OpOverloadPacket | Sequence[OpOverload | OpOverloadPacket],
    rule: str | Strategies,
    local_args: LocalArgs | None = None,
) -> None:
    """Register the rule of one or several ops.

    Args:
        op: an overload, a packet (all of its overloads), or several.
        rule: a notation such as ``"m k, k n -> m n"``, or a function from an `OpCall` to strategies.
        local_args: how arguments that speak of global sizes are turned into local ones.

    Raises:
        RuleError: the notation is malformed or does not fit the op, or the op has a rule already.
    """
    caller = sys._getframe(1)  # inspect.stack would read source files, a second in all
    origin = f"{caller.f_code.co_filename.rsplit('/', 1)[-1]}:{caller.f_lineno}"
    items: Sequence[Any] = op if isinstance(op, (list, tuple)) else [op]
    for item in items:
        for overload in overloads(item):
            if overload in _RULES:
                raise RuleError(f"{overload} already has a rule, from {_RULES[overload].origin} (again: {origin})")
            strategies = parse_notation(rule, overload) if isinstance(rule, str) else rule
            _RULES[overload] = Rule(strategies, local_args, origin)


def find_rule(op: OpOverload) -> Rule | None:
    """The rule of an op, or None."""
    return _RULES.get(op)


def replace_rule(op: OpOverload, rule: Rule) -> None:
    """Put a user's rule in place of ours."""
    _RULES[op] = rule


def registered_ops() -> list[OpOverload]:
    """All ops that have a rule."""
    return list(_RULES)
