"""The one door to private names of torch. Supported range: 2.11 to 2.15.

Every private name that shardcompile relies on is imported here, with the versions in which it was seen. A test
asserts that all of them exist in the installed version, so that an upgrade breaks in one file with one message.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx.traceback as fx_traceback
from torch._C._distributed_c10d import _register_work  # 2.11 - 2.15
from torch._dynamo.eval_frame import set_code_exec_strategy  # 2.11 - 2.15
from torch._dynamo.types import FrameAction, FrameExecStrategy  # 2.11 - 2.15
from torch._guards import CompileContext, TracingContext, detect_fake_mode  # 2.11 - 2.15
from torch._inductor.custom_graph_pass import CustomGraphPass  # 2.11 - 2.15
from torch._ops import OpOverload, OpOverloadPacket  # 2.11 - 2.15
from torch._subclasses.fake_tensor import (  # 2.11 - 2.15
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    is_fake,
)
from torch._subclasses.functional_tensor import (  # 2.11 - 2.15
    FunctionalTensor,
    FunctionalTensorMode,
    disable_functional_mode,
)
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources  # 2.11 - 2.15
from torch.distributed.distributed_c10d import _get_default_store, _resolve_process_group  # 2.11 - 2.15
from torch.distributed.tensor.debug import _comm_mode  # 2.11 - 2.15
from torch.fx.experimental.proxy_tensor import (  # 2.11 - 2.15
    _SympyExprTrackerValue,
    disable_proxy_modes_tracing,
    get_proxy_mode,
)
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols,  # 2.11 - 2.15
    guard_or_false,  # 2.11 - 2.15
    statically_known_true,  # 2.11 - 2.15
)
from torch.utils._python_dispatch import return_and_correct_aliasing  # 2.11 - 2.15
from torch.utils._sympy.interp import sympy_interp  # 2.11 - 2.15
from torch.utils._sympy.reference import PythonReferenceAnalysis  # 2.11 - 2.15

from shardcompile.compat.block_symbols import GAPS, Gaps
from shardcompile.compat.patches import keep_ranks_alike as keep_ranks_alike
from shardcompile.compat.patches import trace_size_obliviously as trace_size_obliviously
from shardcompile.compat.patches import without_guards as without_guards
from shardcompile.compat.worlds import add_guard, forget_with_world, note_trace, start_epoch, world_epoch
from shardcompile.compat.wrappers import exchange_tensors as exchange_tensors

__all__ = [
    "UNKNOWN_OUTPUT_SHAPE",
    "CustomGraphPass",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "coordinate",
    "count_as_collective",
    "current_mesh",
    "decomposition_of",
    "detect_fake_mode",
    "expression_of",
    "faking_like",
    "first_input_size",
    "follow_view",
    "forget_with_world",
    "from_first_symbols",
    "functional_variant",
    "give_storage",
    "global_extents",
    "group_name_of",
    "guarded",
    "has_guarded_address",
    "in_backward_pass",
    "in_mode_of",
    "is_compiling",
    "is_fake",
    "is_specialised",
    "is_traced",
    "is_transforming",
    "is_unbacked",
    "keep_first_proxies",
    "keep_from_dynamo",
    "keep_protocol_from_dynamo",
    "keep_ranks_alike",
    "keep_symbol",
    "kernel_of",
    "let_comm_debug_mode_see_through",
    "lowered_when_traced",
    "mark_static",
    "mark_weakly_dynamic",
    "mesh_itself",
    "note_input_size",
    "note_trace",
    "noted",
    "once_in_trace",
    "outside_transforms",
    "process_group",
    "refusing_unknown_shapes",
    "register_work",
    "retraced",
    "same_symbol",
    "settle",
    "share_storage",
    "shares_storage",
    "size_hint",
    "stands_for_itself",
    "start_epoch",
    "store",
    "suggest_hint",
    "surely",
    "trace_size_obliviously",
    "unrecorded_symbols",
    "untraced",
    "without_base",
    "without_guards",
    "world_epoch",
]


UNKNOWN_OUTPUT_SHAPE = (DynamicOutputShapeException, DataDependentOutputException)
"""What an op on fake tensors raises whose result depends on values."""


def process_group(name: str) -> ProcessGroup:
    """The process group with this name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def store() -> torch.distributed.Store:
    """The key-value store of the default process group."""
    return _get_default_store()


