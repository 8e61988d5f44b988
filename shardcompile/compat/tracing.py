"""Whether code is traced, transformed or compiled, and how to step out of that. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.fx.traceback as fx_traceback
from torch._dynamo import compiled_autograd  # 2.11 - 2.15
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # 2.11 - 2.15
from torch._guards import (
    CompileContext,  # 2.11 - 2.15
    TracingContext,  # 2.11 - 2.15
    detect_fake_mode,  # 2.11 - 2.15
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,  # 2.11 - 2.15
    DynamicOutputShapeException,  # 2.11 - 2.15
    FakeTensor,  # 2.11 - 2.15
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

has_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # 2.11 - 2.15
"""The number of modes that see ops before tensor subclasses do."""

UNKNOWN_OUTPUT_SHAPE = (DynamicOutputShapeException, DataDependentOutputException)
"""The errors of an op on fake tensors whose result depends on values."""
UNKNOWN_SIZE = GuardOnDataDependentSymNode
"""The error of a trace when torch must decide by an unbacked size."""


def in_backward_pass() -> bool:
    """Whether this code runs inside a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1  # 2.11 - 2.15


def dispatch_is_off() -> bool:
    """Whether C++ has switched `__torch_dispatch__` off, as it does while it reads numbers out of a list."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded("Python")  # 2.11 - 2.15


@contextlib.contextmanager
def with_dispatch() -> Iterator[None]:
    """Inside the context, `__torch_dispatch__` is on, whoever has switched it off."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.Python, False),  # 2.11 - 2.15
        torch._C._SetExcludeDispatchKeyGuard(keys.PythonTLSSnapshot, False),  # what torch.tensor excludes, too, in 2.11
    ):
        yield


@contextlib.contextmanager
def annotate_nodes(**notes: str) -> Iterator[None]:
    """Inside the context, traced nodes get these notes in ``node.meta["custom"]["shardcompile"]``.

    In a backward pass the key is ``"shardcompile_backward"``, since AOTAutograd copies the notes of a forward node to
    its backward nodes.
    """
    key = "shardcompile_backward" if in_backward_pass() else "shardcompile"
    outer = fx_traceback.current_meta.get("custom", {}).get(key, {})  # 2.11 - 2.15
    with fx_traceback.annotate({key: outer | notes}):
        yield


def is_traced() -> bool:
    """Whether a tracer records this code as a graph."""
    return get_proxy_mode() is not None


def tracer_of(x: torch.Tensor) -> str | None:
    """The tracer that records a wrapper subclass as one value of its graph; None if none does.

    AOTAutograd records its inner tensors.
    """
    if torch._C._is_tracing():
        return "torch.jit.trace"
    mode = get_proxy_mode()
    if mode is None or x not in mode.tracer.tensor_tracker:  # 2.11 - 2.15
        return None
    return "make_fx, which torch.export and torch.func.linearize use as well,"


def compiles_backward_passes() -> bool:
    """Whether compiled autograd will trace the backward passes of what runs now."""
    return bool(compiled_autograd.compiled_autograd_enabled) and torch.is_grad_enabled()  # 2.11 - 2.15


def in_mode_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Enter the mode of a traced tensor again, to compute with the tensor after the trace has left the mode.

    AOTAutograd (2.11 - 2.15) leaves the functional mode before it takes arguments apart. Dynamo leaves the fake mode
    before it looks at the results of a function.
    """
    if isinstance(x, FunctionalTensor):
        return contextlib.nullcontext() if _functional_mode() is not None else FunctionalTensorMode()
    return fake_mode_like(x)


def _functional_mode() -> object:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)  # 2.11 - 2.15


def is_compiling() -> bool:
    """Whether Dynamo compiles a frame in this thread."""
    return CompileContext.try_get() is not None


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is active, such as vmap, grad or jvp."""
    return torch._C._are_functorch_transforms_active()  # 2.11 - 2.15


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Inside the context, ops skip autograd, and with it the decompositions that torch registers there."""
    return torch._C._AutoDispatchBelowAutograd()  # type: ignore[no-any-return,unused-ignore]  # 2.11 - 2.15


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Inside the context, no transform of `torch.func` is active. An active one would wrap new tensors."""
    if not is_transforming():
        return contextlib.nullcontext()
    return temporarily_clear_interpreter_stack()


def outside_trace() -> contextlib.AbstractContextManager[object]:
    """Inside the context, ops on fake tensors leave no node in the graph. `retrace` adds nodes for sizes later."""
    stack = contextlib.ExitStack()
    stack.enter_context(disable_functional_mode())
    stack.enter_context(disable_proxy_modes_tracing())
    return stack


_IMBALANCE = "_shardcompile_imbalance"


def note_imbalance(ratio: float) -> None:
    """Note for the running compilation how much larger than the mean the largest shard of an input is."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None and context.fake_mode.shape_env is not None:
        notes = vars(context.fake_mode.shape_env)
        notes[_IMBALANCE] = max(ratio, notes.get(_IMBALANCE, 1.0))


def imbalance_of(traced: Iterable[torch.Tensor]) -> float:
    """The largest ratio that `note_imbalance` noted when tensors were traced; 1 if none was."""
    for x in traced:
        for size in x.shape:
            if isinstance(size, torch.SymInt):
                return float(vars(size.node.shape_env).get(_IMBALANCE, 1.0))
    return 1.0


def memo_of(mode: object) -> dict[object, object]:
    """A memo that lives as long as a fake mode. It is an attribute of the mode, since its entries may refer to that."""
    return mode.__dict__.setdefault("_shardcompile", {})  # type: ignore[no-any-return]


def refuse_unknown_shapes(mode: FakeTensorMode, op: torch._ops.OpOverload) -> contextlib.AbstractContextManager[None]:
    """Inside the context, even in a trace, a fake op raises if the shape of its result depends on values."""
    return contextlib.nullcontext() if mode.shape_env is None else _refuse(mode.shape_env, op)


@contextlib.contextmanager
def _refuse(shape_env: ShapeEnv, op: torch._ops.OpOverload) -> Iterator[None]:
    pending = shape_env.pending_fresh_unbacked_symbols  # 2.11 - 2.15
    before = len(pending)
    yield
    if len(pending) > before:
        del pending[before:]
        raise DynamicOutputShapeException(op)


def fake_mode_like(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """The fake mode of `x`, so that ops without inputs make fake tensors, too. If `x` is not fake, a null context."""
    mode = detect_fake_mode([x]) if is_fake(x) and get_proxy_mode() is None else None
    return contextlib.nullcontext() if mode is None else mode


def is_fake_outside_traces(x: object) -> bool:
    """Whether a tensor is one of `offline.fake_tensors`. The mode of a trace has symbols for sizes; theirs has none."""
    return type(x) is FakeTensor and x.fake_mode.shape_env is None
