"""Serializes partitions as op arguments: the only module that knows how an op's schema encodes them.

A partition takes three arguments: shard sizes, a key and a grouping; see `GroupPartition`. A list of partitions takes
four: all sizes, all keys and all groupings, each concatenated, and lengths. The lengths state for each partition how
many entries of the sizes and of the groupings belong to it. In a graph, some of these integers are nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardcompile.sharding.sizes import GroupPartition

PARTITION_WIDTH = 3
"""Number of arguments that encode a partition."""

PARTITIONS_WIDTH = 4
"""Number of arguments that encode a list of partitions."""


def partition_schema(prefix: str = "") -> str:
    """Returns the arguments that encode a partition, as text of an op's schema.

    Args:
        prefix: prefix of the argument names, for an op that takes two partitions.
    """
    return f"SymInt[] {prefix}sizes, SymInt {prefix}key, SymInt[] {prefix}grouping"


def partitions_schema() -> str:
    """Returns the arguments that encode a list of partitions, as text of an op's schema."""
    return "SymInt[] sizes, SymInt[] keys, SymInt[] groupings, int[] lengths"


def write_partition(partition: GroupPartition) -> tuple[Any, Any, Any]:
    """Encodes a partition as op arguments."""
    return partition.sizes, partition.key, partition.grouping


def read_partition(arguments: Sequence[Any]) -> GroupPartition:
    """Decodes a partition from the three arguments of `write_partition`."""
    return GroupPartition(*arguments)


def write_partitions(partitions: Sequence[GroupPartition]) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    """Encodes a list of partitions as op arguments."""
    sizes = [s for p in partitions for s in p.sizes]
    groupings = [n for p in partitions for n in p.grouping]
    return (
        sizes,
        [p.key for p in partitions],
        groupings,
        [n for p in partitions for n in (len(p.sizes), len(p.grouping))],
    )


def read_partitions(arguments: Sequence[Any]) -> list[GroupPartition]:
    """Decodes the partitions from the four arguments of `write_partitions`."""
    sizes, keys, groupings, lengths = arguments
    partitions: list[GroupPartition] = []
    i = j = 0
    for key, n_sizes, n_grouping in zip(keys, lengths[::2], lengths[1::2], strict=True):
        partitions.append(GroupPartition(sizes[i : i + n_sizes], key, groupings[j : j + n_grouping]))
        i, j = i + n_sizes, j + n_grouping
    return partitions
