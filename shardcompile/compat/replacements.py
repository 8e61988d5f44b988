"""Replacements for functions of torch while a graph with shards is compiled. `patches` gives the reasons."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from typing import TYPE_CHECKING, TypeVar
from unittest import mock

import sympy
import torch
import torch._subclasses.fake_impls as fake_impls
import torch.fx.experimental._config as _symbolic_shapes_config
from torch import _prims_common
from torch._dynamo.backends import common  # 2.11 - 2.15
from torch._functorch._aot_autograd import graph_compile  # 2.11 - 2.15
from torch._guards import detect_fake_mode  # 2.11 - 2.15
from torch._inductor.virtualized import V  # 2.11 - 2.15
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # 2.11 - 2.15
from torch.utils._sympy.functions import (
    Max,  # 2.11 - 2.15
    Min,  # 2.11 - 2.15
)
from torch.utils._sympy.symbol import (
    SymT,  # 2.11 - 2.15
    symbol_is_type,  # 2.11 - 2.15
)

from shardcompile.compat.late_sizes import retry_traces
from shardcompile.compat.patch import replace, replace_entry, require
from shardcompile.compat.sizes import Formula, IntLike, is_unbacked, size_hint
from shardcompile.compat.tracing import UNKNOWN_SIZE

if TYPE_CHECKING:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen  # 2.11 - 2.15
    from torch._inductor.ir import AssertScalar, NonOwningLayout  # 2.11 - 2.15
    from torch._inductor.sizevars import SizeVarAllocator  # 2.11 - 2.15
    from torch.utils._ordered_set import OrderedSet  # 2.11 - 2.15

Symbols = Callable[..., "OrderedSet[sympy.Symbol]"]
_T = TypeVar("_T")


def without_guards(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """If `x` is part of a trace, decide on symbolic sizes by their hints inside the context, and install no guards.

    This is for code that does not change the graph, such as checks that can only raise.
    """
    mode = detect_fake_mode([x])
    if mode is None or mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.suppress_guards()


def views_by_stride(stack: contextlib.ExitStack) -> None:
    replace(stack, fake_impls, "_compute_stride", _without_comparing)  # 2.11 - 2.15


def memory_format_by_hint(stack: contextlib.ExitStack) -> None:
    replace(stack, torch._C, "_conv_determine_backend_memory_format", answer_by_hint)  # 2.11 - 2.15


def channels_last_by_hint(stack: contextlib.ExitStack) -> None:
    replace(stack, _prims_common, "are_strides_like_channels_last_or_false", _comparing_by_hint)  # 2.11 - 2.15


def traces_agree(stack: contextlib.ExitStack) -> None:
    for stage in ("aot_stage2_autograd", "aot_stage2_inference"):
        require(graph_compile, stage)
    replace(stack, common, "aot_module_simplified", retry_traces)  # 2.11 - 2.15


def shards_of_modules_vary(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._dynamo.variables import builder  # 2.11 - 2.15

    replace(stack, builder, "tensor_always_has_static_shape", _unless_sharded)


def symbols_by_both_names(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    replace(stack, PythonWrapperCodegen, "codegen_input_symbol_assignment", _by_both_names)  # 2.11 - 2.15


def fill_order_by_hint(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir

    replace(stack, ir, "get_fill_order", _sort_by_hint)  # 2.11 - 2.15


def asserts_of_known_sizes(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir

    replace(stack, ir.AssertScalar, "__init__", _with_symbols_of_inputs)  # 2.11 - 2.15


def places_of_parts(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir

    replace(stack, ir.NonOwningLayout, "get_free_symbol_uses", _and_of_the_view)  # 2.11 - 2.15


def batched_products_by_hint(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.lowering import lowerings

    replace_entry(
        stack, "torch._inductor.lowering.lowerings", lowerings, torch.ops.aten.bmm.default, _lower_by_hint
    )  # 2.11 - 2.15


def clamped_ends(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import SliceView  # 2.11 - 2.15
    from torch._inductor.sizevars import SizeVarAllocator

    replace(stack, SliceView, "normalize_start_end", _with_numbers_worked_out)  # 2.11 - 2.15
    replace(stack, SizeVarAllocator, "evaluate_min", lambda _: _one_of_two_if_known(Min, 0))  # 2.11 - 2.15
    replace(stack, SizeVarAllocator, "evaluate_max", lambda _: _one_of_two_if_known(Max, 1))  # 2.11 - 2.15


def failed_checks(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.sizevars import SizeVarAllocator

    replace(stack, SizeVarAllocator, "expect_true", _without_a_guard_if_false)  # 2.11 - 2.15


def _without_a_guard_if_false(expect: Callable[..., bool]) -> Callable[..., bool]:
    """Have a check whose condition does not hold for the hints return False, and install no guard."""

    def expected(self: SizeVarAllocator, condition: sympy.Basic) -> bool:
        if self.statically_known_true(condition):
            return True
        if not any(symbol_is_type(s, SymT.UNBACKED_INT) for s in condition.free_symbols):
            with self.shape_env.suppress_guards():
                if not self.shape_env.evaluate_expr(condition):
                    return False
        return expect(self, condition)

    return expected


def _unless_sharded(is_static: Callable[..., tuple[bool, object]]) -> Callable[..., tuple[bool, object]]:
    """Have Dynamo trace sharded buffers and parameters of modules by the marks on their shards."""

    def static(tensor: object, is_tensor: bool, *args: object, **kwargs: object) -> tuple[bool, object]:
        if is_tensor and hasattr(tensor, "_is_static"):
            return False, None
        return is_static(tensor, is_tensor, *args, **kwargs)

    return static


def _and_of_the_view(symbols: Symbols) -> Symbols:
    """The symbols of the tensor that a part lies in, with those of the part's place in it."""

    def of_layout(layout: NonOwningLayout, unbacked_only: bool = False) -> OrderedSet[sympy.Symbol]:
        return symbols(layout, unbacked_only) | layout.view.get_free_symbol_uses(unbacked_only)

    return of_layout


