"""Several index tensors of adjacent dims as a single one, which indexes these dims flattened.

``x[samples, places]``, where `samples` and `places` are identically sharded over the mesh dim that shards ``x`` along
dim 0, becomes ``x.flatten(0, 1)[samples * x.shape[1] + places]``. Rows are then sent only to ranks that lack them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.ops import NotServed
from shardcompile.ops.index.planned_gathers import is_linked, not_linked
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Partition


def joined_numbers(sizes: Sequence[IntLike], indices: Sequence[Tensor]) -> Tensor:
    """Indices into the flattened dims, in the shape to which the indices broadcast.

    An index that is out of range along one dim becomes one that is out of range of the flattened dims.

    Args:
        sizes: sizes of the dims.
        indices: an index tensor for each dim; negative indices count from its end.
    """
    total: Any = math.prod(sizes)
    flat: Any = 0
    outside: Any = False
    for n, index in zip(sizes, indices, strict=True):
        size: Any = n
        row = torch.where(index < 0, index + size, index)
        outside = (row < 0) | (row >= size) | outside
        flat = row + flat * size
    return torch.where(outside, total, flat)


def linked_numbers(
    partition: Partition | None, sizes: Sequence[IntLike], indices: Sequence[Tensor]
) -> Sharded | NotServed:
    """`joined_numbers`, if the rows can be gathered by a gather plan (see `is_linked`).

    Args:
        partition: partition of the flattened dims.
        sizes: sizes of the dims.
        indices: an index tensor for each dim.
    """
    if not any(is_linked(i, partition) for i in indices):
        return not_linked(indices[0], partition)
    flat = joined_numbers(sizes, indices)
    return flat if is_linked(flat, partition) else not_linked(flat, partition)
