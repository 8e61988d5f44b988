"""Sizes that may be symbols: what is known of them, compared and hinted at. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,  # 2.11 - 2.15
    guard_or_false,  # 2.11 - 2.15
    statically_known_true,  # 2.11 - 2.15
)


def same_symbol(a: object, b: object) -> bool:
    """Whether two sizes are equal; of those that get their value when the graph runs, whether they surely are.

    Installs a guard where the sizes are symbols whose values are known.
    """
    if a is b:
        return True
    return surely(a == b) if is_unbacked(a) or is_unbacked(b) else bool(a == b)


def settle(size: object, number: int) -> None:
    """Have a trace know a size by the number that it is on this rank, where other guards say so already.

    It is not compared: its hint, which all ranks share, is another number on most of them.
    """
    if not isinstance(size, torch.SymInt) or is_unbacked(size) or size.node.expr.is_number:
        return
    expression: Any = size.node.expr
    env: Any = size.node.shape_env
    symbol, *others = expression.free_symbols
    factor, rest = expression.coeff(symbol), expression.xreplace({symbol: sympy.Integer(0)})
    if others or expression != factor * symbol + rest or factor == 0:
        return
    value = (number - rest) / factor
    env.backed_var_to_val[symbol] = value  # 2.12 - 2.15; `var_to_val` before
    env.size_like.discard(symbol)  # what is may not become 0 or 1; 2.11 - 2.15
    env._set_replacement(symbol, value, "the block of a known cut")  # 2.11 - 2.15


def surely(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds whatever the symbols in it are; installs no guard."""
    return statically_known_true(condition)


def guarded(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds, with a guard; False if it depends on numbers that only a run gives."""
    if isinstance(condition, torch.SymBool) and condition.node.has_hint():
        return bool(condition)  # `guard_or_false` does not look at hints while sizes are traced obliviously
    return guard_or_false(condition)


def size_hint(value: Any, default: int = 64) -> int:
    """The number to reckon with for a size that may be symbolic; installs no guard.

    Args:
        value: the size.
        default: for each symbol that gets its value when the graph runs.
    """
    if isinstance(value, int):
        return value
    hint = value.node.hint
    if hint is None:
        expression, env = value.node.expr, value.node.shape_env
        suggested = env.var_to_hint_override  # 2.11 - 2.15
        hints = {s: suggested.get(s, env.create_symintnode(s, hint=None).node.hint) for s in expression.free_symbols}
        hint = expression.xreplace({s: sympy.Integer(default if h is None else h) for s, h in hints.items()})
    return int(hint)


def suggest_hint(size: Any, number: int) -> None:
    """Have `size_hint`, and Inductor, reckon with a number for a symbol that gets its value when the graph runs.

    Args:
        size: anything; only such a symbol is changed.
        number: the same on every rank.
    """
    if is_unbacked(size) and size.node.expr.is_symbol:
        size.node.shape_env.var_to_hint_override[size.node.expr] = max(number, 2)  # 2.11 - 2.15


def is_specialised(size: object) -> bool:
    """Whether a size that was a symbol has become a number while tracing."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_number)


def is_unbacked(value: object) -> bool:
    """Whether a size is a symbol that gets its value when the graph runs."""
    return isinstance(value, torch.SymInt) and bool(free_unbacked_symbols(value))  # 2.11 - 2.15


def expression_of(size: object) -> Any:
    """The formula of a size that may be symbolic: hashable, and equal for sizes that surely are."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
