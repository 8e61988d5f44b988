"""Several index tensors, which name elements of neighbouring dims, as one: numbers of rows of these dims joined.

``x[samples, places]``, where samples are cut, and places are cut like them, becomes ``x.flatten(0, 1)[samples *
x.shape[1] + places]``. Rows that lie where they are named are not sent then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.layout import Cut, IntLike
from shardcompile.ops.index.linked import is_linked
from shardcompile.sharded import Sharded


def joined_numbers(extents: Sequence[IntLike], indices: Sequence[Tensor]) -> Tensor:
    """Numbers of elements in the order of the joined dims; of the shape to which the indices broadcast.

    An element that is out of range along one dim gets a number that is out of range of all.

    Args:
        extents: of the dims.
        indices: for each dim; negative numbers count from its end.
    """
    total: Any = math.prod(extents)
    number: Any = 0
    outside: Any = False
    for n, index in zip(extents, indices, strict=True):
        extent: Any = n
        place = torch.where(index < 0, index + extent, index)
        outside = (place < 0) | (place >= extent) | outside
        number = place + number * extent
    return torch.where(outside, total, number)


def linked_numbers(cut: Cut | None, extents: Sequence[IntLike], indices: Sequence[Tensor]) -> Sharded | None:
    """`joined_numbers`, if they are cut over the ranks over which rows are cut; otherwise None.

    Args:
        cut: of the rows.
        extents: of the dims.
        indices: for each dim.
    """
    if not any(is_linked(i, cut) for i in indices):
        return None
    numbers = joined_numbers(extents, indices)
    return numbers if is_linked(numbers, cut) else None
