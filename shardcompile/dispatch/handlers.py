"""Handlers that users put in front of ours, at three levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

Handler = Callable[..., Any]


class Handlers:
    """Registries of user handlers.

    Attributes:
        ops: by aten or custom op overload, called in place of dispatch as the op: ``handler(*args, **kwargs)``.
        functions: by Python function, called above autograd as ``handler(func, types, args, kwargs)``.
        names: the same, by the function's qualified name, or that of an op, such as ``my_lib.my_op.default``.
    """

    ops: ClassVar[dict[Any, Handler]] = {}
    functions: ClassVar[dict[Any, Handler]] = {}
    names: ClassVar[dict[str, Handler]] = {}

    @staticmethod
    def of_function(function: object) -> Handler | None:
        """The handler of what a tensor's `__torch_function__` is called with."""
        found = Handlers.functions.get(function) or Handlers.names.get(getattr(function, "__qualname__", ""))
        return found or (Handlers.names.get(str(function)) if Handlers.names else None)
