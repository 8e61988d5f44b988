"""`cumprod` along a sharded dim, with a gradient that consists of scans, each of which sends one row per rank.

The gradient of torch reads whether there are zeros, and is a loop over the size while tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcompile.ops.scan import sharded as scans
from shardcompile.ops.support.sharded_rows import has_static_sizes
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import redistributed, sharded_gradient


class _CumulativeProduct(torch.autograd.Function):
    """The cumulative product, with a gradient of scans."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        """Computes the cumulative product."""
        out = scans.cumprod(x, dim)
        ctx.dim = dim
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Computes the gradient; by torch's loop if it needs a gradient itself, for which zeros are a harder case."""
        x, out = ctx.saved_tensors
        grad = sharded_gradient(grad, type(out), out._spec.layout)
        grad = redistributed(grad, out._spec.layout.with_dtype(grad.dtype))
        if torch.is_grad_enabled():
            return torch.ops.aten.cumprod_backward.default(grad, x, ctx.dim, out), None
        return _gradient(grad, redistributed(x, out._spec.layout), out, ctx.dim), None


def _gradient(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """Computes the gradient of the cumulative product `out` of `x` with scans.

    Before the first zero it is the reversed cumulative sum of ``grad * out``, divided by `x`. At the first zero the
    products are those with a one in its place. After it the gradient is zero, since all products contain that zero.
    """
    num_zeros = scans.cumsum((x == 0).to(torch.int64), dim)
    is_first_zero = (x == 0) & (num_zeros == 1)
    x, out = (t.conj() if t.is_complex() else t for t in (x, out))
    products_without_zero = scans.cumprod(torch.where(is_first_zero, 1, x), dim)
    before_zero = scans.cumsum_from_end(grad * out, dim) / torch.where(num_zeros == 0, x, 1)
    at_zero = torch.where(is_first_zero, scans.cumsum_from_end(grad * products_without_zero, dim), 0)
    return torch.where(num_zeros == 0, before_zero, at_zero)


def cumprod(
    func: Callable[..., Tensor], input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Implements ``torch.cumprod``; calls torch's function where no gradient of a sharded tensor is needed."""
    options = {} if out is None else {"out": out}
    if out is not None or not isinstance(dim, int) or not _wants_gradient(input, dim):
        return func(input, dim, dtype=dtype, **options)
    return _CumulativeProduct.apply(input if dtype is None else input.to(dtype), dim)


def _wants_gradient(x: Tensor, dim: int) -> bool:
    """Returns whether `x` is sharded and requires a gradient."""
    if not isinstance(x, Sharded) or not -x.ndim <= dim < x.ndim or not torch.is_grad_enabled():
        return False
    return x.requires_grad and any(c is not None for c in x._spec.layout.partitions) and not has_static_sizes(x)
