"""Handlers that users put in front of ours, at three levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

Handler = Callable[..., Any]


class Handlers:
    """Registries of user handlers.

    Attributes:
        ops: by aten or custom op overload, called in place of dispatch as ``handler(op, types, args, kwargs)``.
        functions: by Python function, called above autograd as ``handler(func, types, args, kwargs)``.
        names: the same, by the function's qualified name, for functions that are made anew on every call.
    """

    ops: ClassVar[dict[Any, Handler]] = {}
    functions: ClassVar[dict[Any, Handler]] = {}
    names: ClassVar[dict[str, Handler]] = {}
