"""What the ranks put into a collective and get out of it, and what it moves: numbers, the same on every rank.

A collective's partitions tell the bytes that move, and whether shards may differ between ranks: they may if the sizes
are known and not all equal. The shard's own size is never asked, because it may happen to be equal to another's on some
ranks only.

An even collective moves what a ring or pairwise exchange does, which is the least possible (Thakur, Rabenseifner,
Gropp, "Optimization of collective communication operations in MPICH", 2005; nccl-tests, PERFORMANCE.md). Uneven shards
go one of two ways, see `shardcompile.collectives.transport`. Sent directly, a rank's local shard goes to each of the
n-1 others. Where every rank has its own link, the owner of the largest shard decides, with (n-1) max(shard). Where all
ranks share one link, the sum decides. Or ranks bring their rows to an even division first, by messages of their own,
and these parts take the ring. Reduced rows go the other way. That takes one more launch.
"""

from __future__ import annotations

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

OUTER = "outer"
"""In place of a group's name: ranks differ, but along another mesh dim than that of the group at hand."""


@dataclass(frozen=True)
class GroupShards:
    """The shards that the ranks of a group put in, or get.

    Attributes:
        sizes: in group order; None if they are not known while compiling.
        number: whether the graph has a number for the size of this rank's local shard, not a symbol.
        halo: rows that a shard may have more than `sizes` says; fewer at the ends of the global size.
        nested: whether other groups along the same mesh dim have other shards.
        assumed: what `sizes` are taken for where only a halo moves, so that they hardly matter.
    """

    sizes: tuple[int, ...] | None
    number: bool
    halo: int = 0
    nested: bool = False
    assumed: tuple[int, ...] | None = None

    @staticmethod
    def of(partition: GroupPartition, total: object, size: object, ranks: int | None, halo: int = 0) -> GroupShards:
        """The shards of a partition.

        Args:
            sharded: with symbols where the compiler does not know it.
            total: what is sharded.
            size: of this rank's local shard.
            ranks: in the group; None if that is not known.
            halo: see above.
        """
        nested = bool(partition.grouping) and not partition.sizes and is_number(partition.key)
        return GroupShards(_known_sizes(partition, total, ranks), is_number(size), halo, nested)

    @property
    def uneven(self) -> bool:
        """Whether sizes in the graph differ between ranks. The same on all of them."""
        if self.sizes is None:
            return self.number  # symbols have hints that the ranks have in common
        return len(set(self.sizes)) > 1 or (self.halo > 0 and len(self.sizes) > 1)

    def labels(self, group_name: str) -> set[str]:
        """The groups along which the sizes may differ."""
        return ({group_name} if self.uneven else set()) | ({OUTER} if self.nested and self.number else set())


@dataclass(frozen=True)
class Member:
    """One tensor of a collective, of which a bucket has several.

    Attributes:
        put: the shards put in; None if all ranks put in tensors of one shape.
        get: the shards got; None if all ranks get tensors of one shape.
        nbytes: of the whole tensor, by hints; those of the payload for what has no partition.
        arriving: bytes that each rank gets from others, and sends, if that does not follow from the shards.
    """

    put: GroupShards | None
    get: GroupShards | None
    nbytes: int
    arriving: tuple[float, ...] | None = None


def of_any_rows(payload: Tensor, shard: object) -> Member:
    """Rows of which the data says where they go: what other ranks put in and get is not known while compiling.

    Args:
        payload: what this rank puts in.
        shard: how many rows it gets.
    """
    put, get = GroupShards(None, is_number(payload.shape[0])), GroupShards(None, is_number(shard))
    return Member(put, get, nbytes_of(payload))


def is_number(size: object) -> bool:
    """Whether a size is known while compiling, and no symbol."""
    return isinstance(size, int)


def _known_sizes(partition: GroupPartition, total: Any, ranks: int | None) -> tuple[int, ...] | None:
    if partition.sizes:
        return tuple(partition.sizes) if all(map(is_number, partition.sizes)) else None
    if ranks is None or not is_number(partition.key) or (partition.key == CHUNK_KEY and not is_number(total)):
        return None
    try:
        return partition.shards(total, ranks)
    except (LookupError, ShardError):  # a key of another process
        return None


