"""Halo reads of windowed ops: convolution and pooling windows that reach over the edges of shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives.derived_partitions import derive, derive_spread, shard_size
from shardcompile.collectives.ranges import FETCH_RANGES, RETURN_RANGES, Ranges, own_rows
from shardcompile.sharding import IntLike, Partition


@dataclass(frozen=True)
class Window:
    """The rows of an input dim that are read for a row of the result.

    Row j reads the rows from ``(j * num - before) / den``, rounded up, to ``(j * num + after) / den``, rounded down. It
    is computed on the rank that holds row ``(j * num + shift) / den``.

    Attributes:
        num: stride from one window to the next in input rows, times `den`.
        den: rows of the result per input row, more than 1 for transposed convolutions.
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
        """Whether row j reads rows symmetrically around input row j, and is computed on its rank."""
        numbers = (self.num, self.den, self.shift, self.after)
        return all(isinstance(n, int) for n in numbers) and numbers == (1, 1, 0, self.before)

    def first_read(self, row: IntLike) -> IntLike:
        """Returns the first row that a row of the result reads; may be negative, which is outside of the dim."""
        return -((self.before - row * self.num) // self.den)


def _partition_and_shift(
    held: Partition, count: IntLike, window: Window, mesh: DeviceMesh
) -> tuple[Partition | None, IntLike]:
    """Returns the partition of a result whose rows stay with input rows, and the shift between the two.

    They stay with the rows that the input had before padding was added, or with those that it has. The partition is
    None if the windows determine it.
    """
    if (window.num, window.den) == (1, 1):
        unpadded = held.provenance.unpadded
        if unpadded is not None and compat.statically_known_true(count == unpadded[0].size):
            return unpadded
        if window.shift == 0 and compat.statically_known_true(count > held.size):
            return derive_spread(held, 0, 1, count, mesh)[0], 0
    return None, window.shift


@dataclass(frozen=True)
class Reads:
    """The rows that a windowed op reads along one sharded dim.

    Attributes:
        dim: the dim.
        held: the partition of the input, over one mesh dim.
        partition: the partition of the result.
        window: the rows that each row of the result reads.
        rows: number of rows that this rank reads, including those outside of the dim.
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
        """Returns the reads for `count` rows of the result."""
        w = window
        same = w.is_aligned and compat.guard_equal(count, held.size)
        if same and w.before == 0:
            return Reads(dim, held, held, window, shard_size(held, mesh), mesh)
        known, shift = (held, w.shift) if same else _partition_and_shift(held, count, window, mesh)
        partition, rows = derive("window", [held], [count, w.num, w.den, w.before, w.after, shift], count, mesh)
        return Reads(dim, held, partition if known is None else known, window, rows, mesh)

    @property
    def first(self) -> IntLike:
        """Index of this rank's first row of the result."""
        return derive("offset", [self.partition], [], self.partition.size, self.mesh)[1]

    @property
    def count(self) -> IntLike:
        """Number of this rank's rows of the result."""
        return shard_size(self.partition, self.mesh)

    def from_others(self, x: Tensor, fetched: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        """Returns copies of the rows of a result of `fetch` before and after those of the local shard."""
        if not self._reaches_out:
            return fetched.narrow(self.dim, 0, 0), fetched.narrow(self.dim, 0, 0)
        first, _, count = own_rows(self._arguments(x, None, self.rows, fill))
        before, after = (0, first), (first + count, fetched.shape[self.dim])
        low, high = (fetched.narrow(self.dim, a, b - a).clone() for a, b in (before, after))
        return low, high

    def joined(self, x: Tensor, from_others: tuple[Tensor, Tensor], fill: float) -> Tensor:
        """Returns the result of `fetch` from the local shard and the rows that `from_others` has returned."""
        if not self._reaches_out:
            return x
        _, first, count = own_rows(self._arguments(x, None, self.rows, fill))
        return torch.cat([from_others[0], x.narrow(self.dim, first, count), from_others[1]], self.dim)

    def fetch(self, x: Tensor, fill: float, dim: int | None = None) -> Tensor:
        """Returns the local shard with all rows that are read.

        Args:
            x: the local shard.
            fill: the value of rows outside of the dim.
            dim: where the dim is in `x`, if not in its place.
        """
        if not self._reaches_out:
            return x
        return FETCH_RANGES.start(self._arguments(x, dim, self.rows, fill)).wait()

    def give_back(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The adjoint of `fetch`: sums the gradients that all ranks have for the rows of the local shard."""
        if not self._reaches_out:
            return x
        shard = shard_size(self.held, self.mesh)
        return RETURN_RANGES.start(self._arguments(x, dim, shard, 0.0)).wait()

    @property
    def _reaches_out(self) -> bool:
        return self.partition is not self.held or bool(self.window.before)  # an int if it is the same partition

    def _arguments(self, x: Tensor, dim: int | None, shard: IntLike, fill: float) -> Ranges:
        (mesh_dim,) = self.held.mesh_dims
        coordinate = compat.coordinate(self.mesh) or ()
        src, dst = (c.group_partition(coordinate) for c in (self.held, self.partition))
        w = self.window
        reach = [self.partition.size, w.num, w.den, w.before, w.after]
        group_name = compat.group_name_of(self.mesh, mesh_dim)
        return Ranges(x, self.dim if dim is None else dim, self.held.size, shard, src, dst, reach, fill, group_name)
