"""Whose memory a tensor is, as autograd and the compiler see it. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing  # 2.11 - 2.15


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of contiguous tensors of one dtype, one tensor after the other: [n], in one call."""
    return torch._utils._flatten_dense_tensors(tensors)


def share_storage(view: torch.Tensor, base: torch.Tensor) -> None:
    """Have a wrapper that is a view of another one say so: same storage, as the compiler's alias analysis expects."""
    torch._functionalize_unsafe_set(view, base)  # 2.11 - 2.15


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory, or in parts of it."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]  # 2.11 - 2.15


def forbid_writes_with_gradients(view: torch.Tensor) -> None:
    """Have autograd refuse to write to a view, and to what it is a view of, where gradients are wanted.

    For one that was turned in place: autograd knows by which view op it came, not where it lies in memory. After a
    write it would repeat that op as if the view had not been turned. What it says then is what it says of views that
    `split` returns: the write is to be replaced by a function that returns its result.
    """
    torch._C._autograd._set_creation_meta(view, torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE)  # 2.11 - 2.15


def without_base(x: torch.Tensor) -> torch.Tensor:
    """The same memory, not known as a view: Dynamo asks for the sizes of what an input is a view of."""
    return x.detach() if x._is_view() else x  # 2.11 - 2.15


def give_storage(x: torch.Tensor) -> None:
    """Have a wrapper without elements claim a storage of a byte.

    To make a fake tensor of it torch (2.11 - 2.15) would resize its storage to nothing, which a wrapper has not got.
    """
    like = torch.Tensor._make_wrapper_subclass(type(x), x.shape, dtype=x.dtype, device=x.device, storage_size=1)
    share_storage(x, like)


def follow_view(op: torch._ops.OpOverload, args: Sequence[object], kwargs: dict[str, Any]) -> None:
    """Give a wrapper on which an in-place view op, such as ``transpose_``, is called its new sizes and strides."""
    return_and_correct_aliasing(op, args, kwargs, args[0])


def exchange_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Have each of two tensor objects be what the other was, for all who have a reference to it.

    As `torch.utils.swap_tensors`, which refuses where an autograd graph or a weak reference knows one of them. Neither
    is wrong here: a graph holds the values, which go on living, and a weak reference means the object.
    """
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)  # type: ignore[attr-defined]  # 2.11 - 2.15
