"""The communication volume of collectives: the shards that ranks put in and get, and the bytes that move.

All results are rank-invariant. They follow from the partitions of a collective. The local shard size itself is never
used, because it may be equal to another size on some ranks only.

An even collective moves what a ring or pairwise exchange moves, which is the minimum (Thakur, Rabenseifner, Gropp,
"Optimization of collective communication operations in MPICH", 2005; nccl-tests, PERFORMANCE.md). For uneven shards
there are two algorithms, see `shardcompile.collectives.transport`. With direct sends, a local shard goes to each of the
n-1 other ranks. If every rank has its own link, the owner of the largest shard is the bottleneck, with
(n-1) max(shard); if all ranks share one link, the sum is. Or messages first bring the rows to an even division, and the
even shards take the ring; a reduction runs in the opposite order. That takes one more launch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives.transport.balance import moved_to_even
from shardcompile.errors import ShardError
from shardcompile.sharding import CHUNK_KEY, GroupPartition, IntLike


@dataclass(frozen=True)
class GroupShards:
    """The shards that the ranks of a group put in, or get.

    Attributes:
        sizes: shard sizes in group order, up to a common factor if their scale is a symbol; None if they are not
            static.
        halo: rows that a shard may have in addition to `sizes`; fewer at the ends of the dim.
        assumed: sizes to assume where `sizes` is None and only a halo moves, so that they hardly matter.
    """

    sizes: tuple[int, ...] | None
    halo: int = 0
    assumed: tuple[int, ...] | None = None

    @staticmethod
    def of(partition: GroupPartition, total: object, ranks: int | None, halo: int = 0) -> GroupShards:
        """Returns the shards of a partition.

        Args:
            partition: the partition, which holds symbols where it is not static.
            total: global size of the dim.
            ranks: size of the group; None if it is not known.
            halo: see `GroupShards`.
        """
        return GroupShards(_known_sizes(partition, total, ranks), halo)


@dataclass(frozen=True)
class Member:
    """One tensor of a collective; a bucket has several.

    Attributes:
        put: the shards that ranks put in; None if all put in tensors of one shape.
        get: the shards that ranks get; None if all get tensors of one shape.
        nbytes: bytes of the global tensor by hints; of the payload if there is no partition.
        arriving: bytes that each rank receives from others and sends, if that does not follow from the shards.
    """

    put: GroupShards | None
    get: GroupShards | None
    nbytes: int
    arriving: tuple[float, ...] | None = None


def of_any_rows(payload: Tensor) -> Member:
    """Returns the member of a data-dependent exchange of a payload, where the shards of other ranks are not known."""
    return Member(GroupShards(None), GroupShards(None), nbytes_of(payload))


def is_number(size: object) -> bool:
    """Returns whether a size is static: an int, not a symbol."""
    return isinstance(size, int)


def _known_sizes(partition: GroupPartition, total: Any, ranks: int | None) -> tuple[int, ...] | None:
    if partition.sizes:
        return tuple(partition.sizes) if all(map(is_number, partition.sizes)) else None
    if ranks is None or not is_number(partition.key) or (partition.key == CHUNK_KEY and not is_number(total)):
        return None
    # A scale that is a symbol is common to all shards: by its hint, their sizes have the right proportions.
    partition = dataclasses.replace(partition, grouping=[compat.size_hint(n) for n in partition.grouping])
    try:
        return partition.shards(total, ranks)
    except (LookupError, ShardError):  # the key is of another process
        return None


def nbytes_of(value: Tensor) -> int:
    """Returns the bytes of a tensor, by size hints."""
    total = value.dtype.itemsize
    for size in value.shape:
        total *= size if type(size) is int else compat.size_hint(size)
    return total


def nbytes_with(value: Tensor, dim: int, dim_size: IntLike) -> int:
    """Returns the bytes of a tensor with another size along a dim, by size hints."""
    total = value.dtype.itemsize * compat.size_hint(dim_size)
    for d, size in enumerate(value.shape):
        total *= 1 if d == dim else compat.size_hint(size)
    return total


def size_of(value: Tensor) -> Any:
    """Returns the bytes of a tensor; may be symbolic."""
    return math.prod(value.shape) * value.dtype.itemsize


def size_with(value: Tensor, dim: int, size: Any) -> object:
    """Returns the bytes of a tensor with another size along a dim; may be symbolic."""
    return math.prod((size, *(s for d, s in enumerate(value.shape) if d != dim))) * value.dtype.itemsize


def shares(side: GroupShards | None, ranks: int) -> list[float]:
    """Returns the fraction of the global tensor that each rank holds; equal fractions if the sizes are not static."""
    if side is None or side.sizes is None or len(side.sizes) != ranks or not sum(side.sizes):
        return [1 / ranks] * ranks
    total = sum(side.sizes)
    return [min(s + side.halo, total) / total if s else 0.0 for s in side.sizes]


# Members of more than one kind of collective.


def gathered(x: Tensor, dim: int, total: IntLike, partition: GroupPartition, ranks: int | None) -> Member:
    """Returns the member of an all-gather: Shard to Replicate."""
    return Member(GroupShards.of(partition, total, ranks), None, nbytes_with(x, dim, total))


def scattered(x: Tensor, dim: int, partition: GroupPartition, ranks: int | None) -> Member:
    """Returns the member of a reduce-scatter or of taking a shard: full tensors to Shard."""
    return Member(None, GroupShards.of(partition, x.shape[dim], ranks), nbytes_of(x))


def resharded(
    x: Tensor, dims: Sequence[int], total: IntLike, partitions: Sequence[GroupPartition], ranks: int | None
) -> Member:
    """Returns the member of an all-to-all: shards of one dim to shards of another."""
    (src_dim, dst_dim), (src, dst) = dims, partitions
    put, get = GroupShards.of(src, total, ranks), GroupShards.of(dst, x.shape[dst_dim], ranks)
    return Member(put, get, nbytes_with(x, src_dim, total))


@dataclass(frozen=True)
class Traffic:
    """The bytes that a collective moves.

    Attributes:
        busiest: bytes that the busiest rank sends or receives.
        total: bytes that all ranks send together.
        packed: bytes that the busiest rank reads and writes in its own memory before sending.
        unpacked: the same after receiving, in the wait.
        ring: the traffic of the alternative algorithm, a ring. Ranks with a link each take the faster of the two.
        messages: whether ranks exchange messages before or after the ring, which takes one more launch.
    """

    busiest: float
    total: float
    packed: float = 0.0
    unpacked: float = 0.0
    ring: Traffic | None = None
    messages: bool = False


@dataclass(frozen=True)
class Load:
    """The bytes of each rank in a collective.

    Attributes:
        nbytes: nbytes[row, rank]: one row with the bytes of each rank's shard, or two rows for an exchange, with the
            bytes that it sends and receives.
    """

    nbytes: np.ndarray

    @staticmethod
    def of_shards(members: Sequence[Member], n: int, times: int = 1) -> Load:
        """Returns the load of a gather or a scatter. A member without shards counts as evenly sharded.

        Args:
            members: the members of a collective.
            n: size of the group.
            times: number of members that make up the global tensor: `n` where a member is a shard.
        """
        return Load(np.sum([np.array([shares(m.put or m.get, n)]) * (times * m.nbytes) for m in members], axis=0))

    @staticmethod
    def of_even_shards(members: Sequence[Member], n: int) -> Load:
        """Returns the load of shards of one size. `nbytes` of a member are those of a shard."""
        return Load.of_shards(members, n, n)

    @staticmethod
    def of_exchange(members: Sequence[Member], n: int) -> Load:
        """Returns the load of an all-to-all from shards of one dim to shards of another."""
        return Load(np.array(sent_and_received(members, n)))

    @staticmethod
    def together(loads: Sequence[Load]) -> Load:
        """Returns the load of several collectives."""
        return Load(np.sum([load.nbytes for load in loads], axis=0))

    @property
    def largest(self) -> float:
        """The largest bytes of a rank."""
        return float(self.nbytes.max())

    @property
    def whole(self) -> float:
        """The bytes of all ranks together."""
        return float(self.nbytes[0].sum())

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.nbytes.shape[1])


def sent_and_received(members: Sequence[Member], n: int) -> tuple[list[float], list[float]]:
    """Returns the bytes that each rank sends and receives in an all-to-all; it keeps its share of its shard."""
    sent, received = [0.0] * n, [0.0] * n
    for m in members:
        for r, (put, get) in enumerate(zip(shares(m.put, n), shares(m.get, n), strict=True)):
            sent[r] += m.nbytes * put * (1 - get)
            received[r] += m.nbytes * get * (1 - put)
    return sent, received


def gathered_in_a_bucket(load: Load) -> Traffic:
    """Returns the traffic of an all-gather bucket, which packs what it sends and unpacks what it receives."""
    copied = 2 * load.largest, 2 * load.whole
    return _all_to_all_ranks(load.nbytes[0], *copied, around_a_ring=copied)


def scattered_in_a_bucket(load: Load) -> Traffic:
    """Returns the traffic of a reduce-scatter bucket, which packs what it sends. Results need no unpacking."""
    packed = 2 * load.whole
    return _all_to_all_ranks(load.nbytes[0], packed, (load.ranks + 1) * load.largest, around_a_ring=(packed, 0.0))


def exchanged_in_a_bucket(load: Load) -> Traffic:
    """Returns the traffic of an all-to-all bucket, which packs what it sends and unpacks what it receives."""
    return Traffic(load.largest, load.whole, 2 * load.largest, 2 * load.largest)


def reduced_in_a_bucket(load: Load, passes: int) -> Traffic:
    """Returns the traffic of torch's even reductions of concatenated tensors: 1 pass to reduce, 2 to all-reduce."""
    n, whole = load.ranks, load.whole
    return Traffic(passes * (n - 1) / n * whole, passes * (n - 1) * whole, 2 * whole)


