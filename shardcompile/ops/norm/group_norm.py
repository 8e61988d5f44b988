"""Group normalization with any dim sharded, including the channels.

Every rank sums over its local channels. If channels are sharded, a shard may end in the middle of a group. So each rank
computes partial sums of all groups, to which it adds the sums of its channels, and these are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from shardcompile import compat
from shardcompile.collectives import shard_size
from shardcompile.ops import state
from shardcompile.ops.support.precision import widened
from shardcompile.ops.support.sharded_rows import first_row, has_static_sizes, positions, reduced, wrap
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, contiguous_stride

aten = torch.ops.aten
_DECOMPOSITION = compat.decomposition_by_torch(aten.native_group_norm.default)
_BACKWARD_DECOMPOSITION = compat.decomposition_by_torch(aten.native_group_norm_backward.default)


def _channel_sums(x: Tensor) -> Tensor:
    """Sums over all dims except samples and channels, to [samples, channels]."""
    return aten.sum.dim_IntList(x, list(range(2, x.ndim))) if x.ndim > 2 else x


def _group_sums(x: Tensor, groups: int) -> Tensor:
    """Sums over the channels of each group: [samples, channels] to [samples, groups]."""
    samples, channels = x.shape
    partition = x._spec.layout.partitions[1] if isinstance(x, Sharded) else None
    if not isinstance(x, Sharded) or partition is None:
        return reduced(aten.sum.dim_IntList(x.reshape(samples, groups, channels // groups), [2]))
    layout, shard = x._spec.layout, x._local_tensor
    channel = positions(shard, first_row(partition, layout), 1, shard_size(partition, layout.mesh))
    group = channel // (channels // groups)
    sums = aten.index_add.default(shard.new_zeros([shard.shape[0], groups]), 1, group, shard)
    placements = [Partial("sum") if p == Shard(1) else p for p in layout.placements]
    shape = [samples, groups]
    summed = Layout.of(layout.mesh, placements, shape, layout.dtype, [layout.partitions[0], None])
    return reduced(wrap(x, sums, summed, contiguous_stride(shape)))


def _expand_to_channels(x: Tensor, channels: Any, ndim: int) -> Tensor:
    """Expands a value per group to all channels of the group: [samples, groups] to [samples, channels, 1, ...]."""
    group = torch.arange(channels, device=x.device) // (channels // x.shape[1])
    return _unsqueeze_to(aten.index_select.default(x, 1, group), ndim)


def _unsqueeze_to(x: Tensor, ndim: int) -> Tensor:
    """Appends dims of size 1, so that the result broadcasts over the dims of a sample."""
    for _ in range(ndim - 2):
        x = x.unsqueeze(-1)
    return x


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: IntLike,
    channels: IntLike,
    inner: IntLike,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """``aten.native_group_norm`` with the variance by the two-pass algorithm, as stable as torch's kernel."""
    if not _sizes_match(x, samples, channels, inner):
        return _DECOMPOSITION(x, weight, bias, samples, channels, inner, groups, eps)
    wide = widened(x)
    count: Any = inner * (channels // groups)  # Any: torch 2.15 types a tensor divided by a SymInt as a number
    mean = _group_sums(_channel_sums(wide), groups) / count
    deviation = wide - _expand_to_channels(mean, channels, x.ndim)
    variance = _group_sums(_channel_sums(deviation * deviation), groups) / count
    scale = (variance + eps).rsqrt()
    out = deviation * _expand_to_channels(scale, channels, x.ndim)
    out = out if weight is None else out * _unsqueeze_to(weight, x.ndim)
    out = out if bias is None else out + _unsqueeze_to(bias, x.ndim)
    dtype = x.dtype if weight is None else weight.dtype
    return out.to(x.dtype), mean.to(dtype), scale.to(dtype)


def _sizes_match(x: Tensor, samples: IntLike, channels: IntLike, inner: IntLike) -> bool:
    """Whether the size arguments of the op are the sizes of its input, as they are if `group_norm` calls it."""
    if x.ndim < 2 or has_static_sizes(x):
        return False
    given = zip(x.shape, (samples, channels), strict=False)
    return compat.statically_known_true(math.prod(x.shape[2:]) == inner) and all(
        compat.statically_known_true(n == m) for n, m in given
    )


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    samples: IntLike,
    channels: IntLike,
    inner: IntLike,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """``aten.native_group_norm_backward``."""
    if not _sizes_match(x, samples, channels, inner):
        return _BACKWARD_DECOMPOSITION(grad, x, mean, scale, weight, samples, channels, inner, groups, wanted)
    wide_grad, mean, scale = widened(grad), widened(mean), widened(scale)
    spread_scale = _expand_to_channels(scale, channels, x.ndim)
    normal = (widened(x) - _expand_to_channels(mean, channels, x.ndim)) * spread_scale
    grad_bias, grad_weight = _channel_sums(wide_grad), _channel_sums(wide_grad * normal)
    if compat.statically_known_true(inner == 0):  # the mean is NaN then, and so is this gradient in torch's kernel
        grad_weight = grad_weight + 0 * _expand_to_channels(mean * scale, channels, 2)
    grad_x = None
    if wanted[0]:
        scaled = [s if weight is None else s * weight for s in (grad_bias, grad_weight)]
        count: Any = inner * (channels // groups)
        means = [_group_sums(s, groups) / count for s in scaled]
        shift, slope = (_expand_to_channels(m, channels, x.ndim) for m in means)
        inside = wide_grad if weight is None else wide_grad * _unsqueeze_to(weight, x.ndim)
        grad_x = ((inside - shift - normal * slope) * spread_scale).to(x.dtype)
    dtype = x.dtype if weight is None else weight.dtype
    grads = [aten.sum.dim_IntList(g, [0]).to(dtype) for g in (grad_weight, grad_bias)]
    return (grad_x, *[g if is_wanted else None for g, is_wanted in zip(grads, wanted[1:], strict=True)])


state(aten.native_group_norm.default, sharded=group_norm)
state(aten.native_group_norm_backward.default, sharded=group_norm_backward)
