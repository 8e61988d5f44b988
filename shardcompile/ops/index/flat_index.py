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
from shardcompile.ops.index.planned_gathers import has_gather_plan, no_gather_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Partition


def flat_index(sizes: Sequence[IntLike], indices: Sequence[Tensor]) -> Tensor:
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


def planned_flat_index(
    partition: Partition | None, sizes: Sequence[IntLike], indices: Sequence[Tensor]
) -> Sharded | NotServed:
    """`flat_index`, if the rows can be gathered by a gather plan (see `has_gather_plan`).

    Args:
        partition: partition of the flattened dims.
        sizes: sizes of the dims.
        indices: an index tensor for each dim.
    """
    if not any(has_gather_plan(i, partition) for i in indices):
        return no_gather_plan(indices[0], partition)
    flat = flat_index(sizes, indices)
    return flat if has_gather_plan(flat, partition) else no_gather_plan(flat, partition)
