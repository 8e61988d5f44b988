"""Patches of torch that are in place while a graph with blocks is compiled, each with its reason, and when it can go.

A block may be empty or of one row on any rank in any call. So a trace must not compare a block's size with 0, 1 or
another size: what it finds becomes a guard that holds on some ranks only, and those ranks compile again, alone. Torch
has a switch for that, `backed_size_oblivious`, that not all of its code heeds yet; most of these patches are about the
places that do not.

`tests/ranks/test_patches.py` has a program for each that goes wrong without it, and fails when it no longer does: the
patch can go then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._subclasses.fake_impls as fake_impls
import torch.fx.experimental._config as _symbolic_shapes_config
from torch._dynamo.callback import callback_handler as _compile_callbacks  # 2.11 - 2.15
from torch._functorch import config as _functorch_config  # 2.11 - 2.15
from torch._guards import TracingContext, detect_fake_mode  # 2.11 - 2.15
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # 2.11 - 2.15
from torch.utils._sympy.functions import Max, Min  # 2.11 - 2.15
from torch.utils._sympy.symbol import SymT, symbol_is_type  # 2.11 - 2.15

from shardcompile.compat.block_symbols import name_symbols_of_blocks
from shardcompile.compat.late_sizes import tracing_again


@dataclass(frozen=True)
class Patch:
    """Something of torch that is replaced.

    Attributes:
        name: of the patch.
        what: the name that is replaced.
        reason: what goes wrong without it.
        upstream: an issue or pull request of PyTorch about it; where none was found, the text that an issue would have.
        versions: of torch that need it, as far as is known.
        put_in: replaces it. Of a compilation's patches it is given a stack that puts things back; of a trace's patches
            the symbols of the trace, which live as long as it does.
    """

    name: str
    what: str
    reason: str
    upstream: str
    versions: str
    put_in: Callable[[Any], None]


_LEFT_OUT: set[str] = set()


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Compile without a patch, to see whether it is needed.

    Raises:
        KeyError: there is no such patch.
    """
    if name not in {p.name for p in PATCHES}:
        raise KeyError(name)
    _LEFT_OUT.add(name)
    try:
        yield
    finally:
        _LEFT_OUT.discard(name)


def trace_size_obliviously() -> None:
    """Make the compilation that is running trace without specialising on sizes of 0 and 1.

    The switch is torch's own (`backed_size_oblivious`), is read all through a compilation, and goes back to what it was
    when the compilation ends, and so do the patches.
    """
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        shape_env = context.fake_mode.shape_env
        if shape_env is not None and not vars(shape_env).keys() & {"suppress_guards", "create_symbol"}:
            _put_in(OF_A_TRACE, shape_env)
        # Without `fullgraph` Dynamo would break the graph where we read the sizes of a derived cut. It asks its own
        # switch for a user's `item`.
        context.fake_mode.allow_scalar_outputs = True  # 2.11 - 2.15
    keep_ranks_alike()
    if _symbolic_shapes_config.backed_size_oblivious:
        return
    _symbolic_shapes_config.backed_size_oblivious = True
    stack = _COMPILATION[0]
    stack.callback(setattr, _symbolic_shapes_config, "backed_size_oblivious", False)
    _put_in(OF_A_COMPILATION, stack)


def keep_ranks_alike() -> None:
    """Have the compilation that is running decide on collectives by the program, not by this rank's numbers.

    For all graphs with sharded tensors: blocks of parameters, and those of a tensor that the program cuts, have known
    sizes, which differ from rank to rank.
    """
    if _COMPILATION:
        return
    _COMPILATION.append(contextlib.ExitStack())
    _put_in(OF_RANKS_ALIKE, _COMPILATION[0])

    def restore(_: Any) -> None:
        _COMPILATION.pop().close()
        _compile_callbacks.remove_end_callback(restore)

    # One for all patches: torch goes on in its list of callbacks behind one that takes itself out.
    _compile_callbacks.register_end_callback(restore)


_COMPILATION: list[contextlib.ExitStack] = []
"""What is put back when the compilation ends that is running; empty if nothing is in place."""


