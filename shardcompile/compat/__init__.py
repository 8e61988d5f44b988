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
import torch._subclasses.fake_impls as fake_impls
import torch.fx.experimental._config as _symbolic_shapes_config
import torch.fx.traceback as fx_traceback
from torch._C._distributed_c10d import _register_work  # 2.11 - 2.15
from torch._dynamo.callback import callback_handler as _compile_callbacks  # 2.11 - 2.15
from torch._dynamo.eval_frame import set_code_exec_strategy  # 2.11 - 2.15
from torch._dynamo.types import FrameAction, FrameExecStrategy  # 2.11 - 2.15
from torch._functorch import config as _functorch_config  # 2.11 - 2.15
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
from torch.fx import GraphModule
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
from torch.utils._sympy.functions import Max, Min  # 2.11 - 2.15
from torch.utils._sympy.interp import sympy_interp  # 2.11 - 2.15
from torch.utils._sympy.reference import PythonReferenceAnalysis  # 2.11 - 2.15
from torch.utils._sympy.symbol import SymT, symbol_is_type  # 2.11 - 2.15

from shardcompile.compat.block_symbols import GAPS, Gaps, name_symbols_of_blocks
from shardcompile.compat.worlds import add_guard, forget_with_world, note_trace, start_epoch, world_epoch

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
    "keep_symbol",
    "kernel_of",
    "let_comm_debug_mode_see_through",
    "lowered_when_traced",
    "mark_static",
    "mark_weakly_dynamic",
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


def coordinate(mesh: Any) -> Any:
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


def same_symbol(a: Any, b: Any) -> bool:
    """Whether two sizes are equal; of those that get their value when the graph runs, whether they surely are.

    Installs a guard where the sizes are symbols whose values are known.
    """
    if a is b:
        return True
    return surely(a == b) if is_unbacked(a) or is_unbacked(b) else bool(a == b)


def settle(size: Any, number: int) -> None:
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


