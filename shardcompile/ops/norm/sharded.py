"""Decomposition of layer normalization along sharded dims, with the variance by the two-pass algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops import state
from shardcompile.ops.reduce.sharded import moments
from shardcompile.ops.support.precision import widened

aten = torch.ops.aten


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    wide = widened(x)
    variance, mean = moments(wide, dims, 0, True)
    scale = (variance + eps).rsqrt()
    out = (wide - mean) * scale
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype), mean, scale


state(aten.native_layer_norm.default, sharded=_layer_norm)
state(
    aten.native_layer_norm_backward.default,
    sharded=compat.decomposition_by_torch(aten.native_layer_norm_backward.default),
)
