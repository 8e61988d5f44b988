"""Sizes that may be symbols: what is known of them, compared and hinted at. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,  # 2.11 - 2.15
    free_unbacked_symbols,  # 2.11 - 2.15
    statically_known_true,  # 2.11 - 2.15
)

IntLike = int | torch.SymInt
"""A size, which is a symbol in a trace."""
Formula: TypeAlias = sympy.Expr
"""What torch knows of a size in a trace: a symbol, a number, or a formula of both."""


def is_one(size: object) -> bool:
    """Whether a size is the number 1. A symbol is not compared: the answer would become a guard."""
    return isinstance(size, int) and size == 1


def divides(part: IntLike, size: IntLike) -> bool:
    """Whether a size is a multiple of another one for all values of their symbols. Installs no guard."""
    rest: Any = size % part  # type: ignore[operator]
    return statically_known_true(rest == 0)


def quotient(size: IntLike, part: IntLike) -> IntLike:
    """A size divided by a part that it is a multiple of; a number where no symbol is left."""
    found = size // part
    return int(found.node.expr) if isinstance(found, torch.SymInt) and found.node.expr.is_number else found


def guard_equal(a: object, b: object) -> bool:
    """Whether two sizes are equal.

    If the values of both are known, their comparison installs a guard. A symbol that gets its value when the graph runs
    equals another size only if the two are equal for all values.
    """
    if a is b:
        return True
    return statically_known_true(a == b) if is_unbacked(a) or is_unbacked(b) else bool(a == b)


def specialise(size: object, number: int) -> None:
    """Replace the symbol of a size by this rank's number, where other guards imply that number already.

    The size and the number are not compared: the size has the same hint on all ranks, and the number differs by rank.
    """
    if not isinstance(size, torch.SymInt) or is_unbacked(size) or size.node.expr.is_number:
        return
    expression: sympy.Expr = size.node.expr
    env: ShapeEnv = size.node.shape_env  # type: ignore[assignment,unused-ignore]  # torch 2.15: or None
    symbol, *others = expression.free_symbols
    factor, rest = expression.coeff(symbol), expression.xreplace({symbol: sympy.Integer(0)})
    if others or expression != factor * symbol + rest or factor == 0:
        return
    value = (number - rest) / factor
    env.backed_var_to_val[symbol] = value  # 2.12 - 2.15; `var_to_val` before
    env.size_like.discard(symbol)  # a symbol that is size-like may not become 0 or 1; 2.11 - 2.15
    env._set_replacement(symbol, value, "the shard of a known partition")  # 2.11 - 2.15
    _SPECIALISED.setdefault(env, set()).add(symbol)


def was_specialised(size: object) -> bool:
    """Whether `specialise` has made a size a number, rather than an op that took it for one."""
    if not isinstance(size, torch.SymInt):
        return False
    settled = _SPECIALISED.get(size.node.shape_env, set())
    return all(symbol in settled for symbol in size.node._expr.free_symbols)  # 2.11 - 2.15


_SPECIALISED: weakref.WeakKeyDictionary[Any, set[sympy.Symbol]] = weakref.WeakKeyDictionary()
"""By trace, the symbols that `specialise` has replaced."""


def guard_or_false(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds. Installs a guard, or returns False if the value is known only at run time."""
    if isinstance(condition, torch.SymBool) and condition.node.has_hint():
        return bool(condition)  # torch's `guard_or_false` ignores hints while sizes are traced obliviously
    return symbolic_shapes.guard_or_false(condition)  # 2.11 - 2.15


def size_hint(value: IntLike, default: int = 64) -> int:
    """The number to calculate with for a size that may be symbolic. Installs no guard.

    Inside of `nominal_hints`, some symbols count as `NOMINAL_SIZE`.

    Args:
        value: the size.
        default: the number for each symbol that gets its value when the graph runs.
    """
    if isinstance(value, int):
        return value
    hint, differs = value.node.hint, _DIFFERS.get()
    if hint is not None and differs is None:
        return int(hint)
    expression: sympy.Expr = value.node.expr
    env: Any = value.node.shape_env
    nominal = [s for s in expression.free_symbols if differs(env, s)] if differs is not None else []
    if hint is None or nominal:
        suggested = _suggested_hints(value)
        hints = {s: suggested.get(s, env.create_symintnode(s, hint=None).node.hint) for s in expression.free_symbols}
        hints |= dict.fromkeys(nominal, NOMINAL_SIZE)
        hint = expression.xreplace({s: sympy.Integer(default if h is None else h) for s, h in hints.items()})
    return int(hint)


NOMINAL_SIZE = 1024
"""What stands for the hint of a symbol, where ranks may have different hints and must come to the same result."""

_DIFFERS: ContextVar[Callable[[ShapeEnv, sympy.Symbol], bool] | None] = ContextVar("differs", default=None)


@contextlib.contextmanager
def nominal_hints(differs: Callable[[ShapeEnv, sympy.Symbol], bool]) -> Iterator[None]:
    """Inside of this, `size_hint` takes `NOMINAL_SIZE` for some symbols.

    Args:
        differs: whether ranks may have other hints of a symbol.
    """
    known: dict[tuple[int, sympy.Symbol], bool] = {}

    def once(env: ShapeEnv, symbol: sympy.Symbol) -> bool:
        key = id(env), symbol
        if key not in known:
            known[key] = differs(env, symbol)
        return known[key]

    token = _DIFFERS.set(once)
    try:
        yield
    finally:
        _DIFFERS.reset(token)


def suggest_hint(size: object, number: int) -> None:
    """Have `size_hint`, and Inductor, use a number as the hint of a symbol that gets its value when the graph runs.

    Args:
        size: anything; the function changes nothing unless this is such a symbol.
        number: the same on every rank.
    """
    if isinstance(size, torch.SymInt) and is_unbacked(size) and size.node.expr.is_symbol:
        _suggested_hints(size)[size.node.expr] = max(number, 2)


def _suggested_hints(size: torch.SymInt) -> dict[sympy.Expr, int]:
    """The hints of unbacked symbols that a trace was told, by symbol."""
    env: Any = size.node.shape_env
    return env.var_to_hint_override  # 2.11 - 2.15


def is_specialised(size: object) -> bool:
    """Whether a size that was a symbol has become a number while tracing."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_number)


def is_unbacked(value: object) -> bool:
    """Whether a size is a symbol that gets its value when the graph runs."""
    return isinstance(value, torch.SymInt) and bool(free_unbacked_symbols(value))  # 2.11 - 2.15


def has_no_hint(value: object) -> bool:
    """Whether nothing tells what a size will be when the graph runs, so that `size_hint` uses its default."""
    if not isinstance(value, torch.SymInt) or not is_unbacked(value):
        return False
    suggested = _suggested_hints(value)
    return any(symbol not in suggested for symbol in free_unbacked_symbols(value))


def expression_of(size: IntLike) -> Formula:
    """The formula of a size that may be symbolic. It is hashable; sizes with equal formulas are equal."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
