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


_OF_FACTORIES = {"dtype", "layout", "device", "pin_memory"}
"""Arguments that an op has to make its result, and the op that is given the result has not."""


def functional_variant(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The op that returns what `op` writes to its argument, or None."""
    namespace, name = op._schema.name.split("::")
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    names = {a for a, _ in wanted}
    plain = name.removesuffix("_")
    # Those of batch norms are left to decompositions, which say more of them.
    functional = [f"{plain}_functional"] if torch.Tag.nondeterministic_seeded in op.tags else []
    for candidate in (name, plain, *functional):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            found = getattr(packet, overload)
            arguments = [
                (a.name, str(a.type)) for a in found._schema.arguments if a.name in names or a.name not in _OF_FACTORIES
            ]
            if arguments == wanted and not found._schema.is_mutable:
                return found
    return None


def factory_arguments(op: torch._ops.OpOverload, functional: torch._ops.OpOverload) -> set[str]:
    """The arguments of a functional variant that the op itself has not."""
    return {a.name for a in functional._schema.arguments} - {a.name for a in op._schema.arguments}


def written_by_results(op: torch._ops.OpOverload) -> list[str | None]:
    """For each result of the functional variant the argument that `op` writes it to, or None if it returns it.

    The results of `op` come first, then the arguments that it writes to and does not return.
    """

    def aliases(x: Any) -> frozenset[str]:
        return frozenset() if x.alias_info is None else frozenset(x.alias_info.before_set)

    written = {aliases(a): a.name for a in op._schema.arguments if is_written(a)}
    returned = [written.get(aliases(r)) for r in op._schema.returns]
    return returned + [name for name in written.values() if name not in returned]


def kernel_of(op: torch._ops.OpOverload) -> Callable[..., object]:
    """The C++ function that `op(...)` calls, without the Python frame around it."""
    return op._op  # 2.11 - 2.15
