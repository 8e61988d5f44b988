"""Conversion of sharded tensors to Python numbers. The result is rank-invariant, and every rank has to take part."""

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
    """Implements ``float(x)``, ``int(x)``, ... where dispatch is disabled, as in ``torch.tensor([x.mean(), 1.0])``."""
    with compat.with_dispatch():
        return func(x)


def _tolist(func: Callable[..., object], x: Sharded) -> object:
    return x.full_tensor().tolist()


def _format(func: Callable[..., Any], x: Any, spec: str) -> str:
    """Formats a tensor without dims as torch formats a plain one."""
    return func(x.detach().full_tensor() if x.ndim == 0 and x._holds_values else x, spec)


def _new_tensor(func: Callable[..., object], x: Tensor, data: object, *args: object, **kwargs: object) -> object:
    """Implements ``x.new_tensor(data)``, where numbers in `data` may be sharded tensors."""
    if not isinstance(data, Tensor):
        data = tree_map_only(Sharded, lambda number: number.detach().full_tensor(), data)
    return func(x, data, *args, **kwargs)


READS_NUMBER = [_Tensor.__float__, _Tensor.__int__, _Tensor.__index__, _Tensor.__bool__, _Tensor.__complex__]
"""Methods that convert a tensor of one element to a number."""

NUMBER_FUNCTIONS: dict[object, Callable[..., object]] = {
    _Tensor.tolist: _tolist,
    _Tensor.__format__: _format,
    _Tensor.new_tensor: _new_tensor,
}
"""Implementations of the torch functions that read numbers."""
