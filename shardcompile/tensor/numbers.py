"""Numbers of sharded tensors that Python or C++ reads. They are the same on every rank, and every rank takes part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardcompile import compat
from shardcompile.sharded import Sharded

_Tensor: Any = torch.Tensor


def as_number(func: Callable[..., object], x: Tensor) -> object:
    """``float(x)`` and its kin where dispatch is off, as in ``torch.tensor([x.mean(), 1.0])``."""
    with compat.with_dispatch():
        return func(x)


def _tolist(func: Callable[..., object], x: Sharded) -> object:
    return x.full_tensor().tolist()


def _format(func: Callable[..., Any], x: Any, spec: str) -> str:
    """A number as torch formats the plain one."""
    return func(x.detach().full_tensor() if x.ndim == 0 and x._holds_values else x, spec)


def _new_tensor(func: Callable[..., object], x: Tensor, data: object, *args: object, **kwargs: object) -> object:
    """``x.new_tensor(data)``, where numbers in `data` may be sharded tensors themselves."""
    if not isinstance(data, Tensor):
        data = tree_map_only(Sharded, lambda number: number.detach().full_tensor(), data)
    return func(x, data, *args, **kwargs)


READS_NUMBER = [_Tensor.__float__, _Tensor.__int__, _Tensor.__index__, _Tensor.__bool__, _Tensor.__complex__]
"""Methods that read a number out of a tensor of one element."""

NUMBER_FUNCTIONS: dict[object, Callable[..., object]] = {
    _Tensor.tolist: _tolist,
    _Tensor.__format__: _format,
    _Tensor.new_tensor: _new_tensor,
}
"""What Python functions of torch do that read numbers."""