def nbytes_of(value: Tensor) -> int:
    """Bytes of a tensor by hints."""
    total = value.dtype.itemsize
    for size in value.shape:
        total *= size if type(size) is int else compat.size_hint(size)
    return total


def nbytes_with(value: Tensor, dim: int, dim_size: IntLike) -> int:
    """Bytes of a tensor, had it this size along a dim, by hints."""
    total = value.dtype.itemsize * compat.size_hint(dim_size)
    for d, size in enumerate(value.shape):
        total *= 1 if d == dim else compat.size_hint(size)
    return total


def size_of(value: Tensor) -> Any:
    """Bytes of a tensor; may be symbolic."""
    return math.prod(value.shape) * value.dtype.itemsize


def size_with(value: Tensor, dim: int, size: Any) -> object:
    """Bytes of a tensor, had it this size along a dim; may be symbolic."""
    return math.prod((size, *(s for d, s in enumerate(value.shape) if d != dim))) * value.dtype.itemsize


def shares(side: GroupShards | None, ranks: int) -> list[float]:
    """The part of a whole that each rank holds; equal parts where the sizes are not known while compiling."""
    if side is None or side.sizes is None or len(side.sizes) != ranks or not sum(side.sizes):
        return [1 / ranks] * ranks
    whole = sum(side.sizes)
    return [min(s + side.halo, whole) / whole if s else 0.0 for s in side.sizes]


# What tensors are to the ranks, for more than one kind of collective.


def gathered(x: Tensor, dim: int, total: IntLike, partition: GroupPartition, ranks: int | None) -> Member:
    """Shards become whole."""
    return Member(GroupShards.of(partition, total, x.shape[dim], ranks), None, nbytes_with(x, dim, total))


def scattered(x: Tensor, dim: int, shard: object, partition: GroupPartition, ranks: int | None) -> Member:
    """A whole becomes shards."""
    return Member(None, GroupShards.of(partition, x.shape[dim], shard, ranks), nbytes_of(x))


def turned(
    x: Tensor, dims: Sequence[int], sizes: Sequence[IntLike], partitions: Sequence[GroupPartition], ranks: int | None
) -> Member:
    """Shards of one dim become shards of another."""
    (src_dim, dst_dim), (total, shard), (src, dst) = dims, sizes, partitions
    put = GroupShards.of(src, total, x.shape[src_dim], ranks)
    get = GroupShards.of(dst, x.shape[dst_dim], shard, ranks)
    return Member(put, get, nbytes_with(x, src_dim, total))


@dataclass(frozen=True)
class Traffic:
    """What a collective moves.

    Attributes:
        busiest: bytes that the rank sends or receives that has most to.
        total: bytes that all ranks send.
        packed: bytes that the busiest rank reads and writes in its own memory before anything is sent.
        unpacked: the same after everything has come, when the collective is awaited.
        ring: the traffic of a second way, by a ring. Ranks that have a link each take the sooner of the two ways.
        messages: whether the ranks exchange messages before or after the ring, which takes one more launch.
    """

    busiest: float
    total: float
    packed: float = 0.0
    unpacked: float = 0.0
    ring: Traffic | None = None
    messages: bool = False


