"""Arguments of torch's functions above autograd. A plain tensor that wants a gradient is promoted to a replicated one.

The gradient of a plain tensor is complete on every rank, and that of a sharded one comes in its own layout.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.errors import UnsupportedOpError
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout
from shardcompile.tensor.autograd import Promote, redistributed
from shardcompile.tensor.repeated import promote

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE_OPERATORS = {f"__i{name}__" for name in _OPERATORS}
IN_PLACE = {
    getattr(torch.Tensor, name)
    for name in dir(torch.Tensor)
    if (name.endswith("_") and not name.startswith("_")) or name in _IN_PLACE_OPERATORS
} | {torch.Tensor.__setitem__}
"""Functions that write to their first argument."""

TAKES_LEAVES = {torch.autograd.grad, torch.autograd.backward}
"""Functions that take a plain tensor as a place in the autograd graph, not as a value."""


def survey(cls: type[Sharded], values: Iterable[object]) -> tuple[DeviceMesh | None, bool]:
    """The mesh of the first sharded tensor, and whether there is a tensor to promote."""
    mesh: DeviceMesh | None = None
    plain = False
    for a in values:
        if isinstance(a, Sharded):
            mesh = a._spec.layout.mesh
            if a._align_grad:
                align_gradient(a)
        elif isinstance(a, Tensor):
            plain = plain or a.requires_grad or _is_dtensor(a)
        elif isinstance(a, (list, tuple)) and a and not isinstance(a[0], (int, str)):
            also_mesh, also_plain = survey(cls, a)
            mesh, plain = mesh or also_mesh, plain or also_plain
    return mesh, plain


def promoted(cls: type[Sharded], mesh: DeviceMesh, a: object) -> object:
    """An argument as a function gets it. Plain tensors that want a gradient become sharded ones, and so do DTensors."""
    if isinstance(a, Tensor):
        if _is_dtensor(a):
            return cls.from_dtensor(a)
        if isinstance(a, cls) or not a.requires_grad or not torch.is_grad_enabled():
            return a
        return promote(a, cls, mesh)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):  # a graph has its own kind of list
        several = [promoted(cls, mesh, b) for b in a]
        return several if isinstance(a, list) else tuple(several)
    return a


def _is_dtensor(a: Tensor) -> bool:
    return type(a).__name__ == "DTensor"


def align_gradient(x: Sharded) -> None:
    """Have gradients arrive in the layout of `x`: in a leaf, or in a compiled function's output, whose backward pass
    was compiled for that layout."""
    with torch._C.DisableTorchFunctionSubclass():
        if not x.requires_grad:
            return
        x._align_grad = False
        layout = x._spec.layout.reduced()
        x.register_hook(functools.partial(laid_out, layout=layout, cls=type(x)))


def laid_out(grad: object, layout: Layout, cls: type[Sharded]) -> object:
    """A gradient in a layout; a plain one is the whole value, the same on every rank."""
    if not isinstance(grad, Tensor):
        return grad  # there is none
    if isinstance(grad, Sharded):
        whole = grad
    elif compat.is_compiling() or grad.shape != layout.shape:
        return grad  # torch says what is wrong with it
    else:
        whole = Promote.apply(grad, cls, layout.mesh)
    return redistributed(whole, layout.with_dtype(whole.dtype))


def wants_gradient(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether autograd records a call, as a tensor among its arguments has a gradient."""
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values()))


def not_in_place(func: Callable[..., object]) -> Callable[..., Any] | None:
    """The method that gives what one of `IN_PLACE` writes; None if there is none."""
    name = func.__name__
    return getattr(torch.Tensor, name.replace("__i", "__") if name in _IN_PLACE_OPERATORS else name[:-1], None)


def write_to_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Write what depends on sharded values, and has a gradient, into a plain tensor: the full value, on every rank.

    Where the function has a form that is not in place, what that gives is gathered, or reduced; otherwise the values.

    Raises:
        UnsupportedOpError: the result does not fit into the plain tensor.
    """
    with compat.annotate_nodes(written_to="plain") if compat.is_traced() else contextlib.nullcontext():
        return _write_to_plain(func, args, kwargs)


def _write_to_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    target, name, functional = args[0], func.__name__, not_in_place(func)
    if functional is None:
        whole = torch.utils._pytree.tree_map_only(Sharded, _whole, (tuple(args), dict(kwargs)))
        return func(*whole[0], **whole[1])
    value = functional(target.clone(), *args[1:], **kwargs)
    if value.shape != target.shape or not torch.can_cast(value.dtype, target.dtype):
        raise UnsupportedOpError(
            f"{name} gives {value.dtype} of shape {tuple(value.shape)}, which cannot be written into {target.dtype} of "
            f"shape {tuple(target.shape)}"
        )
    return target.copy_(value.full_tensor())


def _whole(x: Sharded) -> Tensor:
    return x.full_tensor()
