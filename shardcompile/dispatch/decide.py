"""Decides how a call runs, from the op's record, the layouts and strides of its tensors, and its other arguments."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import local_shape_of
from shardcompile.compat import OpOverload
from shardcompile.dispatch.calls import describe, refuse_unlike_shards, tensors_text
from shardcompile.dispatch.foreign import check_collective
from shardcompile.dispatch.gather import Gathered, fallback
from shardcompile.dispatch.implemented import refuse_on_all_ranks
from shardcompile.dispatch.mutate import (
    FunctionalWrite,
    InPlace,
    InPlaceView,
    argument,
    refuse_expanded,
    refuse_windows,
)
from shardcompile.dispatch.run import (
    Decomposed,
    Direct,
    DirectView,
    Entry,
    IndexChecked,
    Local,
    Specs,
    Strides,
    copies_shard,
)
from shardcompile.errors import UnsupportedOpError, refusal
from shardcompile.ops import OpCall, OpRecord, ShardedDecomposition, TensorArg, record_of
from shardcompile.ops.choice import Choice, OutputPlan, choose
from shardcompile.ops.record import Rule, Run
from shardcompile.ops.support.as_integers import moved_dtype, moves_as_integers
from shardcompile.ops.support.gather_log import log_replicated
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.strides import may_misstate_strides
from shardcompile.ops.view.segmented import any_segmented, on_contiguous_shards, view_on_contiguous_shards
from shardcompile.sharded import Sharded
from shardcompile.sharding import QUANTIZED, Layout, Spec

_BY_TORCH = "torch's decomposition"


@dataclass(eq=False)
class Request:
    """One call, as the stages of `PRECEDENCE` see it.

    Attributes:
        cls: the class of sharded tensors.
        record: the record of the op.
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    cls: type[Sharded]
    record: OpRecord
    args: tuple[object, ...]
    kwargs: dict[str, object]

    @property
    def op(self) -> OpOverload:
        """The op overload."""
        return self.record.op

    @functools.cached_property
    def call(self) -> OpCall:
        """The call with layouts in place of tensors."""
        return describe(self.cls, self.op, self.args, self.kwargs)

    @functools.cached_property
    def written(self) -> list[int | str]:
        """The arguments that the op writes to, each as its position or its name."""
        return _find_mutated(self.op, self.args, self.kwargs)


Stage = Callable[[Request], Entry | None]
"""Returns the entry that runs a call, or None to leave it to the next stage; raises if the call is refused."""


