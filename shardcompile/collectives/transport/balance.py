"""Shards of any sizes beside an even division of the same rows, in the same order.

A ring moves parts of one size, and every link carries the same. Shards of other sizes take the same ring if ranks first
bring them to an even division: each sends its neighbours what it has too much of. Reduced rows go the other way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardcompile.collectives.transport.base import Range, overlap, running_ends, shifted


def even_parts(whole: int, ranks: int, unit: int = 1) -> tuple[int, list[Range]]:
    """The size of the parts of an even division, and each rank's part of what there is.

    The parts have exactly one size if the ranks divide what there is. Otherwise the last ones have less.

    Args:
        whole: how much there is.
        ranks: among which it is divided.
        unit: the size is a multiple of this, unless the ranks divide what there is.
    """
    size, rest = divmod(whole, ranks)
    if rest:
        size = -(-whole // (ranks * unit)) * unit
    return size, [(min(r * size, whole), min((r + 1) * size, whole)) for r in range(ranks)]


def moved_to_even(sizes: Sequence[float] | np.ndarray) -> float:
    """How much the busiest rank sends or receives between shards of these sizes and an even division of them."""
    held = np.asarray(sizes, dtype=np.float64)
    part = held.sum() / len(held)
    ends, partitions = held.cumsum(), part * np.arange(1, len(held) + 1)
    kept = np.minimum(ends, partitions) - np.maximum(ends - held, partitions - part)
    return float((np.maximum(held, part) - kept.clip(0)).max())


class Balance(NamedTuple):
    """What a rank exchanges between its shard and its part of an even division.

    Attributes:
        size: of the parts.
        of_shard: for each rank what of this rank's local shard lies in that rank's part.
        of_part: for each rank what of this rank's part lies in that rank's shard.
    """

    size: int
    of_shard: list[Range]
    of_part: list[Range]

    @staticmethod
    @functools.lru_cache(maxsize=512)
    def of(sizes: tuple[int, ...], me: int, unit: int) -> Balance:
        """Work it out. Kept, because a program moves the same shards again and again.

        Args:
            sizes: of the shards.
            me: this rank, of the group.
            unit: see `even_parts`.
        """
        ends = running_ends(sizes)
        size, parts = even_parts(sum(sizes), len(sizes), unit)
        of_shard = [shifted(overlap(ends[me], part), -ends[me][0]) for part in parts]
        of_part = [shifted(overlap(shard, parts[me]), -parts[me][0]) for shard in ends]
        return Balance(size, of_shard, of_part)
