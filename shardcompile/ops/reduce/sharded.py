"""Decompositions of reductions, softmax and losses into other ops on the same global tensors.

They are correct on any layout because every op that they use is. A decomposition is used where the op would otherwise
have to gather a sharded dim. The counts in them (`numel`, `shape`) are global, never those of a local shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.ops import state
from shardcompile.ops.record import Run
from shardcompile.ops.support.logsumexp import is_nothing, largest, logsumexp
from shardcompile.ops.support.precision import wide_dtype, widened
from shardcompile.sharding import IntLike

aten = torch.ops.aten


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return [dim % max(x.ndim, 1)] if isinstance(dim, int) else [d % max(x.ndim, 1) for d in dim]


def _count(x: Tensor, dims: Sequence[int]) -> IntLike:
    """Returns the number of elements that a reduction over `dims` combines."""
    return math.prod([x.shape[d] for d in dims]) if x.ndim else 1


def _mean_dim(
    x: Tensor, dim: int | Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = _dims(x, dim)
    dtype = x.dtype if dtype is None else dtype
    total = aten.sum.dim_IntList(x, dims, keepdim, dtype=wide_dtype(dtype))
    return (total / _count(x, dims)).to(dtype)


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean_dim(x, None, dtype=dtype)


def moments(
    x: Tensor, dim: int | Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Returns variance and mean by the two-pass algorithm, as stable as torch's kernels."""
    dims = _dims(x, dim)
    dtype = x.dtype
    x = widened(x)
    count: Any = _count(x, dims)
    mean = aten.sum.dim_IntList(x, dims, True) / count
    deviation = x - mean
    square = deviation * deviation.conj() if x.is_complex() else deviation * deviation
    total = aten.sum.dim_IntList(square.real if x.is_complex() else square, dims, keepdim)
    degrees = count - (1 if correction is None else correction)
    degrees = torch.sym_max(degrees, 0) if not isinstance(degrees, float) else max(degrees, 0.0)
    if not keepdim and x.ndim:
        mean = aten.squeeze.dims(mean, dims)
    return (total / degrees).to(dtype.to_real()), mean.to(dtype)


