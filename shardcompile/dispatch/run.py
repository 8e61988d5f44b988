"""Dispatch entries: run a call as the op on local shards, or as a decomposition on sharded tensors.

Entries are cached in eager mode, so nothing in them depends on the rank or on local values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.ops import NotServed, OpRecord
from shardcompile.ops.choice import Choice
from shardcompile.ops.index.in_range import check_indices
from shardcompile.ops.random.streams import drawn
from shardcompile.ops.support.copied_views import (
    follow,
    note_view,
)
from shardcompile.ops.support.gather_log import unserved
from shardcompile.ops.support.global_meta import tensors_of
from shardcompile.ops.support.kept import keep, kept, sees_writes
from shardcompile.ops.support.strides import all_in_order, in_one_order, in_order
from shardcompile.ops.support.view_elements import note_elements
from shardcompile.planning import RedistributionPlan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Spec, contiguous_stride, dense_stride

Specs = Sequence[Spec | list[Spec | None] | None]
Strides = Sequence[Sequence[IntLike] | None]


_INDEX_DTYPES = (torch.int64, torch.int32)
"""Dtypes of indices, of whose views it is recorded which elements they hold."""


class Entry:
    """A cached decision, which runs a call.

    Attributes:
        path: a description of how the call runs, for reports.
        specs_by_id: the specs whose ids are part of the cache key, kept alive as long as the entry.
    """

    path = "on local shards"
    specs_by_id: Sequence[Spec] = ()

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        raise NotImplementedError


class Decomposed(Entry):
    """Runs a decomposition of the op: a function of sharded tensors that calls other ops.

    Args:
        function: the decomposition.
        otherwise: returns the entry for arguments for which `function` returns `NotServed`, or NotImplemented as some
            of torch's decompositions do, or raises. It is cached with the entry, so it must not keep the arguments of
            the first call alive.
        strides: the strides of the op's results; empty if they are data-dependent, or if the results are views.
        path: as in `Entry`.
    """

    def __init__(
        self,
        function: Callable[..., object],
        otherwise: Callable[[tuple[object, ...], dict[str, object]], Entry],
        strides: Strides = (),
        path: str = "its sharded decomposition",
    ) -> None:
        self.path = path
        self.function = function
        self.otherwise = otherwise
        self.strides = strides

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            out = self.function(*args, **kwargs)
        if isinstance(out, NotServed):
            with unserved(out.reason):
                entry = self.otherwise(args, kwargs)
            return entry.run(cls, args, kwargs)
        if out is NotImplemented:
            return self.otherwise(args, kwargs).run(cls, args, kwargs)
        return self._with_strides(cls, out)

    def _with_strides(self, cls: type[Sharded], out: object) -> object:
        """Gives the results the strides of the op itself, because later ops decide by strides what can be a view."""
        if not self.strides:
            return out
        if isinstance(out, Tensor):
            return _with_stride(cls, out, self.strides[0])
        assert isinstance(out, (list, tuple)), "strides are stated for one tensor, or for several"
        return type(out)(_with_stride(cls, x, s) for x, s in zip(out, self.strides, strict=True))


def _with_stride(cls: type[Sharded], x: object, stride: Sequence[IntLike] | None) -> object:
    if not isinstance(x, Sharded) or stride is None:
        return x
    # Dims of size 1 are compared as well: `cat` takes strides of (6, 1, 2, 1) for the channels_last format.
    if all(compat.size_hint(a) == compat.size_hint(b) for a, b in zip(x._spec.stride, stride, strict=True)):
        return x
    stride = compat.retrace(stride)
    return cls._wrap(in_order(x._local_tensor, stride), Spec.of(x._spec.layout, stride))


class IndexChecked(Entry):
    """Checks that the indices of a call are in range before another entry runs it.

    Args:
        record: the record of an op that takes indices.
        entry: the entry that runs the call.
    """

    def __init__(self, record: OpRecord, entry: Entry) -> None:
        self.record = record
        self.entry = entry
        self.path = entry.path

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        check_indices(cls, self.record, args, kwargs)
        return self.entry.run(cls, args, kwargs)


class Local(Entry):
    """Redistributes the inputs as the chosen strategy requires, runs the op on local shards, and wraps the results.

    Args:
        record: the record of the op.
        choice: the chosen strategy, with a plan for each input.
        specs: the specs of the results.
        arguments: computes the arguments of the op on local shards, for ops with sizes among them; None for no change.
        strides_like: the index of a tensor argument, if `strides.may_misstate_strides` holds for the op.
    """

    def __init__(
        self,
        record: OpRecord,
        choice: Choice,
        specs: Specs,
        arguments: Callable[[tuple[object, ...]], tuple[object, ...]] | None,
        strides_like: int | None = None,
    ) -> None:
        self.record = record
        self.op = op = record.op
        self.function: Callable[..., Any] = record.kernel or compat.kernel_of(op)
        self.plans = [p if p.steps else None for p in choice.plans]
        self.specs: Sequence[Any] = specs
        self.arguments = arguments
        self.mutates = op._schema.is_mutable
        self.aliases = op.is_view
        self.exchanges = any(p is not None for p in self.plans)
        self.copies_view = self.aliases and (self.exchanges or copies_shard(record, choice, specs))
        self.is_fresh = not self.mutates and not self.aliases
        self.views_integers = self.aliases and choice.plans[0].src.dtype in _INDEX_DTYPES
        self.has_single_output = len(op._schema.returns) == 1 and not isinstance(specs[0], list) if specs else True
        self.strides_like = strides_like
        self.is_unsharded = self.is_fresh and self.has_single_output and _is_unsharded(specs)
        self.has_unbacked_shape = self.is_fresh and torch.Tag.dynamic_output_shape in op.tags
        if record.is_random:
            self.function = drawn(op, choice.plans[0].src.mesh, choice.sharded_mesh_dims)
        elif self.is_fresh and op.namespace == "aten" and _may_refuse_empty_shards(specs):
            self.function = _skip_empty_shards(self.function, specs)

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        out = self._shards(cls, args, kwargs)
        if self.mutates:
            return args[0]
        if self.is_unsharded and type(out) is Tensor:
            return cls._wrap(out, _with_actual_stride(out, self.specs[0]))
        specs = _with_local_sizes(out, self.specs) if self.has_unbacked_shape else self.specs
        if self.is_fresh and (self.exchanges or not compat.is_traced()):
            out = all_in_order(out, specs)
        if self.has_single_output:
            wrapped = out if specs[0] is None else cls._wrap(out, specs[0])
        else:
            wrapped = _wrap_all(cls, out, specs)
        if self.aliases:
            return self._as_view(cls, args, kwargs, wrapped)
        return wrapped

    def _shards(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        plans = iter(self.plans)
        # Kernels choose by strides how results are stored, and in which order random elements are drawn.
        ordered = self.copies_view or (self.is_unsharded and (self.record.is_random or not compat.is_traced()))
        fresh = self.is_fresh
        local_args = tuple([localize(cls, a, plans, ordered, fresh) for a in args])
        local_kwargs = {k: localize(cls, a, plans, ordered, fresh) for k, a in kwargs.items()} if kwargs else kwargs
        if self.arguments is not None:
            local_args = self.arguments(local_args)
        if self.strides_like is not None and type(local_args[self.strides_like]) is not Tensor:
            stride = next(s.stride for s in self.specs if s is not None)
            out = self.function(*in_one_order(self.record, local_args, stride), **local_kwargs)
            return all_in_order(out, self.specs)
        out = self.function(*local_args, **local_kwargs)
        if self.exchanges and fresh:
            _forget_shared_sums((*args, *kwargs.values()), out)
        return out

    def _as_view(self, cls: type[Sharded], args: tuple[Any, ...], kwargs: dict[str, object], wrapped: Any) -> object:
        outs = wrapped if isinstance(wrapped, (list, tuple)) else [wrapped]
        if not self.record.is_same:
            for out in outs:
                note_view(args[0], out)
        if self.copies_view or args[0]._copied is not None:
            follow_all(wrapped, self.op, args, lambda: self._shards(cls, args, kwargs))
            return wrapped
        if type(args[0]._local_tensor) is not Tensor:
            return wrapped  # a trace that sees a shared storage would regenerate the output by `as_strided`
        for at, out in enumerate(outs):
            out._borrows = args[0]._borrows
            if self.views_integers:
                note_elements(out, self.op, args, None if outs is not wrapped else at)
            compat.share_storage(out, args[0])
        return wrapped


def copies_shard(record: OpRecord, choice: Choice, specs: Specs) -> bool:
    """Whether the local shard of a view op's result has to be a copy."""
    if not callable(record.copies_shard):
        return record.copies_shard
    assert isinstance(specs[0], Spec), "a view op that may copy its shard returns one tensor"
    return record.copies_shard(choice.plans[0].dst, specs[0].layout)


