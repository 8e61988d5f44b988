"""The patches of torch that hold during a compilation, each with its reason and its versions.

A shard may be empty or have one row, on any rank in any call. So a trace must not compare a shard's size with 0, 1 or
another size. The answer would become a guard that holds on some ranks only, and the other ranks would compile again,
alone. Torch has a switch for that, `backed_size_oblivious`, but not all of its code obeys the switch. Most of these
patches change the code that does not.

`compiling` puts these patches in and takes them out. The others stay until the process ends: some come with the first
sharded tensor (`wrappers`, `state_dicts`, `groups`), some with the first trace of a collective (`inductor`).

For each patch `tests/ranks/test_patches.py` has a program that goes wrong without it. When such a program goes right,
the test fails, and the patch can go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch.fx.experimental.symbolic_shapes import ShapeEnv  # 2.11 - 2.15

from shardcompile.compat.artifacts import OF_ARTIFACTS
from shardcompile.compat.compiled_once import COMPILED_ONCE
from shardcompile.compat.dtensor_padding import pads_on_all_ranks
from shardcompile.compat.gpu_kernels import MIXED_REDUCTIONS_BY_HINT, SIZES_OVER_TWO_DIMS
from shardcompile.compat.groups import COLLECTIVES_IN_COMM_DEBUG_MODE
from shardcompile.compat.index_strides import STRIDES_BY_TERMS
from shardcompile.compat.inductor import OF_COLLECTIVES
from shardcompile.compat.kernel_questions import (
    ones_in_kernels_by_hint,
    plain_sizes_are_guarded,
    sizes_stay_symbols,
    storage_of_no_rows,
)
from shardcompile.compat.patch import Patch, put_in, replace
from shardcompile.compat.replacements import (
    asserts_of_known_sizes,
    batched_products_by_hint,
    channels_last_by_hint,
    clamped_ends,
    decide_by_hint_where_guards_are_suppressed,
    failed_checks,
    fill_order_by_hint,
    memory_format_by_hint,
    places_of_parts,
    shards_of_modules_vary,
    symbols_by_both_names,
    traces_agree,
    views_by_stride,
)
from shardcompile.compat.saved_strides import saved_after_written, saved_as_traced
from shardcompile.compat.scheduling import (
    BROADCAST_BY_GUARDS,
    NUMBERS_OF_WRITTEN_ROWS,
    ROWS_OF_GROUPS,
    parts_own_no_memory,
    reads_after_writes,
)
from shardcompile.compat.shard_symbols import name_symbols_of_shards
from shardcompile.compat.slice_sizes import PARTS_TO_THE_END, SLICES_BY_FORMULA
from shardcompile.compat.state_dicts import OF_STATE_DICTS
from shardcompile.compat.strides import ORDER_BY_DIVISORS, ORDERS_OF_UNKNOWN_STRIDES, STRIDES_AFTER_SIZES
from shardcompile.compat.wrappers import OF_WRAPPERS
from shardcompile.compat.writes import copies_by_hint, joins_of_copies, overlap_by_hint, overlaps_of_sizes

OF_RANKS_ALIKE = (
    Patch(
        "reads_after_writes",
        "torch._inductor.scheduler.SchedulerNode._compute_attrs",
        "When Inductor fuses loops of different shapes, it computes again what a loop reads, and forgets which writes "
        "must come before. A wait is such a write, so code may read the result of a collective before the wait.",
        "https://github.com/pytorch/pytorch/issues/185509, https://github.com/pytorch/pytorch/pull/185873, "
        "https://github.com/pytorch/pytorch/pull/177816; cancel_reduction_split forgets it still (2.15).",
        "2.11 - 2.15",
        reads_after_writes,
    ),
    Patch(
        "parts_own_no_memory",
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.can_reuse",
        "A result that is computed from a part of a join may be stored in place of that part, in the memory of the "
        "whole. When nobody reads the whole any more, another result gets that memory: silently wrong values.",
        "decide_inplace_update takes inputs with a NonOwningLayout: its result is a view of the owner's memory then, "
        "and the wrapper frees and reuses the owner while the result lives. def f(x, w): a = x.sin(); "
        "s = torch.cat([x, a]).cumsum(0); e = a * s[2:]; t = e.cumsum(0); return e, t, w @ s gives a wrong e and t for "
        "torch.randn(2, 5), torch.randn(4, 4), on CPUs.",
        "2.11 - 2.15",
        parts_own_no_memory,
    ),
    BROADCAST_BY_GUARDS,
    ROWS_OF_GROUPS,
    STRIDES_BY_TERMS,
    Patch(
        "joins_of_copies",
        "torch._inductor.ir.ConcatKernel.realize_into",
        "Inductor computes the parts of a join in the memory of the whole. If a later op writes to a part in place, as "
        "the gradient of a slice or of a diagonal does, the whole changes, too: silently wrong gradients.",
        "https://github.com/pytorch/pytorch/issues/177821 is the same where the whole is written to. Of a part: with "
        "b = x.sin(); c = torch.cat([y, b], 1); d = b.diagonal_scatter(z) a compiled function has z in c, too, if the "
        "cat comes first (a backward graph, or reorder_for_locality = False). Mended in 2.15.",
        "2.11 - 2.14",
        joins_of_copies,
    ),
    Patch(
        "saved_after_written",
        "torch._functorch._aot_autograd.graph_compile._aot_stage2b_bw_compile",
        "The backward graph is compiled for the strides that Inductor gave to the saved tensors. If the program writes "
        "to a sharded input, each saved tensor gets the strides of another one.",
        "_aot_stage2b_bw_compile counts the results of the forward graph by the metadata of inner tensors, where an "
        "input of a tensor subclass that is written to may be none; the partitioner counts by "
        "compute_inner_mutated_inp_indices_from_subclass_meta. RuntimeError: mismatch in length of strides and shape.",
        "2.11 - 2.15",
        saved_after_written,
    ),
    SIZES_OVER_TWO_DIMS,
    MIXED_REDUCTIONS_BY_HINT,
    Patch(
        "pads_on_all_ranks",
        "torch.distributed.tensor.placement_types.pad_tensor, unpad_tensor",
        "Before a gather DTensor pads every shard that is smaller than the largest. Paddings are not merged "
        "(`parts_stay_separate`), nor are their collectives; equal gathers without padding are. So ranks have "
        "different numbers of collectives.",
        "By its comment, pad_tensor leaves a node for a padding of 0 while tracing, so that all ranks have the same "
        "graph. It leaves none if the amount is a number.",
        "2.11 - 2.14",
        pads_on_all_ranks,
        kind="sizes",
    ),
    Patch(
        "traces_agree",
        "torch._dynamo.backends.common.aot_module_simplified",
        "AOTAutograd counts the results of the forward pass in one trace and records the graph in another. If the "
        "second trace finds that a symbol is a number, by the backward pass or by the strides of a result, it has "
        'fewer results: "Node ... was invalid", a tensor taken for a size, or results of another shape.',
        "Symbols that are specialised in the trace that is recorded (by the backward pass, or as it is noted how each "
        "result lies in memory, where a range shrinks to one number) change how many results the forward graph of a "
        "tensor subclass has, after they were counted: DTensor fails in the same way.",
        "2.11 - 2.15",
        traces_agree,
    ),
    Patch(
        "shards_of_modules_vary",
        "torch._dynamo.variables.builder.tensor_always_has_static_shape",
        "Dynamo traces the buffers and parameters of modules with numbers for sizes. Inputs that are identically "
        "sharded have symbols, so a sharded buffer would not fit them; shards of parameters differ between ranks.",
        "force_parameter_static_shapes also holds for tensor subclasses whose inner tensors are marked as dynamic: it "
        "ignores the marks on their inner tensors.",
        "2.11 - 2.15",
        shards_of_modules_vary,
        kind="sizes",
    ),
    COMPILED_ONCE,
)
"""Put in when a compilation meets its first sharded tensor, and taken out when it ends."""

OF_A_COMPILATION = (
    Patch(
        "later_traces",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.__init__",
        "Dynamo may trace a function again. Symbols of its plain inputs are made before it meets a sharded one, and "
        "so before the patches of that trace are put in.",
        "None: it puts in the other patches, see symbols_of_shards.",
        "2.11 - 2.15",
        lambda stack: replace(stack, ShapeEnv, "__init__", _putting_into_traces),
        kind="sizes",
    ),
    Patch(
        "ones_in_kernels_by_hint",
        "torch.fx.experimental.sym_node.SymNode.guard_bool",
        "C++ kernels ask whether a shard has one row, to find out whether it is contiguous. The answer becomes a guard "
        "that some ranks fail. A branch of the program on an unbacked size and a global one has no answer with the "
        "switch, which lets a global size be 0: it gets a guard that the global size is at least 2.",
        "Comparisons of SymInts with 0 and 1 in C++ (SymInt::operator==) guard with backed_size_oblivious too, which "
        "guard_or_false does not: contiguous() of an expanded tensor, in the decomposition of log_softmax.",
        "2.11 - 2.15",
        ones_in_kernels_by_hint,
        kind="sizes",
    ),
    Patch(
        "plain_sizes_are_guarded",
        "torch.fx.experimental.symbolic_shapes._guard_or",
        "The switch holds for all sizes, although those of plain tensors are the same on all ranks. "
        "With the switch a slice of a plain tensor has an unknown number of rows, and later ops fail.",
        "backed_size_oblivious could be a property of symbols. With it, x.chunk(2)[-1] of a dynamic x has an unbacked "
        "size, and unbind() of that keeps the dim.",
        "2.11 - 2.15",
        plain_sizes_are_guarded,
        kind="sizes",
    ),
    Patch(
        "sizes_stay_symbols",
        "torch._subclasses.fake_tensor._DISPATCH_META_HANDLERS[aten.size.default]; SymNode.guard_int",
        "A C++ kernel that takes sizes as numbers gets hints if guards are suppressed. Then the graph is wrong for "
        "every shard. The patch raises an error.",
        "The inverse of unfold in functionalization takes base.sizes(), although unfold_backward takes SymInt[]: a "
        "write through windows specialises on the sizes of the tensor.",
        "2.11 - 2.15",
        sizes_stay_symbols,
        kind="sizes",
    ),
    Patch(
        "storage_of_no_rows",
        "torch.fx.experimental.sym_node.SymNode.expect_true",
        "Torch computes the length of a storage from the strides of its tensor. For a shard that turns out empty the "
        "length is negative, and a check in the graph fails on that rank.",
        "clone_preserve_strides (in Python, and in C++ from 2.15 on) makes a tensor as long as a storage of unbacked "
        "sizes. It computes the length as if there were elements, and asserts size >= 0 at run time: it should clamp "
        "the length to at least 0.",
        "2.11 - 2.15",
        storage_of_no_rows,
    ),
    Patch(
        "saved_as_traced",
        "torch._inductor.graph.GraphLowering.run_node",
        "Inductor may store a saved tensor with its dims in another order than the graph says. It tells the backward "
        "graph, but not of unbacked strides. Views by strides are not told either: they read "
        "joined shards in another order, without a word.",
        "GraphLowering.run_node requires strides of outputs and of inputs of as_strided, and compile_fx reports them, "
        "only without unbacked symbols: assert_size_stride of the backward pass fails (size 7==7, stride 1==2).",
        "2.11 - 2.15",
        saved_as_traced,
    ),
    Patch(
        "copies_by_hint",
        "torch._subclasses.fake_impls.run_and_return_new_tensor_of_input_device",
        "A write to a part of a tensor makes a copy that keeps the strides of the part. Torch's fake kernel asks "
        "whether the part is dense. A rank whose shard has one column gets another answer than its neighbours.",
        "The fake kernel of aten.copy guards on the sizes of what it copies (is it dense?), and gives the result the "
        "same strides either way.",
        "2.11 - 2.15",
        copies_by_hint,
        kind="sizes",
    ),
    Patch(
        "overlaps_of_sizes",
        "torch._inductor.fx_passes.reinplace.compute_overlapping_tensors",
        "Inductor writes into a tensor in place if no view that is read later overlaps it. It asks whether views of a "
        "shard have rows, with a guard that an empty shard fails, so that ranks compile alone.",
        "reinplace guards on the sizes of views of one storage; it could assume an overlap if a size is unknown, as it "
        "does for sizes that depend on data.",
        "2.11 - 2.15",
        overlaps_of_sizes,
        kind="sizes",
    ),
    Patch(
        "views_by_stride",
        "torch._subclasses.fake_impls._compute_stride",
        "When Inductor lowers a view it compares strides, and so asks for the size of a shard.",
        "Inductor's view lowering computes strides with guards although backed_size_oblivious is on: pass "
        "size_oblivious=True to _compute_stride from GraphLowering, as the fake kernels do.",
        "2.11 - 2.15",
        views_by_stride,
        kind="sizes",
    ),
    Patch(
        "overlap_by_hint",
        "torch._debug_has_internal_overlap",
        "Inductor copies a shard when it lowers `select`. The copy checks whether the shard overlaps itself, and so "
        "compares sizes with 1. The check can only raise.",
        "_debug_has_internal_overlap guards on backed symbols when called on fake tensors; it should answer by hints, "
        "since it is a check that can only raise.",
        "2.11 - 2.15",
        overlap_by_hint,
        kind="sizes",
    ),
    Patch(
        "memory_format_by_hint",
        "torch._C._conv_determine_backend_memory_format",
        "Torch chooses the memory format of a convolution by whether there is more than one image. With one image both "
        "formats are the same.",
        "The meta kernel of convolution guards on a batch of 1 through _conv_determine_backend_memory_format, with "
        "backed_size_oblivious as well.",
        "2.11 - 2.15",
        memory_format_by_hint,
        kind="sizes",
    ),
    Patch(
        "channels_last_by_hint",
        "torch._prims_common.are_strides_like_channels_last_or_false",
        "Torch asks whether a result of four dims is stored with the channels last. The last comparison of strides "
        "leaves a guard, which a shard of one row fails.",
        "are_strides_like_channels_last_or_false compares `min == strides[1]` with a guard, between comparisons that "
        "leave none: guard_or_true would do.",
        "2.11 - 2.15",
        channels_last_by_hint,
        kind="sizes",
    ),
    Patch(
        "symbols_by_both_names",
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.codegen_input_symbol_assignment",
        "An input may come with a gradient that it already has, which has its own symbol for the same size. Generated "
        "code defines the input's symbol only.",
        "https://github.com/pytorch/pytorch/issues/155468, https://github.com/pytorch/pytorch/pull/185473",
        "2.11 - 2.14",
        symbols_by_both_names,
    ),
    Patch(
        "fill_order_by_hint",
        "torch._inductor.ir.get_fill_order",
        "Inductor sorts strides by comparing them, and leaves guards that a shard of one row fails.",
        "https://github.com/pytorch/pytorch/pull/183840 (strides that surely are in order); get_fill_order itself "
        "still compares backed strides with guards.",
        "2.11 - 2.15",
        fill_order_by_hint,
        kind="sizes",
    ),
    Patch(
        "asserts_of_known_sizes",
        "torch._inductor.ir.AssertScalar.__init__",
        "Generated code compares a size that is known at run time with a size. If the program later specialises the "
        "size, as a view with a stated size does, or finds it equal to another one, the code names a symbol that "
        "nothing defines.",
        "create_deferred_runtime_asserts writes the expression as it was deferred; backed symbols in it that were "
        "specialized or unified later should be replaced: NameError: name 's75' is not defined.",
        "2.11 - 2.15",
        asserts_of_known_sizes,
    ),
    Patch(
        "places_of_parts",
        "torch._inductor.ir.NonOwningLayout.get_free_symbol_uses",
        "Inductor computes a part of a join in its place in the result. That place may depend on a number of rows that "
        "is known at run time only. The code may use this number before it defines it: UnboundLocalError.",
        "https://github.com/pytorch/pytorch/pull/191615 does so for the result; the offset of a part, which is not in "
        "its layout's size and strides, is to be counted among the symbols that it uses as well.",
        "2.11 - 2.15",
        places_of_parts,
    ),
    Patch(
        "batched_products_by_hint",
        "torch._inductor.lowering.lowerings[aten.bmm]",
        "On CPUs the lowering asks whether the factors have one row, to copy those that the kernel would copy. If the "
        "number of rows is unbacked, the lowering fails.",
        "The CPU lowering of bmm guards on sizes of 1 (is_contiguous_strides_for_shape of factors) with "
        "backed_size_oblivious; statically_known_true would do.",
        "2.11 - 2.15",
        batched_products_by_hint,
        kind="sizes",
    ),
    Patch(
        "clamped_ends",
        "torch._inductor.sizevars.SizeVarAllocator.evaluate_min, evaluate_max; "
        "torch._inductor.ir.SliceView.normalize_start_end",
        "When Inductor clamps the end of a slice, it picks one of two sizes with a guard, or gives up. When it keeps "
        "the formula, it does not evaluate it to a number.",
        "https://github.com/pytorch/pytorch/pull/175819 (Min and Max are left where nothing is known); "
        "MinMaxBase.factor_minmax leaves Max(3, 6) unevaluated in Min(s, Max(3, 6)), and SymNode.compute_hint raises "
        "TypeError: Expected a number but got FloorDiv.",
        "2.11 - 2.15",
        clamped_ends,
        kind="sizes",
    ),
    Patch(
        "failed_checks",
        "torch._inductor.sizevars.SizeVarAllocator.expect_true",
        "When Inductor lowers a view, it tries one formula, checks it, and takes another one if the check fails. The "
        "failed check leaves a guard on the size of a shard, which ranks with one row fail.",
        "View._dynamic_reshape_indexer checks a formula that need not hold, and check_equals guards that it does not: "
        "x.view(2 * s, 2) of an x [s, 4] installs s != 1. A check that fails by the hints needs no guard.",
        "2.11 - 2.14",
        failed_checks,
        kind="sizes",
    ),
    ORDER_BY_DIVISORS,
    ORDERS_OF_UNKNOWN_STRIDES,
    NUMBERS_OF_WRITTEN_ROWS,
    SLICES_BY_FORMULA,
    PARTS_TO_THE_END,
)
"""Put in when a compilation meets its first shard of unknown size, and taken out when it ends."""

OF_A_TRACE = (
    Patch(
        "decisions_where_guards_are_suppressed",
        "ShapeEnv.suppress_guards",
        "AOTAutograd compares the strides of saved activations with those that Inductor chose. With the switch on, "
        "they count as different, and the backward graph gets the strides of the first call as constants.",
        "suppress_guards() with backed_size_oblivious: comparisons that may use hints without leaving a guard are "
        "answered False instead.",
        "2.11 - 2.15",
        decide_by_hint_where_guards_are_suppressed,
        kind="sizes",
    ),
    Patch(
        "symbols_of_shards",
        "ShapeEnv.create_symbol, _produce_dyn_sizes_from_int_tuple, _compute_symbolic_stride",
        "Torch makes symbols from the numbers of this rank's local shard, and gives equal numbers one symbol. Other "
        "ranks "
        "have other numbers, so they would get other graphs and guards.",
        "Duck shaping has no way to say that dims with equal hints are different (or that dims with different hints "
        "are one) for some inputs only; a tensor subclass needs it for its inner tensors.",
        "2.11 - 2.15",
        name_symbols_of_shards,
        kind="sizes",
    ),
)
"""Put into the `ShapeEnv` of a trace. They live as long as it does."""


def put_into_trace(shape_env: ShapeEnv) -> None:
    """Puts in the patches of a trace, unless they are in place."""
    if not vars(shape_env).keys() & {"suppress_guards", "create_symbol"}:
        put_in(OF_A_TRACE, shape_env)


def _putting_into_traces(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def initialised(shape_env: ShapeEnv, *args: object, **kwargs: object) -> None:
        init(shape_env, *args, **kwargs)
        put_into_trace(shape_env)

    return initialised


def all_patches() -> tuple[Patch, ...]:
    """The patches of a compilation, of collectives and artifacts, and those that come with the first sharded tensor."""
    of_tensors = (*OF_WRAPPERS, *OF_STATE_DICTS, COLLECTIVES_IN_COMM_DEBUG_MODE, STRIDES_AFTER_SIZES)
    return (*OF_RANKS_ALIKE, *OF_A_COMPILATION, *OF_A_TRACE, *OF_COLLECTIVES, *OF_ARTIFACTS, *of_tensors)