def _var(
    x: Tensor, dim: int | Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return moments(x, dim, correction, keepdim)[0]


def _std(
    x: Tensor, dim: int | Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _var_mean(
    x: Tensor, dim: int | Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return moments(x, dim, correction, keepdim)


def _std_mean(
    x: Tensor, dim: int | Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = moments(x, dim, correction, keepdim)
    return variance.sqrt(), mean


def _vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    magnitude = widened(x.abs())
    return _norm_of_magnitudes(magnitude, ord, dims, keepdim).to(x.dtype.to_real())


def _norm_shape(
    x: Tensor,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    **named: torch.dtype | None,
) -> Tensor:
    """The shape kernel. Torch's fake kernel (2.11 - 2.12) keeps a negative dim of size 1, so dims are wrapped first."""
    return aten.linalg_vector_norm.default(x, ord, _dims(x, dim), keepdim, **named)


def _norm_of_magnitudes(magnitude: Tensor, ord: float, dims: list[int], keepdim: bool) -> Tensor:
    if ord == math.inf:
        return aten.amax.default(magnitude, dims, keepdim)
    if ord == -math.inf:
        return aten.amin.default(magnitude, dims, keepdim)
    if ord == 0:
        return aten.sum.dim_IntList((magnitude != 0).to(magnitude.dtype), dims, keepdim)
    if ord == 1:
        return aten.sum.dim_IntList(magnitude, dims, keepdim)
    if magnitude.dtype is torch.float32 and magnitude.device.type == "cpu":
        magnitude = magnitude.double()  # as plain PyTorch does on CPU, so that squares of large values do not overflow
    if ord == 2:
        return aten.sum.dim_IntList(magnitude * magnitude, dims, keepdim).sqrt()
    return aten.sum.dim_IntList(magnitude**ord, dims, keepdim) ** (1.0 / ord)


def _logsumexp(x: Tensor, dim: int | Sequence[int] | None, keepdim: bool = False) -> Tensor:
    return logsumexp(x, _dims(x, dim), keepdim, largest)


def _logsumexp_shape(x: Tensor, dim: int | Sequence[int] | None, keepdim: bool = False) -> Tensor:
    """The shape kernel, which also permits empty dims.

    Torch's meta function takes a maximum, and so asserts that a dim of unbacked size is not empty.
    """
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    return aten.sum.dim_IntList(x, _dims(x, dim), keepdim)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x)
    if is_nothing(x, dim):
        return wide.clone() if half_to_float else x.clone()
    unnormalised = (wide - largest(wide, [dim], True)).exp()
    out = unnormalised / aten.sum.dim_IntList(unnormalised, [dim], True)
    return out if half_to_float else out.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x)
    if is_nothing(x, dim):
        return wide.clone() if half_to_float else x.clone()
    shifted = wide - largest(wide, [dim], True)
    out = shifted - aten.sum.dim_IntList(shifted.exp(), [dim], True).log()
    return out if half_to_float else out.to(x.dtype)


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    product = widened(grad) * widened(out)
    result = product - widened(out) * aten.sum.dim_IntList(product, [dim], True)
    return result.to(dtype)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    wide = widened(grad)
    result = wide - widened(out).exp() * aten.sum.dim_IntList(wide, [dim], True)
    return result.to(dtype)


def _positions(x: Tensor, dim: int) -> Tensor:
    """Returns the index along `dim` of every element, broadcastable to `x`: a plain tensor, the same on every rank."""
    shape = [1] * x.ndim
    shape[dim] = -1
    return torch.arange(x.shape[dim], device=x.device).view(shape)


def _arg_extremum(x: Tensor, best: Tensor, dim: int, keepdim: bool) -> Tensor:
    """Returns the first index along `dim` at which `x` equals the extremum, where a NaN equals a NaN."""
    hit = x == best
    if x.is_floating_point():
        hit = hit | (x.isnan() & best.isnan())
    where = torch.where(hit, _positions(x, dim), x.shape[dim])
    return aten.amin.default(where, [dim], keepdim)


def _extremum_dim(reduce: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def decomposed(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        if x.ndim == 0:
            return x.clone(), torch.zeros_like(x, dtype=torch.int64)
        dim = dim % x.ndim
        best = reduce(x, [dim], True)
        index = _arg_extremum(x, best, dim, keepdim)
        return (best if keepdim else aten.squeeze.dims(best, [dim])), index

    return decomposed


def _arg(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def decomposed(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None or x.ndim <= 1:
            return _extremum_dim(reduce)(x, 0 if dim is None else dim, keepdim)[1]
        # Full reduction: the smallest flat index at which `x` equals the extremum.
        best = reduce(x, [], True)
        hit = x == best
        if x.is_floating_point():
            hit = hit | (x.isnan() & best.isnan())
        flat: Any = 0
        for d in range(x.ndim):
            flat = flat * x.shape[d] + _positions(x, d)
        index = aten.amin.default(torch.where(hit, flat, x.numel()), [], False)
        return index.reshape([1] * x.ndim) if keepdim else index

    return decomposed


def _mse_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    return _reduce((x - target) ** 2, reduction)


def _reduce(x: Tensor, reduction: int) -> Tensor:
    """Reduces a loss: none, mean or sum, encoded as in ``torch.nn._reduction``."""
    if reduction == 0:
        return x
    return x.mean() if reduction == 1 else x.sum()


def _loss_backward(op: OpOverload) -> Run:
    """Returns the decomposition of the backward op of a loss.

    Torch's decomposition divides by the number of elements, even if it is 0, so that case is treated separately.
    """
    decomposition = compat.decomposition_by_torch(op)

    def run(grad: Tensor, x: Tensor, target: Tensor, *args: object) -> object:
        empty = isinstance(x.numel(), int) and x.numel() == 0
        return aten.sub.Tensor(x, target) if empty else decomposition(grad, x, target, *args)

    return run


for _op in (aten.mse_loss_backward.default, aten.huber_loss_backward.default, aten.smooth_l1_loss_backward.default):
    state(_op, sharded=_loss_backward(_op))
state(aten.mean.dim, sharded=_mean_dim)
state(aten.mean.default, sharded=_mean)
state(aten.var.correction, sharded=_var)
state(aten.std.correction, sharded=_std)
state(aten.var_mean.correction, sharded=_var_mean)
state(aten.std_mean.correction, sharded=_std_mean)
state(aten.linalg_vector_norm.default, sharded=_vector_norm, shape_kernel=_norm_shape)
state(aten.logsumexp.default, sharded=_logsumexp, shape_kernel=_logsumexp_shape)
state(aten._softmax.default, sharded=_softmax)
state(aten._log_softmax.default, sharded=_log_softmax)
state(aten._softmax_backward_data.default, sharded=_softmax_backward)
state(aten._log_softmax_backward_data.default, sharded=_log_softmax_backward)
state(aten.max.dim, sharded=_extremum_dim(aten.amax.default))
state(aten.min.dim, sharded=_extremum_dim(aten.amin.default))
state(aten.argmax.default, sharded=_arg(aten.amax.default))
state(aten.argmin.default, sharded=_arg(aten.amin.default))
state(aten.mse_loss.default, sharded=_mse_loss)
