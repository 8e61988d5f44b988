"""`cumprod` with a gradient of scans, each of which passes on one row for every rank where the dim is sharded.

Torch's own looks for zeros and, in a trace, is a loop over the size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcompile.ops.scan import sharded as scans
from shardcompile.ops.view.rows import has_static_sizes
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import redistributed, sharded_gradient


class _CumulativeProduct(torch.autograd.Function):
    """Products of every row and those before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        """The products."""
        out = scans.cumprod(x, dim)
        ctx.dim = dim
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient; by torch's loop if it shall have a gradient itself, for which zeros need more care."""
        x, out = ctx.saved_tensors
        grad = sharded_gradient(grad, type(out), out._spec.layout)
        grad = redistributed(grad, out._spec.layout.with_dtype(grad.dtype))
        if torch.is_grad_enabled():
            return torch.ops.aten.cumprod_backward.default(grad, x, ctx.dim, out), None
        return _gradient(grad, redistributed(x, out._spec.layout), out, ctx.dim), None


def _gradient(grad: Tensor, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """In front of the first zero sums of products, divided by the factor that is left out.

    At the first zero itself the products are those with a one in its place; behind it all of them hold that zero.
    """
    zeros = scans.cumsum((x == 0).to(torch.int64), dim)
    is_first = (x == 0) & (zeros == 1)
    x, out = (t.conj() if t.is_complex() else t for t in (x, out))
    others = scans.cumprod(torch.where(is_first, 1, x), dim)
    in_front = scans.cumsum_from_end(grad * out, dim) / torch.where(zeros == 0, x, 1)
    at_first = torch.where(is_first, scans.cumsum_from_end(grad * others, dim), 0)
    return torch.where(zeros == 0, in_front, at_first)


def cumprod(
    func: Callable[..., Tensor], input: Tensor, dim: int, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """``torch.cumprod``."""
    options = {} if out is None else {"out": out}
    if out is not None or not isinstance(dim, int) or not _wants_gradient(input, dim):
        return func(input, dim, dtype=dtype, **options)
    return _CumulativeProduct.apply(input if dtype is None else input.to(dtype), dim)


def _wants_gradient(x: Tensor, dim: int) -> bool:
    """Whether there is a gradient to take, of a tensor that is sharded."""
    if not isinstance(x, Sharded) or not -x.ndim <= dim < x.ndim or not torch.is_grad_enabled():
        return False
    return x.requires_grad and any(c is not None for c in x._spec.layout.partitions) and not has_static_sizes(x)
