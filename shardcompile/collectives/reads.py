"""Rows that read rows of other ranks: windows of a convolution or a pool that reach over the edges of shards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives.derived_partitions import derive, derive_spread, shard_size
from shardcompile.collectives.ranges import FETCH_RANGES, RETURN_RANGES, Ranges
from shardcompile.sharding import IntLike, Partition


@dataclass(frozen=True)
class Window:
    """Which rows of a dim are read for a row of the result.

    For row j those from ``(j * num - before) / den``, rounded up, to ``(j * num + after) / den``, rounded down. It is
    computed where row ``(j * num + shift) / den`` is.

    Attributes:
        num: rows from one window to the next, times `den`.
        den: rows of the result for one that is read.
        before: see above.
        after: see above.
        shift: see above.
    """

    num: IntLike
    den: IntLike
    before: IntLike
    after: IntLike
    shift: IntLike

    @property
    def is_aligned(self) -> bool:
        """Whether row j is computed where row j is."""
        numbers = (self.num, self.den, self.shift, self.after)
        return all(isinstance(n, int) for n in numbers) and numbers == (1, 1, 0, self.before)

    def first_read(self, row: IntLike) -> IntLike:
        """The first row that is read for a row of the result; may be in front of the dim."""
        return -((self.before - row * self.num) // self.den)


def _partition_and_shift(
    held: Partition, count: IntLike, window: Window, mesh: DeviceMesh
) -> tuple[Partition | None, IntLike]:
    """The partition of a result if its rows stay with rows of the dim, and by how many rows the two are apart.

    They stay with those that the dim had before others were added around them, or has. None if windows decide.
    """
    if (window.num, window.den) == (1, 1):
        if held.core is not None and compat.statically_known_true(count == held.core[0].size):
            return held.core
        if window.shift == 0 and compat.statically_known_true(count > held.size):
            return derive_spread(held, 0, 1, count, mesh)[0], 0
    return None, window.shift


@dataclass(frozen=True)
class Reads:
    """What is read along one sharded dim.

    Attributes:
        dim: the dim.
        held: its partition, over one mesh dim.
        sharded: of the result.
        window: which rows are read.
        rows: how many this rank reads, those outside of the dim included.
        mesh: the mesh.
    """

    dim: int
    held: Partition
    partition: Partition
    window: Window
    rows: IntLike
    mesh: DeviceMesh

    @staticmethod
    def of(dim: int, held: Partition, count: IntLike, window: Window, mesh: DeviceMesh) -> Reads:
        """What is read for `count` rows along a dim."""
        w = window
        same = w.is_aligned and compat.same_symbol(count, held.size)
        if same and w.before == 0:
            return Reads(dim, held, held, window, shard_size(held, mesh), mesh)
        known, shift = (held, w.shift) if same else _partition_and_shift(held, count, window, mesh)
        partition, rows = derive("reading", [held], [count, w.num, w.den, w.before, w.after, shift], count, mesh)
        return Reads(dim, held, partition if known is None else known, window, rows, mesh)

    @property
    def first(self) -> IntLike:
        """Where this rank's rows of the result begin."""
        return derive("located", [self.partition], [], self.partition.size, self.mesh)[1]

    @property
    def count(self) -> IntLike:
        """How many rows of the result this rank has."""
        return shard_size(self.partition, self.mesh)

    def fetch(self, x: Tensor, fill: float) -> Tensor:
        """A shard with all rows that are read, those outside of the dim filled with a number."""
        if not self._reaches_out:
            return x
        return FETCH_RANGES.start(self._arguments(x, self.rows, fill)).wait()

    def give_back(self, x: Tensor) -> Tensor:
        """The way back for gradients: sums of what the ranks have for the rows of a shard."""
        if not self._reaches_out:
            return x
        shard = shard_size(self.held, self.mesh)
        return RETURN_RANGES.start(self._arguments(x, shard, 0.0)).wait()

    @property
    def _reaches_out(self) -> bool:
        return self.partition is not self.held or bool(self.window.before)  # a number, if it is the same partition

    def _arguments(self, x: Tensor, shard: IntLike, fill: float) -> Ranges:
        (mesh_dim,) = self.held.mesh_dims
        coordinate = compat.coordinate(self.mesh) or ()
        src, dst = (c.group_ref(coordinate) for c in (self.held, self.partition))
        w = self.window
        reach = [self.partition.size, w.num, w.den, w.before, w.after]
        group_name = compat.group_name_of(self.mesh, mesh_dim)
        return Ranges(x, self.dim, self.held.size, shard, src, dst, reach, fill, group_name)