def group_name_of(mesh: DeviceMesh, mesh_dim: int) -> str:
    """Name of the process group of this rank along a mesh dim."""
    return mesh.get_group(mesh_dim).group_name


def mesh_itself(mesh: DeviceMesh | None) -> DeviceMesh:
    """A mesh, in place of what a graph that gets it as an input is traced with; by default the current one.

    Raises:
        RuntimeError: none was given, and there is no current one.
    """
    found: DeviceMesh = current_mesh() if mesh is None else getattr(mesh, "real_obj", mesh)  # 2.12 - 2.15
    return found


def coordinate(mesh: DeviceMesh) -> Any:
    """This rank's place in a mesh, a number for each mesh dim; None outside of it."""
    return mesh.get_coordinate()


def register_work(tensor: torch.Tensor, work: torch.distributed.Work) -> None:
    """Have `wait_tensor(tensor)` wait for `work`; several works of one tensor are all awaited."""
    _register_work(tensor, work)


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``. What is being compiled holds while that is the current one.

    Raises:
        RuntimeError: there is none.
    """
    mesh = _innermost_mesh()
    if TracingContext.try_get() is not None:
        kept = weakref.ref(mesh)  # what keeps a mesh keeps its process groups
        add_guard(lambda _: _is_innermost(kept()), "the current mesh is that of the trace")
    return mesh


def _innermost_mesh() -> DeviceMesh:
    current = getattr(DeviceMesh, "_get_current_mesh", None)  # where it lives moved between 2.11 and 2.15
    return _mesh_resources.get_current_mesh() if current is None else current()


def _is_innermost(mesh: DeviceMesh | None) -> bool:
    try:
        return mesh is not None and _innermost_mesh() is mesh
    except RuntimeError:
        return False


def same_symbol(a: object, b: object) -> bool:
    """Whether two sizes are equal; of those that get their value when the graph runs, whether they surely are.

    Installs a guard where the sizes are symbols whose values are known.
    """
    if a is b:
        return True
    return surely(a == b) if is_unbacked(a) or is_unbacked(b) else bool(a == b)


def settle(size: object, number: int) -> None:
    """Have a trace know a size by the number that it is on this rank, where other guards say so already.

    It is not compared: its hint, which all ranks share, is another number on most of them.
    """
    if not isinstance(size, torch.SymInt) or is_unbacked(size) or size.node.expr.is_number:
        return
    expression: Any = size.node.expr
    env: Any = size.node.shape_env
    symbol, *others = expression.free_symbols
    factor, rest = expression.coeff(symbol), expression.xreplace({symbol: sympy.Integer(0)})
    if others or expression != factor * symbol + rest or factor == 0:
        return
    value = (number - rest) / factor
    env.backed_var_to_val[symbol] = value  # 2.12 - 2.15; `var_to_val` before
    env.size_like.discard(symbol)  # what is may not become 0 or 1; 2.11 - 2.15
    env._set_replacement(symbol, value, "the block of a known cut")  # 2.11 - 2.15


def surely(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds whatever the symbols in it are; installs no guard."""
    return statically_known_true(condition)


