"""Prepares the arguments of torch functions above autograd: plain tensors that require a gradient are promoted.

They become replicated tensors, so that the gradient of a plain tensor is complete on every rank. The gradient of a
sharded tensor arrives in the layout of the tensor.
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


def survey(cls: type[Sharded], values: Iterable[object]) -> tuple[DeviceMesh | None, bool]:
    """Returns the mesh of the first sharded tensor, and whether there is a tensor to promote."""
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
            nested_mesh, nested_plain = survey(cls, a)
            mesh, plain = mesh or nested_mesh, plain or nested_plain
    return mesh, plain


def promoted(cls: type[Sharded], mesh: DeviceMesh, a: object) -> object:
    """Promotes an argument: plain tensors that require a gradient, and DTensors, become sharded tensors."""
    if isinstance(a, Tensor):
        if _is_dtensor(a):
            return cls.from_dtensor(a)
        if isinstance(a, cls) or not a.requires_grad or not torch.is_grad_enabled():
            return a
        return promote(a, cls, mesh)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):  # includes the immutable lists of FX graphs
        items = [promoted(cls, mesh, b) for b in a]
        return items if isinstance(a, list) else tuple(items)
    return a


def _is_dtensor(a: Tensor) -> bool:
    return type(a).__name__ == "DTensor"


def align_gradient(x: Sharded) -> None:
    """Registers a hook that brings the gradient of `x` to its layout.

    A leaf needs it, and so does an output of a compiled function, whose backward pass was compiled for that layout.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not x.requires_grad:
            return
        x._align_grad = False
        layout = x._spec.layout.reduced()
        x.register_hook(functools.partial(laid_out, layout=layout, cls=type(x)))


def laid_out(grad: object, layout: Layout, cls: type[Sharded]) -> object:
    """Redistributes a gradient to a layout; a plain gradient counts as replicated."""
    if not isinstance(grad, Tensor):
        return grad  # None
    if isinstance(grad, Sharded):
        sharded = grad
    elif compat.is_compiling() or grad.shape != layout.shape:
        return grad  # torch raises the error for a wrong shape
    else:
        sharded = Promote.apply(grad, cls, layout.mesh)
    return redistributed(sharded, layout.with_dtype(sharded.dtype))


def wants_gradient(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Returns whether autograd records a call, because a tensor among its arguments requires a gradient."""
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in (*args, *kwargs.values()))


def not_in_place(func: Callable[..., object]) -> Callable[..., Any] | None:
    """Returns the out-of-place method for a function of `IN_PLACE`, or None if there is none."""
    name = func.__name__
    return getattr(torch.Tensor, name.replace("__i", "__") if name in _IN_PLACE_OPERATORS else name[:-1], None)


def write_to_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Runs an in-place function that writes sharded values with a gradient into a plain tensor.

    The plain tensor receives the full value on every rank. If the function has an out-of-place variant, the result of
    that is gathered or reduced; otherwise the sharded arguments are.

    Raises:
        UnsupportedOpError: the result does not fit into the plain tensor.
    """
    with compat.annotate_nodes(written_to="plain") if compat.is_traced() else contextlib.nullcontext():
        return _write_to_plain(func, args, kwargs)


def _write_to_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    target, name, functional = args[0], func.__name__, not_in_place(func)
    if functional is None:
        full_args, full_kwargs = torch.utils._pytree.tree_map_only(Sharded, _full_tensor, (tuple(args), dict(kwargs)))
        return func(*full_args, **full_kwargs)
    value = functional(target.clone(), *args[1:], **kwargs)
    if value.shape != target.shape or not torch.can_cast(value.dtype, target.dtype):
        raise UnsupportedOpError(
            f"{name} gives {value.dtype} of shape {tuple(value.shape)}, which cannot be written into {target.dtype} of "
            f"shape {tuple(target.shape)}"
        )
    return target.copy_(value.full_tensor())


def _full_tensor(x: Sharded) -> Tensor:
    return x.full_tensor()
