"""Parses the index of ``x[...]`` that contains a boolean mask."""

from __future__ import annotations

from types import EllipsisType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

ViewItem = slice | int | torch.SymInt | None
"""An item of a basic index, which returns a view."""


class MaskedIndex(NamedTuple):
    """An index of one mask and basic items, split into a view and a mask of that view.

    Attributes:
        view: the basic items, with full slices in place of the mask; None if they leave the tensor unchanged.
        dim: the first masked dim of the view.
        mask: the mask.
    """

    view: tuple[ViewItem, ...] | None
    dim: int
    mask: Tensor

    @property
    def view_index(self) -> tuple[slice | Tensor, ...]:
        """The index of the mask into the view."""
        return (*[slice(None)] * self.dim, self.mask)


def is_mask(item: object) -> TypeGuard[Tensor]:
    """Returns whether an item of an index is a mask."""
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.ndim > 0


def has_mask(index: object) -> bool:
    """Returns whether an index is a mask, or a tuple that contains one."""
    return any(is_mask(i) for i in index) if isinstance(index, tuple) else is_mask(index)


def masked_index(index: object, ndim: int) -> MaskedIndex | None:
    """Parses an index of one mask and integers, slices, None or an ellipsis; returns None for any other index.

    Args:
        index: the argument of `__getitem__`.
        ndim: number of dims of the tensor.
    """
    items = index if isinstance(index, tuple) else (index,)
    mask: Tensor | None = None
    parsed: list[ViewItem | EllipsisType | Tensor] = []
    num_indexed = 0  # dims of the tensor that the items index
    for item in items:
        if is_mask(item):
            if mask is not None:
                return None
            mask = item
            num_indexed += item.ndim
        elif isinstance(item, slice) or (isinstance(item, (int, torch.SymInt)) and not isinstance(item, bool)):
            num_indexed += 1
        elif item is not None and not isinstance(item, EllipsisType):
            return None
        parsed.append(item)
    if mask is None or num_indexed > ndim:
        return None
    view: list[ViewItem] = []
    dims = dim = 0  # number of dims of the view so far; number of dims before the mask
    for item in parsed:
        if isinstance(item, EllipsisType):
            view.extend([slice(None)] * (ndim - num_indexed))
            dims += ndim - num_indexed
            num_indexed = ndim  # a second ellipsis stands for nothing
        elif isinstance(item, Tensor):
            dim = dims
            view.extend([slice(None)] * item.ndim)
        else:
            view.append(item)
            dims += 0 if isinstance(item, (int, torch.SymInt)) else 1
    changes = any(item != slice(None) for item in view)
    return MaskedIndex(tuple(view) if changes else None, dim, mask if mask.dtype is torch.bool else mask != 0)