def guarded(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds, with a guard; False if it depends on numbers that only a run gives."""
    if isinstance(condition, torch.SymBool) and condition.node.has_hint():
        return bool(condition)  # `guard_or_false` does not look at hints while sizes are traced obliviously
    return guard_or_false(condition)


def size_hint(value: Any, default: int = 64) -> int:
    """The number to reckon with for a size that may be symbolic; installs no guard.

    Args:
        value: the size.
        default: for each symbol that gets its value when the graph runs.
    """
    if isinstance(value, int):
        return value
    hint = value.node.hint
    if hint is None:
        expression, env = value.node.expr, value.node.shape_env
        suggested = env.var_to_hint_override  # 2.11 - 2.15
        hints = {s: suggested.get(s, env.create_symintnode(s, hint=None).node.hint) for s in expression.free_symbols}
        hint = expression.xreplace({s: sympy.Integer(default if h is None else h) for s, h in hints.items()})
    return int(hint)


def suggest_hint(size: Any, number: int) -> None:
    """Have `size_hint`, and Inductor, reckon with a number for a symbol that gets its value when the graph runs.

    Args:
        size: anything; only such a symbol is changed.
        number: the same on every rank.
    """
    if is_unbacked(size) and size.node.expr.is_symbol:
        size.node.shape_env.var_to_hint_override[size.node.expr] = max(number, 2)  # 2.11 - 2.15


def global_extents(shape: Sequence[object]) -> tuple[Any, ...]:
    """The global extents of a result, which were computed while nothing was traced, computed again: see `retraced`.

    Those of 0 and 1 are numbers, with a guard, as they are where an input has them. A 1 may be broadcast. And where a
    formula is 0 on this call only, torch (2.11 - 2.15) divides by it: from ``rows * columns == rows`` it takes that
    there is one column.
    """
    return tuple(_number_if_small(n) for n in retraced(shape))


def _number_if_small(extent: Any) -> object:
    small = isinstance(extent, torch.SymInt) and not is_unbacked(extent) and size_hint(extent) in (0, 1)
    return int(extent) if small else extent


def is_specialised(size: object) -> bool:
    """Whether a size that was a symbol has become a number while tracing."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_number)


def is_unbacked(value: object) -> bool:
    """Whether a size is a symbol that gets its value when the graph runs."""
    return isinstance(value, torch.SymInt) and bool(free_unbacked_symbols(value))  # 2.11 - 2.15


def count_as_collective(op_packets: Sequence[Any]) -> None:
    """Have CommDebugMode count these ops."""
    for packet in op_packets:
        _comm_mode.NATIVE_TO_PY_MAPPING[packet] = packet


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of contiguous tensors of one dtype, one tensor after the other: [n], in one call."""
    return torch._utils._flatten_dense_tensors(tensors)


def lowered_when_traced(op: torch._ops.OpOverload, fake: Callable[..., object]) -> Callable[..., Any]:
    """The fake kernel of a collective, which teaches Inductor the op when a trace meets it for the first time.

    Inductor's lowerings take more than a second to import, which eager programs need not pay.
    """

    def traced(*args: Any) -> object:
        _lower_as_collective(op)
        return fake(*args)

    return traced


@functools.cache
def _lower_as_collective(op: torch._ops.OpOverload) -> None:
    """Have Inductor treat an op as a collective: keep its order, and its send buffer alive until the wait.

    As an ordinary fallback the buffer would be reused while it is still being sent.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def lowering(*args: Any) -> object:
        kernel: Any = ir._CollectiveKernel.create_out_of_place(op, *args)
        return torch.utils._pytree.tree_map(ir.TensorBox.create, kernel)

    # No constraint on strides: to ask for those of the trace, Inductor would compare symbolic strides, and so
    # specialise on the size of this rank's block.
    register_lowering(op, type_promotion_kind=None)(lowering)


def preserve_node_ordering(graph: torch.fx.Graph, before: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]) -> None:
    """Have Inductor run, for each node, others before it that it does not read."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering as preserve  # 2.11 - 2.15
    from torch.utils._ordered_set import OrderedSet

    preserve(graph, {node: OrderedSet(others) for node, others in before.items()})


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


def inductor_has(option: str) -> bool:
    """Whether the installed Inductor has a setting of this name."""
    from torch._inductor import config

    return option in config._config  # type: ignore[attr-defined]  # 2.11 - 2.15


def is_traced() -> bool:
    """Whether what runs now is written to a graph."""
    return get_proxy_mode() is not None


def in_mode_of(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Compute with a tensor of a trace that has left the mode in which such tensors are computed with.

    AOTAutograd (2.11 - 2.15) leaves it before it asks what it is given for its parts, and Dynamo leaves that of fake
    tensors before it looks at what a function returns.
    """
    if isinstance(x, FunctionalTensor):
        return contextlib.nullcontext() if _functional_mode() is not None else FunctionalTensorMode()
    return faking_like(x)


def _functional_mode() -> object:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)  # 2.11 - 2.15


def is_compiling() -> bool:
    """Whether Dynamo is compiling something in this thread."""
    return CompileContext.try_get() is not None


