"""Which way shards of any sizes are gathered and reduced soonest on NCCL.

A way is chosen by sizes that all ranks know, and by the version of NCCL, which is the same on all ranks: NCCL refuses
others. Costs are in bytes that a ring moves in the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum

from shardcompile.collectives.transport.balance import even_parts, moved_to_even

FUSES_BROADCASTS = (2, 30)
"""From this version on NCCL makes one kernel of the broadcasts of a group, whatever their sizes."""

ALIGNED = 16
"""Bytes: NCCL moves what begins at multiples of this faster."""

_SENDS = 1.25
"""Bytes that a ring moves in the time of a byte of grouped sends: an estimate, not measured by this project."""

_COPIES = 0.1
"""The same for a byte that is read and written in a GPU's own memory."""

_LAUNCH = 2**18
"""The same for a kernel that is launched, and its latency."""


class Way(Enum):
    """How shards are gathered, or how terms are reduced into shards."""

    EVEN = "torch's collective, straight from and into place: the shards have one size"
    BROADCASTS = "a broadcast of each shard, all of them in one group"
    BALANCED = "torch's collective over an even division, and messages between that and the shards"
    SENDS = "a message from each rank to each other, all of them in one group"


@functools.lru_cache(maxsize=512)
def way_to_gather(nbytes: tuple[int, ...], version: tuple[int, ...]) -> Way:
    """The way in which shards are gathered soonest.

    Args:
        nbytes: of each rank's local shard.
        version: of NCCL.
    """
    return _cheapest(costs_to_gather(nbytes, version))


@functools.lru_cache(maxsize=512)
def way_to_reduce(nbytes: tuple[int, ...]) -> Way:
    """The way in which terms are reduced into shards soonest.

    Args:
        nbytes: of each rank's local shard.
    """
    return _cheapest(costs_to_reduce(nbytes))


def costs_to_gather(nbytes: Sequence[int], version: tuple[int, ...]) -> dict[Way, float]:
    """What each way to gather that may be taken costs; of equal ones the first counts.

    A ring of broadcasts moves over each link all shards but the one of the rank that it leads to. A shard that is sent
    to each other rank leaves its owner ``n - 1`` times. An even division takes messages between neighbours, and then a
    ring of equal parts.
    """
    n, largest, whole = len(nbytes), max(nbytes), sum(nbytes)
    if largest * n == whole:
        return {Way.EVEN: _LAUNCH + (n - 1) * largest}
    costs: dict[Way, float] = {}
    launches = 1 if version >= FUSES_BROADCASTS else sum(b > 0 for b in nbytes)
    costs[Way.BROADCASTS] = launches * _LAUNCH + whole - min(nbytes)
    costs[Way.BALANCED] = _over_an_even_division(nbytes)
    costs[Way.SENDS] = _LAUNCH + _by_messages(nbytes)
    return costs


def costs_to_reduce(nbytes: Sequence[int]) -> dict[Way, float]:
    """What each way to reduce that may be taken costs; of equal ones the first counts.

    What is sent to the owners of the shards is reduced there: the owner reads a term of each rank. What takes the ring
    is reduced on the way.
    """
    n, largest, whole = len(nbytes), max(nbytes), sum(nbytes)
    if largest * n == whole:
        return {Way.EVEN: _LAUNCH + (n - 1) * largest}
    return {
        Way.BALANCED: _over_an_even_division(nbytes),
        Way.SENDS: 2 * _LAUNCH + _by_messages(nbytes) + _COPIES * (n + 1) * largest,
    }


def _by_messages(nbytes: Sequence[int]) -> float:
    """Messages from each rank to each other: the busiest one sends its shard to all, or gets the shards of all."""
    return _SENDS * max((len(nbytes) - 1) * max(nbytes), sum(nbytes) - min(nbytes))


def _over_an_even_division(nbytes: Sequence[int]) -> float:
    """Messages and a ring, and the copies around them: of a rank's own part, and of the whole if it is padded."""
    n, whole = len(nbytes), sum(nbytes)
    size, _ = even_parts(whole, n, ALIGNED)
    copied = size + (2 * whole if whole % n else 0)
    return 3 * _LAUNCH + (n - 1) * size + _SENDS * moved_to_even(nbytes) + _COPIES * copied


def _cheapest(costs: dict[Way, float]) -> Way:
    return min(costs, key=lambda way: costs[way])
