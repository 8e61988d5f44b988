"""Balancing of uneven shards: the messages between an uneven partition and the even division of the same rows.

A ring moves shards of one size, and every link carries the same number of bytes. Uneven shards can take the ring if
messages first bring them to the even division: each rank sends its excess to its neighbours. A reduction runs in the
opposite order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardcompile.collectives.transport.base import Range, overlap, running_ends, shifted


def even_parts(whole: int, ranks: int, unit: int = 1) -> tuple[int, list[Range]]:
    """Returns the shard size of an even division, and the range of each rank.

    All ranges have this size if `ranks` divides `whole`. Otherwise the last ones are shorter.

    Args:
        whole: global size.
        ranks: number of ranks.
        unit: the shard size is a multiple of this, unless `ranks` divides `whole`.
    """
    size, rest = divmod(whole, ranks)
    if rest:
        size = -(-whole // (ranks * unit)) * unit
    return size, [(min(r * size, whole), min((r + 1) * size, whole)) for r in range(ranks)]


def moved_to_even(sizes: Sequence[float] | np.ndarray) -> float:
    """Returns how much the busiest rank sends or receives between shards of these sizes and the even division."""
    held = np.asarray(sizes, dtype=np.float64)
    part = held.sum() / len(held)
    ends, even_ends = held.cumsum(), part * np.arange(1, len(held) + 1)
    kept = np.minimum(ends, even_ends) - np.maximum(ends - held, even_ends - part)
    return float((np.maximum(held, part) - kept.clip(0)).max())


class Balance(NamedTuple):
    """The ranges that a rank exchanges between its shard and its part of the even division.

    Attributes:
        size: shard size of the even division.
        of_shard: for each rank the range of the local shard that lies in that rank's part.
        of_part: for each rank the range of this rank's part that lies in that rank's shard.
    """

    size: int
    of_shard: list[Range]
    of_part: list[Range]

    @staticmethod
    @functools.lru_cache(maxsize=512)
    def of(sizes: tuple[int, ...], me: int, unit: int) -> Balance:
        """Computes the ranges. Cached, because a program moves the same shards repeatedly.

        Args:
            sizes: shard sizes.
            me: this rank in the group.
            unit: see `even_parts`.
        """
        ends = running_ends(sizes)
        size, parts = even_parts(sum(sizes), len(sizes), unit)
        of_shard = [shifted(overlap(ends[me], part), -ends[me][0]) for part in parts]
        of_part = [shifted(overlap(shard, parts[me]), -parts[me][0]) for shard in ends]
        return Balance(size, of_shard, of_part)
