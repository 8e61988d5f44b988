"""The rows that a mask keeps: their indices on this rank and their partition.

Kept rows stay on their ranks, and one small collective exchanges their counts. The row-major order of the masked dims
may differ from the order of the ranks, as in ``x[batch, sequence]`` with a sharded sequence dim. In that case the kept
rows are exchanged once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import SegmentOrder, first_rows, gather_counts, order_of_segments, partition_of_sizes
from shardcompile.sharding import IntLike, Layout, Partition

_WITHOUT_INDEX_SELECT = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes for which torch has no kernel of `index_select`, but one of `index`."""


class KeptRows(NamedTuple):
    """The rows that a mask keeps.

    Attributes:
        size: their count on all ranks.
        partition: their partition; None if they are replicated.
        indices: the flat indices of the local kept rows in this rank's shard of the mask: [n], int64.
        order: the exchange that brings them into row-major order; None if they are in that order.
    """

    size: IntLike
    partition: Partition | None
    indices: Tensor
    order: SegmentOrder | None

    def select(self, rows: Tensor, dim: int) -> Tensor:
        """Selects the kept rows of this rank's rows, in row-major order. Differentiable."""
        if rows.dtype in _WITHOUT_INDEX_SELECT:
            return self.to_row_major(torch.ops.aten.index.Tensor(rows, [None] * dim + [self.indices]), dim)
        return self.to_row_major(rows.index_select(dim, self.indices), dim)

    def to_row_major(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Brings kept rows from the order of the local shards to row-major order. Differentiable."""
        return rows if self.order is None else self.order.ordered(rows.movedim(dim, 0)).movedim(0, dim)

    def write(self, rows: Tensor, values: Tensor, dim: int, accumulate: bool) -> Tensor:
        """Returns this rank's rows with values copied or added to the kept rows. Differentiable.

        Args:
            rows: this rank's rows.
            values: the values for the kept rows, in row-major order.
            dim: the dim of the rows.
            accumulate: whether values are added.
        """
        if self.order is not None:
            values = self.order.returned(values.movedim(dim, 0)).movedim(0, dim)
        index_op = torch.index_add if accumulate else torch.index_copy
        return index_op(rows, dim, self.indices, values)


def can_be_ordered(layout: Layout) -> bool:
    """Returns whether `kept_rows` supports a mask of this layout, with at most one exchange along a sharded dim."""
    sharded_dims = _sharded_dims(layout)
    if _is_row_major(layout):
        return True
    one_mesh_dim = len(layout.partition_of(sharded_dims[-1]).mesh_dims) == 1
    two_dims = len(sharded_dims) == 2 and _has_leading_ones(layout, sharded_dims[0])
    return one_mesh_dim and (len(sharded_dims) == 1 or two_dims)


def _is_row_major(layout: Layout) -> bool:
    """Returns whether the shards follow one another in row-major order."""
    return _has_leading_ones(layout, max(_sharded_dims(layout), default=0))


def _sharded_dims(layout: Layout) -> list[int]:
    return [d for d, partition in enumerate(layout.partitions) if partition is not None]


def _has_leading_ones(layout: Layout, dim: int) -> bool:
    """Returns whether all dims before `dim` have size 1."""
    return all(isinstance(n, int) and n == 1 for n in layout.shape[:dim])


def kept_rows(keep: Tensor, layout: Layout) -> KeptRows:
    """Finds the rows that a mask keeps.

    Args:
        keep: this rank's shard of the mask.
        layout: the layout of the mask, for which `can_be_ordered` holds.
    """
    mesh, about = layout.mesh, math.prod(map(compat.size_hint, layout.shape))
    sharded_dims = _sharded_dims(layout)
    mesh_dims = [m for d in sharded_dims for m in layout.partition_of(d).mesh_dims]
    if any(isinstance(n, int) and n == 0 for n in layout.shape):  # so that a trace knows that there are none
        parts = [mesh.shape[m] for m in mesh_dims]
        return KeptRows(0, Partition.chunk(mesh_dims, parts, 0) if parts else None, _indices(keep, 0), None)
    if not sharded_dims:
        size: Any = compat.keep_symbol(keep.sum().item())
        if not isinstance(size, int):
            torch._check(size >= 0)
            compat.suggest_hint(size, about)
        return KeptRows(size, None, _indices(keep, size), None)
    if _is_row_major(layout):
        partition = _partition_of_counts(keep.sum().view(1), mesh, mesh_dims, about)
        return KeptRows(partition.size, partition, _indices(keep, partition.local_size(compat.coordinate(mesh))), None)
    group_name = compat.group_name_of(mesh, mesh_dims[-1])
    counts = keep.flatten(sharded_dims[-1]).sum(-1).reshape(-1)
    segments = gather_counts(torch.constant_pad_nd(counts, [0, 1]), group_name)  # padded, as there may be no segment
    partition = _partition_of_counts(segments.sum(1), mesh, mesh_dims, about, gathered=1)
    num_local = partition.local_size(compat.coordinate(mesh))
    order = order_of_segments(segments, keep, num_local, group_name)
    return KeptRows(partition.size, partition, _indices(keep, num_local), order)


def _partition_of_counts(
    counts: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], about: int, gathered: int = 0
) -> Partition:
    """Returns the partition whose shard sizes are the ranks' counts of rows.

    Args:
        counts: the count of this rank, or the counts of all ranks along the innermost mesh dims.
        mesh: the mesh.
        mesh_dims: the mesh dims over which the rows are sharded, outermost first.
        about: an upper bound of the total count, as a size hint.
        gathered: along how many of the innermost mesh dims `counts` are those of all ranks.
    """
    for mesh_dim in reversed(mesh_dims[: len(mesh_dims) - gathered]):
        counts = gather_counts(counts, compat.group_name_of(mesh, mesh_dim)).view(-1)
    return partition_of_sizes(counts, mesh, mesh_dims, about=about)


def _indices(keep: Tensor, count: IntLike) -> Tensor:
    """Returns the flat indices of the true elements of a mask: [count]."""
    keep = keep.reshape(-1)
    size = keep.shape[0]
    target = torch.where(keep, keep.cumsum(0) - 1, size)
    indices = torch.arange(size, device=keep.device)
    return first_rows(target.new_zeros([size + 1]).scatter(0, target, indices), count)
