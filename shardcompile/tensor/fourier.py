"""Fourier transforms of real tensors (`rfft`, `rfft2`, `rfftn`) whose gradient stays sharded.

The gradient of torch copies the gradient of the modes into a plain tensor of zeros of the global shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from shardcompile import compat
from shardcompile.sharded import Sharded

aten = torch.ops.aten
_NORMALIZATIONS = {None: 0, "backward": 0, "ortho": 1, "forward": 2}
"""The integers that aten uses for the modes of normalization: none, by the root of the sizes, by the sizes."""


class _RealTransform(torch.autograd.Function):
    """The one-sided Fourier transform of a real tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any, dims: list[int], normalization: int) -> Any:
        """Computes the one-sided transform."""
        ctx.dims, ctx.normalization, ctx.size = dims, normalization, x.shape[dims[-1]]
        return aten._fft_r2c.default(x, dims, normalization, True)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Computes the gradient; the modes that the one-sided transform omits have a gradient of zero."""
        last = ctx.dims[-1]
        padding = [0] * (2 * (grad.ndim - last) - 1) + [ctx.size - grad.shape[last]]
        two_sided = torch.constant_pad_nd(grad, padding)
        return torch.real(aten._fft_c2c.default(two_sided, ctx.dims, ctx.normalization, False)), None, None


def _rfft(
    func: Callable[..., Tensor],
    x: Tensor,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
    **options: object,
) -> Tensor:
    if not isinstance(dim, int) or options or not _is_supported(x, [dim], None if n is None else [n], norm):
        return func(x, n, dim, norm, **options)
    return _transform(x, None if n is None else [n], [dim], norm)


def _rfft2(
    func: Callable[..., Tensor],
    x: Tensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] = (-2, -1),
    norm: str | None = None,
    **options: object,
) -> Tensor:
    if options or not _is_supported(x, dim, s, norm):
        return func(x, s, dim, norm, **options)
    return _transform(x, s, dim, norm)


def _rfftn(
    func: Callable[..., Tensor],
    x: Tensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] | None = None,
    norm: str | None = None,
    **options: object,
) -> Tensor:
    dims = dim if dim is not None else range(-(x.ndim if s is None else len(s)), 0)
    if options or not _is_supported(x, dims, s, norm):
        return func(x, s, dim, norm, **options)
    return _transform(x, s, dims, norm)


def _is_supported(x: object, dims: object, sizes: Sequence[int] | None, norm: object) -> bool:
    """Returns whether `x` is sharded and requires a gradient, and torch accepts the arguments."""
    if not isinstance(x, Sharded) or not (torch.is_grad_enabled() and x.requires_grad) or compat.is_transforming():
        return False
    if norm not in _NORMALIZATIONS or x.dtype not in (torch.float32, torch.float64):
        return False
    if not isinstance(dims, (list, tuple, range)) or not dims or not all(-x.ndim <= d < x.ndim for d in dims):
        return False
    if len({d % x.ndim for d in dims}) < len(dims) or (sizes is not None and len(sizes) != len(dims)):
        return False
    if any(isinstance(n, int) and (n == 0 or n < -1) for n in (*(sizes or ()), *(x.shape[d] for d in dims))):
        return False
    return any(c is not None for c in x._spec.layout.partitions)


def _transform(x: Tensor, sizes: Sequence[int] | None, dims: Sequence[int], norm: str | None) -> Tensor:
    dims = [d % x.ndim for d in dims]
    for d, n in zip(dims, sizes or [-1] * len(dims), strict=True):
        if not isinstance(n, int) or n != -1:
            x = _resize(x, d, n)
    return _RealTransform.apply(x, dims, _NORMALIZATIONS[norm])


def _resize(x: Tensor, dim: int, size: int) -> Tensor:
    current = x.shape[dim]
    if compat.guard_equal(current, size):
        return x
    if size < current:
        return x.narrow(dim, 0, size)
    return nnf.pad(x, [0] * (2 * (x.ndim - dim) - 1) + [size - current])


FOURIER_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.fft.rfft: _rfft,
    torch.fft.rfft2: _rfft2,
    torch.fft.rfftn: _rfftn,
}
"""Implementations by torch function."""
