"""``logsumexp`` from other ops: on sharded tensors that are sharded where it sums, and on local shards inside a
trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops.support.precision import HALVES

aten = torch.ops.aten


def logsumexp(x: Tensor, dims: list[int], keepdim: bool, amax: Callable[[Tensor, list[int], bool], Tensor]) -> Tensor:
    """The logarithm of a sum of exponentials, of what is left of the largest term.

    Args:
        x: a sharded tensor, or a shard.
        dims: that are summed over.
        keepdim: whether they stay, with an size of 1.
        amax: the largest elements along dims, which stay.
    """
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    if x.dtype in HALVES:
        return logsumexp(x.float(), dims, keepdim, amax).to(x.dtype)
    if any(is_nothing(x, d) for d in dims):
        return aten.sum.dim_IntList(x.exp(), dims, keepdim).log()
    top = amax(x, dims, True)
    top = torch.where(top.abs() == math.inf, torch.zeros_like(top), top)
    out = aten.sum.dim_IntList((x - top).exp(), dims, True).log() + top
    return out if keepdim or not x.ndim else aten.squeeze.dims(out, dims)


def largest(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """``amax``, which is -inf where a run finds nothing along a dim. Torch's asserts that there is something."""
    unknown = [d % x.ndim for d in dims if x.ndim and compat.is_unbacked(x.shape[d])]
    if unknown:
        row = [int(side == 1 and d in unknown) for d in reversed(range(x.ndim)) for side in (0, 1)]
        x = aten.constant_pad_nd.default(x, row, -math.inf)
    return aten.amax.default(x, dims, keepdim)


def is_nothing(x: Tensor, dim: int) -> bool:
    """Whether there is nothing along a dim on any rank; such an size is static in a trace as well."""
    return x.ndim > 0 and isinstance(x.shape[dim], int) and x.shape[dim] == 0
