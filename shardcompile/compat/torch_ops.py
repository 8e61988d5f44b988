"""What torch knows of an op: its decomposition, its functional variant, its kernel. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table  # 2.11 - 2.15


def decomposition_of(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The function that writes an op with other ops, from torch's own table, or None."""
    return decomposition_table.get(op)


def decomposition_by_torch(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A function that looks up torch's decomposition of an op at each call, and calls it."""

    def decomposed(*args: object, **kwargs: object) -> object:
        function = decomposition_of(op)
        assert function is not None, f"torch has no decomposition of {op}"
        return function(*args, **kwargs)

    return decomposed


def is_written(argument: torch.Argument) -> bool:
    """Whether an op writes to an argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def functional_variant(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The op that returns what `op` writes to its argument, or None."""
    namespace, name = op._schema.name.split("::")
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for candidate in (name, name.removesuffix("_")):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            arguments = [(a.name, str(a.type)) for a in found._schema.arguments]
            if arguments == wanted and not found._schema.is_mutable:
                return found
    return None


def kernel_of(op: torch._ops.OpOverload) -> Callable[..., object]:
    """The C++ function that `op(...)` calls, without the Python frame around it."""
    return op._op  # 2.11 - 2.15
