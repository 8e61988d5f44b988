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


def has_runs(layout: Layout) -> bool:
    """Whether some sharded dim has several segments, so that its shards are not ranges of consecutive rows."""
    return any(p is not None and not is_one(p.runs) for p in layout.partitions)


def neighbouring(partition: Partition) -> Partition:
    """Returns the partition of the same shard sizes with one segment: each shard is a range of consecutive rows."""
    return partition if is_one(partition.runs) else replace(partition, runs=1, origin=None, core=None, home=None)


def in_segments(runs: IntLike, partition: Partition) -> Partition | None:
    """Returns the partition of the same shard sizes with `runs` segments, of which each shard has equally many rows.

    Returns None if the shard sizes are not divisible by `runs`, if the partition has several segments already, is a
    chunk partition, or uses several mesh dims.
    """
    if partition.kind == "chunk" or not is_sharded_once(partition) or partition.unscaled(runs) is None:
        return None
    return replace(partition, runs=runs, origin=None, core=None, home=None)


def is_sharded_once(partition: Partition | None) -> TypeGuard[Partition]:
    """Whether a dim is sharded over exactly one mesh dim, into ranges of consecutive rows."""
    return partition is not None and len(partition.mesh_dims) == 1 and is_one(partition.runs)


@dataclass(frozen=True)
class Apart:
    """The view of a tensor in which the leading dims that were flattened into sharded dims are split off again.

    Attributes:
        runs: for each dim the size of the leading dim to split off; 1 to leave the dim as it is.
    """

    runs: tuple[IntLike, ...]

    @staticmethod
    def of(layout: Layout) -> Apart:
        """Returns the view that splits every segmented dim of a layout."""
        return Apart(tuple(1 if p is None else p.runs for p in layout.partitions))

    def dim(self, dim: int) -> int:
        """Returns the index of a dim in the view."""
        return dim + sum(not is_one(n) for n in self.runs[: dim + 1])

    def shape(self, shape: Sequence[IntLike]) -> list[IntLike]:
        """Returns the shape of the view, for a global shape or that of a local shard."""
        parts = ([n] if is_one(runs) else [runs, n // runs] for n, runs in zip(shape, self.runs, strict=True))
        return [n for sizes in parts for n in sizes]

    def layout(self, layout: Layout) -> Layout:
        """Returns the layout of the view.

        Every partition of `layout` has as many segments as `runs` states for its dim.
        """
        partitions: list[Partition | None] = []
        for partition, runs in zip(layout.partitions, self.runs, strict=True):
            partitions += ([] if is_one(runs) else [None]) + [
                partition if partition is None else partition.parted(runs)
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