def decide(cls: type[Sharded], op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Entry:
    """Returns the entry that runs a call: that of the first stage of `PRECEDENCE` that serves it.

    The decision, and every error, is rank-invariant.
    """
    request = Request(cls, record_of(op), args, kwargs)
    return next(entry for stage in PRECEDENCE if (entry := stage(request)) is not None)


def check_inputs(request: Request) -> None:
    """Refuses collectives on sharded tensors, shards that contradict their layouts, and quantized results."""
    check_collective(request.op, request.args, request.kwargs)
    refuse_unlike_shards(request.cls, request.op, request.args, request.kwargs)
    values = (*request.args, *request.kwargs.values())
    quantized = next((a for a in values if isinstance(a, torch.dtype) and a in QUANTIZED), None)
    if quantized is not None:
        raise UnsupportedOpError(
            f"{request.op} gives a quantized tensor ({quantized}), and shards are dense "
            f"({tensors_text(request.cls, request.args, request.kwargs)}); "
            "call it on x.to_local(), with a scale that all ranks share"
        )


def move_as_integers(request: Request) -> Entry | None:
    """Serves ops that only move elements of a dtype without kernels, such as float8: the elements move as integers."""
    dtype = moved_dtype(request.record, request.args, request.kwargs)
    return None if dtype is None else Decomposed(moves_as_integers(request.record, dtype), _last_resort_of(request))


def check_dtypes(request: Request) -> None:
    """Raises on all ranks what a kernel raises for the dtypes on those ranks whose shards are not empty."""
    refuse_on_all_ranks(request.record, request.args, request.kwargs)


def unflatten_segments(request: Request) -> Entry | None:
    """Serves calls that need consecutive rows, on tensors whose shards have several segments."""
    op, decomposition = request.op, request.record.sharded
    if not any_segmented([*request.args, *request.kwargs.values()]) or not _needs_consecutive_rows(request):
        return None
    in_view = Decomposed(
        (view_on_contiguous_shards if op.is_view else on_contiguous_shards)(op), _last_resort_of(request)
    )
    if decomposition is None or decomposition.segmented is None:
        return in_view
    return Decomposed(decomposition.segmented, lambda *_: in_view, _decomposition_strides(request, decomposition))


def run_required_decomposition(request: Request) -> Entry | None:
    """Serves ops whose sharded decomposition every call uses."""
    decomposition = request.record.sharded
    if decomposition is None or not decomposition.always:
        return None
    strides = _decomposition_strides(request, decomposition)
    return Decomposed(decomposition.run, _last_resort_of(request), strides)


def write_to_arguments(request: Request) -> Entry | None:
    """Serves ops that write to arguments: on local shards, by the functional variant, or decomposed by torch."""
    if not request.written:
        return None
    return _with_index_check(request, _decide_mutation(request))


def run_by_rule(request: Request) -> Entry | None:
    """Serves ops that have a rule: on local shards, or decomposed where the rule would communicate more."""
    if request.record.rule is None:
        return None
    return _with_index_check(request, _decide_by_rule(request, request.record.rule))


def run_sharded_decomposition(request: Request) -> Entry | None:
    """Serves ops that have a sharded decomposition and no rule."""
    decomposition = request.record.sharded
    if decomposition is None:
        return None
    call = request.call
    return _with_index_check(request, Decomposed(decomposition.run, lambda *_: fallback(call)))


def run_torch_decomposition(request: Request) -> Entry | None:
    """Serves ops that torch decomposes into other ops."""
    composite = _composite(request.record)
    if composite is None:
        return None
    call = request.call
    return _with_index_check(request, Decomposed(composite, lambda *_: fallback(call), path=_BY_TORCH))


def gather_inputs(request: Request) -> Entry:
    """Serves every other op: gathers its sharded inputs and runs it on full tensors."""
    return fallback(request.call)


PRECEDENCE: tuple[Stage, ...] = (
    check_inputs,
    move_as_integers,
    check_dtypes,
    unflatten_segments,
    run_required_decomposition,
    write_to_arguments,
    run_by_rule,
    run_sharded_decomposition,
    run_torch_decomposition,
    gather_inputs,
)
"""The order in which an op is served. Handlers that a user has registered for the op come before it, see
`shardcompile.dispatch.engine.dispatch`. An entry that is a decomposition may leave a call to the entry that it names.
"""


def _with_index_check(request: Request, entry: Entry) -> Entry:
    # The ops that a gather or a functional variant dispatches check the indices themselves.
    needs_check = request.record.indices is not None and not isinstance(entry, (Gathered, FunctionalWrite))
    return IndexChecked(request.record, entry) if needs_check else entry


def _last_resort_of(request: Request) -> Callable[[tuple[object, ...], dict[str, object]], Entry]:
    """Returns `_last_resort` for the class and the op of a request; it keeps no arguments alive."""
    return functools.partial(_last_resort, request.cls, request.record)


def _last_resort(cls: type[Sharded], record: OpRecord, args: tuple[object, ...], kwargs: dict[str, object]) -> Entry:
    """Returns the entry for a call that no decomposition serves: the fallback, unless the op writes to an argument."""
    op = record.op
    if op._schema.is_mutable:
        raise refusal(
            str(op), tensors_text(cls, args, kwargs),
            "it writes to its argument, and no sharded decomposition of it serves these arguments",
            "Take full_tensor() of the inputs, or put a decomposition in its place: "
            "ShardTensor.register_dispatch_handler(op, handler)",
        )  # fmt: skip
    return fallback(describe(cls, op, args, kwargs))


def _needs_consecutive_rows(request: Request) -> bool:
    """Whether the op's decomposition assumes that a shard is a range of consecutive rows of the global tensor."""
    record, op = request.record, request.op
    if record.sharded is None or op._schema.is_mutable:
        return False
    if record.sharded.always or record.rule is None:
        return True
    choice = choose(_layouts(request.call), record.rule.strategies_for(request.call), len(op._schema.returns))
    return choice is None or choice.changes_sharded_dims


def _decide_by_rule(request: Request, rule: Rule) -> Entry:
    op, call, record, decomposition = request.op, request.call, request.record, request.record.sharded
    produced = functools.partial(_produced_bytes, op, request.args, request.kwargs)
    choice = choose(_layouts(call), rule.strategies_for(call), len(op._schema.returns), produced=produced)
    assert choice is not None, "replicating all inputs is always possible"

    def as_chosen(args: tuple[object, ...], kwargs: dict[str, object]) -> Entry:
        try:
            entry = _local_entry(record, call, choice, args, kwargs)
        except compat.UNKNOWN_OUTPUT_SHAPE:
            if op.is_view:  # a slice with unbacked bounds: Dynamo breaks the graph, or reports that it cannot
                raise
            return fallback(call)
        log_replicated(op, choice.plans)
        return entry

    if decomposition is None or not (
        choice.changes_sharded_dims or (decomposition.preferred is not None and decomposition.preferred(call))
    ):
        return as_chosen(request.args, request.kwargs)
    return Decomposed(decomposition.run, as_chosen, _decomposition_strides(request, decomposition))


def _produced_bytes(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> list[int]:
    """Returns the bytes of each global output, by hints while tracing; empty if the output shape is data-dependent."""
    try:
        out = global_meta(op, args, kwargs)
    except (*compat.UNKNOWN_OUTPUT_SHAPE, NotImplementedError):
        return []
    outputs = out if isinstance(out, tuple) and len(op._schema.returns) > 1 else (out,)
    return [
        math.prod(compat.size_hint(s) for s in x.shape) * x.dtype.itemsize if isinstance(x, Tensor) else 0
        for x in outputs
    ]


def _composite(record: OpRecord) -> Run | None:
    """Returns torch's decomposition of the op: its composite kernel, or an entry of torch's decomposition table."""
    op = record.op
    if record.not_decomposed:
        return None
    if op._can_decompose():
        return op.decompose
    decomposition = compat.decomposition_of(op)
    return None if decomposition is None else functools.partial(_check_first, op, decomposition)


def _check_first(op: OpOverload, decomposition: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Runs a decomposition after the op's own checks of shapes, which some decompositions lack."""
    _check_shapes(op, args, kwargs)
    return decomposition(*args, **kwargs)


def _decomposition_strides(request: Request, decomposition: ShardedDecomposition) -> Strides:
    """Returns the strides for the results of a sharded decomposition; None for a result that keeps its own."""
    if decomposition.stored == "none":
        return []
    strides = _stated_strides(request.op, request.args, request.kwargs)
    return strides if decomposition.stored == "all" else [None if n else s for n, s in enumerate(strides)]


def _stated_strides(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Strides:
    """Returns the strides of an op's results; None for a result that is no tensor.

    Returns an empty list if the strides are data-dependent, or if the results are views. Raises the errors that plain
    PyTorch raises for these shapes.
    """
    try:
        meta = global_meta(op, args, kwargs)
    except (*compat.UNKNOWN_OUTPUT_SHAPE, NotImplementedError):
        return []
    if op.is_view:
        return []
    metas = meta if isinstance(meta, (list, tuple)) else [meta]
    return [m.stride() if isinstance(m, Tensor) else None for m in metas]


def _check_shapes(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raises what plain PyTorch raises for these shapes, unless they are data-dependent."""
    with contextlib.suppress(*compat.UNKNOWN_OUTPUT_SHAPE, NotImplementedError):
        global_meta(op, args, kwargs)


def _layouts(call: OpCall) -> list[Layout]:
    return [t.layout for t in call.tensors]


def _local_entry(
    record: OpRecord,
    call: OpCall,
    choice: Choice,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Entry:
    specs = _output_specs(call, choice.outputs, args, kwargs)
    arguments = None
    local_args = None if record.rule is None else record.rule.local_args
    if local_args is not None:
        layouts = [s.layout for s in (specs[0] if isinstance(specs[0], list) else specs) if isinstance(s, Spec)]

        def arguments(local: tuple[object, ...]) -> tuple[object, ...]:
            # The local shape is computed in each call, because in-process ranks (threads) share the cached entry.
            return local_args(call, local, layouts, local_shape_of)

    stays = not any(p.steps for p in choice.plans)
    strides_like = None
    if any(isinstance(s, Spec) for s in specs) and may_misstate_strides(record, [t.ndim for t in call.tensors]):
        strides_like = next((i for i, a in enumerate(args) if isinstance(a, Tensor)), None)
    if stays and arguments is None and _is_simple(call, specs):
        return Direct(record, choice, specs, None, strides_like)
    if stays and strides_like is None and _is_simple_view(call, specs) and not copies_shard(record, choice, specs):
        return DirectView(record, choice, specs, arguments)
    return Local(record, choice, specs, arguments, strides_like)


def _is_simple(call: OpCall, specs: Specs) -> bool:
    """Whether a call returns one new tensor and has no tensors inside of lists or keyword arguments."""
    direct = sum(isinstance(a, TensorArg) for a in call.args)
    fresh = not call.op.is_view and not call.op._schema.is_mutable
    return fresh and direct == len(call.tensors) and len(specs) == 1 and isinstance(specs[0], Spec)


def _is_simple_view(call: OpCall, specs: Specs) -> bool:
    """Whether a call returns one view of its first argument, which is its only tensor."""
    is_view = call.op.is_view and not call.op._schema.is_mutable
    first = len(call.tensors) == 1 and isinstance(call.args[0], TensorArg)
    return is_view and first and len(specs) == 1 and isinstance(specs[0], Spec)


def _output_specs(
    call: OpCall, outputs: Sequence[OutputPlan], args: tuple[object, ...], kwargs: dict[str, object]
) -> Specs:
    """Returns the specs of the outputs; global shapes, strides and dtypes are inferred from the global inputs."""
    like = call.tensors[0].layout

    def spec(meta: object, plan: OutputPlan) -> Spec | list[Spec | None] | None:
        if isinstance(meta, (list, tuple)):
            return [spec(m, plan) for m in meta]  # type: ignore[misc]
        if not isinstance(meta, Tensor):
            return None
        layout = plan.layout(like, compat.global_sizes(meta.shape), meta.dtype)
        return Spec.of(layout, compat.retrace(meta.stride()))

    meta = global_meta(call.op, args, kwargs)
    metas = meta if isinstance(meta, tuple) and len(call.op._schema.returns) > 1 else (meta,)
    return [spec(m, plan) for m, plan in zip(metas, outputs, strict=True)]


def _find_mutated(op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> list[int | str]:
    """Returns the arguments that the op writes to, each as its position or its name."""
    if not op._schema.is_mutable:
        return []
    written = [i if i < len(args) else a.name for i, a in enumerate(op._schema.arguments) if compat.is_written(a)]
    return [w for w in written if argument(w, args, kwargs) is not None]


def _functional_checks_shapes(record: OpRecord, functional: OpOverload) -> bool:
    """Whether the functional variant has to check the shapes, because the op's own fake kernel fails.

    Fake kernels of ``out`` variants refuse a generator and the options of factories.
    """
    return record.is_random or bool(compat.factory_arguments(record.op, functional))


def _decide_mutation(request: Request) -> Entry:
    """Returns the entry for an op that writes to arguments: on shards, by its functional variant, or decomposed."""
    cls, record, call, mutated = request.cls, request.record, request.call, request.written
    args, kwargs = request.args, request.kwargs
    targets = [argument(m, args, kwargs) for m in mutated]
    if not all(isinstance(t, Tensor) for t in targets):
        raise UnsupportedOpError(f"{call.op} writes to a list of tensors; use the op on each of them")
    functional = compat.functional_variant(call.op)
    if record.becomes is not None:
        if type(targets[0]) is not cls:
            raise UnsupportedOpError(
                f"{call.op} gives a plain tensor the memory of a sharded one ({tensors_text(cls, args, kwargs)}), "
                "which has none of its own; take x.to_local() or x.full_tensor()"
            )
        return InPlaceView(call.op, record.becomes)
    if torch.Tag.inplace_view in call.op.tags and functional is not None:
        return InPlaceView(call.op, functional)
    written = [t._spec for t in targets if type(t) is cls]
    refuse_expanded(record, written)
    if functional is None or not _functional_checks_shapes(record, functional):
        _check_shapes(call.op, args, kwargs)
    rule = record.rule
    # Graphs contain the seeded op, which is functional, in place of a random op.
    draws_functionally = record.is_random and functional is not None
    if mutated == [0] and type(targets[0]) is cls and rule is not None and not draws_functionally:
        choice = choose(_layouts(call), rule.strategies_for(call), len(call.op._schema.returns), in_place=True)
        if choice is not None:
            log_replicated(call.op, choice.plans)
            return InPlace(record, choice)
    if functional is not None:
        refuse_windows(record, written)
        return FunctionalWrite(call.op, functional, mutated)
    composite = _composite(record)
    if composite is not None:
        return Decomposed(composite, _last_resort_of(request), path=_BY_TORCH)
    if any(type(t) is cls for t in targets):
        raise UnsupportedOpError(f"{call.op} writes to its argument and has no functional variant to run instead")
    return fallback(call)
