"""The items of ``x[...]`` where one of them is a mask."""

from __future__ import annotations

from types import EllipsisType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

ViewItem = slice | int | torch.SymInt | None
"""An item of an index that gives a view."""


class MaskedIndex(NamedTuple):
    """An index of a mask beside what gives views.

    Attributes:
        view: the items that give a view, with slices of everything in place of the mask; None if they change nothing.
        dim: the first dim of the view that is masked.
        mask: the mask.
    """

    view: tuple[ViewItem, ...] | None
    dim: int
    mask: Tensor

    @property
    def of_view(self) -> tuple[slice | Tensor, ...]:
        """The index of the view."""
        return (*[slice(None)] * self.dim, self.mask)


def is_mask(item: object) -> TypeGuard[Tensor]:
    """Whether an item of an index is a mask."""
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.ndim > 0


def has_mask(index: object) -> bool:
    """Whether an index is a mask, or a tuple with one."""
    return any(is_mask(i) for i in index) if isinstance(index, tuple) else is_mask(index)


def masked_index(index: object, ndim: int) -> MaskedIndex | None:
    """An index with one mask, and integers, slices, None or an ellipsis beside it; None for any other.

    Args:
        index: as Python gets it.
        ndim: of the tensor.
    """
    items = index if isinstance(index, tuple) else (index,)
    mask: Tensor | None = None
    known: list[ViewItem | EllipsisType | Tensor] = []
    given = 0  # dims of the tensor that the items take
    for item in items:
        if is_mask(item):
            if mask is not None:
                return None
            mask = item
            given += item.ndim
        elif isinstance(item, slice) or (isinstance(item, (int, torch.SymInt)) and not isinstance(item, bool)):
            given += 1
        elif item is not None and not isinstance(item, EllipsisType):
            return None
        known.append(item)
    if mask is None or given > ndim:
        return None
    view: list[ViewItem] = []
    dims = dim = 0  # of the view so far; in front of the mask
    for item in known:
        if isinstance(item, EllipsisType):
            view.extend([slice(None)] * (ndim - given))
            dims += ndim - given
            given = ndim  # a second ellipsis stands for nothing
        elif isinstance(item, Tensor):
            dim = dims
            view.extend([slice(None)] * item.ndim)
        else:
            view.append(item)
            dims += 0 if isinstance(item, (int, torch.SymInt)) else 1
    changes = any(item != slice(None) for item in view)
    return MaskedIndex(tuple(view) if changes else None, dim, mask if mask.dtype is torch.bool else mask != 0)