_RUN_ON_EMPTY_SHARDS = {"cpu"}
"""The device types on which every kernel of torch accepts empty shards."""


def _gives_list(specs: Specs) -> bool:
    """Whether an op has a single result that is a list of tensors."""
    return len(specs) == 1 and isinstance(specs[0], list)


def _may_refuse_empty_shards(specs: Specs) -> bool:
    found = specs[0] if _gives_list(specs) else specs
    return bool(found) and all(
        isinstance(s, Spec) and s.layout.mesh.device_type not in _RUN_ON_EMPTY_SHARDS
        for s in found  # type: ignore[union-attr]
    )


def _skip_empty_shards(function: Callable[..., object], specs: Specs) -> Callable[..., object]:
    """Wraps a kernel so that in eager mode results without elements are allocated without running it.

    On GPUs some of torch's kernels raise for empty shards, or read out of bounds, as those of embeddings do.
    """
    found: Sequence[Spec] = specs[0] if _gives_list(specs) else specs  # type: ignore[assignment]
    kind = found[0].layout.mesh.device_type

    def run(*args: object, **kwargs: object) -> object:
        shards = [b for a in args for b in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(b, Tensor)]
        # While tracing, and for shape inference, the shards are of another class or on the meta device.
        hold_values = all(type(b) is Tensor and b.device.type == kind for b in shards)
        if not hold_values or all(map(Tensor.numel, shards)) or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        coordinate = compat.coordinate(found[0].layout.mesh) or ()
        shapes = [s.layout.local_shape(coordinate) for s in found]
        if any(0 not in shape for shape in shapes):
            return function(*args, **kwargs)
        made = [shards[0].new_empty(shape, dtype=s.layout.dtype) for s, shape in zip(found, shapes, strict=True)]
        return made if _gives_list(specs) else made[0] if len(made) == 1 else tuple(made)

    return run


