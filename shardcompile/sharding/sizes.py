"""Shard sizes: chunking, the keys that identify shard sizes inside a graph, and the shards of one process group."""

from __future__ import annotations

import functools
import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardcompile.compat.sizes import IntLike as IntLike
from shardcompile.errors import LayoutError

CHUNK_KEY = 0
"""The key of a chunk partition, whose sizes follow from the global size. Those of dynamic partitions are hashes."""

_KEY_BASE = 1 << 60
_TABLE_LIMIT = 1 << 24  # total number of shard sizes in the table, 128 MiB; the least recently used are evicted


def digest_of(data: str | bytes) -> int:
    """Returns a 56-bit hash that is the same in every process."""
    given = data.encode() if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(given, digest_size=7).digest(), "big")


REMEMBERED = 256
"""How many results a function of all shard sizes remembers: compiled code calls it with the same ones in each step."""


def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Returns the sizes of the chunks of `torch.chunk`, padded with zeros to `parts` shards.

    >>> chunk_sizes(9, 4)
    (3, 3, 3, 0)
    """
    if parts == 1:
        return (size,)
    full = -(-size // parts)
    return tuple(max(min(size - i * full, full), 0) for i in range(parts))


def nested_chunk_sizes(size: int, parts: Sequence[int], scale: int = 1) -> tuple[int, ...]:
    """Returns the shard sizes of `torch.chunk` applied to each mesh dim in turn, the outermost first.

    >>> nested_chunk_sizes(10, [3], scale=2)
    (4, 4, 2)

    Args:
        size: the size that is divided.
        parts: the sizes of the mesh dims.
        scale: number of adjacent elements that stay together, a divisor of `size`.
    """
    return _nested_chunk_sizes(size, tuple(parts), scale)


@functools.lru_cache(REMEMBERED)
def _nested_chunk_sizes(size: int, parts: tuple[int, ...], scale: int) -> tuple[int, ...]:
    sizes: tuple[int, ...] = (size // scale,)
    for count in parts:
        sizes = tuple(itertools.chain.from_iterable(chunk_sizes(n, count) for n in sizes))
    return tuple([n * scale for n in sizes])


class _SizeTable:
    """Maps keys to shard sizes, so that an op inside a compiled graph can look up the partition it is called with.

    A key enters a graph in the shape of the inner tensor ``_partition_keys`` (`shardcompile.tensor.metadata`).

    Keys are hashes of the sizes, so they agree between ranks, processes and warm starts. The lowest bit of a key states
    whether the sizes are torch.chunk's, so that a trace can test it on a symbolic key.
    """

    def __init__(self) -> None:
        self._by_key: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._by_sizes: dict[tuple[tuple[int, ...], bool], int] = {}
        self._stored = 0

    def key_of(self, sizes: tuple[int, ...], chunked: bool) -> int:
        key = self._by_sizes.get((sizes, chunked))
        if key is not None:
            self._by_key.move_to_end(key)
            return key
        digest = hashlib.blake2b(array("q", sizes).tobytes(), digest_size=8).digest()
        key = (_KEY_BASE + int.from_bytes(digest, "big") % _KEY_BASE) // 2 * 2 + chunked
        if self._by_key.setdefault(key, sizes) != sizes:
            raise LayoutError(
                f"two partitions share the key {key}: {self._by_key[key]} and {sizes}; use another partition"
            )
        self._by_sizes[sizes, chunked] = key
        self._stored += len(sizes)
        self._evict()
        return key

    def find(self, key: int) -> tuple[int, ...] | None:
        return self._by_key.get(key)

    def sizes_of(self, key: int) -> tuple[int, ...]:
        sizes = self._by_key.get(key)
        if sizes is None:
            raise LayoutError(
                f"the partition with key {key} is no longer known in this process: more than {_TABLE_LIMIT} shard "
                "sizes were used since it was last used. Keep fewer steps in flight, or raise the limit."
            )
        self._by_key.move_to_end(key)  # it may be a constant of a graph, which nothing else uses
        return sizes

    def use(self, key: int) -> None:
        if key in self._by_key:
            self._by_key.move_to_end(key)

    def _evict(self) -> None:
        while self._stored > _TABLE_LIMIT and len(self._by_key) > 1:
            key, sizes = self._by_key.popitem(last=False)
            del self._by_sizes[sizes, key % 2 == 1]
            self._stored -= len(sizes)


_TABLE = _SizeTable()


def key_of(sizes: tuple[int, ...], parts: Sequence[int]) -> int:
    """Returns the key of these shard sizes and registers it in this process.

    Args:
        sizes: all shard sizes, the outermost mesh dim varying slowest.
        parts: the sizes of the mesh dims.

    Raises:
        LayoutError: other sizes have the same key.
    """
    return _TABLE.key_of(sizes, sizes == nested_chunk_sizes(sum(sizes), parts))


def remember_key(key: int, sizes: tuple[int, ...]) -> None:
    """Registers a key that another process computed for these sizes."""
    _TABLE.key_of(sizes, key % 2 == 1)


def use_key(key: int) -> None:
    """Counts a key as used, so that its sizes stay known: for what remembers results by keys and reads no sizes."""
    _TABLE.use(key)


def lookup_sizes(key: int) -> tuple[int, ...] | None:
    """Returns the sizes of a key, or None if it is unknown in this process."""
    return _TABLE.find(key)


def sizes_of_key(key: int, coarsening: int = 1, scale: int = 1) -> tuple[int, ...]:
    """Returns all shard sizes of the dynamic partition with this key.

    Args:
        key: the key, as in `TraceState`.
        coarsening: number of adjacent shards of the key that form one shard, as in `TraceState`.
        scale: number of elements per element of the key's sizes, as in `TraceState`.

    Raises:
        LayoutError: the key is unknown in this process.
    """
    base = _TABLE.sizes_of(key)
    return base if coarsening == scale == 1 else grouped_sizes(base, 0, len(base) // coarsening, coarsening, scale)


@functools.lru_cache(REMEMBERED)
def grouped_sizes(sizes: tuple[int, ...], first: int, count: int, coarsening: int, scale: int) -> tuple[int, ...]:
    """Returns the sizes of groups of adjacent shards.

    >>> grouped_sizes((1, 2, 0, 4), 1, 1, 2, 10)
    (40,)

    Args:
        sizes: all shard sizes.
        first: index of the first group.
        count: number of groups.
        coarsening: number of shards of a group.
        scale: number of elements per element of `sizes`.
    """
    starts = range(first * coarsening, (first + count) * coarsening, coarsening)
    return tuple([sum(sizes[i : i + coarsening]) * scale for i in starts])


@dataclass(frozen=True)
class GroupPartition:
    """The shard sizes within one process group, encoded as arguments of a collective op.

    Attributes:
        sizes: static shard sizes in group order; empty if `key` determines them.
        key: the key of the full partition; `CHUNK_KEY` for torch.chunk of the rows that the group holds together.
        grouping: empty, or (number of adjacent shards of `key` that form one shard of the group, index of the group's
            first shard, elements per element of `key`'s sizes). While tracing the last entry may be symbolic.
    """

    sizes: list[int]
    key: IntLike
    grouping: list[Any]

    def shards(self, total: int, ranks: int) -> tuple[int, ...]:
        """Returns the shard sizes in group order at run time; see `resolve`."""
        return GroupPartition.resolve(total, self.sizes, self.key, self.grouping, ranks)  # type: ignore[arg-type]

    @staticmethod
    def resolve(
        total: int, sizes: Sequence[int], key: int, grouping: Sequence[int], world_size: int
    ) -> tuple[int, ...]:
        """Returns the shard sizes in group order at run time.

        Args:
            total: the sum of the group's shard sizes.
            sizes: as in `GroupPartition`.
            key: as in `GroupPartition`.
            grouping: as in `GroupPartition`.
            world_size: the number of ranks in the group.
        """
        if sizes:
            return tuple(sizes)
        if key == CHUNK_KEY:
            return nested_chunk_sizes(total, (world_size,), grouping[2] if grouping else 1)
        shards = _TABLE.sizes_of(key)
        if not grouping:
            return shards[:world_size]  # those of the first group, if the partition is nested
        inner, first, scale = grouping
        return grouped_sizes(shards, first, world_size, inner, scale)
