"""The gradient of layer normalization on a local shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops import state
from shardcompile.ops.support.local_shards import unguarded
from shardcompile.ops.support.precision import widened

aten = torch.ops.aten
_PLAIN: Any = unguarded(aten.native_layer_norm_backward.default)


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> Sequence[Tensor | None]:
    """`native_layer_norm_backward` of a shard of unbacked size; torch's own guards on whether there are rows."""
    if not any(map(compat.is_unbacked, x.shape)):
        return _PLAIN(grad, x, shape, mean, scale, weight, bias, wanted)
    first = x.ndim - len(shape)
    outer, inner = list(range(first)), list(range(first, x.ndim))
    wide_grad, scale = widened(grad), widened(scale)
    normal = (widened(x) - widened(mean)) * scale
    scaled = wide_grad if weight is None else wide_grad * weight
    count: Any = math.prod(shape)
    shift = aten.sum.dim_IntList(scaled, inner, True) / count
    slope = aten.sum.dim_IntList(scaled * normal, inner, True) / count
    grad_x = ((scaled - shift - normal * slope) * scale).to(x.dtype) if wanted[0] else None
    terms = [wide_grad * normal, wide_grad]
    parameter_grads = [
        aten.sum.dim_IntList(term, outer).to(p.dtype) if is_wanted and p is not None else None
        for term, p, is_wanted in zip(terms, (weight, bias), wanted[1:], strict=True)
    ]
    return (grad_x, *parameter_grads)


state(aten.native_layer_norm_backward.default, kernel=_layer_norm_backward)
