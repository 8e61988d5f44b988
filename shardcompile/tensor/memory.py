"""Functions that access the memory of a tensor. A sharded tensor has none of its own, so they raise a clear error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from shardcompile import compat
from shardcompile.errors import UnsupportedOpError, refusal
from shardcompile.sharded import Sharded

_Tensor: Any = torch.Tensor


def refuse_memory(call: str, *given: object) -> NoReturn:
    """Refuses a call that reads or returns memory.

    Args:
        call: the call, as part of the message.
        given: the arguments, which contain sharded tensors.

    Raises:
        UnsupportedOpError: always.
    """
    raise refusal(
        call,
        ", ".join(x._spec.layout.describe() for x in tree_leaves(given) if isinstance(x, Sharded)),
        "a sharded tensor has no memory of its own that others could read",
        "Take x.to_local() for this rank's local shard, or x.full_tensor() for all of it",
    )


def data_ptr(x: Sharded) -> int:
    """Returns 0 to torch's own code, which recognizes wrapper subclasses by it; refuses other callers."""
    # The two frames are this function and the method that calls it.
    return 0 if compat.torch_compares_memory(2) else refuse_memory("data_ptr()", x)


def untyped_storage(x: Sharded) -> torch.UntypedStorage:
    """Returns to torch's own code a storage that can be compared but not read; refuses other callers."""
    if not compat.torch_compares_memory(2):
        refuse_memory("untyped_storage()", x)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.untyped_storage(x)


def explain_read(
    error: RuntimeError, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Replaces the error of a kernel that reads the memory of its arguments below dispatch by a clear one.

    Raises:
        UnsupportedOpError: if `error` is such an error.
    """
    if any(text in str(error) for text in compat.NO_MEMORY):
        name = getattr(func, "__name__", str(func))
        try:
            refuse_memory(f"{name}(), which reads the memory of its arguments,", args, kwargs)
        except UnsupportedOpError as refused:
            raise refused from error


def _refuse(func: Callable[..., object], *args: object, **kwargs: object) -> NoReturn:
    refuse_memory(f"{func.__name__}()", args, kwargs)


def _numpy(func: Callable[..., Any], x: Any, **kwargs: Any) -> object:
    """Implements ``x.numpy()`` for tensors without dims; larger tensors are not gathered implicitly."""
    if x.ndim > 0:
        raise refusal(
            "numpy()",
            x._spec.layout.describe(),
            "numpy does not support shards",
            "Take x.to_local().numpy() for this rank's local shard, or x.full_tensor().numpy() for all of it. To "
            "combine an array with a sharded tensor write torch.from_numpy(array), and torch.sin for np.sin",
        )
    if x.requires_grad and not kwargs.get("force"):
        return func(torch.zeros((), requires_grad=True))  # raises torch's own error
    return func(x.detach().full_tensor(), **kwargs)


def _array(_: object, x: torch.Tensor, dtype: Any = None, *, copy: bool | None = None) -> Any:
    """Implements ``np.asarray(x)``."""
    array: Any = _numpy(_Tensor.numpy, x)
    return array if dtype is None else array.astype(dtype, copy=False)


def _cuda_array_interface(func: Callable[..., object], x: Sharded) -> object:
    """Implements ``x.__cuda_array_interface__``: raises an `AttributeError`, so that callers try another protocol."""
    if not x.is_cuda:
        return func(x)  # raises torch's own error
    try:
        refuse_memory("__cuda_array_interface__", x)
    except UnsupportedOpError as refused:
        raise AttributeError(str(refused)) from None


MEMORY_FUNCTIONS: dict[object, Callable[..., object]] = {
    _Tensor.numpy: _numpy,
    _Tensor.__array__: _array,
    _Tensor.__cuda_array_interface__.__get__: _cuda_array_interface,
    **dict.fromkeys(
        [
            _Tensor.__dlpack__,
            _Tensor.share_memory_,
            _Tensor.storage,
            _Tensor.apply_,
            _Tensor.map_,
            _Tensor.map2_,
            _Tensor.data_ptr,  # `torch.Tensor.data_ptr(x)`; the class overrides `x.data_ptr()`
            _Tensor.untyped_storage,
            *(getattr(_Tensor, name) for name in ("const_data_ptr",) if hasattr(_Tensor, name)),  # new in some 2.x
        ],
        _refuse,
    ),
}
"""Implementations of the torch functions that access memory."""
