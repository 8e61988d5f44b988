"""`torch.einsum` of two tensors, and its gradient, which is made of two more of them."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops.matmul.einsum import contract
from shardcompile.ops.view.rows import has_static_sizes
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import sharded_gradient


class _Einsum(torch.autograd.Function):
    """A sum of products."""

    @staticmethod
    def forward(ctx: Any, a: str, b: str, out: str, x: Any, y: Any) -> Any:
        """The sum."""
        ctx.letters = a, b, out
        of_x, of_y = ctx.needs_input_grad[3:]
        # What no gradient is made of may be written to before the backward pass.
        ctx.save_for_backward(x if of_y else None, y if of_x else None)
        found = contract(a, b, out, x, y)
        ctx.cls, ctx.layout = type(found), found._spec.layout
        return found

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Each tensor's gradient is the sum of products of the result's and the other tensor."""
        a, b, out = ctx.letters
        x, y = ctx.saved_tensors
        grad = sharded_gradient(grad, ctx.cls, ctx.layout)
        of_x = of_y = None
        if ctx.needs_input_grad[3]:
            of_x = _Einsum.apply(out, b, a, grad, y.conj() if y.is_complex() else y)
        if ctx.needs_input_grad[4]:
            of_y = _Einsum.apply(a, out, b, x.conj() if x.is_complex() else x, grad)
        return None, None, None, of_x, of_y


def einsum(func: Callable[..., object], equation: object, *operands: Any) -> object:
    """``torch.einsum``; what has another form than that of two tensors with a name for each dim is left to torch."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    letters = _letters(equation, tensors)
    if letters is None:
        return func(equation, *operands)
    return _Einsum.apply(*letters, *tensors)


def _letters(equation: object, tensors: Sequence[Tensor]) -> tuple[str, str, str] | None:
    """The letters of both tensors and of the result, one for each dim, if torch's own would have to move something."""
    if not isinstance(equation, str) or len(tensors) != 2 or not all(isinstance(t, Tensor) for t in tensors):
        return None
    sides = equation.replace(" ", "").split("->")
    terms = sides[0].split(",")
    if len(sides) != 2 or len(terms) != 2 or compat.is_transforming() or tensors[0].dtype != tensors[1].dtype:
        return None
    if torch.is_autocast_enabled(tensors[0].device.type):
        return None  # which casts what torch's own multiplies
    if not any(isinstance(t, Sharded) and _is_sharded(t) and not has_static_sizes(t) for t in tensors):
        return None
    others = iter(c for c in string.ascii_letters if c not in equation)
    between = max(t.ndim - len(s.replace("...", "")) for t, s in zip(tensors, terms, strict=True))
    names = [next(others) for _ in range(max(between, 0))]
    a, b = (
        s.replace("...", "".join(names[len(names) - (t.ndim - len(s) + 3) :]) if t.ndim > len(s) - 3 else "")
        for t, s in zip(tensors, terms, strict=True)
    )
    out = sides[1].replace("...", "".join(names))
    return (a, b, out) if _is_plain(a, b, out, tensors) else None


def _is_sharded(x: Sharded) -> bool:
    return any(c is not None for c in x._spec.layout.partitions)


def _is_plain(a: str, b: str, out: str, tensors: Sequence[Tensor]) -> bool:
    """Whether each dim has a name of its own, no size is broadcast, and nothing is summed in one tensor alone."""
    if any(len(set(s)) < len(s) or "." in s for s in (a, b, out)) or not set(out) <= set(a + b):
        return False
    if any(t.ndim != len(s) for t, s in zip(tensors, (a, b), strict=True)) or (set(a) ^ set(b)) - set(out):
        return False
    sizes = ((tensors[0].shape[a.index(c)], tensors[1].shape[b.index(c)]) for c in set(a) & set(b))
    return all(compat.same_symbol(m, n) for m, n in sizes)
