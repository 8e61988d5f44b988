"""The last resort: inputs are gathered, and the op runs on full values on every rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile import compat, config
from shardcompile.compat import OpOverload
from shardcompile.dispatch.calls import plain_layout
from shardcompile.dispatch.run import Entry, follow_all, localize
from shardcompile.errors import UnsupportedOpError
from shardcompile.layout import Layout, Spec
from shardcompile.ops import OpCall
from shardcompile.ops.choice import whole_plan
from shardcompile.plan import Plan
from shardcompile.sharded import Sharded, first_sharded

log = logging.getLogger("shardcompile")
_FELL_BACK: set[OpOverload] = set()


def fallback(call: OpCall) -> Entry:
    """Gather, and say so once for each op; raises where `config.fallback` is "error"."""
    plans = tuple(whole_plan(t.layout) for t in call.tensors)
    nbytes = sum(p.nbytes for p in plans)
    inputs = "; ".join(f"input {i}: {t.layout.describe()}" for i, t in enumerate(call.tensors))
    text = f"{call.op} has no rule: run on full values on every rank, {nbytes} B moved ({inputs})"
    if config.fallback == "error":
        raise UnsupportedOpError(f"{text}; shardcompile.config.fallback is 'error'. Register a rule: register_sharding")
    if call.op not in _FELL_BACK and any(p.steps for p in plans):  # whole values that are there cost nothing
        _FELL_BACK.add(call.op)
        log.info(text)
        if config.fallback == "warn":
            warnings.warn(text, stacklevel=2)
    return Gathered(call.op, plans, call.tensors[0].layout)


class Gathered(Entry):
    """Gather all inputs, run the op on full values, keep the results replicated."""

    way = "on full values"

    def __init__(self, op: OpOverload, plans: Sequence[Plan], like: Layout) -> None:
        self.op = op
        self.plans = [p if p.steps else None for p in plans]
        self.mesh = like.mesh

    def run(self, cls: type[Sharded], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if compat.is_traced():
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
        return self.op(*local_args, **local_kwargs)

    def _wrap(self, cls: type[Sharded], out: object) -> object:
        if isinstance(out, (list, tuple)):
            return type(out)(self._wrap(cls, o) for o in out)
        if not isinstance(out, Tensor):
            return out
        if out.layout is not torch.strided or out.is_nested:
            kind = "nested" if out.is_nested else "sparse"
            raise UnsupportedOpError(
                f"{self.op} gives a {out.layout} tensor, and a {kind} tensor has no blocks. Of the gradient of an "
                "embedding: leave out sparse=True and take an optimizer for dense gradients; otherwise take "
                "full_tensor() of the inputs"
            )
        for size in out.shape:
            compat.keep_own_node(size)
        return cls._wrap(out, Spec.of(plain_layout(self.mesh, out), tuple(out.stride())))
