"""The memory of a tensor, as autograd and the compiler see it. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing  # 2.11 - 2.15


def flatten_together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of shape [n] with all elements of contiguous tensors of one dtype, one tensor after the other."""
    return torch._utils._flatten_dense_tensors(tensors)


def share_storage(view: torch.Tensor, base: torch.Tensor) -> None:
    """Give a wrapper that is a view of another wrapper the same storage, as the compiler's alias analysis expects."""
    torch._functionalize_unsafe_set(view, base)  # 2.11 - 2.15


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same storage."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]  # 2.11 - 2.15


def forbid_writes_with_gradients(view: torch.Tensor) -> None:
    """Have autograd refuse writes to a view, and to its base, if they require gradients.

    This is for a view that was transposed in place. Autograd records the view op, not the place in memory. After a
    write it would repeat that op as if the view had not been transposed. The error is the one for views that `split`
    returns: it asks for a function that returns its result in place of the write.
    """
    torch._C._autograd._set_creation_meta(view, torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE)  # 2.11 - 2.15


def without_base(x: torch.Tensor) -> torch.Tensor:
    """The same memory, but no view of a base: Dynamo would ask for the sizes of the base of an input."""
    return x.detach() if x._is_view() else x  # 2.11 - 2.15


def give_storage(x: torch.Tensor) -> None:
    """Give a wrapper without elements a storage of one byte.

    To make a fake tensor of it, torch (2.11 - 2.15) would resize its storage to 0 bytes, but a wrapper has none.
    """
    like = torch.Tensor._make_wrapper_subclass(type(x), x.shape, dtype=x.dtype, device=x.device, storage_size=1)
    share_storage(x, like)


NO_MEMORY = ("data is not allocated yet", "Cannot access data pointer of Tensor")
"""What stands in the error of a kernel that reads the memory of a tensor that has none, or writes there."""

refuse_pointer: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr  # 2.11 - 2.15
"""Has C++ raise where it asks for the address of a tensor's memory. A wrapper's is 0, and reading there ends the
process.
"""

_READS_THE_ADDRESS = "torch.cuda._utils"  # 2.11 - 2.15
"""The one module of torch that hands the address of a tensor on, to a kernel."""


def torch_compares_memory(depth: int) -> bool:
    """Whether torch's own Python code asks for the memory of a tensor, to compare it with other memory.

    For a wrapper it expects the address 0, and a storage of its own that nothing can be read from.

    Args:
        depth: how many frames above the caller of this function the question was asked.
    """
    caller: Any = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return caller.startswith("torch.") and caller != _READS_THE_ADDRESS


def follow_view(op: torch._ops.OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Give a wrapper its new sizes and strides after an in-place view op on it, such as ``transpose_``."""
    return_and_correct_aliasing(op, args, kwargs, args[0])


def exchange_tensors(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchange the contents of two tensor objects. Each reference now sees what the other object was.

    `torch.utils.swap_tensors` does the same, but refuses if an autograd graph or a weak reference knows one of them.
    Both are safe here: a graph keeps the values alive, and a weak reference means the object.
    """
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)  # type: ignore[attr-defined]  # 2.11 - 2.15