def decomposition_of(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The op in terms of other ops, from torch's own table, or None."""
    from torch._decomp import decomposition_table  # 2.11 - 2.15

    return decomposition_table.get(op)


def decomposition_by_torch(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Torch's decomposition of an op that has one, looked up when it is called: importing the table takes time."""

    def decomposed(*args: object, **kwargs: object) -> object:
        function = decomposition_of(op)
        assert function is not None, f"torch has no decomposition of {op}"
        return function(*args, **kwargs)

    return decomposed


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


def mark_weakly_dynamic(x: torch.Tensor, hints: Mapping[int, int | None], gaps: Gaps | None = None) -> None:
    """Have Dynamo give these dims symbols of their own, as `torch._dynamo.maybe_mark_dynamic` would.

    Set directly: the public function refuses fake tensors, takes no hint, and is a frame of Python for each dim.

    Args:
        x: an input of the function that is compiled.
        hints: by dim, the number to take decisions with in place of the present extent; None for that one.
        gaps: of a block with gaps along a cut dim.
    """
    x._dynamo_weak_dynamic_indices = set(hints)  # type: ignore[attr-defined]
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


def share_storage(view: torch.Tensor, base: torch.Tensor) -> None:
    """Have a wrapper that is a view of another one say so: same storage, as the compiler's alias analysis expects."""
    torch._functionalize_unsafe_set(view, base)  # 2.11 - 2.15


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory, or in parts of it."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]  # 2.11 - 2.15


def forbid_writes_with_gradients(view: torch.Tensor) -> None:
    """Have autograd refuse to write to a view, and to what it is a view of, where gradients are wanted.

    For one that was turned in place: autograd knows by which view op it came, not where it lies in memory, and would
    repeat that op after a write, as if the view had not been turned. What it says then is what it says of views that
    `split` returns: the write is to be replaced by a function that returns its result.
    """
    torch._C._autograd._set_creation_meta(view, torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE)  # 2.11 - 2.15


def without_base(x: torch.Tensor) -> torch.Tensor:
    """The same memory, not known as a view: Dynamo asks for the sizes of what an input is a view of."""
    return x.detach() if x._is_view() else x  # 2.11 - 2.15


def give_storage(x: torch.Tensor) -> None:
    """Have a wrapper without elements claim a storage of a byte.

    To make a fake tensor of it torch (2.11 - 2.15) would resize its storage to nothing, which a wrapper has not got.
    """
    like = torch.Tensor._make_wrapper_subclass(type(x), x.shape, dtype=x.dtype, device=x.device, storage_size=1)
    share_storage(x, like)


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is going on: vmap, grad, jvp and what is made of them."""
    return torch._C._are_functorch_transforms_active()  # 2.11 - 2.15


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Compute as if no transform of `torch.func` were going on, which would wrap what is made."""
    if not is_transforming():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # 2.11 - 2.15

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


def refusing_unknown_shapes(mode: Any, op: torch._ops.OpOverload) -> contextlib.AbstractContextManager[None]:
    """Inside of it an op on fake tensors whose result has a shape that depends on values raises, in a trace as well."""
    return contextlib.nullcontext() if mode.shape_env is None else _refusing(mode.shape_env, op)


@contextlib.contextmanager
def _refusing(shape_env: Any, op: torch._ops.OpOverload) -> Iterator[None]:
    pending = shape_env.pending_fresh_unbacked_symbols  # 2.11 - 2.15
    before = len(pending)
    yield
    if len(pending) > before:
        del pending[before:]
        raise DynamicOutputShapeException(op)


def retraced(sizes: Sequence[object]) -> tuple[Any, ...]:
    """Sizes that were computed while nothing was traced, computed again from what the trace knows."""
    mode = get_proxy_mode()
    if mode is None or not any(isinstance(s, torch.SymInt) for s in sizes):
        return tuple(sizes)
    known = {e: entry.value for e, entry in mode.tracer.sympy_expr_tracker.items()}  # 2.11 - 2.15
    known.update((kept.node.expr, kept) for kept in _KEPT_SYMBOLS.get(mode.tracer, ()))  # by now renamed, maybe
    return tuple(_retraced(known, s) if isinstance(s, torch.SymInt) else s for s in sizes)


def from_first_symbols(make: Callable[[], object]) -> Any:
    """A size in terms of the inputs that were there first, whatever it is computed from.

    What is computed from the size of a gradient would be read off the gradient by the backward graph. Inductor
    (2.11 - 2.15) wants every symbol in the sizes of a graph's inputs to be the whole size of one of them, or an input.
    """
    with untraced():
        size = make()
    return retraced([size])[0]


class _FirstKept(dict[Any, Any]):
    """A dict whose entries are never replaced."""

    def __setitem__(self, key: object, value: object) -> None:
        self.setdefault(key, value)


def keep_symbol(size: object) -> Any:
    """Have `retraced` use this size for its symbol, which gets its value when the graph runs; returns it.

    The gradients of the forward graph's results may have the same size. They are inputs of the joint graph and come
    first, but the forward graph cannot read it off them.
    """
    mode = get_proxy_mode()
    if mode is not None and isinstance(size, torch.SymInt):
        _KEPT_SYMBOLS.setdefault(mode.tracer, []).append(size)
    return size


_KEPT_SYMBOLS: weakref.WeakKeyDictionary[Any, list[torch.SymInt]] = weakref.WeakKeyDictionary()


def keep_first_proxies() -> None:
    """In the trace that is going on, have the first node that gives a symbol stay the one that stands for it.

    The tracer (2.11 - 2.15) takes the last one: after `a + b` the result of `(a + b) - b` stands for the input `a`, and
    a sum that is built anew from `a` and `b` is then defined by itself, without end.
    """
    mode = get_proxy_mode()
    if mode is None or type(mode.tracer.sympy_expr_tracker) is not dict:
        return
    tracker = _FirstKept()
    # Of the inputs of a joint graph, too: the tracer has gone through them by now, gradients last.
    nodes: dict[Any, Any] = mode.tracer.symnode_tracker.sym_node_dict  # type: ignore[assignment]  # 2.11 - 2.15
    for node, proxy in nodes.items():
        if node.pytype is int and node.is_symbolic() and node.expr.is_symbol:
            tracker[node.expr] = _SympyExprTrackerValue(proxy, torch.SymInt(node))
    for expression, entry in mode.tracer.sympy_expr_tracker.items():
        tracker[expression] = entry
    mode.tracer.sympy_expr_tracker = tracker


def _retraced(known: dict[Any, Any], size: torch.SymInt) -> object:
    if not size.node.is_symbolic():
        return size
    expression = size.node.expr
    if expression.is_number:  # a symbol that is known by now
        return int(expression)
    if expression in known:
        return known[expression]
    symbols = {s: known[s] for s in expression.free_symbols if s in known}
    if len(symbols) < len(expression.free_symbols):
        return size
    return sympy_interp(_Arithmetic, symbols, expression)


class _Arithmetic(PythonReferenceAnalysis):
    """Formulas on sizes."""

    @staticmethod
    def trunc_to_int(x: object, dtype: object) -> object:
        """``int(x)``, for which torch (2.11 - 2.15) would leave a formula in place of a number."""
        return torch.sym_int(x)


_MEMOS: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def once_in_trace(
    what: tuple[object, ...], like: torch.SymInt, make: Callable[[], Sequence[torch.SymInt]]
) -> Sequence[Any]:
    """Symbols that get their value when the graph runs: made once in a trace, and the same ones in all of its passes.

    Dynamo and AOTAutograd run a function several times before they record it, and make the gradients of its results
    of what they found. These have to have the symbols of the recorded graph, and its nodes have to stand for them.

    Args:
        what: names them: strings, numbers, and formulas as `expression_of` gives them.
        like: any symbol of the trace.
        make: makes them.
    """
    mode, shape_env = get_proxy_mode(), like.node.shape_env
    memo = _MEMOS.setdefault(shape_env if mode is None else mode.tracer, {})
    of_all = _MEMOS.setdefault(shape_env, {})
    for kept in (memo, of_all):
        _follow_replacements(kept, what, shape_env)
    if what not in memo:
        symbols = make()
        if mode is not None:
            for new, known in zip(symbols, of_all.setdefault(what, symbols), strict=True):
                if not isinstance(_known_value(known), int):
                    _rename(shape_env, new, known)
                    _stand_for(mode.tracer, new)
        memo[what] = symbols
    first = of_all.get(what, memo[what])
    return [k if isinstance(k := _known_value(f), int) else s for s, f in zip(memo[what], first, strict=True)]


def _follow_replacements(memo: dict[Any, Any], what: Any, shape_env: Any) -> None:
    """Have a memo find what it has by another name: an extent was a symbol then, and is known as a number by now."""
    if what in memo:
        return
    for name, symbols in list(memo.items()):
        if len(name) == len(what) and what == tuple(
            shape_env.replace(part) if isinstance(part, sympy.Basic) else part
            for part in name  # 2.11 - 2.15
        ):
            memo[what] = symbols
            return


_INPUT_SIZES: weakref.WeakKeyDictionary[Any, dict[Any, torch.SymInt]] = weakref.WeakKeyDictionary()


def note_input_size(what: object, size: torch.SymInt) -> None:
    """Have `first_input_size` find a size of an input by a name; the first size that has the name keeps it."""
    _INPUT_SIZES.setdefault(size.node.shape_env, {}).setdefault(what, size)


def first_input_size(what: object, like: object) -> Any:
    """The size that `note_input_size` was given in the trace of the size `like`, or None."""
    found = _INPUT_SIZES.get(like.node.shape_env, {}).get(what) if isinstance(like, torch.SymInt) else None
    return None if found is None else retraced([found])[0]


def stands_for_itself(size: Any) -> None:
    """Have a size that gets its value when the graph runs be read off the node that gives it, in a trace.

    As with `keep_symbol`; also where it turns out to be that of an input of the joint graph only later.
    """
    mode = get_proxy_mode()
    if mode is not None and is_unbacked(size):
        _stand_for(mode.tracer, size)


def _known_value(size: Any) -> object:
    """A size as a number, if it is known to be one by now."""
    return int(size.node.expr) if is_specialised(size) else size


def _rename(shape_env: Any, new: torch.SymInt, known: torch.SymInt) -> None:
    a, b = new.node.expr, known.node.expr
    if a != b:
        shape_env._rename_unbacked_to(a, b)  # 2.11 - 2.15


def _stand_for(tracer: Any, size: torch.SymInt) -> None:
    """Have the node that gives a size stand for its symbol, in place of an input of the joint graph that has it too."""
    keep_symbol(size)
    proxy = tracer.symnode_tracker[size]  # 2.11 - 2.15
    dict.__setitem__(tracer.sympy_expr_tracker, size.node.expr, _SympyExprTrackerValue(proxy, size))


def expression_of(size: object) -> Any:
    """The formula of a size that may be symbolic: hashable, and equal for sizes that surely are."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def faking_like(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Where `x` is fake, ops that take no tensor make fake ones, too, even if the mode is not on at the moment."""
    mode = detect_fake_mode([x]) if is_fake(x) and get_proxy_mode() is None else None
    return contextlib.nullcontext() if mode is None else mode


def unrecorded_symbols(of: object) -> contextlib.AbstractContextManager[None]:
    """While no graph is recorded, as in Dynamo's runs on fake tensors: the symbols made here need not reach a result.

    Dynamo looks for them in the result of the op of which they are an inner matter; the recorded run makes them anew.

    Args:
        of: a size or a tensor of the trace; others are left alone.
    """
    if get_proxy_mode() is not None:
        return contextlib.nullcontext()
    if isinstance(of, torch.Tensor):
        mode = detect_fake_mode([of])
        shape_env: Any = None if mode is None else mode.shape_env
    else:
        shape_env = of.node.shape_env if isinstance(of, torch.SymInt) else None
    return contextlib.nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()


def follow_view(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Give a wrapper on which an in-place view op, such as ``transpose_``, is called its new sizes and strides."""
    return_and_correct_aliasing(op, args, kwargs, args[0])


def kernel_of(op: torch._ops.OpOverload) -> Callable[..., object]:
    """What `op(...)` calls, without the frame of Python around it."""
    return op._op  # 2.11 - 2.15


def keep_from_dynamo(function: Callable[..., object]) -> None:
    """Have Dynamo run this function and all that it calls as they are, where it does not trace them into a caller.

    Where a user's frame cannot be compiled, as around a graph break inside of a ``with``, Dynamo tries to compile every
    frame that is called from it on its own, those below a tensor's dispatch included.
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


def let_comm_debug_mode_see_through(cls: type[torch.Tensor]) -> None:
    """Have CommDebugMode count the collectives inside of an op on this class, as it does for DTensor.

    A mode runs before a subclass does, and would see only the op. CommDebugMode steps back for DTensor by name and
    offers no way to say so for another class, so the check is put in front of its handler.
    """
    mode = _comm_mode.CommDebugMode
    handler = mode.__torch_dispatch__

    def step_back(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if any(issubclass(t, cls) for t in types):
            return NotImplemented
        return handler(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = torch.compiler.disable(step_back)  # type: ignore[method-assign]