def answer_by_hint(check: Callable[..., object]) -> Callable[..., object]:
    """Have a function of a tensor decide by hints, without guards that would hold on some ranks only.

    One such function is a check that can only raise, when Inductor copies a shard to lower `select`. Another chooses
    the memory format of a convolution's result by whether there is more than one image. With one image, all formats are
    the same.
    """

    def checked(x: torch.Tensor, *args: object) -> object:
        with without_guards(x):
            return check(x, *args)

    return checked


def _comparing_by_hint(decide: Callable[..., bool]) -> Callable[..., bool]:
    """Have a function of sizes and strides leave no guards. The switch for sizes of 0 and 1 stays as it is."""

    def decided(shape: Sequence[object], strides: Sequence[object]) -> bool:
        env = next((size.node.shape_env for size in (*shape, *strides) if isinstance(size, torch.SymInt)), None)
        with contextlib.nullcontext() if env is None else ShapeEnv.suppress_guards(env):  # not as `OF_A_TRACE` has it
            return decide(shape, strides)

    return decided


def _with_symbols_of_inputs(init: Callable[..., None]) -> Callable[..., None]:
    """Replace symbols of sizes in an assert of generated code as inputs' sizes have them replaced: those define them.

    Unbacked sizes stay: what a graph was told about them would make every assert true.
    """

    def made(self: AssertScalar, scalar: Formula, msg: str) -> None:
        env = V.graph.sizevars.shape_env
        sizes = [s for s in scalar.free_symbols if symbol_is_type(s, SymT.SIZE)]
        init(self, scalar.xreplace({s: env.replace(s) for s in sizes}), msg)

    return made


