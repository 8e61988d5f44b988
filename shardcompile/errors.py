"""Errors of shardcompile.

All of them derive from `RuntimeError`, because Python's binary operators swallow a `TypeError` raised inside of an
operator's dispatch (``x + y`` would then only report "unsupported operand").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self


def _unchanged(kind: type[ShardError]) -> type[ShardError]:
    return kind


class ShardError(RuntimeError):
    """Base class of every error that shardcompile raises on purpose.

    Attributes:
        class_to_raise: maps the class that is instantiated to the class of the new error: itself, or a subclass of it.
    """

    class_to_raise: ClassVar[Callable[[type[ShardError]], type[ShardError]]] = _unchanged

    def __new__(cls, *args: object) -> Self:
        """Creates an error that torch's compiler does not wrap; see `compat.raised_errors`."""
        return super().__new__(ShardError.class_to_raise(cls), *args)  # type: ignore[return-value]


class LayoutError(ShardError):
    """A layout is malformed, or does not fit the tensor, the mesh or the other ranks."""


class RedistributeError(ShardError):
    """No sequence of collectives, or no meaningful one, leads from one layout to another."""


class UnsupportedOpError(ShardError):
    """An op cannot run on these layouts without giving a wrong result."""


class IndexRangeError(ShardError, IndexError):
    """An index is out of range; also raised where plain PyTorch raises a `RuntimeError`."""


class RuleError(ShardError):
    """A sharding rule is malformed, or registered twice."""


class CollectiveError(ShardError):
    """The arguments of a collective disagree with the layout it was given."""


class RowRangeError(CollectiveError, IndexRangeError):
    """A row index, or the rank that a row is sent to, is out of range on some rank; raised on all ranks."""


class PassError(ShardError):
    """A graph pass is unknown, or cannot be applied to a graph."""


class DivergenceError(ShardError):
    """Ranks have diverged, or one of them has died, so that the others would hang."""


def refusal(call: str, given: str, why: str, workaround: str) -> UnsupportedOpError:
    """Returns the error that refuses a call: the op, the layouts, the reason, and the way out.

    Args:
        call: the op or function, by the name that the user calls.
        given: the layouts of its inputs, as text.
        why: the reason, as a clause.
        workaround: what to do instead, as a sentence without its full stop.
    """
    return UnsupportedOpError(f"{call} of {given}: {why}. {workaround}")
