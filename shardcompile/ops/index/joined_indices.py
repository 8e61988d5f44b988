"""Several index tensors, which name elements of neighbouring dims, as one: row indices of these dims joined.

``x[samples, places]``, where samples are sharded, and places are sharded like them, becomes ``x.flatten(0, 1)[samples *
x.shape[1] + places]``. Rows that lie where they are named are not sent then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.ops.index.planned_gathers import is_linked
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Partition


def joined_numbers(sizes: Sequence[IntLike], indices: Sequence[Tensor]) -> Tensor:
    """Numbers of elements in the order of the joined dims; of the shape to which the indices broadcast.

    An element that is out of range along one dim gets a number that is out of range of all.

    Args:
        sizes: of the dims.
        indices: for each dim; negative numbers count from its end.
    """
    total: Any = math.prod(sizes)
    number: Any = 0
    outside: Any = False
    for n, index in zip(sizes, indices, strict=True):
        size: Any = n
        place = torch.where(index < 0, index + size, index)
        outside = (place < 0) | (place >= size) | outside
        number = place + number * size
    return torch.where(outside, total, number)


def linked_numbers(partition: Partition | None, sizes: Sequence[IntLike], indices: Sequence[Tensor]) -> Sharded | None:
    """`joined_numbers`, if they are sharded over the ranks over which rows are sharded; otherwise None.

    Args:
        sharded: of the rows.
        sizes: of the dims.
        indices: for each dim.
    """
    if not any(is_linked(i, partition) for i in indices):
        return None
    numbers = joined_numbers(sizes, indices)
    return numbers if is_linked(numbers, partition) else None
