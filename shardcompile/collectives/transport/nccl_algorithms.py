"""Chooses the fastest algorithm to gather uneven shards, or to reduce into them, on NCCL.

The choice is rank-invariant: it depends on sizes that all ranks know and on the version of NCCL, which must be the same
on all ranks. Costs are in bytes that a ring moves in the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum

from shardcompile.collectives.transport.balance import even_parts, moved_to_even

FUSES_BROADCASTS = (2, 30)
"""From this version on NCCL fuses the broadcasts of a group into one kernel, whatever their sizes."""

ALIGNED = 16
"""Alignment in bytes: NCCL moves aligned buffers faster."""

_SENDS = 1.25
"""Cost of one byte of grouped sends: an estimate, not measured by this project."""

_COPIES = 0.1
"""Cost of one byte that is read and written in a GPU's own memory."""

_LAUNCH = 2**18
"""Cost of launching a kernel, with its latency."""


class Algorithm(Enum):
    """The algorithm by which shards are gathered, or terms are reduced into shards."""

    EVEN = "torch's collective, straight from and into place: the shards have one size"
    BROADCASTS = "a broadcast of each shard, all of them in one group"
    BALANCED = "torch's collective over an even division, and messages between that and the shards"
    SENDS = "a message from each rank to each other, all of them in one group"


@functools.lru_cache(maxsize=512)
def gather_algorithm(nbytes: tuple[int, ...], version: tuple[int, ...]) -> Algorithm:
    """Returns the fastest algorithm to gather shards.

    Args:
        nbytes: bytes of each rank's shard.
        version: version of NCCL.
    """
    return _cheapest(costs_to_gather(nbytes, version))


@functools.lru_cache(maxsize=512)
def reduce_algorithm(nbytes: tuple[int, ...]) -> Algorithm:
    """Returns the fastest algorithm to reduce terms into shards.

    Args:
        nbytes: of each rank's local shard.
    """
    return _cheapest(costs_to_reduce(nbytes))


def costs_to_gather(nbytes: Sequence[int], version: tuple[int, ...]) -> dict[Algorithm, float]:
    """Returns the cost of each available algorithm to gather; among equal costs the first wins.

    A ring of broadcasts moves over each link all shards but that of the rank at its end. With direct sends, a shard
    leaves its owner ``n - 1`` times. An even division takes messages between neighbours, and then a ring of equal
    shards.
    """
    n, largest, whole = len(nbytes), max(nbytes), sum(nbytes)
    if largest * n == whole:
        return {Algorithm.EVEN: _LAUNCH + (n - 1) * largest}
    costs: dict[Algorithm, float] = {}
    launches = 1 if version >= FUSES_BROADCASTS else sum(b > 0 for b in nbytes)
    costs[Algorithm.BROADCASTS] = launches * _LAUNCH + whole - min(nbytes)
    costs[Algorithm.BALANCED] = _over_an_even_division(nbytes)
    costs[Algorithm.SENDS] = _LAUNCH + _by_messages(nbytes)
    return costs


def costs_to_reduce(nbytes: Sequence[int]) -> dict[Algorithm, float]:
    """Returns the cost of each available algorithm to reduce; among equal costs the first wins.

    With direct sends, the owner of a shard reduces it, and reads a term of each rank. A ring reduces on the way.
    """
    n, largest, whole = len(nbytes), max(nbytes), sum(nbytes)
    if largest * n == whole:
        return {Algorithm.EVEN: _LAUNCH + (n - 1) * largest}
    return {
        Algorithm.BALANCED: _over_an_even_division(nbytes),
        Algorithm.SENDS: 2 * _LAUNCH + _by_messages(nbytes) + _COPIES * (n + 1) * largest,
    }


def _by_messages(nbytes: Sequence[int]) -> float:
    """Returns the cost of direct sends: the busiest rank sends its shard to all, or receives the shards of all."""
    return _SENDS * max((len(nbytes) - 1) * max(nbytes), sum(nbytes) - min(nbytes))


def _over_an_even_division(nbytes: Sequence[int]) -> float:
    """Returns the cost of messages, a ring, and local copies: of a rank's own part, and of everything if padded."""
    n, whole = len(nbytes), sum(nbytes)
    size, _ = even_parts(whole, n, ALIGNED)
    copied = size + (2 * whole if whole % n else 0)
    return 3 * _LAUNCH + (n - 1) * size + _SENDS * moved_to_even(nbytes) + _COPIES * copied


def _cheapest(costs: dict[Algorithm, float]) -> Algorithm:
    return min(costs, key=costs.__getitem__)
