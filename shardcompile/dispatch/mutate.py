"""Ops that write to an argument: on its local shard, by their functional variant, or by turning it into a view."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.dispatch.calls import plain_layout
from shardcompile.dispatch.run import Entry, Local
from shardcompile.errors import UnsupportedOpError, refusal
from shardcompile.ops import OpRecord
from shardcompile.ops.choice import Choice, whole_plan
from shardcompile.ops.random.streams import kernel_on_shards
from shardcompile.ops.record import Run
from shardcompile.ops.support.copied_views import (
    TURNED,
    WATCHED,
    has_followers,
    has_views,
    note_turn,
    note_write,
    was_turned,
)
from shardcompile.ops.support.local_shards import copy_shard
from shardcompile.ops.support.strides import in_one_order
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded, first_sharded, shard_of
from shardcompile.sharding import Layout, Spec, may_overlap

_NOT_IN_PLACE = "Use the out-of-place op, such as x = x.transpose(0, 1) for x.transpose_(0, 1)"


def argument(which: int | str, args: Sequence[object], kwargs: dict[str, object]) -> Any:
    """Returns an argument by its position or its name."""
    return args[which] if isinstance(which, int) else kwargs.get(which)


def _refuse_gradients_of_turned(op: OpOverload, target: Sharded, values: Sequence[object]) -> None:
    """Raises if a write would give gradients to views of a tensor that has since been transposed in place.

    Autograd would regenerate these views from the transposed tensor.
    """
    wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
    if wanted and was_turned(target):
        raise refusal(
            str(op), target._spec.layout.describe(),
            "it, or its base, was turned in place into a view of itself while views of it existed, and their gradients "
            "would be those of the same view ops on the turned tensor",
            _NOT_IN_PLACE,
        )  # fmt: skip


class InPlace(Local):
    """Runs an in-place op on this rank's local shard."""

    def __init__(self, record: OpRecord, choice: Choice) -> None:
        super().__init__(record, choice, [None], None)
        self.direct = not any(self.plans)

    def run(self, cls: type[Sharded], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
        target = args[0]
        if TURNED:
            _refuse_gradients_of_turned(self.op, target, args[1:])
        copied = target._copied
        if copied is not None:
            copied.check_writable(self.op)
        if self.direct and not kwargs:
            shards = [a._local_tensor if type(a) is cls else a for a in args]
            if type(shards[0]) is not Tensor and self.record.elementwise:
                shards[1:] = in_one_order(self.record, shards[1:], shards[0].stride())
            self.function(*_copy_overlapping(shards))
        else:
            self._shards(cls, args, kwargs)
        if copied is not None:
            copied.write_back(target)
        if WATCHED:
            note_write(target)
        return target if self.op._schema.returns else None


def _copy_overlapping(shards: list[object]) -> list[object]:
    """Copies the shards that share memory with the written one, which is the first.

    Torch raises if a kernel reads memory that partially overlaps the memory it writes. An empty shard never overlaps,
    so its rank would continue while the others raise.
    """
    target = shards[0]
    if type(target) is not Tensor or len(shards) == 1:
        return shards
    for i, x in enumerate(shards):
        if type(x) is Tensor and x is not target and compat.shares_storage(x, target):
            shards[i] = x.clone()
    return shards


class InPlaceView(Entry):
    """Runs an op that turns its argument into a view of itself, e.g. ``transpose_``."""

    path = "the op that is not in place, then taken over"

    def __init__(self, op: OpOverload, functional: Run) -> None:
        self.op = op
        self.functional = functional

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        target = args[0]
        assert isinstance(target, Sharded), "a plain tensor cannot be turned into a sharded one"
        if target.requires_grad and not target._is_view() and has_views(target):
            # Autograd regenerates views of a plain tensor by `as_strided`, from their place in memory. For views of a
            # sharded tensor it replays the view op.
            raise refusal(
                str(self.op), target._spec.layout.describe(),
                "views of it exist, and their gradients would be those of the same view ops on the turned tensor",
                _NOT_IN_PLACE,
            )  # fmt: skip
        if has_followers(target):
            raise refusal(
                str(self.op), target._spec.layout.describe(),
                "views of it exist that a local shard cannot alias, and that are copied again after every write to it",
                _NOT_IN_PLACE,
            )  # fmt: skip
        # A copied view follows its base. The base must not be the target itself, which is about to become the view.
        view: Any = self.functional(target._stand_in(), *args[1:], **kwargs)
        if view._copied is not None and view._copied.follows(target):
            raise UnsupportedOpError(
                f"{self.op} of a tensor to a view of itself that a local shard cannot alias "
                f"({view._spec.layout.describe()}); clone the view first"
            )
        target._turn_into(view)
        if has_views(target):
            note_turn(target)
        if target._is_view():
            compat.forbid_writes_with_gradients(target)
        compat.follow_view(self.op, args, kwargs)
        return target


class FunctionalWrite(Entry):
    """Runs the functional variant of an op, then copies its results to the arguments that the op writes to."""

    path = "the op that is not in place, then a copy"

    def __init__(self, op: OpOverload, functional: OpOverload, mutated: list[int | str]) -> None:
        self.op = op
        self.functional = functional
        self.outs = {a.name for a in op._schema.arguments if a.is_out}
        names = [a.name for a in op._schema.arguments]
        self.mutated = {names[m] if isinstance(m, int) else m: m for m in mutated}
        self.by_results = compat.written_by_results(op)
        self.factory = compat.factory_arguments(op, functional)
        functional_defaults = {a.name for a in functional._schema.arguments if a.has_default_value()}
        self.defaults = [
            (i, a.name, a.default_value)
            for i, a in enumerate(op._schema.arguments)
            if a.has_default_value() and a.name not in functional_defaults
        ]

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        targets = {name: argument(m, args, kwargs) for name, m in self.mutated.items()}
        for target in targets.values():
            if type(target) is not cls:
                continue
            if TURNED:
                _refuse_gradients_of_turned(self.op, target, args)
            if target._copied is not None:
                target._copied.check_writable(self.op)
        into_plain = compat.is_traced() and any(type(target) is not cls for target in targets.values())
        with compat.annotate_nodes(written_to="plain") if into_plain else contextlib.nullcontext():
            out = self._compute_and_write(targets, args, kwargs)
        return None if not out else out[0] if len(out) == 1 else tuple(out)

    def _compute_and_write(
        self, targets: dict[str, Any], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Sequence[object]:
        """Returns what the op returns: the arguments that were written to, and the results that are not arguments."""
        given = {name: value for i, name, value in self.defaults if i >= len(args)}
        given |= {k: v for k, v in kwargs.items() if k not in self.outs}
        function: Run = self.functional
        if self.factory:
            target = next(iter(targets.values()))
            given |= {k: getattr(target, k) for k in ("dtype", "device") if k in self.factory}
            if not any(isinstance(a, Sharded) for a in (*args, *given.values())):
                function = kernel_on_shards(self.functional, target._spec.layout.mesh, ())
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **given)
        results = result if isinstance(result, (list, tuple)) else [result]
        for name, value in zip(self.by_results, results, strict=True):
            if name in targets:
                _write(self.op, targets[name], value)
        returned = [targets.get(name, value) for name, value in zip(self.by_results, results, strict=True)]  # type: ignore[arg-type]
        return returned[: len(self.op._schema.returns)]


def refuse_expanded(record: OpRecord, targets: Sequence[Spec]) -> None:
    """Raises if elements of a target share memory because it is expanded.

    A kernel raises only if the local shard has several such elements, which depends on the rank. An op that writes one
    value everywhere is allowed, because the order of its writes does not matter.
    """
    for target in () if record.one_value else targets:
        if any(
            isinstance(s, int) and s == 0 and not (isinstance(n, int) and n <= 1)
            for n, s in zip(target.shape, target.stride, strict=True)
        ):
            raise refusal(
                str(record.op), f"{target.layout.describe()}, an expanded tensor",
                "several of its elements share a memory location", "Clone it before it is written to",
            )  # fmt: skip


def refuse_windows(record: OpRecord, targets: Sequence[Spec]) -> None:
    """Raises if a target may consist of overlapping windows and its new values are computed before they are copied.

    A true in-place kernel, such as that of ``add_``, would add to a shared row once for each window.
    """
    for target in () if record.one_value else targets:
        if may_overlap(target.shape, target.stride):
            raise refusal(
                str(record.op), f"{target.layout.describe()} with strides {tuple(target.stride)}",
                "several of its elements share a memory location",
                "Clone it before it is written to, or write to the base of the view",
            )  # fmt: skip


def _write(op: OpOverload, target: Tensor, value: Tensor) -> None:
    """Copies a value into a tensor of any layout; into a plain tensor on every rank."""
    if tuple(value.shape) != tuple(target.shape):
        given = target._spec.layout.describe() if isinstance(target, Sharded) else "a plain tensor"
        raise refusal(
            str(op), f"out={given}",
            f"out has shape {tuple(target.shape)}, not {tuple(value.shape)}, and a sharded result resizes no tensor",
            "Give an out of the result's shape, or none",
        )  # fmt: skip
    if not torch.can_cast(value.dtype, target.dtype):
        raise UnsupportedOpError(
            f"{op}: result type {value.dtype} can't be cast to the desired output type {target.dtype}"
        )
    if not isinstance(target, Sharded) and not isinstance(value, Sharded):
        target.copy_(value)
        return
    mesh = first_sharded((target, value))._spec.layout.mesh
    source = value._spec.layout if isinstance(value, Sharded) else plain_layout(mesh, value)
    local = shard_of(value)
    if not isinstance(target, Sharded):
        target.copy_(run_plan(whole_plan(source), local))
        return
    wanted = target._spec.layout
    same = [a == b and source.dtype is wanted.dtype for a, b in zip(source.placements, wanted.placements, strict=True)]
    # A plan cannot end in a new `Partial`: the value is replicated there, and then split into terms.
    reachable = [Replicate() if p.is_partial() and not s else p for p, s in zip(wanted.placements, same, strict=True)]
    layout = Layout.of(mesh, reachable, source.shape, source.dtype, wanted.partitions)
    local = run_plan(find_plan(source, layout), local)
    for mesh_dim, (before, after) in enumerate(zip(reachable, wanted.placements, strict=True)):
        if isinstance(after, Partial) and before != after:
            local = _reduction_term(local, after.reduce_op, compat.coordinate(mesh)[mesh_dim] == 0)
    copy_shard(target._local_tensor, local)
    if target._copied is not None:
        target._copied.write_back(target)
    note_write(target)


def _reduction_term(value: Tensor, reduce_op: str, first: bool) -> Tensor:
    """Returns this rank's term of a pending reduction whose result is `value`."""
    if reduce_op not in ("sum", "product"):
        return value
    neutral = torch.full((), int(reduce_op == "product"), dtype=value.dtype, device=value.device)
    if compat.is_fake(value):  # while tracing, every rank must have the same nodes, on which passes decide
        return torch.where(torch.full((), first, dtype=torch.bool, device=value.device), value, neutral)
    return value if first else neutral.expand(value.shape).clone()
