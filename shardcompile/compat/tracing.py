"""Whether something is traced, transformed or compiled, and how to step out of that. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.fx.traceback as fx_traceback
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # 2.11 - 2.15
from torch._guards import (
    CompileContext,  # 2.11 - 2.15
    detect_fake_mode,  # 2.11 - 2.15
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,  # 2.11 - 2.15
    DynamicOutputShapeException,  # 2.11 - 2.15
    FakeTensorMode,  # 2.11 - 2.15
    is_fake,  # 2.11 - 2.15
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor,  # 2.11 - 2.15
    FunctionalTensorMode,  # 2.11 - 2.15
    disable_functional_mode,  # 2.11 - 2.15
)
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,  # 2.11 - 2.15
    get_proxy_mode,  # 2.11 - 2.15
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,  # 2.11 - 2.15
    ShapeEnv,  # 2.11 - 2.15
)

UNKNOWN_OUTPUT_SHAPE = (DynamicOutputShapeException, DataDependentOutputException)
"""What an op on fake tensors raises whose result depends on values."""
UNKNOWN_SIZE = GuardOnDataDependentSymNode
"""What a trace raises where torch takes a decision by a size that only a run gives."""


def in_backward_pass() -> bool:
    """Whether autograd runs what runs now."""
    return torch._C._current_graph_task_id() != -1  # 2.11 - 2.15


@contextlib.contextmanager
def noted(**notes: str) -> Iterator[None]:
    """Inside of it, nodes that are traced say why: ``node.meta["custom"]["shardcompile"]``.

    In a backward pass ``["shardcompile_backward"]``, since AOTAutograd adds the forward node's notes to a backward one.
    """
    key = "shardcompile_backward" if in_backward_pass() else "shardcompile"
    outer = fx_traceback.current_meta.get("custom", {}).get(key, {})  # 2.11 - 2.15
    with fx_traceback.annotate({key: outer | notes}):
        yield


def is_traced() -> bool:
    """Whether what runs now is written to a graph."""
    return get_proxy_mode() is not None


def in_mode_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Enter the mode of a traced tensor, so that it can be computed with after the trace has left that mode.

    AOTAutograd (2.11 - 2.15) leaves it before it takes its arguments apart. Dynamo leaves the mode of fake tensors
    before it looks at what a function returns.
    """
    if isinstance(x, FunctionalTensor):
        return contextlib.nullcontext() if _functional_mode() is not None else FunctionalTensorMode()
    return faking_like(x)


def _functional_mode() -> object:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)  # 2.11 - 2.15


def is_compiling() -> bool:
    """Whether Dynamo is compiling something in this thread."""
    return CompileContext.try_get() is not None


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is going on: vmap, grad, jvp and what is made of them."""
    return torch._C._are_functorch_transforms_active()  # 2.11 - 2.15


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Compute as if no transform of `torch.func` were going on, which would wrap what is made."""
    if not is_transforming():
        return contextlib.nullcontext()
    return temporarily_clear_interpreter_stack()


def untraced() -> contextlib.AbstractContextManager[object]:
    """Inside a trace: compute on fake tensors without leaving a node in the graph. See `retraced`."""
    stack = contextlib.ExitStack()
    stack.enter_context(disable_functional_mode())
    stack.enter_context(disable_proxy_modes_tracing())
    return stack


def kept_with(mode: object) -> dict[object, object]:
    """What is kept for as long as a mode of fake tensors lives: in the mode, since it may refer to it."""
    return mode.__dict__.setdefault("_shardcompile", {})  # type: ignore[no-any-return]


def refusing_unknown_shapes(mode: FakeTensorMode, op: torch._ops.OpOverload) -> contextlib.AbstractContextManager[None]:
    """Inside of it an op on fake tensors whose result has a shape that depends on values raises, in a trace as well."""
    return contextlib.nullcontext() if mode.shape_env is None else _refuse(mode.shape_env, op)


@contextlib.contextmanager
def _refuse(shape_env: ShapeEnv, op: torch._ops.OpOverload) -> Iterator[None]:
    pending = shape_env.pending_fresh_unbacked_symbols  # 2.11 - 2.15
    before = len(pending)
    yield
    if len(pending) > before:
        del pending[before:]
        raise DynamicOutputShapeException(op)


def faking_like(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Where `x` is fake, ops that take no tensor make fake ones, too, even if the mode is not on at the moment."""
    mode = detect_fake_mode([x]) if is_fake(x) and get_proxy_mode() is None else None
    return contextlib.nullcontext() if mode is None else mode
