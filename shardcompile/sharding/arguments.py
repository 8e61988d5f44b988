"""Partitions as arguments of an op: the one place that knows how a partition, or a list of partitions, is written in
an op's signature.

A partition is three arguments: shard sizes, a key and a grouping, see `GroupPartition`. A list of partitions is four:
all sizes, all keys, all groupings, and lengths. The lengths say for each partition how many of the sizes, and of the
numbers of groupings, are its own. In a graph, nodes stand in place of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardcompile.sharding.sizes import GroupPartition

PARTITION_WIDTH = 3
"""Arguments for a partition."""

PARTITIONS_WIDTH = 4
"""Arguments for a list of partitions."""


def partition_schema(prefix: str = "") -> str:
    """The arguments of a sharded as an op's schema has them.

    Args:
        prefix: of their names, for an op that has two partitions.
    """
    return f"SymInt[] {prefix}sizes, SymInt {prefix}key, SymInt[] {prefix}grouping"


def partitions_schema() -> str:
    """The arguments of a list of partitions as an op's schema has them."""
    return "SymInt[] sizes, SymInt[] keys, SymInt[] groupings, int[] lengths"


def write_partition(partition: GroupPartition) -> tuple[Any, Any, Any]:
    """A sharded as arguments."""
    return partition.sizes, partition.key, partition.grouping


def read_partition(arguments: Sequence[Any]) -> GroupPartition:
    """The partition that three arguments say."""
    return GroupPartition(*arguments)


def write_partitions(partitions: Sequence[GroupPartition]) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    """A list of partitions as arguments."""
    sizes = [s for c in partitions for s in c.sizes]
    groupings = [n for c in partitions for n in c.grouping]
    return (
        sizes,
        [c.key for c in partitions],
        groupings,
        [n for c in partitions for n in (len(c.sizes), len(c.grouping))],
    )


def read_partitions(arguments: Sequence[Any]) -> list[GroupPartition]:
    """The partitions that four arguments say."""
    sizes, keys, groupings, lengths = arguments
    partitions: list[GroupPartition] = []
    i = j = 0
    for key, n_sizes, n_grouping in zip(keys, lengths[::2], lengths[1::2], strict=True):
        partitions.append(GroupPartition(sizes[i : i + n_sizes], key, groupings[j : j + n_grouping]))
        i, j = i + n_sizes, j + n_grouping
    return partitions