@dataclass(frozen=True)
class Load:
    """What each rank has of the tensors of a collective, in bytes: a row for shards, two for an exchange.

    Attributes:
        nbytes: nbytes[row, rank]: of shards the rank's own; of an exchange what it sends, and what it receives.
    """

    nbytes: np.ndarray

    @staticmethod
    def of_shards(members: Sequence[Member], n: int, times: int = 1) -> Load:
        """The traffic of shards that become whole, or of a whole that becomes shards. A member without shards counts as
        divided evenly.

        Args:
            members: of a collective.
            n: ranks in the group.
            times: how many of a member make the whole: `n` where a member is a shard.
        """
        return Load(np.sum([np.array([shares(m.put or m.get, n)]) * (times * m.nbytes) for m in members], axis=0))

    @staticmethod
    def of_even_shards(members: Sequence[Member], n: int) -> Load:
        """The traffic of shards of one size. `nbytes` of a member are those of a shard."""
        return Load.of_shards(members, n, n)

    @staticmethod
    def of_exchange(members: Sequence[Member], n: int) -> Load:
        """The traffic of shards of one dim that become shards of another."""
        return Load(np.array(sent_and_received(members, n)))

    @staticmethod
    def together(loads: Sequence[Load]) -> Load:
        """The traffic of several collectives."""
        return Load(np.sum([load.nbytes for load in loads], axis=0))

    @property
    def largest(self) -> float:
        """The bytes of the rank that has most."""
        return float(self.nbytes.max())

    @property
    def whole(self) -> float:
        """The bytes of all ranks."""
        return float(self.nbytes[0].sum())

    @property
    def ranks(self) -> int:
        """How many there are."""
        return int(self.nbytes.shape[1])


def sent_and_received(members: Sequence[Member], n: int) -> tuple[list[float], list[float]]:
    """Bytes by rank where shards are turned: rank p sends the part of its shard that belongs to rank q's."""
    sent, received = [0.0] * n, [0.0] * n
    for m in members:
        for r, (put, get) in enumerate(zip(shares(m.put, n), shares(m.get, n), strict=True)):
            sent[r] += m.nbytes * put * (1 - get)
            received[r] += m.nbytes * get * (1 - put)
    return sent, received


def gathered_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed, and what has come unpacked."""
    copied = 2 * load.largest, 2 * load.whole
    return _all_to_all_ranks(load.nbytes[0], *copied, around_a_ring=copied)


def scattered_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed. The sum of n terms comes out in its place, or the sum itself."""
    packed = 2 * load.whole
    return _all_to_all_ranks(load.nbytes[0], packed, (load.ranks + 1) * load.largest, around_a_ring=(packed, 0.0))


def exchanged_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed, and what has come unpacked."""
    return Traffic(load.largest, load.whole, 2 * load.largest, 2 * load.largest)


def reduced_in_a_bucket(load: Load, passes: int) -> Traffic:
    """What torch's even collectives move of tensors that were joined: once to reduce, twice to tell everybody."""
    n, whole = load.ranks, load.whole
    return Traffic(passes * (n - 1) / n * whole, passes * (n - 1) * whole, 2 * whole)


def shards_to_all(members: Sequence[Member], n: int) -> Traffic:
    """Each shard goes to the n-1 others. The same backwards, and the sum of n terms, where ranks get shards."""
    held = Load.of_shards(members, n).nbytes[0]
    reduced = (n + 1) * float(held.max()) if members[0].get is not None else 0.0
    return _all_to_all_ranks(held, 0.0, reduced)


def _all_to_all_ranks(
    held: np.ndarray, packed: float, unpacked: float, around_a_ring: tuple[float, float] = (0.0, 0.0)
) -> Traffic:
    """The traffic where all ranks get, or reduce, all shards.

    Args:
        held: bytes of each rank's local shard.
        packed: see `Traffic`, where shards are sent.
        unpacked: the same.
        around_a_ring: these two, where a ring moves an even division of the shards.
    """
    n, whole, largest = len(held), float(held.sum()), float(held.max())
    even = largest * n <= whole * (1 + 1e-9)  # sums of floats
    through = (n - 1) / n * whole + (0.0 if even else moved_to_even(held))
    ring = Traffic(through, (n - 1) * whole, *around_a_ring, messages=not even)
    return Traffic((n - 1) * largest, (n - 1) * whole, packed, unpacked, ring)


def even_gather(members: Sequence[Member], n: int) -> Traffic:
    """Equal shards: `nbytes` are those of one shard."""
    whole = n * sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * whole, (n - 1) * whole)


def even_scatter(members: Sequence[Member], n: int) -> Traffic:
    """Terms of one shape, of which every rank gets an equal part."""
    whole = sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * whole, (n - 1) * whole)


def even_exchange(members: Sequence[Member], n: int) -> Traffic:
    """The traffic of an even exchange: each rank keeps one part in n of its payload."""
    payload = sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * payload, (n - 1) * payload)
