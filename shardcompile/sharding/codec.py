"""Writes partitions as other data and reads them back: as op arguments, metadata of graphs, and plain data for pickles.

* As arguments of a collective, a partition is the shard sizes of one process group: three arguments, shard sizes, a key
  and a grouping; see `GroupPartition`. A list of partitions takes four: all sizes, all keys and all groupings, each
  concatenated, and lengths. The lengths state for each partition how many entries of the sizes and of the groupings
  belong to it.
* As arguments of an op that derives a partition from others, it is a list of ints that begins with a tag.
* In the metadata of a graph's input, it is a `PartitionMetadata`, beside which a tensor carries symbols into the graph.
* In a checkpoint, it is its kind, mesh dims and sizes.

In a graph, some of these integers are nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shardcompile.compat import expression_of, is_one
from shardcompile.sharding.partition import Kind, Partition, TraceState
from shardcompile.sharding.sizes import GroupPartition, IntLike, nested_chunk_sizes, sizes_of_key

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


def write_group_partition(partition: GroupPartition) -> tuple[list[int], IntLike, list[IntLike]]:
    """Encodes a partition as op arguments."""
    return partition.sizes, partition.key, partition.grouping


def read_group_partition(arguments: Sequence[Any]) -> GroupPartition:
    """Decodes a partition from the three arguments of `write_group_partition`."""
    return GroupPartition(*arguments)


def write_group_partitions(partitions: Sequence[GroupPartition]) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    """Encodes a list of partitions as op arguments."""
    sizes = [s for p in partitions for s in p.sizes]
    groupings = [n for p in partitions for n in p.grouping]
    return (
        sizes,
        [p.key for p in partitions],
        groupings,
        [n for p in partitions for n in (len(p.sizes), len(p.grouping))],
    )


def read_group_partitions(arguments: Sequence[Any]) -> list[GroupPartition]:
    """Decodes the partitions from the four arguments of `write_group_partitions`."""
    sizes, keys, groupings, lengths = arguments
    partitions: list[GroupPartition] = []
    i = j = 0
    for key, n_sizes, n_grouping in zip(keys, lengths[::2], lengths[1::2], strict=True):
        partitions.append(GroupPartition(sizes[i : i + n_sizes], key, groupings[j : j + n_grouping]))
        i, j = i + n_sizes, j + n_grouping
    return partitions


# Arguments of an op that derives partitions

_SIZES, _KEY, _CHUNK, _REPLICATED = range(4)
"""Tags: all shard sizes, the key of a dynamic partition, a size that torch.chunk divides, a replicated dim's size."""


def write_sizes(partition: Partition | IntLike) -> list[IntLike]:
    """Encodes all shard sizes of a partition as ints; an int stands for a replicated dim of that size."""
    if not isinstance(partition, Partition):
        return [_REPLICATED, partition]
    trace = partition.trace
    if partition.kind == "chunk":
        return [_CHUNK, partition.size, trace.scale]
    sizes = partition.static_sizes if partition.kind == "fixed" else partition.known_sizes
    if sizes is None:
        return [_KEY, trace.key, trace.coarsening, trace.scale]
    return [_SIZES, len(sizes), *sizes]


def read_sizes(code: Sequence[int], parts: Sequence[int]) -> list[tuple[int, ...]]:
    """Decodes at run time the shard sizes of partitions that `write_sizes` has encoded one after the other.

    Args:
        code: the ints.
        parts: the sizes of the mesh dims that shard the partitions.
    """
    partitions: list[tuple[int, ...]] = []
    rest = iter(code)
    for tag in rest:
        if tag == _REPLICATED:
            partitions.append((next(rest),))
        elif tag == _CHUNK:
            size, scale = next(rest), next(rest)
            partitions.append(nested_chunk_sizes(size, parts, scale))
        elif tag == _SIZES:
            partitions.append(tuple(itertools.islice(rest, next(rest))))
        else:
            partitions.append(sizes_of_key(next(rest), next(rest), next(rest)))
    return partitions


# Metadata of a graph's inputs

_SYMBOLIC = 0
"""The placeholder of a symbolic number in a `PartitionMetadata`."""