def _is_unsharded(specs: Specs) -> bool:
    """Whether a single result has no sharded dim and dense strides, so that the kernel decides its strides.

    Strides with gaps are those of a view. AOTAutograd creates views by an op that is no view op to the dispatcher, and
    the local shard of such a view may be a copy with other strides.
    """
    spec = specs[0] if specs else None
    if (
        not isinstance(spec, Spec)
        or not spec.is_plain
        or any(partition is not None for partition in spec.layout.partitions)
    ):
        return False
    dims = zip(spec.shape, spec.stride, dense_stride(spec.shape, spec.stride), strict=True)
    return all(compat.size_hint(n) <= 1 or compat.size_hint(a) == compat.size_hint(b) for n, a, b in dims)


def _with_actual_stride(out: Tensor, spec: Spec) -> Spec:
    """Returns the spec of an unsharded result with the kernel's strides, which fake kernels sometimes misstate."""
    return spec if out.stride() == spec.stride else Spec.of(spec.layout, out.stride())


def _with_local_sizes(out: Tensor | Sequence[Tensor], specs: Specs) -> list[Spec | None]:
    """Returns the specs with the actual sizes of the local shards in dims that are not sharded.

    These sizes are data-dependent. Each call in a trace has its own unbacked symbols for them, but the specs were
    inferred once.
    """
    outs = [out] if isinstance(out, Tensor) else out
    return [_with_sizes_of_shard(o, s) if isinstance(s, Spec) else None for o, s in zip(outs, specs, strict=True)]


def _with_sizes_of_shard(shard: Tensor, spec: Spec) -> Spec:
    layout = spec.layout
    sizes = [
        compat.keep_symbol(local_size) if partition is None and compat.is_unbacked(n) else n
        for n, local_size, partition in zip(layout.shape, shard.shape, layout.partitions, strict=True)
    ]
    if all(a is b for a, b in zip(sizes, layout.shape, strict=True)):
        return spec
    unsharded = all(partition is None for partition in layout.partitions)
    stride = shard.stride() if unsharded else contiguous_stride(sizes)
    return Spec.of(Layout.of(layout.mesh, layout.placements, sizes, layout.dtype, layout.partitions), stride)


def follow_all(wrapped: Any, op: OpOverload, args: tuple[object, ...], shards: Callable[[], Any]) -> None:
    """Registers each result of a view op as a copied view that follows its base."""
    if not isinstance(wrapped, (list, tuple)):
        follow(wrapped, op, args, None, shards)
        return
    for i, out in enumerate(wrapped):
        follow(out, op, args, i, lambda i=i: shards()[i])  # type: ignore[misc]


