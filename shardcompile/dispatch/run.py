"""What is done for a call: a function of sharded tensors, or the op on local shards.

It is decided once in eager mode and kept, so nothing here depends on the rank or on local values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.ops import OpRecord
from shardcompile.ops.choice import Choice
from shardcompile.ops.index.in_range import check_indices
from shardcompile.ops.random.streams import drawn
from shardcompile.ops.support.copied_views import (
    follow,
    note_view,
)
from shardcompile.ops.support.strides import all_in_order, in_one_order, in_order
from shardcompile.planning import Plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Spec, contiguous_stride, dense_stride

Specs = Sequence[Spec | list[Spec | None] | None]
Strides = Sequence[Sequence[IntLike] | None]


class Entry:
    """What is done for a call.

    Attributes:
        way: in words.
        specs_by_id: the specs whose identities are in the cache key.
    """

    way = "on local shards"
    specs_by_id: Sequence[Spec] = ()

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        raise NotImplementedError


class Composed(Entry):
    """Run a function of sharded tensors instead.

    Args:
        function: the op in terms of others.
        otherwise: what is done with arguments for which the function returns NotImplemented, as some of torch's do: an
            entry, or an error. NotImplemented would end up in other ops as an argument. It is kept, so it must not
            hold on to the arguments of the first call.
        strides: that the results of the op have; empty if they are not known, or are views.
        way: as in `Entry`.
    """

    def __init__(
        self,
        function: Callable[..., object],
        otherwise: Callable[[tuple[object, ...], dict[str, object]], Entry],
        strides: Strides = (),
        way: str = "its form",
    ) -> None:
        self.way = way
        self.function = function
        self.otherwise = otherwise
        self.strides = strides

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            out = self.function(*args, **kwargs)
        if out is not NotImplemented:
            return self._stored(cls, out)
        return self.otherwise(args, kwargs).run(cls, args, kwargs)

    def _stored(self, cls: type[Sharded], out: object) -> object:
        """The results, with the strides of the op itself: later ops decide by strides what can be a view."""
        if not self.strides:
            return out
        if isinstance(out, Tensor):
            return _with_stride(cls, out, self.strides[0])
        assert isinstance(out, (list, tuple)), "what has strides is a tensor, or several"
        return type(out)(_with_stride(cls, x, s) for x, s in zip(out, self.strides, strict=True))


def _with_stride(cls: type[Sharded], x: object, stride: Sequence[IntLike] | None) -> object:
    if not isinstance(x, Sharded) or stride is None:
        return x
    # Along sizes of 1 as well: `cat` takes strides of (6, 1, 2, 1) for those of images that are stored by channels.
    if all(compat.size_hint(a) == compat.size_hint(b) for a, b in zip(x._spec.stride, stride, strict=True)):
        return x
    stride = compat.retrace(stride)
    return cls._wrap(in_order(x._local_tensor, stride), Spec.of(x._spec.layout, stride))


class Checked(Entry):
    """Look at indices first.

    Args:
        record: of an op that has some.
        entry: what is done then.
    """

    def __init__(self, record: OpRecord, entry: Entry) -> None:
        self.record = record
        self.entry = entry
        self.way = entry.way

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        check_indices(cls, self.record, args, kwargs)
        return self.entry.run(cls, args, kwargs)


class Local(Entry):
    """Bring the inputs to the layouts that are needed, run the op on local shards, wrap the results.

    Args:
        record: of the op.
        choice: the plans of its inputs.
        specs: of its results.
        arguments: makes the arguments of the op on local shards.
        strides_like: where `strides.may_misstate_strides` holds, which argument is a tensor.
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
        self.moved = self.aliases and (self.exchanges or _copies_shard(record, choice, specs))
        self.fresh = not self.mutates and not self.aliases
        self.single = len(op._schema.returns) == 1 and not isinstance(specs[0], list) if specs else True
        self.strides_like = strides_like
        self.whole = self.fresh and self.single and _is_whole(specs)
        self.sized_by_run = self.fresh and torch.Tag.dynamic_output_shape in op.tags
        if record.is_random:
            self.function = drawn(op, choice.plans[0].src.mesh, choice.sharded_mesh_dims)
        elif self.fresh and op.namespace == "aten" and _may_refuse_empty_shards(specs):
            self.function = _unless_empty(self.function, specs)

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        out = self._shards(cls, args, kwargs)
        if self.mutates:
            return args[0]
        if self.whole and type(out) is Tensor:
            return cls._wrap(out, _as_stored(out, self.specs[0]))
        if self.fresh and (self.exchanges or not compat.is_traced()):
            out = all_in_order(out, self.specs)
        specs = _with_own_sizes(out, self.specs) if self.sized_by_run else self.specs
        if self.single:
            wrapped = out if specs[0] is None else cls._wrap(out, specs[0])
        else:
            wrapped = _wrap_all(cls, out, specs)
        if self.aliases:
            return self._as_view(cls, args, kwargs, wrapped)
        return wrapped

    def _shards(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        plans = iter(self.plans)
        # Kernels decide by strides how results are stored, and in which order elements are drawn.
        ordered = self.moved or (self.whole and (self.record.is_random or not compat.is_traced()))
        local_args = tuple([localize(cls, a, plans, ordered) for a in args])
        local_kwargs = {k: localize(cls, a, plans, ordered) for k, a in kwargs.items()} if kwargs else kwargs
        if self.arguments is not None:
            local_args = self.arguments(local_args)
        if self.strides_like is not None and type(local_args[self.strides_like]) is not Tensor:
            stride = next(s.stride for s in self.specs if s is not None)
            out = self.function(*in_one_order(self.record, local_args, stride), **local_kwargs)
            return all_in_order(out, self.specs)
        return self.function(*local_args, **local_kwargs)

    def _as_view(self, cls: type[Sharded], args: tuple[Any, ...], kwargs: dict[str, object], wrapped: Any) -> object:
        outs = wrapped if isinstance(wrapped, (list, tuple)) else [wrapped]
        if not self.record.is_same:
            for out in outs:
                note_view(args[0], out)
        if self.moved or args[0]._copied is not None:
            follow_all(wrapped, self.op, args, lambda: self._shards(cls, args, kwargs))
            return wrapped
        if type(args[0]._local_tensor) is not Tensor:
            return wrapped  # a trace that saw the same storage would have the output made anew, by `as_strided`
        for out in outs:
            compat.share_storage(out, args[0])
        return wrapped


def _copies_shard(record: OpRecord, choice: Choice, specs: Specs) -> bool:
    """Whether the local shard of a view has to be a copy."""
    if not callable(record.copies_shard):
        return record.copies_shard
    assert isinstance(specs[0], Spec), "such a view is one tensor"
    return record.copies_shard(choice.plans[0].dst, specs[0].layout)


_RUN_ON_EMPTY_SHARDS = {"cpu"}
"""Types of devices on which every kernel of torch takes shards without elements."""


def _gives_list(specs: Specs) -> bool:
    """Whether an op has one result that is a list of tensors."""
    return len(specs) == 1 and isinstance(specs[0], list)


def _may_refuse_empty_shards(specs: Specs) -> bool:
    found = specs[0] if _gives_list(specs) else specs
    return bool(found) and all(
        isinstance(s, Spec) and s.layout.mesh.device_type not in _RUN_ON_EMPTY_SHARDS
        for s in found  # type: ignore[union-attr]
    )


def _unless_empty(function: Callable[..., object], specs: Specs) -> Callable[..., object]:
    """Have a result without elements be made without the op, in eager mode.

    On GPUs some of torch's kernels refuse empty shards, or read memory that is not theirs, as those of embeddings do.
    """
    found: Sequence[Spec] = specs[0] if _gives_list(specs) else specs  # type: ignore[assignment]
    kind = found[0].layout.mesh.device_type

    def run(*args: object, **kwargs: object) -> object:
        shards = [b for a in args for b in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(b, Tensor)]
        # In a trace, and where only shapes are asked for, shards are of another class, or on no device.
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


def _is_whole(specs: Specs) -> bool:
    """Whether a result has no sharded dim, so that its shard is computed as plain PyTorch computes the tensor.

    Strides that leave gaps are those of a view. AOTAutograd takes views by an op that is none to the dispatcher; the
    shard of such a view may be a copy, which is stored in another way.
    """
    spec = specs[0] if specs else None
    if (
        not isinstance(spec, Spec)
        or not spec.is_plain
        or any(partition is not None for partition in spec.layout.partitions)
    ):
        return False
    told = zip(spec.shape, spec.stride, dense_stride(spec.shape, spec.stride), strict=True)
    return all(compat.size_hint(n) <= 1 or compat.size_hint(a) == compat.size_hint(b) for n, a, b in told)


def _as_stored(out: Tensor, spec: Spec) -> Spec:
    """The spec of a whole result, with the strides that the kernel gave: those of fake kernels are others at times."""
    return spec if out.stride() == spec.stride else Spec.of(spec.layout, out.stride())


def _with_own_sizes(out: Tensor | Sequence[Tensor], specs: Specs) -> list[Spec | None]:
    """Specs in which dims that are not sharded have the sizes of the shard.

    The data says these sizes. Each call in a trace has symbols of its own for them, and specs were worked out once.
    """
    outs = [out] if isinstance(out, Tensor) else out
    return [_with_sizes_of(o, s) if isinstance(s, Spec) else None for o, s in zip(outs, specs, strict=True)]


def _with_sizes_of(shard: Tensor, spec: Spec) -> Spec:
    layout = spec.layout
    sizes = [
        compat.keep_symbol(own) if partition is None and compat.is_unbacked(n) else n
        for n, own, partition in zip(layout.shape, shard.shape, layout.partitions, strict=True)
    ]
    if all(a is b for a, b in zip(sizes, layout.shape, strict=True)):
        return spec
    whole = all(partition is None for partition in layout.partitions)
    stride = shard.stride() if whole else contiguous_stride(sizes)
    return Spec.of(Layout.of(layout.mesh, layout.placements, sizes, layout.dtype, layout.partitions), stride)


def follow_all(wrapped: Any, op: OpOverload, args: tuple[object, ...], shards: Callable[[], Any]) -> None:
    """Have the result of a view op, or all of its results, follow what was viewed."""
    if not isinstance(wrapped, (list, tuple)):
        follow(wrapped, op, args, None, shards)
        return
    for i, out in enumerate(wrapped):
        follow(out, op, args, i, lambda i=i: shards()[i])  # type: ignore[misc]


def localize(cls: type[Sharded], a: object, plans: Iterator[Plan | None], keep_order: bool = False) -> object:
    """An argument of the op on local shards: plans bring its tensors to the layouts that are needed.

    Args:
        cls: the class of sharded tensors.
        a: the argument.
        plans: of tensors in order, None where nothing has to be done. The plans of `a` are consumed.
        keep_order: whether what was moved is stored in the order of the global strides.
    """
    if isinstance(a, Tensor):
        plan = next(plans)
        local = a._local_tensor if type(a) is cls else a
        if plan is None:
            return local
        return in_order(run_plan(plan, local), a.stride()) if keep_order else run_plan(plan, local)
    if isinstance(a, (list, tuple)):
        return [localize(cls, b, plans, keep_order) for b in a]
    return a


def _wrap_all(cls: type[Sharded], out: Any, specs: Sequence[Any]) -> Any:
    if _gives_list(specs):
        return [t if s is None else cls._wrap(t, s) for t, s in zip(out, specs[0], strict=True)]
    return tuple([t if s is None or t is None else cls._wrap(t, s) for t, s in zip(out, specs, strict=True)])


class Direct(Local):
    """Run the op on the shards as they are: one result, tensors as positional arguments only."""

    def __init__(
        self, record: OpRecord, choice: Choice, specs: Specs, arguments: None, strides_like: int | None
    ) -> None:
        super().__init__(record, choice, specs, arguments, strides_like)
        spec = specs[0]
        assert isinstance(spec, Spec), "such a call has one tensor as its result"
        self.spec = spec
        self.in_rows = spec.is_plain and spec.stride == contiguous_stride(spec.shape)

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        shards = [a._local_tensor if type(a) is cls else a for a in args]
        spec = self.spec
        if self.strides_like is not None and type(shards[self.strides_like]) is not Tensor:
            shards = in_one_order(self.record, shards, spec.stride)
            return cls._wrap(in_order(self.function(*shards, **kwargs), spec.stride), spec)
        out = self.function(*shards, **kwargs)
        if self.sized_by_run:
            spec = _with_sizes_of(out, spec)
        if self.whole and type(out) is Tensor:
            return cls._wrap(out, _as_stored(out, spec))
        # A kernel chooses the order by the strides of a shard, of which one of few rows has others than the whole.
        if type(out) is Tensor and not (self.in_rows and out.is_contiguous()):
            out = in_order(out, spec.stride)
        return cls._wrap(out, spec)
