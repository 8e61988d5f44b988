"""``logsumexp`` from other ops: for tensors that are sharded along summed dims, and for local shards inside a trace."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops.support.precision import HALVES

aten = torch.ops.aten


def logsumexp(x: Tensor, dims: list[int], keepdim: bool, amax: Callable[[Tensor, list[int], bool], Tensor]) -> Tensor:
    """The logarithm of a sum of exponentials, computed relative to the largest term.

    Args:
        x: a sharded tensor, or a local shard.
        dims: the dims that are summed over.
        keepdim: whether these stay, with size 1.
        amax: computes the maximum along dims; called with ``keepdim=True``.
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
    """``amax``, which is -inf along an unbacked dim that turns out to be empty. Torch's asserts that it is not."""
    unbacked = [d % x.ndim for d in dims if x.ndim and compat.is_unbacked(x.shape[d])]
    if unbacked:
        row = [int(side == 1 and d in unbacked) for d in reversed(range(x.ndim)) for side in (0, 1)]
        x = aten.constant_pad_nd.default(x, row, -math.inf)
    return aten.amax.default(x, dims, keepdim)


def is_nothing(x: Tensor, dim: int) -> bool:
    """Whether the global size of a dim is 0, which is static in a trace as well."""
    return x.ndim > 0 and isinstance(x.shape[dim], int) and x.shape[dim] == 0
