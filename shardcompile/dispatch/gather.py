"""The fallback: gathers the inputs of an op and runs it on full tensors on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile import compat, config
from shardcompile.compat import OpOverload
from shardcompile.dispatch.calls import kind_of, plain_layout
from shardcompile.dispatch.run import Entry, follow_all, localize
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops import OpCall, OpRecord, record_of
from shardcompile.ops.choice import whole_plan
from shardcompile.ops.random.streams import kernel_on_shards
from shardcompile.ops.support.gather_log import inputs_text, log_gather, unserved_text
from shardcompile.planning import RedistributionPlan
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import Layout, Spec


def fallback(call: OpCall) -> Entry:
    """Returns the entry that gathers the inputs, and logs the gather; raises if `config.fallback` is "error"."""
    record = record_of(call.op)
    plans = tuple(whole_plan(t.layout) for t in call.tensors)
    if not record.reads_value:
        _report(call, sum(p.nbytes for p in plans), _reason(record))
    return Gathered(call.op, plans, call.tensors[0].layout, annotate=not record.reads_value)


def _reason(record: OpRecord) -> str:
    if record.rule is None and record.sharded is None and not record.functions:
        return "it has no sharding rule"
    return unserved_text() or "no sharding rule or decomposition of it serves this call"


def _report(call: OpCall, nbytes: int, reason: str) -> None:
    """Logs the first gather of an op, and later ones that move far more bytes.

    Raises:
        UnsupportedOpError: `config.fallback` is "error".
    """
    inputs = inputs_text([t.layout for t in call.tensors])
    text = f"{call.op} runs on full tensors on every rank, {nbytes} B gathered: {reason} ({inputs})"
    if config.fallback == "error":
        raise UnsupportedOpError(f"{text}; shardcompile.config.fallback is 'error'. Register a rule: register_sharding")
    if log_gather(call.op, nbytes, text) and config.fallback == "warn":
        warnings.warn(text, stacklevel=3)


class Gathered(Entry):
    """Gathers all inputs, runs the op on full tensors, and returns replicated results.

    Args:
        op: the op.
        plans: the plans that replicate the inputs.
        like: the layout of one of the inputs, for its mesh.
        annotate: whether the nodes of the collectives are annotated with this op, for reports.
    """

    path = "on full tensors"

    def __init__(
        self, op: OpOverload, plans: Sequence[RedistributionPlan], like: Layout, annotate: bool = True
    ) -> None:
        self.op = op
        self.annotate = annotate
        self.plans = [p if p.steps else None for p in plans]
        self.mesh = like.mesh
        self.function = kernel_on_shards(op, like.mesh, ())

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if self.annotate and compat.is_traced():
            with compat.annotate_nodes(gathered_for=str(self.op)):
                return self._run(cls, args, kwargs)
        return self._run(cls, args, kwargs)

    def _run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        wrapped = self._wrap(cls, self._values(cls, args, kwargs))
        if self.op.is_view and (any(p is not None for p in self.plans) or first_sharded(args)._copied is not None):
            follow_all(wrapped, self.op, args, lambda: self._values(cls, args, kwargs))
        return wrapped

    def _values(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        plans = iter(self.plans)
        local_args = [localize(cls, a, plans, keep_order=True) for a in args]
        local_kwargs = {k: localize(cls, a, plans, keep_order=True) for k, a in kwargs.items()}
        return self.function(*local_args, **local_kwargs)

    def _wrap(self, cls: type[Sharded], out: object) -> object:
        if isinstance(out, (list, tuple)):
            return type(out)(self._wrap(cls, o) for o in out)
        if not isinstance(out, Tensor):
            return out
        if out.layout is not torch.strided or out.is_nested:
            kind = "nested" if out.is_nested else "sparse"
            raise UnsupportedOpError(
                f"{self.op} returns a {kind_of(out)} tensor, and a {kind} tensor has no shards. Of the gradient of an "
                "embedding: leave out sparse=True and take an optimizer for dense gradients; otherwise take "
                "full_tensor() of the inputs"
            )
        for size in out.shape:
            compat.keep_own_node(size)
        return cls._wrap(out, Spec.of(plain_layout(self.mesh, out), tuple(out.stride())))
