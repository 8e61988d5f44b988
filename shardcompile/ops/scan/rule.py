"""Rules of cumulative ops, `flip`, `roll` and `repeat`: any dim along which the op does not work may be sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardcompile import compat
from shardcompile.ops.reduce.rule import other_dims
from shardcompile.ops.registry import register
from shardcompile.ops.strategy import OpCall, Strategy, along

aten = torch.ops.aten


def _flip(call: OpCall) -> Iterable[Strategy]:
    ndim = call.tensors[0].ndim
    dims = {d % max(ndim, 1) for d in call.args[1]}
    return [along([d], [d]) for d in range(ndim) if d not in dims]


def _roll(call: OpCall) -> Iterable[Strategy]:
    """Any dim that is not rolled may be sharded; without dims the flattened tensor is rolled, so that none may."""
    ndim = call.tensors[0].ndim
    dims = {d % max(ndim, 1) for d in call.arg(2, "dims", ())}
    return [along([d], [d]) for d in range(ndim) if dims and d not in dims]


def _repeat(call: OpCall) -> Iterable[Strategy]:
    """Any dim that is not repeated may be sharded."""
    repeats = call.args[1]
    new = len(repeats) - call.tensors[0].ndim
    once = (isinstance(n, int) and n == 1 for n in repeats[new:])
    return [along([d], [d + new]) for d, only in enumerate(once) if only]


def _cumprod(call: OpCall) -> Iterable[Strategy]:
    shape = call.tensors[0].shape
    if shape and not compat.in_backward_pass():
        # Torch unrolls the gradient over the dim, so that a graph has to specialize on its size. In the backward pass
        # (the gradient of `prod`) it is too late to specialize, since the forward graph has returned the sizes. It is
        # not necessary there, as a graph has no second derivative.
        int(shape[call.args[1] % len(shape)])
    return other_dims(1)(call)


register([aten.cumsum.default, aten.logcumsumexp.default], other_dims(1))
register(aten.cumprod.default, _cumprod)
register([aten.cummax.default, aten.cummin.default], other_dims(1))
register(aten.flip.default, _flip)
register(aten.roll.default, _roll)
register(aten.repeat.default, _repeat)
