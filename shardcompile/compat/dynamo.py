"""What Dynamo is told of inputs, and of functions that it must not trace. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint

import torch
from torch._dynamo.backends import registry  # 2.11 - 2.15
from torch._dynamo.eval_frame import set_code_exec_strategy  # 2.11 - 2.15
from torch._dynamo.types import (
    FrameAction,  # 2.11 - 2.15
    FrameExecStrategy,  # 2.11 - 2.15
)

from shardcompile.compat.block_symbols import GAPS, Gaps


def name_backend(name: str, function: str) -> None:
    """Have `torch.compile` know a backend by its name, also where the package is on the path but was not installed.

    Args:
        name: of the backend.
        function: ``module:function``, imported when the backend is first used.
    """
    registry._BACKENDS.setdefault(name, EntryPoint(name, function, "torch_dynamo_backends"))  # 2.11 - 2.15


def mark_weakly_dynamic(x: torch.Tensor, hints: Mapping[int, int | None], gaps: Gaps | None = None) -> None:
    """Have Dynamo give these dims symbols of their own, as `torch._dynamo.maybe_mark_dynamic` would.

    Set directly: the public function refuses fake tensors, takes no hint, and is a frame of Python for each dim.

    Args:
        x: an input of the function that is compiled.
        hints: by dim, the number to take decisions with in place of the present extent; None for that one.
        gaps: of a block with gaps along a cut dim.
    """
    marked: set[int] = getattr(x, "_dynamo_weak_dynamic_indices", set())  # by a user; a graph is guarded by all marks
    x._dynamo_weak_dynamic_indices = marked | set(hints)  # type: ignore[attr-defined]
    x._dynamo_hint_overrides = {d: h for d, h in hints.items() if h is not None}  # type: ignore[attr-defined]
    if gaps:
        x._dynamo_hint_overrides[GAPS] = gaps  # type: ignore[attr-defined]
    x._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def mark_static(x: torch.Tensor) -> None:
    """Have Dynamo take the shape of an input for numbers, whatever shapes came from the same place in earlier calls."""
    for name in ("_dynamo_weak_dynamic_indices", "_dynamo_hint_overrides"):  # 2.11 - 2.15
        vars(x).pop(name, None)
    x._dynamo_static_indices = set(range(x.ndim))  # type: ignore[attr-defined]  # 2.11 - 2.15
    x._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def has_guarded_address(x: torch.Tensor) -> bool:
    """Whether what is compiled holds for this very tensor alone, as Dynamo says of an optimizer's state."""
    return getattr(x, "_dynamo_static_input_type", None) == "guarded"  # 2.11 - 2.15


def keep_from_dynamo(function: Callable[..., object]) -> None:
    """Have Dynamo run this function and all that it calls as they are, where it does not trace them into a caller.

    Where a user's frame cannot be compiled, Dynamo tries to compile every frame below it on its own, those of a
    tensor's dispatch included. That happens around a graph break inside of a ``with``.
    """
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def keep_protocol_from_dynamo(cls: type) -> None:
    """`keep_from_dynamo` for what torch itself calls of a class, in eager frames of its own.

    Those of a tensor class are private to us or to Python by their name; those of an autograd function are two.
    """
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if (name.startswith("_") or name in ("forward", "backward")) and hasattr(function, "__code__"):
            keep_from_dynamo(function)