def global_extents(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The global extents of a result, which were computed while nothing was traced, computed again: see `retraced`.

    Those of 0 and 1 are numbers, with a guard, as they are where an input has them. A 1 may be broadcast. And where a
    formula is 0 on this call only, torch (2.11 - 2.15) divides by it: from ``rows * columns == rows`` it takes that
    there is one column.
    """
    return tuple(_number_if_small(n) for n in retraced(shape))


def _number_if_small(extent: Any) -> Any:
    small = isinstance(extent, torch.SymInt) and not is_unbacked(extent) and size_hint(extent) in (0, 1)
    return int(extent) if small else extent


def is_specialised(size: Any) -> bool:
    """Whether a size that was a symbol has become a number while tracing."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_number)


def is_unbacked(value: Any) -> bool:
    """Whether a size is a symbol that gets its value when the graph runs."""
    return isinstance(value, torch.SymInt) and bool(free_unbacked_symbols(value))  # 2.11 - 2.15


def count_as_collective(op_packets: Sequence[Any]) -> None:
    """Have CommDebugMode count these ops."""
    for packet in op_packets:
        _comm_mode.NATIVE_TO_PY_MAPPING[packet] = packet


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of contiguous tensors of one dtype, one tensor after the other: [n], in one call."""
    return torch._utils._flatten_dense_tensors(tensors)


def lowered_when_traced(op: torch._ops.OpOverload, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake kernel of a collective, which teaches Inductor the op when a trace meets it for the first time.

    Inductor's lowerings take more than a second to import, which eager programs need not pay.
    """

    def traced(*args: Any) -> Any:
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

    def lowering(*args: Any) -> Any:
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


def in_mode_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Compute with a tensor of a trace that has left the mode in which such tensors are computed with.

    AOTAutograd (2.11 - 2.15) leaves it before it asks what it is given for its parts, and Dynamo leaves that of fake
    tensors before it looks at what a function returns.
    """
    if isinstance(x, FunctionalTensor):
        return contextlib.nullcontext() if _functional_mode() is not None else FunctionalTensorMode()
    return faking_like(x)


def _functional_mode() -> Any:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)  # 2.11 - 2.15


def is_compiling() -> bool:
    """Whether Dynamo is compiling something in this thread."""
    return CompileContext.try_get() is not None


def trace_size_obliviously() -> None:
    """Make the compilation that is running trace without specialising on sizes of 0 and 1.

    A block may be empty or of one row on any rank in any call; a graph that is specialised on it would have to be
    compiled again, on that rank alone. The switch is torch's own (`backed_size_oblivious`), is read all through a
    compilation, and goes back to what it was when the compilation ends.
    """
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        _decide_by_hint_where_guards_are_suppressed(context.fake_mode.shape_env)
        # Without `fullgraph` Dynamo would break the graph where we read the sizes of a derived cut. It asks its own
        # switch for a user's `item`.
        context.fake_mode.allow_scalar_outputs = True  # 2.11 - 2.15
    if _symbolic_shapes_config.backed_size_oblivious:
        return
    _symbolic_shapes_config.backed_size_oblivious = True
    stride_of_view, overlaps = fake_impls._compute_stride, torch._debug_has_internal_overlap  # 2.11 - 2.15
    fake_impls._compute_stride = _without_comparing(stride_of_view)
    torch._debug_has_internal_overlap = _unguarded(overlaps)  # type: ignore[assignment]
    # Torch 2.15 repeats the wait for a result that the backward pass needs, and saves both: one tensor under two names.
    # If Inductor may write to what was saved, it overwrites the one that it still has to read.
    donated, _functorch_config.donated_buffer = _functorch_config.donated_buffer, False  # 2.11 - 2.15
    memory_format = torch._C._conv_determine_backend_memory_format  # 2.11 - 2.15
    torch._C._conv_determine_backend_memory_format = _unguarded(memory_format)
    from torch._functorch import partitioners  # 2.11 - 2.15
    from torch._inductor import ir
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.lowering import lowerings

    save_collectives = partitioners.force_save_collectives  # 2.11 - 2.15
    partitioners.force_save_collectives = _where_they_were_traced(save_collectives)
    assign = PythonWrapperCodegen.codegen_input_symbol_assignment  # 2.11 - 2.15
    PythonWrapperCodegen.codegen_input_symbol_assignment = _by_both_names(assign)  # type: ignore[method-assign]
    fill_order = ir.get_fill_order  # 2.11 - 2.15
    ir.get_fill_order = _sorted_by_hint(fill_order)
    bmm = torch.ops.aten.bmm.default
    lower_bmm = lowerings[bmm]  # 2.11 - 2.15
    lowerings[bmm] = _lowered_by_hint(lower_bmm)
    from torch._inductor.sizevars import SizeVarAllocator  # 2.11 - 2.15

    smaller, larger = SizeVarAllocator.evaluate_min, SizeVarAllocator.evaluate_max  # 2.11 - 2.15
    SizeVarAllocator.evaluate_min = _one_of_two_if_known(Min, 0)  # type: ignore[method-assign]
    SizeVarAllocator.evaluate_max = _one_of_two_if_known(Max, 1)  # type: ignore[method-assign]

    def restore(_: Any) -> None:
        _functorch_config.donated_buffer = donated
        partitioners.force_save_collectives = save_collectives
        torch._C._conv_determine_backend_memory_format = memory_format
        lowerings[bmm] = lower_bmm
        SizeVarAllocator.evaluate_min = smaller  # type: ignore[method-assign]
        SizeVarAllocator.evaluate_max = larger  # type: ignore[method-assign]
        PythonWrapperCodegen.codegen_input_symbol_assignment = assign  # type: ignore[method-assign]
        _symbolic_shapes_config.backed_size_oblivious = False
        fake_impls._compute_stride, torch._debug_has_internal_overlap = stride_of_view, overlaps
        ir.get_fill_order = fill_order
        _compile_callbacks.remove_end_callback(restore)

    _compile_callbacks.register_end_callback(restore)


def _where_they_were_traced(save_collectives: Callable[..., None]) -> Callable[..., None]:
    """Have the backward graph hold the collectives of the backward pass, those that depend on no gradient included.

    The partitioner would move such a one to the forward graph or not, by the sizes of what is to be saved: ranks that
    know their own blocks as numbers would decide otherwise, and wait for one another. It moved one and left the other
    copy in the backward graph, too, where nothing reads it, since nothing that waits is taken for dead code.
    """

    def save(joint: GraphModule) -> None:
        save_collectives(joint)
        for node in joint.graph.nodes:
            if node.target is not torch.ops._c10d_functional.wait_tensor.default:
                continue
            parts = (node, *node.all_input_nodes)
            # Torch 2.14 waits in the backward pass again for what the forward pass has sent.
            if all(part.meta.get("partitioner_tag") == "is_backward" for part in parts):  # 2.11 - 2.15
                for part in parts:
                    part.meta["partitioner_tag"] = "must_be_in_backward"

    return save


def _unguarded(check: Callable[..., Any]) -> Callable[..., Any]:
    """A question about a tensor, answered by hints without guards, which would hold on some ranks only.

    For a check that can only raise: Inductor copies blocks where it lowers `select`. And for the memory format of a
    convolution's result: it asks whether there is more than one image, and where there is one, formats are the same.
    """

    def checked(x: torch.Tensor, *args: Any) -> Any:
        with without_guards(x):
            return check(x, *args)

    return checked


def _lowered_by_hint(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Have Inductor lower an op by hints, without guards.

    On CPUs it asks of the factors of a batched product whether they have one row, to copy those that the kernel would
    copy. Either answer is right for all sizes.
    """
    from torch._inductor.virtualized import V  # 2.11 - 2.15

    def lower(*args: Any, **kwargs: Any) -> Any:
        with V.graph.sizevars.shape_env.suppress_guards():
            return lowering(*args, **kwargs)

    return lower


def _one_of_two_if_known(formula: Any, which: int) -> Callable[..., Any]:
    """Inductor's `evaluate_min` or `evaluate_max`, which leaves a formula where it is not known which size it is.

    Where ends of a slice are clamped, Inductor takes one of both, and guards on that. With guards only from what holds
    for all sizes it finds neither and gives up ("evaluate_min ... with unbacked symints"), and before that it takes a
    size for the smaller one that divides the other: a multiple of it may be 0.

    Args:
        formula: of both sizes.
        which: of the sizes in ascending order is wanted.
    """

    def evaluate(self: Any, left: Any, right: Any) -> Any:
        left, right = (sympy.sympify(x).xreplace(self.inv_precomputed_replacements) for x in (left, right))
        for in_order in ((left, right), (right, left)):
            if self.statically_known_leq(*in_order):
                return in_order[which]
        return formula(left, right)

    return evaluate


def _by_both_names(assign: Callable[..., None]) -> Callable[..., None]:
    """Have generated code name a size also by the symbol that took the place of its own.

    The gradient that an input has already brings a symbol of its own for the same size. Which of the two replaces the
    other is a matter of their names, and code of torch before 2.15 knows only the input's.
    """
    from torch._inductor.virtualized import V  # 2.11 - 2.15

    def assigned(self: Any, name: str, value: Any, bound_vars: Any, *rest: Any, **options: Any) -> None:
        assign(self, name, value, bound_vars, *rest, **options)
        for symbol in list(bound_vars):
            other = V.graph.sizevars.simplify(symbol)
            if not isinstance(other, sympy.Symbol):  # a number by now, or what another symbol is multiplied with
                continue
            if other not in bound_vars and symbol_is_type(other, SymT.SIZE):
                self.prefix.writeline(f"{other} = {symbol}")
                bound_vars.add(other)

    return assigned


def _without_comparing(stride_of_view: Callable[..., Any]) -> Callable[..., Any]:
    """Have Inductor take strides for different, where it lowers a view, unless they are equal for all sizes.

    It asks for the size of a block otherwise, and what it finds is a guard that holds on some ranks only.
    """
    from torch._inductor.graph import GraphLowering  # 2.11 - 2.15
    from torch._inductor.virtualized import V  # 2.11 - 2.15

    def strides(*args: Any, size_oblivious: bool = False, **kwargs: Any) -> Any:
        oblivious = size_oblivious or isinstance(V.graph, GraphLowering)
        return stride_of_view(*args, size_oblivious=oblivious, **kwargs)

    return strides


def _sorted_by_hint(fill_order: Callable[..., Any]) -> Callable[..., Any]:
    """Have Inductor sort strides by their hints, which are the same on every rank and larger than 1.

    It would compare them, and leave guards that a block of one row breaks. Where a dim has extent 0 or 1, its stride
    may stand anywhere in the order.
    """

    def order(strides: Sequence[Any], shape_env: Any = None) -> Any:
        of_strides = next((s.node.shape_env for s in strides if isinstance(s, torch.SymInt)), shape_env)
        if of_strides is None:
            return fill_order(strides)
        with of_strides.suppress_guards():
            return fill_order(strides, shape_env)

    return order


def _decide_by_hint_where_guards_are_suppressed(shape_env: Any) -> None:
    """Turn the switch off inside of ``shape_env.suppress_guards()``, where a decision by hint leaves no guard.

    AOTAutograd compares there the strides of saved activations with those that Inductor chose (2.11 - 2.15). With the
    switch on it takes them for different, and bakes the strides of the first call into the backward graph.
    """
    if shape_env is None or "suppress_guards" in vars(shape_env):
        return
    suppress = shape_env.suppress_guards

    @contextlib.contextmanager
    def suppress_and_decide() -> Iterator[None]:
        before = _symbolic_shapes_config.backed_size_oblivious
        _symbolic_shapes_config.backed_size_oblivious = False
        try:
            with suppress():
                yield
        finally:
            _symbolic_shapes_config.backed_size_oblivious = before

    shape_env.suppress_guards = suppress_and_decide
    name_symbols_of_blocks(shape_env)


def decomposition_of(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """The op in terms of other ops, from torch's own table, or None."""
    from torch._decomp import decomposition_table  # 2.11 - 2.15

    return decomposition_table.get(op)


def decomposition_by_torch(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Torch's decomposition of an op that has one, looked up when it is called: importing the table takes time."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
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


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Compute as if no transform of `torch.func` were going on, which would wrap what is made."""
    if not is_transforming():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # 2.11 - 2.15

    return temporarily_clear_interpreter_stack()


def untraced() -> contextlib.AbstractContextManager[Any]:
    """Inside a trace: compute on fake tensors without leaving a node in the graph. See `retraced`."""
    stack = contextlib.ExitStack()
    stack.enter_context(disable_functional_mode())
    stack.enter_context(disable_proxy_modes_tracing())
    return stack


def kept_with(mode: Any) -> dict[Any, Any]:
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


def retraced(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes that were computed while nothing was traced, computed again from what the trace knows."""
    mode = get_proxy_mode()
    if mode is None or not any(isinstance(s, torch.SymInt) for s in sizes):
        return tuple(sizes)
    known = {e: entry.value for e, entry in mode.tracer.sympy_expr_tracker.items()}  # 2.11 - 2.15
    known.update((kept.node.expr, kept) for kept in _KEPT_SYMBOLS.get(mode.tracer, ()))  # by now renamed, maybe
    return tuple(_retraced(known, s) if isinstance(s, torch.SymInt) else s for s in sizes)


def from_first_symbols(make: Callable[[], Any]) -> Any:
    """A size in terms of the inputs that were there first, whatever it is computed from.

    What is computed from the size of a gradient would be read off the gradient by the backward graph. Inductor
    (2.11 - 2.15) wants every symbol in the sizes of a graph's inputs to be the whole size of one of them, or an input.
    """
    with untraced():
        size = make()
    return retraced([size])[0]


class _FirstKept(dict[Any, Any]):
    """A dict whose entries are never replaced."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self.setdefault(key, value)


def keep_symbol(size: Any) -> Any:
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


def _retraced(known: dict[Any, Any], size: torch.SymInt) -> Any:
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
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        """``int(x)``, for which torch (2.11 - 2.15) would leave a formula in place of a number."""
        return torch.sym_int(x)


_MEMOS: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def once_in_trace(
    what: tuple[Any, ...], like: torch.SymInt, make: Callable[[], Sequence[torch.SymInt]]
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


def note_input_size(what: Any, size: torch.SymInt) -> None:
    """Have `first_input_size` find a size of an input by a name; the first size that has the name keeps it."""
    _INPUT_SIZES.setdefault(size.node.shape_env, {}).setdefault(what, size)


def first_input_size(what: Any, like: Any) -> Any:
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


def _known_value(size: Any) -> Any:
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


def expression_of(size: Any) -> Any:
    """The formula of a size that may be symbolic: hashable, and equal for sizes that surely are."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def faking_like(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Where `x` is fake, ops that take no tensor make fake ones, too, even if the mode is not on at the moment."""
    mode = detect_fake_mode([x]) if is_fake(x) and get_proxy_mode() is None else None
    return contextlib.nullcontext() if mode is None else mode


def unrecorded_symbols(of: Any) -> contextlib.AbstractContextManager[None]:
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


def without_guards(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Where `x` is part of a trace: take decisions on symbolic sizes by their hints, and install no guards for them.

    For what has no influence on the graph, such as checks that can only raise.
    """
    mode = detect_fake_mode([x])
    if mode is None or mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.suppress_guards()


def follow_view(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Give a wrapper on which an in-place view op, such as ``transpose_``, is called its new sizes and strides."""
    return_and_correct_aliasing(op, args, kwargs, args[0])


def kernel_of(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """What `op(...)` calls, without the frame of Python around it."""
    return op._op  # 2.11 - 2.15


def keep_from_dynamo(function: Callable[..., Any]) -> None:
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

    def step_back(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, cls) for t in types):
            return NotImplemented
        return handler(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = torch.compiler.disable(step_back)  # type: ignore[method-assign]
