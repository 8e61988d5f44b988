"""Rules of layer normalization: the dims that are not normalized may be sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardcompile.ops.registry import register
from shardcompile.ops.strategy import OpCall, Strategy, TensorArg, along

aten = torch.ops.aten


def _layer_norm(call: OpCall) -> Iterable[Strategy]:
    batch = call.tensors[0].ndim - len(call.args[1])
    parameters = len(call.tensors) - 1
    for dim in range(batch):
        yield along([dim, *[None] * parameters], [dim, dim, dim])


def _layer_norm_backward(call: OpCall) -> Iterable[Strategy]:
    _, _, normalized, *_ = call.args
    batch = call.tensors[0].ndim - len(normalized)
    present = [isinstance(a, TensorArg) for a in call.args]
    parameters = sum(present[5:])
    for dim in range(batch):
        yield along([dim, dim, dim, dim, *[None] * parameters], [dim, "sum", "sum"])


register(aten.native_layer_norm.default, _layer_norm)
register(aten.native_layer_norm_backward.default, _layer_norm_backward)
