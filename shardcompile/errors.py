"""Errors of shardcompile.

All derive from `RuntimeError`: a `TypeError` raised inside an operator's dispatch is swallowed by Python's binary
operators (``x + y`` would then only say "unsupported operand").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self


def _as_it_is(kind: type[ShardError]) -> type[ShardError]:
    return kind


class ShardError(RuntimeError):
    """Base class of every error that shardcompile raises on purpose.

    Attributes:
        class_to_raise: chooses the class of a new error: the one that was called, or a subclass of it.
    """

    class_to_raise: ClassVar[Callable[[type[ShardError]], type[ShardError]]] = _as_it_is

    def __new__(cls, *args: object) -> Self:
        """Make an error that torch's compiler does not wrap; see `compat.raised_errors`."""
        return super().__new__(ShardError.class_to_raise(cls), *args)  # type: ignore[return-value]


class LayoutError(ShardError):
    """A layout is malformed, or does not fit the tensor, the mesh or the other ranks."""


class RedistributeError(ShardError):
    """There is no way, or no meaningful way, from one layout to another."""


class UnsupportedOpError(ShardError):
    """An operation cannot be carried out on this layout without giving a wrong result."""


class IndexRangeError(ShardError, IndexError):
    """An index is out of range; also where plain PyTorch has a `RuntimeError` for it."""


class RuleError(ShardError):
    """A sharding rule is malformed, or registered twice."""


class CollectiveError(ShardError):
    """The arguments of a collective disagree with the layout it was given."""


class RowRangeError(CollectiveError, IndexRangeError):
    """A number of a row, or the rank that a row is sent to, is out of range on some rank; raised on all of them."""


class PassError(ShardError):
    """A graph pass is unknown, or cannot be applied to a graph."""


class DivergenceError(ShardError):
    """Ranks do not do the same, or one of them has died, so that others would wait without end."""


def refusal(call: str, given: str, why: str, way_out: str) -> UnsupportedOpError:
    """The error with which a call is refused: what was called, on which layouts, why not, and what to do instead.

    Args:
        call: the op or function, as the user knows it.
        given: the layouts that it met.
        why: a clause.
        way_out: a sentence without its full stop.
    """
    return UnsupportedOpError(f"{call} of {given}: {why}. {way_out}")