def shards_to_all(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic of an all-gather, or of a reduce-scatter, which also sums n terms on each rank."""
    held = Load.of_shards(members, n).nbytes[0]
    reduced = (n + 1) * float(held.max()) if members[0].get is not None else 0.0
    return _all_to_all_ranks(held, 0.0, reduced)


def _all_to_all_ranks(
    held: np.ndarray, packed: float, unpacked: float, around_a_ring: tuple[float, float] = (0.0, 0.0)
) -> Traffic:
    """Returns the traffic where all ranks get, or reduce, all shards.

    Args:
        held: bytes of each rank's shard.
        packed: `Traffic.packed` with direct sends.
        unpacked: `Traffic.unpacked` with direct sends.
        around_a_ring: the two with a ring over an even division.
    """
    n, total, largest = len(held), float(held.sum()), float(held.max())
    even = largest * n <= total * (1 + 1e-9)  # tolerance for float sums
    busiest = (n - 1) / n * total + (0.0 if even else moved_to_even(held))
    ring = Traffic(busiest, (n - 1) * total, *around_a_ring, messages=not even)
    return Traffic((n - 1) * largest, (n - 1) * total, packed, unpacked, ring)


def even_gather(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic of an even all-gather; `nbytes` are those of one shard."""
    total = n * sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * total, (n - 1) * total)


def even_scatter(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic of an even reduce-scatter."""
    total = sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * total, (n - 1) * total)


def even_exchange(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic of an even all-to-all: each rank keeps one n-th of its payload."""
    payload = sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * payload, (n - 1) * payload)