def localize(
    cls: type[Sharded],
    a: object,
    plans: Iterator[RedistributionPlan | None],
    keep_order: bool = False,
    keep_sums: bool = False,
) -> object:
    """Replaces the tensors in an argument by local shards, redistributed by their plans.

    Args:
        cls: the class of sharded tensors.
        a: the argument.
        plans: an iterator over the plans of all tensors in order, None for a tensor that needs no redistribution; those
            of `a` are consumed.
        keep_order: whether a redistributed shard is stored in the order of the global strides.
        keep_sums: whether tensors keep the values of pending reductions in eager mode; no result may share their
            memory.
    """
    if isinstance(a, Tensor):
        plan = next(plans)
        local = a._local_tensor if type(a) is cls else a
        if plan is None:
            return local
        if keep_sums and type(a) is cls and plan.only_reduces and not a._borrows and sees_writes(a):
            moved = _sum_of(a, plan, local)
        else:
            moved = run_plan(plan, local)
        return in_order(moved, a.stride()) if keep_order else moved
    if isinstance(a, (list, tuple)):
        return [localize(cls, b, plans, keep_order, keep_sums) for b in a]
    return a


def _forget_shared_sums(args: Sequence[object], out: object) -> None:
    """Drops sums whose memory a result shares, as that of dropout without probability does."""
    results = [t for t in tensors_of([out]) if type(t) is Tensor]
    for a in tensors_of(args):
        if not isinstance(a, Sharded) or a._kept is None:
            continue
        for key in [k for k in a._kept if isinstance(k, Layout)]:
            if any(compat.shares_storage(a._kept[key].value, t) for t in results):
                del a._kept[key]


def _sum_of(x: Sharded, plan: RedistributionPlan, local: Tensor) -> Tensor:
    """Returns the value of a pending reduction.

    The tensor keeps it until it is written to, so that several ops that read it send nothing more than one. A graph
    needs no such memory: equal collectives are one there.
    """
    value = kept(x, plan.dst)
    if value is None:
        value = run_plan(plan, local)
        keep(x, plan.dst, value)
    return value  # type: ignore[no-any-return]


def _wrap_all(cls: type[Sharded], out: Any, specs: Sequence[Any]) -> Any:
    if _gives_list(specs):
        return [t if s is None else cls._wrap(t, s) for t, s in zip(out, specs[0], strict=True)]
    return tuple([t if s is None or t is None else cls._wrap(t, s) for t, s in zip(out, specs, strict=True)])


class Direct(Local):
    """Fast path of `Local`: no redistribution, one new result, tensors as positional arguments only."""

    def __init__(
        self, record: OpRecord, choice: Choice, specs: Specs, arguments: None, strides_like: int | None
    ) -> None:
        super().__init__(record, choice, specs, arguments, strides_like)
        spec = specs[0]
        assert isinstance(spec, Spec), "a direct call returns one tensor"
        self.spec = spec
        self.is_contiguous = spec.is_plain and spec.stride == contiguous_stride(spec.shape)

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        shards = [a._local_tensor if type(a) is cls else a for a in args]
        spec = self.spec
        if self.strides_like is not None and type(shards[self.strides_like]) is not Tensor:
            shards = in_one_order(self.record, shards, spec.stride)
            return cls._wrap(in_order(self.function(*shards, **kwargs), spec.stride), spec)
        out = self.function(*shards, **kwargs)
        if self.has_unbacked_shape:
            spec = _with_sizes_of_shard(out, spec)
        if self.is_unsharded and type(out) is Tensor:
            return cls._wrap(out, _with_actual_stride(out, spec))
        # A kernel chooses the memory format by the strides of the shard, which are ambiguous if it has few rows.
        if type(out) is Tensor and not (self.is_contiguous and out.is_contiguous()):
            out = in_order(out, spec.stride)
        return cls._wrap(out, spec)


class DirectView(Local):
    """Fast path of `Local` for a view: no redistribution, one result that shares the memory of the first argument.

    Half of the ops of a transformer's eager step are views.
    """

    def run(self, cls: type[Sharded], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        x = args[0]
        if x._copied is not None or type(x._local_tensor) is not Tensor:
            return super().run(cls, args, kwargs)
        local: tuple[object, ...] = (x._local_tensor, *args[1:])
        if self.arguments is not None:
            local = self.arguments(local)
        view = cls._wrap(self.function(*local, **kwargs), self.specs[0])
        if not self.record.is_same:
            note_view(x, view)
        if x._borrows:
            view._borrows = True
        if self.views_integers:
            note_elements(view, self.op, args)
        compat.share_storage(view, x)
        return view
