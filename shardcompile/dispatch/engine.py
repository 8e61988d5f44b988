# The class of sharded tensors arrives as an argument, so that its attributes are unknown here.
# mypy: disable-error-code="attr-defined, union-attr"
"""The engine: unwrap, ask the rule, redistribute inputs, run the op on blocks, wrap.

What is decided for a call depends on its op, the layouts and strides of its tensors and its other arguments only,
never on the rank or on local values. In eager mode the decision is made once and kept; inside a trace, where sizes
are symbols, it is made for every call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat, config
from shardcompile.collectives import block_shape
from shardcompile.compat import OpOverload
from shardcompile.dispatch.attention import ATTENTION_OPS
from shardcompile.dispatch.choice import Choice, OutputPlan, choose, whole_plan
from shardcompile.dispatch.copied_views import (
    TURNED,
    WATCHED,
    follow,
    has_followers,
    has_views,
    note_turn,
    note_view,
    note_write,
    was_turned,
)
from shardcompile.dispatch.decompositions import DECOMPOSITIONS, NOT_DECOMPOSED
from shardcompile.dispatch.foreign import check_collective
from shardcompile.dispatch.global_meta import global_meta, tensors_of
from shardcompile.dispatch.handlers import Handlers
from shardcompile.dispatch.index_range import INDEXED, check_indices
from shardcompile.dispatch.joined import any_joined, of_neighbours, view_of_neighbours
from shardcompile.dispatch.listwise import listwise_form
from shardcompile.dispatch.local_ops import COPYING_VIEWS, LOCAL_OPS, copy_block
from shardcompile.dispatch.memory_ops import MEMORY_OPS
from shardcompile.dispatch.random import RANDOM_OPS
from shardcompile.dispatch.strides import all_in_order, in_one_order, in_order, may_be_mistold
from shardcompile.errors import LayoutError, UnsupportedOpError, refusal
from shardcompile.layout import Cut, Layout, Spec, contiguous_stride
from shardcompile.plan import Plan, find_plan
from shardcompile.redistribute import run_plan
from shardcompile.rules import OpCall, Rule, TensorArg, find_rule, is_elementwise, is_pointwise, pointwise_rule

log = logging.getLogger("shardcompile")
_CACHE: dict[Any, _Entry] = {}
_CACHE_LIMIT = 1 << 15
_FELL_BACK: set[OpOverload] = set()
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}
_NOT_IN_PLACE = "Take the form that is not in place, such as x = x.transpose(0, 1) for x.transpose_(0, 1)"
_POINTWISE = Rule(pointwise_rule, None, "torch.Tag.pointwise")


def clear_cache() -> None:
    """Forget all decisions, after a rule has changed."""
    _CACHE.clear()


compat.forget_with_world(clear_cache)


def dispatch(
    cls: Any, op: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run an op whose arguments hold at least one sharded tensor; the `__torch_dispatch__` of its class.

    Args:
        cls: the class of sharded tensors.
        op: the overload.
        types: classes of the arguments.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if torch.is_inference_mode_enabled() and op.is_view and not args[0].is_inference():
        # A view of an ordinary tensor is one itself, also when it is taken in inference mode: both share a version.
        with torch.inference_mode(False), torch.no_grad():
            return dispatch(cls, op, types, args, kwargs)
    # The common case first, and without a call for each argument: this is the cost of every eager op.
    key: list[Any] = [id(op)]
    for a in args:
        kind = type(a)
        if kind is cls:
            key.append(id(a._spec))
        elif kind is list and a and type(a[0]) is int:
            key.append(tuple(a))
        else:
            _extend_key(key, cls, a)
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            _extend_key(key, cls, a)
    else:
        kwargs = {}
    try:
        entry = _CACHE.get(tuple(key))
    except TypeError:  # a symbolic size cannot be hashed
        entry = None
    if entry is None:
        if op in Handlers.ops:
            return Handlers.ops[op](*args, **kwargs)
        entry = _decide(cls, op, args, kwargs)
        _remember(cls, key, entry, args, kwargs)
        out = entry.run(cls, args, kwargs)
        for x in tensors_of([*args, *kwargs.values()]):
            if type(x) is cls and not x._spec.is_plain:
                _refuse_specialised(op, x._spec.layout)
        return out
    return entry.run(cls, args, kwargs)


def _extend_key(key: list[Any], cls: type, a: Any) -> None:
    """Add what a decision depends on; specs by identity, which the entry keeps alive."""
    kind = type(a)
    key.append(kind)  # 1, 1.0 and True are equal but not the same argument
    if kind is cls:
        key.append(id(a._spec))
    elif kind is list or kind is tuple:
        if a and type(a[0]) is int:
            key.append(tuple(a))
            return
        key.append(len(a))
        for b in a:
            _extend_key(key, cls, b)
    elif isinstance(a, Tensor):
        key.extend((tuple(a.shape), a.stride(), a.dtype, a.device))
    else:
        key.append([] if kind is torch.SymFloat or kind is torch.SymBool else a)  # not to be hashed, as a `SymInt`


def _remember(cls: type, key: list[Any], entry: _Entry, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    specs = [x._spec for x in tensors_of([*args, *kwargs.values()]) if type(x) is cls]
    if not all(s.is_plain for s in specs):
        return
    entry.specs_by_id = specs
    if len(_CACHE) >= _CACHE_LIMIT:
        _CACHE.clear()
    try:
        _CACHE[tuple(key)] = entry
    except TypeError:  # a symbolic size among the other arguments
        return


class _Entry:
    """What is done for a call.

    Attributes:
        specs_by_id: the specs whose identities are in the cache key.
    """

    specs_by_id: Sequence[Spec] = ()

    def run(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Composed(_Entry):
    """Run a function of sharded tensors instead.

    Args:
        function: the op in terms of others.
        otherwise: of arguments, what is done where the function returns NotImplemented, as some of torch's do. It is
            kept, and must not hold on to the arguments that it was decided on.
        strides: that the results of the op have; empty if they are not known, or are views.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        otherwise: Callable[[Any, Any], _Entry] | None = None,
        strides: Sequence[Any] = (),
    ) -> None:
        self.function = function
        self.otherwise = otherwise
        self.strides = strides

    def run(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = self.function(*args, **kwargs)
        if self.otherwise is None or out is not NotImplemented:
            return self._stored(cls, out)
        return self.otherwise(args, kwargs).run(cls, args, kwargs)

    def _stored(self, cls: type, out: Any) -> Any:
        """The results, stored as those of the op itself: by that later ops decide what can be a view."""
        if not self.strides:
            return out
        if isinstance(out, Tensor):
            return _with_stride(cls, out, self.strides[0])
        return type(out)(_with_stride(cls, x, s) for x, s in zip(out, self.strides, strict=True))


def _with_stride(cls: Any, x: Any, stride: Any) -> Any:
    if type(x) is not cls or stride is None:
        return x
    pairs = zip(x.shape, x._spec.stride, stride, strict=True)
    if all(compat.size_hint(n) <= 1 or compat.size_hint(a) == compat.size_hint(b) for n, a, b in pairs):
        return x
    stride = compat.retraced(stride)
    return cls._wrap(in_order(x._local_tensor, stride), Spec.of(x._spec.layout, stride))


class _Checked(_Entry):
    """Look at indices first.

    Args:
        op: one of those that have some.
        entry: what is done then.
    """

    def __init__(self, op: OpOverload, entry: _Entry) -> None:
        self.op = op
        self.entry = entry

    def run(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_indices(cls, self.op, args, kwargs)
        return self.entry.run(cls, args, kwargs)


class _Local(_Entry):
    """Bring the inputs to the layouts that are needed, run the op on blocks, wrap the results.

    Args:
        op: the op.
        choice: the plans of its inputs.
        specs: of its results.
        arguments: makes the arguments of the op on blocks.
        mistold: where `strides.may_be_mistold` holds, which argument is a tensor.
    """

    def __init__(
        self,
        op: OpOverload,
        choice: Choice,
        specs: Sequence[Any],
        arguments: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None,
        mistold: int | None = None,
    ) -> None:
        self.op = op
        self.function = LOCAL_OPS.get(op) or compat.kernel_of(op)
        self.plans = [p if p.steps else None for p in choice.plans]
        self.specs = specs
        self.arguments = arguments
        self.mutates = op._schema.is_mutable
        self.aliases = op.is_view
        self.exchanges = any(p is not None for p in self.plans)
        self.moved = self.aliases and (self.exchanges or op in COPYING_VIEWS)
        self.fresh = not self.mutates and not self.aliases
        self.single = len(op._schema.returns) == 1 and not isinstance(specs[0], list) if specs else True
        self.mistold = mistold

    def run(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._blocks(cls, args, kwargs)
        if self.mutates:
            return args[0]
        if self.fresh and (self.exchanges or not compat.is_traced()):
            out = all_in_order(out, self.specs)
        if self.single:
            wrapped = out if self.specs[0] is None else cls._wrap(out, self.specs[0])
        else:
            wrapped = _wrap_all(cls, out, self.specs)
        if self.aliases:
            return self._as_view(cls, args, kwargs, wrapped)
        return wrapped

    def _blocks(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plans = iter(self.plans)
        local_args = tuple([_localize(cls, a, plans, self.moved) for a in args])
        local_kwargs = {k: _localize(cls, a, plans, self.moved) for k, a in kwargs.items()} if kwargs else kwargs
        if self.arguments is not None:
            local_args = self.arguments(local_args)
        if self.mistold is not None and type(local_args[self.mistold]) is not Tensor:
            stride = next(s.stride for s in self.specs if s is not None)
            out = self.function(*in_one_order(self.op, local_args, stride), **local_kwargs)
            return all_in_order(out, self.specs)
        return self.function(*local_args, **local_kwargs)

    def _as_view(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrapped: Any) -> Any:
        outs = wrapped if isinstance(wrapped, (list, tuple)) else [wrapped]
        if self.op is not torch.ops.aten.detach.default:
            for out in outs:
                note_view(args[0], out)
        if self.moved or args[0]._copied is not None:
            _follow_all(wrapped, self.op, args, lambda: self._blocks(cls, args, kwargs))
            return wrapped
        if type(args[0]._local_tensor) is not Tensor:
            return wrapped  # a trace that saw the same storage would have the output made anew, by `as_strided`
        for out in outs:
            compat.share_storage(out, args[0])
        return wrapped


def _refuse_specialised(op: OpOverload, layout: Layout) -> None:
    """Raise, on all ranks alike, if a trace has taken the size of this rank's block for a number.

    It took the hint, which all ranks share. The graph would be right on the ranks that happen to have this size, and
    the others would be left behind.
    """
    for dim, cut in enumerate(layout.cuts):
        if cut is not None and cut.is_traced and compat.is_specialised(cut.block) and not _is_settled(cut):
            raise UnsupportedOpError(
                f"{op} cannot be compiled on a block whose size is not known beforehand: it takes the size of dim "
                f"{dim} for a number ({layout.describe()}). Redistribute that dim to Replicate before it, or call it "
                "outside of the compiled function"
            )


def _is_settled(cut: Cut) -> bool:
    """Whether a trace has learnt that a cut is a known one."""
    return cut.kind == "dynamic" and (isinstance(cut.key, int) or compat.is_specialised(cut.key))


def _follow_all(wrapped: Any, op: OpOverload, args: tuple[Any, ...], blocks: Callable[[], Any]) -> None:
    """Have the result of a view op, or all of its results, follow what was viewed."""
    if not isinstance(wrapped, (list, tuple)):
        follow(wrapped, op, args, None, blocks)
        return
    for i, out in enumerate(wrapped):
        follow(out, op, args, i, lambda i=i: blocks()[i])  # type: ignore[misc]


def _localize(cls: type, a: Any, plans: Iterator[Plan | None], keep_order: bool = False) -> Any:
    if isinstance(a, Tensor):
        plan = next(plans)
        local = a._local_tensor if type(a) is cls else a
        if plan is None:
            return local
        return in_order(run_plan(plan, local), a.stride()) if keep_order else run_plan(plan, local)
    if isinstance(a, (list, tuple)):
        return [_localize(cls, b, plans, keep_order) for b in a]
    return a


def _wrap_all(cls: type, out: Any, specs: Sequence[Any]) -> Any:
    if len(specs) == 1 and isinstance(specs[0], list):
        return [t if s is None else cls._wrap(t, s) for t, s in zip(out, specs[0], strict=True)]
    return tuple([t if s is None or t is None else cls._wrap(t, s) for t, s in zip(out, specs, strict=True)])


def _decide(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
    check_collective(cls, op, args, kwargs)
    if any_joined(cls, [*args, *kwargs.values()]) and _needs_neighbours(cls, op, args, kwargs):
        return _Composed((view_of_neighbours if op.is_view else of_neighbours)(cls, op))
    if op in ATTENTION_OPS:
        if "backward" in op.name():
            return _Composed(ATTENTION_OPS[op])
        strides = _stated_strides(cls, op, args, kwargs)
        # What it gives besides is for its backward alone.
        return _Composed(ATTENTION_OPS[op], None, [None if n else s for n, s in enumerate(strides)])
    listwise = listwise_form(op)
    if listwise is not None:
        return _Composed(listwise)
    if torch.Tag.nondeterministic_seeded in op.tags:
        if op in RANDOM_OPS:
            return _Composed(RANDOM_OPS[op])
        raise UnsupportedOpError(f"{op}: no sharded form of this random op; {_tensors_text(cls, args, kwargs)}")
    call = _describe(cls, op, args, kwargs)
    mutated = _mutated(op, args, kwargs)
    entry = (
        _decide_mutation(cls, call, mutated, args, kwargs) if mutated else _decide_functional(cls, call, args, kwargs)
    )
    # What is gathered, or done by the functional form, is looked at there.
    return _Checked(op, entry) if op in INDEXED and not isinstance(entry, (_Gathered, _Written)) else entry


def _needs_neighbours(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a form of an op that is no rule's would take the rows of a block for neighbours."""
    if op in ATTENTION_OPS or op in RANDOM_OPS:
        return True
    if op not in DECOMPOSITIONS:
        return False
    rule = _rule_of(op)
    if rule is None:
        return True
    call = _describe(cls, op, args, kwargs)
    choice = choose(_layouts(call), rule.ways(call), len(op._schema.returns))
    return choice is None or choice.communicates


def _decide_functional(cls: type, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
    op = call.op
    rule = _rule_of(op)
    if rule is not None:
        produced = functools.partial(_produced_bytes, cls, op, args, kwargs)
        choice = choose(_layouts(call), rule.ways(call), len(op._schema.returns), produced=produced)
        assert choice is not None, "replicating everything is always possible"

        def as_chosen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Entry:
            try:
                return _local_entry(cls, call, rule, choice, args, kwargs)
            except compat.UNKNOWN_OUTPUT_SHAPE:
                return _fallback(call)

        if not (choice.communicates and op in DECOMPOSITIONS):
            return as_chosen(args, kwargs)
        return _Composed(DECOMPOSITIONS[op], as_chosen, _stated_strides(cls, op, args, kwargs))
    if op in DECOMPOSITIONS:
        return _Composed(DECOMPOSITIONS[op], lambda *_: _fallback(call))
    composite = _composite(cls, op)
    if composite is not None:
        return _Composed(composite, lambda *_: _fallback(call))
    return _fallback(call)


def _produced_bytes(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Bytes of each output's global tensor, by hints while tracing; none if they depend on values."""
    try:
        out = global_meta(cls, op, args, kwargs)
    except compat.UNKNOWN_OUTPUT_SHAPE:
        return []
    outputs = out if isinstance(out, tuple) and len(op._schema.returns) > 1 else (out,)
    return [
        math.prod(compat.size_hint(s) for s in x.shape) * x.dtype.itemsize if isinstance(x, Tensor) else 0
        for x in outputs
    ]


def _rule_of(op: OpOverload) -> Rule | None:
    return find_rule(op) or (_POINTWISE if is_pointwise(op) else None)


def _composite(cls: type, op: OpOverload) -> Callable[..., Any] | None:
    """The op in terms of others, if torch has it so: its own kernel, or its table of decompositions."""
    if op in NOT_DECOMPOSED:
        return None
    if op._can_decompose():
        return op.decompose
    decomposition = compat.decomposition_of(op)
    return None if decomposition is None else functools.partial(_checked, cls, op, decomposition)


def _checked(cls: type, op: OpOverload, decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A decomposition, of which some leave out what the op itself checks."""
    _check_shapes(cls, op, args, kwargs)
    return decomposition(*args, **kwargs)


def _stated_strides(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Strides of the results of an op, None of what is no tensor; empty if they are not known, or are those of views.

    Errors that plain PyTorch raises for these shapes are raised here.
    """
    try:
        meta = global_meta(cls, op, args, kwargs)
    except (*compat.UNKNOWN_OUTPUT_SHAPE, NotImplementedError):
        return []
    if op.is_view:
        return []
    metas = meta if isinstance(meta, (list, tuple)) else [meta]
    return [m.stride() if isinstance(m, Tensor) else None for m in metas]


def _check_shapes(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what plain PyTorch raises for these shapes, where they are known."""
    with contextlib.suppress(*compat.UNKNOWN_OUTPUT_SHAPE, NotImplementedError):
        global_meta(cls, op, args, kwargs)


def _layouts(call: OpCall) -> list[Layout]:
    return [t.layout for t in call.tensors]


# Describing a call


def _describe(cls: type, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpCall:
    mesh = _common_mesh(cls, op, args, kwargs)
    tensors: list[TensorArg] = []

    def describe(a: Any) -> Any:
        if isinstance(a, Tensor):
            layout = a._spec.layout if type(a) is cls else _plain_layout(mesh, a)
            tensors.append(TensorArg(layout))
            return tensors[-1]
        if isinstance(a, (list, tuple)):
            return [describe(b) for b in a]
        return a

    described = tuple(describe(a) for a in args)
    named = {k: describe(a) for k, a in kwargs.items()}
    return OpCall(op, described, named, tuple(tensors))


def _plain_layout(mesh: Any, x: Tensor) -> Layout:
    return Layout.whole(mesh, tuple(x.shape), x.dtype)


def _common_mesh(cls: type, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    mesh = None
    for x in tensors_of([*args, *kwargs.values()]):
        if type(x) is not cls:
            _refuse_foreign(op, x)
        elif mesh is None:
            mesh = x._spec.layout.mesh
        elif x._spec.layout.mesh is not mesh and x._spec.layout.mesh != mesh:
            raise LayoutError(
                f"{op}: tensors on two meshes, {mesh} and {x._spec.layout.mesh}; bring them to one mesh first "
                "(full_tensor() and distribute_tensor())"
            )
    if mesh is None:
        raise UnsupportedOpError(f"{op} was called without a sharded tensor")
    return mesh


def _refuse_foreign(op: OpOverload, x: Tensor) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(x, DTensor):
        raise UnsupportedOpError(
            f"{op} mixes a ShardTensor and a DTensor ({x.placements}); convert one: ShardTensor.from_dtensor(x) or "
            "y.to_dtensor()"
        )


def _tensors_text(cls: type, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    return "; ".join(
        f"input {i}: {x._spec.layout.describe() if type(x) is cls else f'plain {tuple(x.shape)}'}"
        for i, x in enumerate(tensors_of([*args, *kwargs.values()]))
    )


# Running on blocks


def _local_entry(
    cls: type, call: OpCall, rule: Rule, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Entry:
    specs = _output_specs(cls, call, choice.outputs, args, kwargs)
    arguments = None
    if rule.local_args is not None:
        layouts = [s.layout for s in (specs[0] if isinstance(specs[0], list) else specs) if s is not None]
        local_args = rule.local_args

        def arguments(local: tuple[Any, ...]) -> tuple[Any, ...]:
            # The shape is asked for in each call: ranks that are threads share what is cached.
            return local_args(call, local, layouts, block_shape)

    simple = arguments is None and not any(p.steps for p in choice.plans) and _is_simple(call, specs)
    mistold = None
    if any(isinstance(s, Spec) for s in specs) and may_be_mistold(call.op, [t.ndim for t in call.tensors]):
        mistold = next((i for i, a in enumerate(args) if isinstance(a, Tensor)), None)
    return (_Direct if simple else _Local)(call.op, choice, specs, arguments, mistold)


def _is_simple(call: OpCall, specs: Sequence[Any]) -> bool:
    """Whether a call has one fresh tensor as its result and no tensors inside of lists or keyword arguments."""
    direct = sum(isinstance(a, TensorArg) for a in call.args)
    fresh = not call.op.is_view and not call.op._schema.is_mutable
    return fresh and direct == len(call.tensors) and len(specs) == 1 and isinstance(specs[0], Spec)


def _output_specs(
    cls: type, call: OpCall, outputs: Sequence[OutputPlan], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Specs of the outputs, their global shapes, strides and dtypes being what the op gives for global inputs."""
    like = call.tensors[0].layout

    def spec(meta: Any, plan: OutputPlan) -> Any:
        if isinstance(meta, (list, tuple)):
            return [spec(m, plan) for m in meta]
        if not isinstance(meta, Tensor):
            return None
        layout = plan.layout(like, compat.global_extents(meta.shape), meta.dtype)
        return Spec.of(layout, compat.retraced(meta.stride()))

    meta = global_meta(cls, call.op, args, kwargs)
    metas = meta if isinstance(meta, tuple) and len(call.op._schema.returns) > 1 else (meta,)
    return [spec(m, plan) for m, plan in zip(metas, outputs, strict=True)]


# Ops that write to an argument


def _mutated(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int | str]:
    """The arguments that are written to, each by its position or its name."""
    if not op._schema.is_mutable:
        return []
    written = [
        i if i < len(args) else a.name
        for i, a in enumerate(op._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    return [w for w in written if _argument(w, args, kwargs) is not None]


def _argument(which: int | str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[which] if isinstance(which, int) else kwargs.get(which)


def _decide_mutation(
    cls: type, call: OpCall, mutated: list[int | str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Entry:
    targets = [_argument(m, args, kwargs) for m in mutated]
    if not all(isinstance(t, Tensor) for t in targets):
        raise UnsupportedOpError(f"{call.op} writes to a list of tensors; use the op on each of them")
    functional = compat.functional_variant(call.op)
    if call.op in MEMORY_OPS:
        if type(targets[0]) is not cls:
            raise UnsupportedOpError(
                f"{call.op} gives a plain tensor the memory of a sharded one ({_tensors_text(cls, args, kwargs)}), "
                "which has none of its own; take x.to_local() or x.full_tensor()"
            )
        return _InPlaceView(call.op, MEMORY_OPS[call.op])
    if torch.Tag.inplace_view in call.op.tags and functional is not None:
        return _InPlaceView(call.op, functional)
    for target in targets:
        if type(target) is cls:
            _refuse_expanded(call.op, target._spec)
    _check_shapes(cls, call.op, args, kwargs)
    rule = _rule_of(call.op)
    if mutated == [0] and type(targets[0]) is cls and rule is not None:
        choice = choose(_layouts(call), rule.ways(call), len(call.op._schema.returns), in_place=True)
        if choice is not None:
            return _InPlace(call.op, choice)
    if functional is not None:
        return _Written(call.op, functional, mutated)
    composite = _composite(cls, call.op)
    if composite is not None:
        return _Composed(composite)
    if any(type(t) is cls for t in targets):
        raise UnsupportedOpError(f"{call.op} writes to its argument and has no functional form to run instead")
    return _fallback(call)


class _Direct(_Local):
    """Run the op on the blocks as they are: one result, tensors as positional arguments only."""

    def __init__(self, op: OpOverload, choice: Choice, specs: Sequence[Any], *rest: Any) -> None:
        super().__init__(op, choice, specs, *rest)
        self.in_rows = specs[0].is_plain and specs[0].stride == contiguous_stride(specs[0].shape)

    def run(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        blocks = [a._local_tensor if type(a) is cls else a for a in args]
        spec = self.specs[0]
        if self.mistold is not None and type(blocks[self.mistold]) is not Tensor:
            blocks = in_one_order(self.op, blocks, spec.stride)
            return cls._wrap(in_order(self.function(*blocks, **kwargs), spec.stride), spec)
        out = self.function(*blocks, **kwargs)
        # A kernel chooses the order by the strides of a block, of which one of few rows has others than the whole.
        if type(out) is Tensor and not (self.in_rows and out.is_contiguous()):
            out = in_order(out, spec.stride)
        return cls._wrap(out, spec)


def _refuse_gradients_of_turned(op: OpOverload, target: Any, values: Sequence[Any]) -> None:
    """Raise if a write would give a gradient to views that autograd would take again of what was turned since."""
    wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
    if wanted and was_turned(target):
        raise refusal(
            str(op), target._spec.layout.describe(),
            "it, or what it is a view of, was turned in place while there were views of it, whose gradients would be "
            "those of the same views of what it turned into",
            _NOT_IN_PLACE,
        )  # fmt: skip


class _InPlace(_Local):
    """Write to this rank's block."""

    def __init__(self, op: OpOverload, choice: Choice) -> None:
        super().__init__(op, choice, [None], None)
        self.direct = not any(self.plans)

    def run(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if TURNED:
            _refuse_gradients_of_turned(self.op, target, args[1:])
        copied = target._copied
        if copied is not None:
            copied.check_writable(self.op)
        if self.direct and not kwargs:
            blocks = [a._local_tensor if type(a) is cls else a for a in args]
            if type(blocks[0]) is not Tensor and is_elementwise(self.op):
                blocks[1:] = in_one_order(self.op, blocks[1:], blocks[0].stride())
            self.function(*_apart(blocks))
        else:
            self._blocks(cls, args, kwargs)
        if copied is not None:
            copied.write_back(target)
        if WATCHED:
            note_write(target)
        return target


def _apart(blocks: list[Any]) -> list[Any]:
    """The blocks of a write, those copied that share memory with the one that is written to.

    Torch refuses to write where it reads, where they overlap in part: for an empty block they never do, and its rank
    would go on alone.
    """
    target = blocks[0]
    if type(target) is not Tensor or len(blocks) == 1:
        return blocks
    for i, x in enumerate(blocks):
        if type(x) is Tensor and x is not target and compat.shares_storage(x, target):
            blocks[i] = x.clone()
    return blocks


class _InPlaceView(_Entry):
    """Turn the argument into a view of itself, e.g. ``transpose_``."""

    def __init__(self, op: OpOverload, functional: Callable[..., Any]) -> None:
        self.op = op
        self.functional = functional

    def run(self, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if target.requires_grad and not target._is_view() and has_views(target):
            # Of a plain tensor's views autograd knows where they lie in memory; of these it calls the view op again.
            raise refusal(
                str(self.op), target._spec.layout.describe(),
                "views of it exist, whose gradients would be those of the same views of what it turns into",
                _NOT_IN_PLACE,
            )  # fmt: skip
        if has_followers(target):
            raise refusal(
                str(self.op), target._spec.layout.describe(),
                "views of it exist that a block cannot hold, and that are made again from it whenever it is written to",
                _NOT_IN_PLACE,
            )  # fmt: skip
        # A copied view follows what it is a view of: that must not be the target, which is about to change.
        view = self.functional(target._stand_in(), *args[1:], **kwargs)
        if view._copied is not None and view._copied.follows(target):
            raise UnsupportedOpError(
                f"{self.op} of a tensor to a view of itself that a block cannot hold ({view._spec.layout.describe()}); "
                "clone the view first"
            )
        target._turn_into(view)
        if has_views(target):
            note_turn(target)
        if target._is_view():
            compat.forbid_writes_with_gradients(target)
        compat.follow_view(self.op, args, kwargs)
        return target


class _Written(_Entry):
    """Compute the functional form, then write its results to the arguments."""

    def __init__(self, op: OpOverload, functional: OpOverload, mutated: list[int | str]) -> None:
        self.op = op
        self.functional = functional
        self.mutated = mutated
        self.outs = {a.name for a in op._schema.arguments if a.is_out}

    def run(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        targets = [_argument(m, args, kwargs) for m in self.mutated]
        for target in targets:
            if type(target) is not cls:
                continue
            if TURNED:
                _refuse_gradients_of_turned(self.op, target, args)
            if target._copied is not None:
                target._copied.check_writable(self.op)
        with torch._C.DisableTorchFunctionSubclass():
            result = self.functional(*args, **{k: v for k, v in kwargs.items() if k not in self.outs})
        results = result if isinstance(result, (list, tuple)) else [result]
        for target, value in zip(targets, results, strict=True):
            _write(cls, self.op, target, value)
        return targets[0] if len(targets) == 1 else tuple(targets)


def _refuse_expanded(op: OpOverload, target: Spec) -> None:
    """Raise if several elements of what is written to lie in one place; a kernel only says so of a block with several.

    One value everywhere is the same in whatever order it is written.
    """
    expanded = any(
        isinstance(s, int) and s == 0 and not (isinstance(n, int) and n <= 1)
        for n, s in zip(target.shape, target.stride, strict=True)
    )
    if expanded and op not in _FILLS:
        raise refusal(
            str(op), f"{target.layout.describe()}, an expanded tensor",
            "several of its elements lie in one place in memory", "Clone it before it is written to",
        )  # fmt: skip


def _write(cls: type, op: OpOverload, target: Any, value: Any) -> None:
    """Copy a value into a tensor, whatever their layouts; into a plain one on every rank."""
    if tuple(value.shape) != tuple(target.shape):
        raise UnsupportedOpError(f"{op}: out has shape {tuple(target.shape)}, not {tuple(value.shape)}")
    if not torch.can_cast(value.dtype, target.dtype):
        raise UnsupportedOpError(
            f"{op}: result type {value.dtype} can't be cast to the desired output type {target.dtype}"
        )
    like = target if type(target) is cls else value
    mesh = like._spec.layout.mesh
    source = value._spec.layout if type(value) is cls else _plain_layout(mesh, value)
    local = value._local_tensor if type(value) is cls else value
    if type(target) is not cls:
        target.copy_(run_plan(whole_plan(source), local))
        return
    wanted = target._spec.layout
    same = [a == b and source.dtype is wanted.dtype for a, b in zip(source.placements, wanted.placements, strict=True)]
    reached = [
        torch.distributed.tensor.Replicate() if p.is_partial() and not s else p
        for p, s in zip(wanted.placements, same, strict=True)
    ]
    layout = Layout.of(mesh, reached, source.shape, source.dtype, wanted.cuts)
    local = run_plan(find_plan(source, layout), local)
    for mesh_dim, (before, after) in enumerate(zip(reached, wanted.placements, strict=True)):
        if before != after:
            local = _as_term(local, after.reduce_op, compat.coordinate(mesh)[mesh_dim] == 0)
    copy_block(target._local_tensor, local)
    if target._copied is not None:
        target._copied.write_back(target)
    note_write(target)


def _as_term(value: Tensor, reduce_op: str, first: bool) -> Tensor:
    """This rank's term of a pending reduction that gives `value`."""
    if first or reduce_op not in ("sum", "product"):
        return value
    return torch.zeros_like(value) if reduce_op == "sum" else torch.ones_like(value)


# The last resort


def _fallback(call: OpCall) -> _Entry:
    plans = tuple(whole_plan(t.layout) for t in call.tensors)
    nbytes = sum(p.nbytes for p in plans)
    inputs = "; ".join(f"input {i}: {t.layout.describe()}" for i, t in enumerate(call.tensors))
    text = f"{call.op} has no rule: run on full values on every rank, {nbytes} B moved ({inputs})"
    if config.fallback == "error":
        raise UnsupportedOpError(f"{text}; shardcompile.config.fallback is 'error'. Register a rule: register_sharding")
    if call.op not in _FELL_BACK:
        _FELL_BACK.add(call.op)
        log.info(text)
        if config.fallback == "warn":
            warnings.warn(text, stacklevel=2)
    return _Gathered(call.op, plans, call.tensors[0].layout)


class _Gathered(_Entry):
    """Gather all inputs, run the op on full values, keep the results replicated."""

    def __init__(self, op: OpOverload, plans: Sequence[Plan], like: Layout) -> None:
        self.op = op
        self.plans = [p if p.steps else None for p in plans]
        self.mesh = like.mesh

    def run(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if compat.is_traced():
            with compat.noted(gathered_for=str(self.op)):
                return self._run(cls, args, kwargs)
        return self._run(cls, args, kwargs)

    def _run(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrapped = self._wrap(cls, self._values(cls, args, kwargs))
        if self.op.is_view and (any(p is not None for p in self.plans) or args[0]._copied is not None):
            _follow_all(wrapped, self.op, args, lambda: self._values(cls, args, kwargs))
        return wrapped

    def _values(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plans = iter(self.plans)
        local_args = [_localize(cls, a, plans, keep_order=True) for a in args]
        local_kwargs = {k: _localize(cls, a, plans, keep_order=True) for k, a in kwargs.items()}
        return self.op(*local_args, **local_kwargs)

    def _wrap(self, cls: type, out: Any) -> Any:
        if isinstance(out, (list, tuple)):
            return type(out)(self._wrap(cls, o) for o in out)
        if not isinstance(out, Tensor):
            return out
        if out.layout is not torch.strided:
            raise UnsupportedOpError(
                f"{self.op} gives a {out.layout} tensor, and a sparse tensor has no blocks. Of the gradient of an "
                "embedding: leave out sparse=True and take an optimizer for dense gradients; otherwise take "
                "full_tensor() of the inputs"
            )
        for size in out.shape:
            compat.stands_for_itself(size)
        return cls._wrap(out, Spec.of(_plain_layout(self.mesh, out), tuple(out.stride())))


def replicated_spec(mesh: Any, x: Tensor) -> Spec:
    """The spec of a plain tensor that is the same on every rank."""
    return Spec.of(_plain_layout(mesh, x), tuple(x.stride()))


def contiguous_spec(layout: Layout) -> Spec:
    """The spec of a contiguous tensor of this layout."""
    return Spec.of(layout, contiguous_stride(layout.shape))
