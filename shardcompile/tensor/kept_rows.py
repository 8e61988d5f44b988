"""Rows that a mask keeps: which ones this rank has, and how they are partitioned over the ranks.

They stay on their ranks, and one small collective tells the counts. Row-major order of the mask's dims may not be that
of the ranks' shards, as of ``x[batch, sequence]`` with a sharded sequence. The kept rows are exchanged once then.
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
        size: how many there are on all ranks.
        sharded: their partition; None if every rank has all of them.
        indices: of each row that this rank keeps its index among the elements of its shard of the mask: [n], int64.
        order: the exchange that brings them into row-major order; None if they are in it.
    """

    size: IntLike
    partition: Partition | None
    indices: Tensor
    order: SegmentOrder | None

    def taken(self, rows: Tensor, dim: int) -> Tensor:
        """The kept ones of this rank's rows, in their order. Differentiable."""
        if rows.dtype in _WITHOUT_INDEX_SELECT:
            return self.in_order(torch.ops.aten.index.Tensor(rows, [None] * dim + [self.indices]), dim)
        return self.in_order(rows.index_select(dim, self.indices), dim)

    def in_order(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Rows that are kept in the order of this rank's shard, in row-major order. Differentiable."""
        return rows if self.order is None else self.order.ordered(rows.movedim(dim, 0)).movedim(0, dim)

    def written(self, rows: Tensor, values: Tensor, dim: int, accumulate: bool) -> Tensor:
        """This rank's rows, the kept ones being replaced or added to. Differentiable.

        Args:
            rows: this rank's.
            values: for the kept rows, in their order.
            dim: of the rows.
            accumulate: whether values are added.
        """
        if self.order is not None:
            values = self.order.returned(values.movedim(dim, 0)).movedim(0, dim)
        write = torch.index_add if accumulate else torch.index_copy
        return write(rows, dim, self.indices, values)


def can_be_ordered(layout: Layout) -> bool:
    """Whether `kept_rows` serves a mask of this layout, perhaps by an exchange along the last sharded dim."""
    sharded = _sharded_dims(layout)
    if _is_in_order(layout):
        return True
    one_mesh_dim = len(layout.partition_of(sharded[-1]).mesh_dims) == 1
    return one_mesh_dim and (len(sharded) == 1 or (len(sharded) == 2 and _is_led_by_ones(layout, sharded[0])))


def _is_in_order(layout: Layout) -> bool:
    """Whether the shards follow one another in row-major order."""
    return _is_led_by_ones(layout, max(_sharded_dims(layout), default=0))


def _sharded_dims(layout: Layout) -> list[int]:
    return [d for d, partition in enumerate(layout.partitions) if partition is not None]


def _is_led_by_ones(layout: Layout, dim: int) -> bool:
    return all(isinstance(n, int) and n == 1 for n in layout.shape[:dim])


def kept_rows(keep: Tensor, layout: Layout) -> KeptRows:
    """The rows that a mask keeps.

    Args:
        keep: this rank's shard of the mask.
        layout: of the mask, for which `can_be_ordered` holds.
    """
    mesh, about = layout.mesh, math.prod(map(compat.size_hint, layout.shape))
    sharded = _sharded_dims(layout)
    mesh_dims = [m for d in sharded for m in layout.partition_of(d).mesh_dims]
    if not sharded:
        size: Any = compat.keep_symbol(keep.sum().item())
        if not isinstance(size, int):
            torch._check(size >= 0)
            compat.suggest_hint(size, about)
        return KeptRows(size, None, _indices(keep, size), None)
    if _is_in_order(layout):
        partition = _partition_of_counts(keep.sum().view(1), mesh, mesh_dims, about)
        return KeptRows(partition.size, partition, _indices(keep, partition.local_size(compat.coordinate(mesh))), None)
    group_name = compat.group_name_of(mesh, mesh_dims[-1])
    counts = keep.flatten(sharded[-1]).sum(-1).reshape(-1)
    parts = gather_counts(torch.constant_pad_nd(counts, [0, 1]), group_name)  # also where there are no segments
    partition = _partition_of_counts(parts.sum(1), mesh, mesh_dims, about, gathered=1)
    shard = partition.local_size(compat.coordinate(mesh))
    return KeptRows(partition.size, partition, _indices(keep, shard), order_of_segments(parts, keep, shard, group_name))


def _partition_of_counts(
    counts: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], about: int, gathered: int = 0
) -> Partition:
    """The partition with this rank's count of rows.

    Args:
        counts: this rank's, or those of all ranks along the innermost mesh dims.
        mesh: the mesh.
        mesh_dims: over which the rows are sharded, outermost first.
        about: how many there are at most.
        gathered: along how many of the innermost mesh dims `counts` are those of all ranks.
    """
    for mesh_dim in reversed(mesh_dims[: len(mesh_dims) - gathered]):
        counts = gather_counts(counts, compat.group_name_of(mesh, mesh_dim)).view(-1)
    return partition_of_sizes(counts, mesh, mesh_dims, about=about)


def _indices(keep: Tensor, count: IntLike) -> Tensor:
    """Where a mask is true, in row-major order: [count]."""
    keep = keep.reshape(-1)
    size = keep.shape[0]
    place = torch.where(keep, keep.cumsum(0) - 1, size)
    indices = torch.arange(size, device=keep.device)
    return first_rows(place.new_zeros([size + 1]).scatter(0, place, indices), count)
