"""Layouts whose sharded dims had leading dims flattened into them: takes such dims apart, and puts them together again.

Rows of such a shard are not neighbours in the whole dim. With the leading dims apart they are neighbours, and
everything that moves rows works on that view.
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
    """Whether some shard is no run of neighbouring rows."""
    return any(c is not None and not is_one(c.runs) for c in layout.partitions)


def neighbouring(partition: Partition) -> Partition:
    """The sharded into shards of the same sizes, each of neighbouring rows."""
    return partition if is_one(partition.runs) else replace(partition, runs=1, origin=None, core=None, home=None)


def in_stretches(runs: IntLike, partition: Partition) -> Partition | None:
    """The sharded into shards of the same sizes, each of which has equally many rows of each of `runs` stretches.

    None if sizes do not divide, if the partition has stretches already, or if several mesh dims sharded.
    """
    if partition.kind == "chunk" or not is_sharded_once(partition) or partition.unscaled(runs) is None:
        return None
    return replace(partition, runs=runs, origin=None, core=None, home=None)


def is_sharded_once(partition: Partition | None) -> TypeGuard[Partition]:
    """Whether one mesh dim shards a dim, into shards that are runs of neighbouring rows."""
    return partition is not None and len(partition.mesh_dims) == 1 and is_one(partition.runs)


@dataclass(frozen=True)
class Apart:
    """How dims are taken apart.

    Attributes:
        runs: for each dim the size of the leading dim that it is given; 1 for none.
    """

    runs: tuple[IntLike, ...]

    @staticmethod
    def of(layout: Layout) -> Apart:
        """As the partitions of a layout ask for."""
        return Apart(tuple(1 if c is None else c.runs for c in layout.partitions))

    def dim(self, dim: int) -> int:
        """Where a dim is afterwards."""
        return dim + sum(not is_one(n) for n in self.runs[: dim + 1])

    def shape(self, shape: Sequence[IntLike]) -> list[IntLike]:
        """A shape, that of a shard too."""
        parts = ([n] if is_one(runs) else [runs, n // runs] for n, runs in zip(shape, self.runs, strict=True))
        return [n for several in parts for n in several]

    def layout(self, layout: Layout) -> Layout:
        """The layout of the tensor with these dims apart; dims that are sharded otherwise are whole or sharded as
        here.
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
