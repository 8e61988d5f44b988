"""`torch.einsum` of two tensors as one sharded contraction; its gradient consists of two more contractions."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops.matmul.einsum import contract
from shardcompile.ops.support.sharded_rows import has_static_sizes
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import sharded_gradient


class _Einsum(torch.autograd.Function):
    """The contraction of two tensors by subscripts."""

    @staticmethod
    def forward(ctx: Any, a: str, b: str, out: str, x: Any, y: Any) -> Any:
        """Computes the contraction."""
        ctx.subscripts = a, b, out
        x_needs_grad, y_needs_grad = ctx.needs_input_grad[3:]
        # A tensor that no gradient reads is not saved: it may be written to before the backward pass.
        ctx.save_for_backward(x if y_needs_grad else None, y if x_needs_grad else None)
        result = contract(a, b, out, x, y)
        ctx.cls, ctx.layout = type(result), result._spec.layout
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Computes the gradient of each tensor: the contraction of the result's gradient and the other tensor."""
        a, b, out = ctx.subscripts
        x, y = ctx.saved_tensors
        grad = sharded_gradient(grad, ctx.cls, ctx.layout)
        grad_x = grad_y = None
        if ctx.needs_input_grad[3]:
            grad_x = _Einsum.apply(out, b, a, grad, y.conj() if y.is_complex() else y)
        if ctx.needs_input_grad[4]:
            grad_y = _Einsum.apply(a, out, b, x.conj() if x.is_complex() else x, grad)
        return None, None, None, grad_x, grad_y


def einsum(func: Callable[..., object], equation: object, *operands: Any) -> object:
    """Implements ``torch.einsum``; equations that `_subscripts` does not cover are left to torch."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    subscripts = _subscripts(equation, tensors)
    if subscripts is None:
        return func(equation, *operands)
    return _Einsum.apply(*subscripts, *tensors)


def _subscripts(equation: object, tensors: Sequence[Tensor]) -> tuple[str, str, str] | None:
    """Returns the subscripts of two tensors and of the result, one letter for each dim.

    Returns None if the equation is not a plain contraction of two tensors, or if neither of them is sharded, so that
    torch's own decomposition has nothing to communicate.
    """
    if not isinstance(equation, str) or len(tensors) != 2 or not all(isinstance(t, Tensor) for t in tensors):
        return None
    sides = equation.replace(" ", "").split("->")
    terms = sides[0].split(",")
    if len(sides) != 2 or len(terms) != 2 or compat.is_transforming() or tensors[0].dtype != tensors[1].dtype:
        return None
    if torch.is_autocast_enabled(tensors[0].device.type):
        return None  # autocast casts the operands of torch's own decomposition
    if not any(isinstance(t, Sharded) and _is_sharded(t) and not has_static_sizes(t) for t in tensors):
        return None
    unused = iter(c for c in string.ascii_letters if c not in equation)
    num_ellipsis_dims = max(t.ndim - len(s.replace("...", "")) for t, s in zip(tensors, terms, strict=True))
    names = [next(unused) for _ in range(max(num_ellipsis_dims, 0))]
    a, b = (
        s.replace("...", "".join(names[len(names) - (t.ndim - len(s) + 3) :]) if t.ndim > len(s) - 3 else "")
        for t, s in zip(tensors, terms, strict=True)
    )
    out = sides[1].replace("...", "".join(names))
    return (a, b, out) if _is_plain(a, b, out, tensors) else None


def _is_sharded(x: Sharded) -> bool:
    return any(c is not None for c in x._spec.layout.partitions)


def _is_plain(a: str, b: str, out: str, tensors: Sequence[Tensor]) -> bool:
    """Returns whether no letter repeats in a term, no size is broadcast, and every summed dim is in both tensors."""
    if any(len(set(s)) < len(s) or "." in s for s in (a, b, out)) or not set(out) <= set(a + b):
        return False
    if any(t.ndim != len(s) for t, s in zip(tensors, (a, b), strict=True)) or (set(a) ^ set(b)) - set(out):
        return False
    sizes = ((tensors[0].shape[a.index(c)], tensors[1].shape[b.index(c)]) for c in set(a) & set(b))
    return all(compat.guard_equal(m, n) for m, n in sizes)
