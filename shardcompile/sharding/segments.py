"""Segmented partitions: sharded dims into which leading dims were flattened, and the view that unflattens them.

A shard of such a dim is not a range of consecutive rows: it has a range in each segment. In the view with the leading
dims split off, it is one range again, and everything that moves rows works on that view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from torch.distributed.tensor.placement_types import Placement, Shard

from shardcompile.compat import is_one
from shardcompile.sharding.layout import Layout
from shardcompile.sharding.partition import Partition
from shardcompile.sharding.sizes import IntLike


def has_segments(layout: Layout) -> bool:
    """Whether some sharded dim has several segments, so that its shards are not ranges of consecutive rows."""
    return any(p is not None and not is_one(p.num_segments) for p in layout.partitions)


def with_one_segment(partition: Partition) -> Partition:
    """Returns the partition of the same shard sizes with one segment: each shard is a range of consecutive rows."""
    if is_one(partition.num_segments):
        return partition
    return _with_segments(partition, 1)


def in_segments(count: IntLike, partition: Partition) -> Partition | None:
    """Returns the partition of the same shard sizes with `count` segments, of which each shard has equally many rows.

    Returns None if the shard sizes are not divisible by `count`, if the partition has several segments already, is a
    chunk partition, or uses several mesh dims.
    """
    if partition.kind == "chunk" or not is_sharded_once(partition) or partition.unflatten_trailing(count) is None:
        return None
    return _with_segments(partition, count)


def _with_segments(partition: Partition, count: IntLike) -> Partition:
    provenance = replace(partition.provenance.of_other_rows(), moved_from=None)
    return replace(partition, num_segments=count, provenance=provenance)


def is_sharded_once(partition: Partition | None) -> TypeGuard[Partition]:
    """Whether a dim is sharded over exactly one mesh dim, into ranges of consecutive rows."""
    return partition is not None and len(partition.mesh_dims) == 1 and is_one(partition.num_segments)


@dataclass(frozen=True)
class Unflattened:
    """The view of a tensor in which the leading dims that were flattened into sharded dims are split off again.

    Attributes:
        num_segments: for each dim the size of the leading dim to split off; 1 to leave the dim as it is.
    """

    num_segments: tuple[IntLike, ...]

    @staticmethod
    def of(layout: Layout) -> Unflattened:
        """Returns the view that splits every segmented dim of a layout."""
        return Unflattened(tuple(1 if p is None else p.num_segments for p in layout.partitions))

    def dim(self, dim: int) -> int:
        """Returns the index of a dim in the view."""
        return dim + sum(not is_one(n) for n in self.num_segments[: dim + 1])

    def shape(self, shape: Sequence[IntLike]) -> list[IntLike]:
        """Returns the shape of the view, for a global shape or that of a local shard."""
        parts = (
            [n] if is_one(count) else [count, n // count] for n, count in zip(shape, self.num_segments, strict=True)
        )
        return [n for sizes in parts for n in sizes]

    def layout(self, layout: Layout) -> Layout:
        """Returns the layout of the view.

        Every partition of `layout` has as many segments as `num_segments` states for its dim.
        """
        partitions: list[Partition | None] = []
        for partition, count in zip(layout.partitions, self.num_segments, strict=True):
            partitions += ([] if is_one(count) else [None]) + [
                partition if partition is None else partition.unflatten_leading(count)
            ]
        return Layout.of(
            layout.mesh,
            [self._placement(p) for p in layout.placements],
            self.shape(layout.shape),
            layout.dtype,
            partitions,
        )

    def _placement(self, placement: Placement) -> Placement:
        return Shard(self.dim(placement.dim)) if isinstance(placement, Shard) else placement