def _lower_by_hint(lowering: Callable[..., object]) -> Callable[..., object]:
    """Have Inductor lower a batched product by hints, without guards.

    On CPUs it asks whether the factors have one row, to copy those that the kernel would copy. Either answer is right
    for all sizes. Unbacked sizes have no answer, so the lowering sees hints in their place.
    """

    def lower(*args: object, **kwargs: object) -> object:
        factors = [node for node in V.graph.current_node.args if isinstance(node, Node)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(V.graph.sizevars.shape_env.suppress_guards())
            for node in factors:
                stack.enter_context(mock.patch.dict(node.meta, val=_of_hinted_sizes(node.meta["val"])))
            return lowering(*args, **kwargs)

    return lower


def _of_hinted_sizes(x: torch.Tensor) -> torch.Tensor:
    if not any(map(is_unbacked, (*x.shape, *x.stride()))):
        return x
    size, stride = (list(map(size_hint, numbers)) for numbers in (x.shape, x.stride()))
    return torch.empty_strided(size, stride, dtype=x.dtype, device="meta")


def _one_of_two_if_known(formula: Callable[[Formula, Formula], Formula], which: int) -> Callable[..., Formula]:
    """Inductor's `evaluate_min` or `evaluate_max`, which returns a formula if it does not know which size to pick.

    When Inductor clamps the end of a slice, it picks one of two sizes and guards on that. Without such guards it gives
    up ("evaluate_min ... with unbacked symints"). Before that, it takes a size that divides the other for the smaller
    one, although the other may be 0.

    Args:
        formula: `Min` or `Max`.
        which: the index of the wanted size, in ascending order.
    """

    def evaluate(self: SizeVarAllocator, left: Formula, right: Formula) -> Formula:
        left, right = (sympy.sympify(x).xreplace(self.inv_precomputed_replacements) for x in (left, right))
        for in_order in ((left, right), (right, left)):
            if self.statically_known_leq(*in_order):
                return in_order[which]
        return formula(left, right)

    return evaluate


def _with_numbers_worked_out(ends_of: Callable[..., Iterable[Formula]]) -> Callable[..., tuple[Formula, ...]]:
    """Evaluate the terms that torch leaves unevaluated in the formulas of a slice's ends.

    Torch factors out what two formulas have in common, and leaves Max(3, 6) in Min(s, Max(3, 6)). With a number for s
    the formula is still no number.
    """

    def ends(*args: object) -> tuple[Formula, ...]:
        return tuple(sympy.sympify(end).doit() for end in ends_of(*args))

    return ends


def _by_both_names(assign: Callable[..., None]) -> Callable[..., None]:
    """Have generated code define a size also under the symbol that replaced its own.

    An input may come with a gradient, which has its own symbol for the same size. The names decide which of the two
    symbols replaces the other, but torch before 2.15 defines only the input's.
    """

    def assigned(
        self: PythonWrapperCodegen,
        name: str,
        value: object,
        bound_vars: MutableSet[sympy.Symbol],
        *rest: object,
        **options: object,
    ) -> None:
        assign(self, name, value, bound_vars, *rest, **options)
        for symbol in list(bound_vars):
            other = V.graph.sizevars.simplify(symbol)
            if not isinstance(other, sympy.Symbol):  # a number by now, or a multiple of another symbol
                continue
            if other not in bound_vars and symbol_is_type(other, SymT.SIZE):
                self.prefix.writeline(f"{other} = {symbol}")
                bound_vars.add(other)

    return assigned


def _without_comparing(stride_of_view: Callable[..., object]) -> Callable[..., object]:
    """When Inductor lowers a view, have it treat strides as different unless they are equal for all sizes.

    It would ask for the size of a shard otherwise, with a guard that holds on some ranks only.
    """
    # Heavy, and only a compilation needs it.
    from torch._inductor.graph import GraphLowering  # 2.11 - 2.15

    def strides(*args: object, size_oblivious: bool = False, **kwargs: object) -> object:
        oblivious = size_oblivious or isinstance(V.graph, GraphLowering)
        return stride_of_view(*args, size_oblivious=oblivious, **kwargs)

    return strides


def _sort_by_hint(fill_order: Callable[..., _T]) -> Callable[..., _T]:
    """Have Inductor sort strides by their hints, which are the same on every rank and larger than 1.

    It would compare them, and leave guards that a shard of one row fails. The stride of a dim of size 0 or 1 may
    stand anywhere in the order.
    """

    def order(strides: Sequence[IntLike], shape_env: ShapeEnv | None = None) -> _T:
        of_strides = next((s.node.shape_env for s in strides if isinstance(s, torch.SymInt)), shape_env)
        if of_strides is None:
            return fill_order(strides)
        with of_strides.suppress_guards():
            # Unbacked strides have no hints. With `shape_env`, torch compares them in another way.
            unknown = any(isinstance(s, torch.SymInt) and is_unbacked(s) for s in strides)
            try:
                return fill_order(strides, of_strides if unknown else shape_env)
            except UNKNOWN_SIZE:  # 2.11 - 2.12
                return fill_order([size_hint(s) for s in strides])

    return order


def decide_by_hint_where_guards_are_suppressed(shape_env: ShapeEnv) -> None:
    """Turn the switch off inside ``shape_env.suppress_guards()``, where a decision by hint leaves no guard."""
    require(ShapeEnv, "suppress_guards")
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

    vars(shape_env)["suppress_guards"] = suppress_and_decide
