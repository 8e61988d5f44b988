"""Marks for Dynamo on inputs, and on functions that it must not trace. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint

import torch
from torch._dynamo import trace_rules  # 2.11 - 2.15
from torch._dynamo.backends import registry  # 2.11 - 2.15
from torch._dynamo.eval_frame import set_code_exec_strategy  # 2.11 - 2.15
from torch._dynamo.types import (
    FrameAction,  # 2.11 - 2.15
    FrameExecStrategy,  # 2.11 - 2.15
)

from shardcompile.compat.shard_symbols import GAPS, SHARDS, Gaps


def name_backend(name: str, function: str) -> None:
    """Register a backend of `torch.compile` by name. An installed package has an entry point; a checkout has none.

    Args:
        name: the name of the backend.
        function: ``module:function``, which is imported when the backend is first used.
    """
    registry._BACKENDS.setdefault(name, EntryPoint(name, function, "torch_dynamo_backends"))  # 2.11 - 2.15


def mark_weakly_dynamic(
    x: torch.Tensor,
    hints: Mapping[int, int | None],
    gaps: Gaps | None = None,
    shards: Mapping[int, object] | None = None,
) -> None:
    """Have Dynamo give each of these dims a new symbol, as `torch._dynamo.maybe_mark_dynamic` would.

    The marks are set directly: the public function refuses fake tensors, takes no hint, and needs a call for each dim.

    Args:
        x: an input of the compiled function.
        hints: for each dim the number by which the compiler decides; None for the present size.
        gaps: the gaps of a shard along a sharded dim.
        shards: for dims of a known partition, what identifies it: sizes of equal shards get one symbol.
    """
    marked: set[int] = getattr(x, "_dynamo_weak_dynamic_indices", set())  # a user's; graphs are guarded by all marks
    x._dynamo_weak_dynamic_indices = marked | set(hints)  # type: ignore[attr-defined]
    x._dynamo_hint_overrides = {d: h for d, h in hints.items() if h is not None}  # type: ignore[attr-defined]
    if gaps:
        x._dynamo_hint_overrides[GAPS] = gaps  # type: ignore[attr-defined]
    if shards:
        x._dynamo_hint_overrides[SHARDS] = shards  # type: ignore[attr-defined]
    x._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def mark_static(x: torch.Tensor) -> None:
    """Have Dynamo trace the shape of an input as numbers, even if the same input had other shapes in earlier calls."""
    for name in ("_dynamo_weak_dynamic_indices", "_dynamo_hint_overrides"):  # 2.11 - 2.15
        vars(x).pop(name, None)
    x._dynamo_static_indices = set(range(x.ndim))  # type: ignore[attr-defined]  # 2.11 - 2.15
    x._has_dynamo_dim_marking = True  # type: ignore[attr-defined]


def has_guarded_address(x: torch.Tensor) -> bool:
    """Whether a graph is guarded by the address of this tensor, as Dynamo does for an optimizer's state."""
    return getattr(x, "_dynamo_static_input_type", None) == "guarded"  # 2.11 - 2.15


def make_known_to_einops(cls: type[torch.Tensor]) -> None:
    """Have einops meet a class of tensors before Dynamo traces the first call of it.

    einops keeps a table of the types that it has met, and Dynamo guards the table. A type that is met in a trace has
    the next call compiled again. For plain tensors torch does the same, at the same time.
    """

    def meet() -> None:
        for x in (torch.empty(1), torch.nn.Parameter(torch.empty(1)), torch.Tensor._make_wrapper_subclass(cls, (1,))):
            sys.modules["einops"].parse_shape(x, "_")

    if "einops" in trace_rules._lazy_module_init or "einops" not in sys.modules:  # 2.11 - 2.15
        trace_rules._lazy_module_init["einops"].append(meet)
    else:  # Dynamo has traced a call
        meet()


def keep_from_dynamo(function: Callable[..., object]) -> None:
    """Have Dynamo not compile this function, or a function that it calls, as a frame of its own.

    If Dynamo cannot compile a user's frame, it tries to compile each frame below it, such as a tensor's dispatch. This
    happens around a graph break inside a ``with``.
    """
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def keep_protocol_from_dynamo(cls: type) -> None:
    """Apply `keep_from_dynamo` to the methods of a class that torch itself calls.

    In a tensor class these have names with a leading underscore. In an autograd function they are `forward` and
    `backward`.
    """
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if (name.startswith("_") or name in ("forward", "backward")) and hasattr(function, "__code__"):
            keep_from_dynamo(function)