def _put_in(patches: Sequence[Patch], where: Any) -> None:
    for patch in patches:
        if patch.name not in _LEFT_OUT:
            patch.put_in(where)


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, by: Callable[[Any], Any]) -> None:
    """Replace something by what a function makes of it, until the stack is closed."""
    found = getattr(owner, name)
    setattr(owner, name, by(found))
    stack.callback(setattr, owner, name, found)


def without_guards(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Where `x` is part of a trace: take decisions on symbolic sizes by their hints, and install no guards for them.

    For what has no influence on the graph, such as checks that can only raise.
    """
    mode = detect_fake_mode([x])
    if mode is None or mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.suppress_guards()


# ---------------------------------------------------------------------------------------- while a compilation runs


def _views_by_stride(stack: contextlib.ExitStack) -> None:
    _replace(stack, fake_impls, "_compute_stride", _without_comparing)  # 2.11 - 2.15


def _overlap_by_hint(stack: contextlib.ExitStack) -> None:
    _replace(stack, torch, "_debug_has_internal_overlap", _unguarded)


def _no_donated_buffers(stack: contextlib.ExitStack) -> None:
    _replace(stack, _functorch_config, "donated_buffer", lambda donated: False)  # 2.11 - 2.15


def _memory_format_by_hint(stack: contextlib.ExitStack) -> None:
    _replace(stack, torch._C, "_conv_determine_backend_memory_format", _unguarded)  # 2.11 - 2.15


def _channels_last_by_hint(stack: contextlib.ExitStack) -> None:
    from torch import _prims_common

    _replace(stack, _prims_common, "are_strides_like_channels_last_or_false", _comparing_by_hint)  # 2.11 - 2.15


def _collectives_stay(stack: contextlib.ExitStack) -> None:
    from torch._functorch import partitioners

    _replace(stack, partitioners, "force_save_collectives", _where_they_were_traced)  # 2.11 - 2.15


def _parts_stay_apart(stack: contextlib.ExitStack) -> None:
    from torch._functorch import compile_utils

    aten = torch.ops.aten
    parts = [
        *(aten.slice, aten.slice_backward, aten.slice_scatter, aten.select, aten.select_backward, aten.select_scatter),
        *(aten.as_strided, aten.as_strided_scatter, aten.split, aten.split_with_sizes, aten.diagonal, aten.roll),
        *(aten.constant_pad_nd, aten.arange, torch.ops.prims.iota),
    ]
    _replace(stack, compile_utils, "rand_ops", lambda kept: [*kept, *parts])  # 2.11 - 2.15


def _traces_agree(stack: contextlib.ExitStack) -> None:
    from torch._dynamo.backends import common

    _replace(stack, common, "aot_module_simplified", tracing_again)  # 2.11 - 2.15


def _symbols_by_both_names(stack: contextlib.ExitStack) -> None:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    _replace(stack, PythonWrapperCodegen, "codegen_input_symbol_assignment", _by_both_names)  # 2.11 - 2.15


def _fill_order_by_hint(stack: contextlib.ExitStack) -> None:
    from torch._inductor import ir

    _replace(stack, ir, "get_fill_order", _sorted_by_hint)  # 2.11 - 2.15


def _batched_products_by_hint(stack: contextlib.ExitStack) -> None:
    from torch._inductor.lowering import lowerings

    bmm = torch.ops.aten.bmm.default
    found = lowerings[bmm]
    lowerings[bmm] = _lowered_by_hint(found)  # 2.11 - 2.15
    stack.callback(lowerings.__setitem__, bmm, found)


def _clamped_ends(stack: contextlib.ExitStack) -> None:
    from torch._inductor.sizevars import SizeVarAllocator

    _replace(stack, SizeVarAllocator, "evaluate_min", lambda _: _one_of_two_if_known(Min, 0))  # 2.11 - 2.15
    _replace(stack, SizeVarAllocator, "evaluate_max", lambda _: _one_of_two_if_known(Max, 1))  # 2.11 - 2.15


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


def _comparing_by_hint(decide: Callable[..., bool]) -> Callable[..., bool]:
    """A question about sizes and strides that leaves no guards; it stays as oblivious of sizes of 1 as it is."""

    def decided(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
        env = next((size.node.shape_env for size in (*shape, *strides) if isinstance(size, torch.SymInt)), None)
        with contextlib.nullcontext() if env is None else ShapeEnv.suppress_guards(env):  # not as `OF_A_TRACE` has it
            return decide(shape, strides)

    return decided


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


def _buffers_vary(stack: contextlib.ExitStack) -> None:
    """Have Dynamo take a sharded buffer of a module as it takes a sharded input: any cut, by one graph."""
    from torch._dynamo.variables import builder  # 2.11 - 2.15

    def vary(is_static: Callable[..., Any]) -> Callable[..., Any]:
        def static(tensor: Any, is_tensor: bool, *args: Any, **kwargs: Any) -> Any:
            if is_tensor and getattr(tensor, "_is_static", True) is False:
                return False, None
            return is_static(tensor, is_tensor, *args, **kwargs)

        return static

    _replace(stack, builder, "tensor_always_has_static_shape", vary)


# ------------------------------------------------------------------------------------------------ while a trace lives


def _decide_by_hint_where_guards_are_suppressed(shape_env: Any) -> None:
    """Turn the switch off inside of ``shape_env.suppress_guards()``, where a decision by hint leaves no guard."""
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


OF_RANKS_ALIKE = (
    Patch(
        "no_donated_buffers",
        "torch._functorch.config.donated_buffer",
        "Torch 2.15 repeats the wait for a result that the backward pass needs, and saves both: one tensor under two "
        "names. If Inductor may write to what was saved, it overwrites the one that it still has to read.",
        "Wrong gradients: wait_tensor is replayed in the forward graph, both results are saved, and one of them is "
        "donated while the other, which shares its memory, is still read.",
        "2.15",
        _no_donated_buffers,
    ),
    Patch(
        "collectives_stay",
        "torch._functorch.partitioners.force_save_collectives",
        "The partitioner moves a collective of the backward pass that depends on no gradient to the forward graph or "
        "not, by the sizes of what is to be saved. Ranks that know their own blocks as numbers decide differently.",
        "https://github.com/pytorch/pytorch/issues/146693 (what is moved from backward to forward); collectives are "
        "not recomputed since https://github.com/pytorch/pytorch/pull/147561, but still moved.",
        "2.11 - 2.15",
        _collectives_stay,
    ),
    Patch(
        "parts_stay_apart",
        "torch._functorch.compile_utils.rand_ops",
        "What is computed twice is computed once. Rows 0 to n and n to 2n of a tensor are the same where this rank's n "
        "is 0: it would send one of them, where others send both. Of what is in this list each call stays.",
        "fx_graph_cse merges nodes by their numbers. Where these are local sizes, ranks of one program merge "
        "different collectives, and wait for one another.",
        "2.11 - 2.15",
        _parts_stay_apart,
    ),
    Patch(
        "traces_agree",
        "torch._dynamo.backends.common.aot_module_simplified",
        "AOTAutograd counts the results of the forward pass in one trace and makes the graph by another. Where the "
        'backward pass finds that a symbol is a number, the second has fewer results: "Node ... was invalid".',
        "Symbols that the backward pass specialises change how many results the forward graph of a tensor subclass "
        "has, after they were counted: DTensor fails in the same way.",
        "2.11 - 2.15",
        _traces_agree,
    ),
    Patch(
        "buffers_vary",
        "torch._dynamo.variables.builder.tensor_always_has_static_shape",
        "Buffers of modules are traced with numbers for sizes. A sharded one would have the block of the rank that "
        "traces, where inputs that are cut alike have symbols, and does not fit them.",
        "force_parameter_static_shapes holds for tensor subclasses whose inner tensors are marked as dynamic, too: the "
        "marks on a buffer's inner tensors are not asked for.",
        "2.11 - 2.15",
        _buffers_vary,
    ),
)
"""Put in when a compilation meets the first sharded tensor, and put back when it ends."""

OF_A_COMPILATION = (
    Patch(
        "views_by_stride",
        "torch._subclasses.fake_impls._compute_stride",
        "Where Inductor lowers a view it asks whether strides are equal, and for the size of a block to tell that.",
        "Inductor's view lowering computes strides with guards although backed_size_oblivious is on: pass "
        "size_oblivious=True to _compute_stride from GraphLowering, as the fake kernels do.",
        "2.11 - 2.14",
        _views_by_stride,
    ),
    Patch(
        "overlap_by_hint",
        "torch._debug_has_internal_overlap",
        "Inductor copies a block where it lowers `select`; the copy asks whether the block overlaps itself, which "
        "compares its sizes with 1. The answer can only raise.",
        "_debug_has_internal_overlap guards on backed symbols when called on fake tensors; it should answer by hints, "
        "since it is a check that can only raise.",
        "2.11 - 2.14",
        _overlap_by_hint,
    ),
    Patch(
        "memory_format_by_hint",
        "torch._C._conv_determine_backend_memory_format",
        "For a convolution's memory format it is asked whether there is more than one image. Where there is one, "
        "formats are the same.",
        "The meta kernel of convolution guards on a batch of 1 through _conv_determine_backend_memory_format, with "
        "backed_size_oblivious as well.",
        "2.11 - 2.15",
        _memory_format_by_hint,
    ),
    Patch(
        "channels_last_by_hint",
        "torch._prims_common.are_strides_like_channels_last_or_false",
        "Of a result with four dims it is asked whether images lie in it with the channel last. The last comparison of "
        "strides leaves a guard, which a block of one row breaks.",
        "are_strides_like_channels_last_or_false compares `min == strides[1]` with a guard, between comparisons that "
        "leave none: guard_or_true would do.",
        "2.11 - 2.15",
        _channels_last_by_hint,
    ),
    Patch(
        "symbols_by_both_names",
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.codegen_input_symbol_assignment",
        "The gradient that an input has already brings a symbol of its own for the same size. Generated code knows "
        "only the input's.",
        "https://github.com/pytorch/pytorch/issues/155468, https://github.com/pytorch/pytorch/pull/185473",
        "2.11 - 2.14",
        _symbols_by_both_names,
    ),
    Patch(
        "fill_order_by_hint",
        "torch._inductor.ir.get_fill_order",
        "Inductor sorts strides by comparing them, and leaves guards that a block of one row breaks.",
        "https://github.com/pytorch/pytorch/pull/183840 (strides that surely are in order); get_fill_order itself "
        "still compares backed strides with guards.",
        "2.11 - 2.15",
        _fill_order_by_hint,
    ),
    Patch(
        "batched_products_by_hint",
        "torch._inductor.lowering.lowerings[aten.bmm]",
        "On CPUs the lowering asks of the factors whether they have one row, to copy those that the kernel would copy.",
        "The CPU lowering of bmm guards on sizes of 1 (is_contiguous_strides_for_shape of factors) with "
        "backed_size_oblivious; statically_known_true would do.",
        "2.11 - 2.15",
        _batched_products_by_hint,
    ),
    Patch(
        "clamped_ends",
        "torch._inductor.sizevars.SizeVarAllocator.evaluate_min, evaluate_max",
        "Where ends of a slice are clamped, Inductor takes one of both and guards on that, or gives up.",
        "https://github.com/pytorch/pytorch/pull/175819 (Min and Max are left where nothing is known)",
        "2.11 - 2.15",
        _clamped_ends,
    ),
)
"""Put in when a compilation meets the first block of unknown size, and put back when it ends."""

OF_A_TRACE = (
    Patch(
        "decisions_where_guards_are_suppressed",
        "ShapeEnv.suppress_guards",
        "AOTAutograd compares the strides of saved activations with those that Inductor chose. With the switch on it "
        "takes them for different, and bakes the strides of the first call into the backward graph.",
        "suppress_guards() with backed_size_oblivious: comparisons that may use hints without leaving a guard are "
        "answered False instead.",
        "2.11 - 2.15",
        _decide_by_hint_where_guards_are_suppressed,
    ),
    Patch(
        "symbols_of_blocks",
        "ShapeEnv.create_symbol, _produce_dyn_sizes_from_int_tuple, _compute_symbolic_stride",
        "Torch makes symbols from the numbers of this rank's block, and takes equal numbers for one size. Ranks have "
        "other numbers, and would trace and guard something else.",
        "Duck shaping has no way to say that dims with equal hints are different (or that dims with different hints "
        "are one) for some inputs only; a tensor subclass needs it for its inner tensors.",
        "2.11 - 2.15",
        name_symbols_of_blocks,
    ),
)
"""Put into the symbols of a trace, which live as long as they do."""

PATCHES = OF_RANKS_ALIKE + OF_A_COMPILATION + OF_A_TRACE
