"""User-defined handlers, which take precedence over the library's dispatch of ops and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

Handler = Callable[..., Any]


class Handlers:
    """The registries of user handlers.

    Attributes:
        ops: by aten or custom op overload; called below autograd in place of the op: ``handler(*args, **kwargs)``.
        functions: by Python function; called above autograd as ``handler(func, types, args, kwargs)``.
        names: like `functions`, by the function's qualified name, or an op's name such as ``my_lib.my_op.default``.
    """

    ops: ClassVar[dict[Any, Handler]] = {}
    functions: ClassVar[dict[Any, Handler]] = {}
    names: ClassVar[dict[str, Handler]] = {}

    @staticmethod
    def of_function(function: object) -> Handler | None:
        """Returns the handler of a function that `__torch_function__` is called with, or None."""
        found = Handlers.functions.get(function) or Handlers.names.get(getattr(function, "__qualname__", ""))
        return found or (Handlers.names.get(str(function)) if Handlers.names else None)