class PartitionMetadata(NamedTuple):
    """The part of a partition that a graph is specialised on, in the metadata of `__tensor_flatten__`.

    The global size, the local size, the key and symbolic numbers are not in it: a graph has them as sizes of tensors.

    Attributes:
        dim: the tensor dim.
        kind: as in `Partition`.
        mesh_dims: as in `Partition`.
        coarsening: as in `TraceState`.
        scale: as in `TraceState`; 0 if it is a symbol.
        sizes: the shard sizes of a fixed partition, else empty.
        num_segments: as in `Partition`; 0 if it is a symbol.
    """

    dim: int
    kind: Kind
    mesh_dims: tuple[int, ...]
    coarsening: int
    scale: IntLike
    sizes: tuple[int, ...]
    num_segments: IntLike

    @staticmethod
    def of(dim: int, partition: Partition) -> PartitionMetadata:
        """Returns the metadata of the partition of a tensor dim."""
        numbers = (partition.trace.scale, partition.num_segments)
        scale, num_segments = (n if isinstance(n, int) else _SYMBOLIC for n in numbers)
        sizes = partition.static_sizes or () if partition.kind == "fixed" else ()
        kind, mesh_dims = partition.kind, partition.mesh_dims
        return PartitionMetadata(dim, kind, mesh_dims, partition.trace.coarsening, scale, sizes, num_segments)

    @property
    def num_symbols(self) -> int:
        """How many of its numbers are symbols."""
        return (self.scale == _SYMBOLIC) + (self.num_segments == _SYMBOLIC)

    def symbols_of(self, partition: Partition) -> list[IntLike]:
        """Returns the numbers of a partition for which this metadata has placeholders."""
        pairs = ((partition.trace.scale, self.scale), (partition.num_segments, self.num_segments))
        return [number for number, static in pairs if static == _SYMBOLIC]

    def with_symbols(self, symbols: Iterator[IntLike]) -> PartitionMetadata:
        """Returns the metadata with the next symbols in place of its placeholders."""
        scale, num_segments = (next(symbols) if n == _SYMBOLIC else n for n in (self.scale, self.num_segments))
        return self._replace(scale=scale, num_segments=num_segments)

    def partition(self, parts: Sequence[int], size: IntLike, key: IntLike, local_size: IntLike) -> Partition:
        """Returns the partition. The metadata has no placeholders.

        Args:
            parts: the sizes of the mesh dims.
            size: the global size of the dim.
            key: the key of a dynamic partition.
            local_size: the size of this rank's local shard. If it or the key is a symbol, the partition is traced.
        """
        partition = self._one_segment(parts, size, key, local_size)
        return partition if is_one(self.num_segments) else replace(partition, num_segments=self.num_segments)

    def _one_segment(self, parts: Sequence[int], size: IntLike, key: IntLike, local_size: IntLike) -> Partition:
        if self.kind == "fixed":
            partition = Partition.of_sizes(self.mesh_dims, parts, self.sizes, "fixed")
            return partition.with_trace(local_size=local_size) if partition.is_traced else partition
        if self.kind == "chunk":
            partition = Partition.chunk(self.mesh_dims, parts, size // self.scale).flatten_trailing(self.scale)
            if partition.known_sizes is not None and type(local_size) is int:
                return partition
            # Also for a static global size: with static shard sizes the graphs of the ranks would differ.
            return replace(partition, known_sizes=None).with_trace(local_size=local_size)
        if any(type(n) is not int for n in (key, size, local_size)):
            partition = Partition.traced(self.mesh_dims, parts, size, key, local_size)
            return partition.with_trace(coarsening=self.coarsening, scale=self.scale)
        sizes = sizes_of_key(key, self.coarsening, self.scale)  # type: ignore[arg-type]
        trace = TraceState(key, self.coarsening, self.scale)
        return Partition("dynamic", self.mesh_dims, tuple(parts), size, sizes, trace=trace)


def trace_key(partition: Partition) -> tuple[object, ...]:
    """Returns a hashable key of the shards of a partition, in which symbols are expressions."""
    trace = partition.trace
    numbers = (trace.key, partition.size, trace.coarsening, trace.scale, partition.num_segments)
    return partition.kind, partition.mesh_dims, partition.known_sizes, *map(expression_of, numbers)


# Pickles

PlainPartition = tuple[Kind, Sequence[int], Sequence[int]]
"""Kind, mesh dims and sizes, which ``torch.load(weights_only=True)`` accepts."""


def write_plain(partition: Partition | None) -> PlainPartition | None:
    """Encodes a partition, or that of a dim that is not sharded, as plain data.

    A chunk partition of rows that were flattened to several elements each is stored with its sizes.

    Raises:
        LayoutError: the partition has several segments, or is traced.
    """
    if partition is None:
        return None
    partition.check_one_segment()
    as_dynamic = partition.kind == "chunk" and partition.trace.scale != 1
    return "dynamic" if as_dynamic else partition.kind, partition.mesh_dims, partition.sizes


def read_plain(plain: PlainPartition | None, mesh_shape: Sequence[int], size: IntLike) -> Partition | None:
    """Decodes the partition of a dim from what `write_plain` returned."""
    if plain is None:
        return None
    kind, mesh_dims, sizes = plain
    parts = [mesh_shape[m] for m in mesh_dims]
    if kind == "chunk":
        return Partition.chunk(mesh_dims, parts, size)
    return Partition.of_sizes(mesh_dims, parts, sizes, kind)
