"""Errors of ours that torch's compiler lets through as they are. Seen in torch 2.11 to 2.15.

The compiler wraps what is raised while a graph is made: Dynamo wraps what an op raises into `TorchRuntimeError`, and
what a backend raises into `BackendCompilerFailed`. Some errors of its own pass: an `Unsupported` where Dynamo runs an
op, an `UncapturedHigherOrderOpError` from there to the caller, a `ShortenTraceback` from the backend. So an error that
is raised while it compiles is of a subclass of our class and of these.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.exc import ShortenTraceback, UncapturedHigherOrderOpError, Unsupported  # 2.11 - 2.15
from torch._dynamo.utils import get_current_node  # 2.11 - 2.15

from shardcompile import errors
from shardcompile.compat.tracing import is_compiling

__all__ = ["let_errors_through"]


def let_errors_through() -> None:
    """From now on, errors of ours keep type and text inside compiled functions."""
    errors.ShardError.class_to_raise = _class_to_raise


def _class_to_raise(kind: type[errors.ShardError]) -> type[errors.ShardError]:
    if not is_compiling() or issubclass(kind, ShortenTraceback):
        return kind
    return _let_through(kind, get_current_node() is not None)  # type: ignore[arg-type]  # mypy asks for a hash


@functools.cache
def _let_through(kind: type[errors.ShardError], by_dynamo: bool) -> type[errors.ShardError]:
    """The subclass of an error's class that the compiler lets through.

    Args:
        kind: the class.
        by_dynamo: whether Dynamo runs an op on fake tensors; otherwise a backend is at work.
    """

    def init(self: errors.ShardError, *args: object) -> None:
        kind.__init__(self, *args)
        ShortenTraceback.__init__(self, str(self), first_useful_frame=None)  # type: ignore[arg-type]

    def reduce(self: errors.ShardError) -> tuple[Any, ...]:
        return kind, self.args

    names: dict[str, Any] = {"__init__": init, "__reduce__": reduce, "__module__": kind.__module__}
    bases: tuple[type, ...] = (kind, ShortenTraceback)
    if by_dynamo:
        bases = (*bases, UncapturedHigherOrderOpError, Unsupported)
        # Dynamo sets it to False. True: the graph does not end before the call, also without ``fullgraph=True``.
        names["skip_frame"] = property(lambda _: True, lambda *_: None)
    found: type[errors.ShardError] = type(kind.__name__, bases, names)
    return found
