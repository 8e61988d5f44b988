"""`Partition`: how one tensor dim is divided into shards over one or several mesh dims.

A partition is rank-invariant: it holds the sizes of *all* shards. There are three kinds, which differ while tracing:

* ``chunk``: the shard sizes follow from the global size as in `torch.chunk`, times `scale`. No sizes are stored, and
  the global size may be symbolic.
* ``fixed``: the shard sizes are static ints, on which a compiled graph is specialised.
* ``dynamic``: the shard sizes are run-time data. In eager mode they are ints; while tracing only their `key`, a symbol,
  is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from shardcompile import compat
from shardcompile.compat import is_one
from shardcompile.errors import LayoutError
from shardcompile.sharding.sizes import (
    CHUNK_KEY,
    GroupPartition,
    IntLike,
    key_of,
    lookup_sizes,
    nested_chunk_sizes,
    remember_key,
)

Kind = Literal["chunk", "fixed", "dynamic"]


@dataclass(frozen=True)
class Partition:
    """How one tensor dim is divided into shards over mesh dims.

    Attributes:
        kind: ``chunk``, ``fixed`` or ``dynamic``.
        mesh_dims: the mesh dims that shard the tensor dim, outermost first.
        parts: the sizes of those mesh dims.
        size: the global size of the tensor dim.
        known_sizes: all shard sizes, the outermost mesh dim varying slowest; None if they are unknown while tracing.
        key: an integer that identifies the shard sizes inside a graph; `CHUNK_KEY` for a chunk partition.
        traced_local_size: while tracing, the size of this rank's local shard, if the trace has a symbol for it.
        coarsening: the number of adjacent shards of `key` that form one shard of this partition.
        scale: the number of elements of this dim per element of `key`'s sizes; more than 1 if trailing dims were
            flattened into the dim. While tracing it may be symbolic, like the sizes of those dims.
        carrier: while tracing, the tensor whose shape carries the key into the graph; ignored by comparisons.
        origin: for the partition of a slice: the partition of the sliced dim, the first row and the step, from which
            the gradient's partition is derived.
        unpadded: for a dim that was padded: the partition of the unpadded dim, and the row at which it begins.
        provisional: whether an op chose the partition in place of the one it was given. Any other partition is
            preferred.
        moved_from: for a dim that was sharded in place of another one: the partition that the other dim had.
        indexed_rows: for row indices, and for the rows gathered by them: the partition of the rows that are indexed. A
            result of `index_add` over as many rows takes it over.
        num_segments: the number of equal segments of the dim, each divided in the same way; more than 1 if leading dims
            were flattened into the dim. While tracing it may be symbolic.
    """

    kind: Kind
    mesh_dims: tuple[int, ...]
    parts: tuple[int, ...]
    size: IntLike
    known_sizes: tuple[int, ...] | None
    key: IntLike
    traced_local_size: IntLike | None = None
    coarsening: int = 1
    scale: IntLike = 1
    carrier: object = field(default=None, compare=False, repr=False)
    origin: tuple[Partition, IntLike, int] | None = field(default=None, repr=False)
    unpadded: tuple[Partition, IntLike] | None = field(default=None, repr=False)
    provisional: bool = field(default=False, repr=False)
    moved_from: Partition | None = field(default=None, repr=False)
    indexed_rows: Partition | None = field(default=None, repr=False)
    num_segments: IntLike = 1

    @staticmethod
    def chunk(mesh_dims: Sequence[int], parts: Sequence[int], size: IntLike) -> Partition:
        """Returns the partition that `torch.chunk` gives, applied to each mesh dim in turn."""
        shards = nested_chunk_sizes(size, parts) if isinstance(size, int) else None
        return Partition("chunk", tuple(mesh_dims), tuple(parts), size, shards, CHUNK_KEY)

    @staticmethod
    def of_sizes(
        mesh_dims: Sequence[int], parts: Sequence[int], sizes: Sequence[int], kind: Kind = "dynamic"
    ) -> Partition:
        """Returns the partition with the given shard sizes.

        Raises:
            LayoutError: a size is negative, or the number of sizes differs from the number of shards.
        """
        shards = tuple(int(s) for s in sizes)
        wanted = math.prod(parts)
        if len(shards) != wanted:
            raise LayoutError(
                f"a dim sharded by mesh dims {tuple(mesh_dims)} of sizes {tuple(parts)} needs {wanted} shard "
                f"sizes, got {len(shards)}: {shards}"
            )
        if any(b < 0 for b in shards):
            raise LayoutError(f"shard sizes must not be negative, got {shards}")
        return Partition(kind, tuple(mesh_dims), tuple(parts), sum(shards), shards, key_of(shards, parts))

    @staticmethod
    def traced(
        mesh_dims: Sequence[int], parts: Sequence[int], size: IntLike, key: IntLike, shard: IntLike
    ) -> Partition:
        """Returns a dynamic partition of a trace, in which only the symbols of its sizes are known."""
        return Partition("dynamic", tuple(mesh_dims), tuple(parts), size, None, key, shard)

    @property
    def is_traced(self) -> bool:
        """Whether the shard sizes are unknown because the partition is part of a trace."""
        return self.known_sizes is None

    @property
    def has_symbols(self) -> bool:
        """Whether this partition, or a partition recorded in it, contains symbols.

        A chunk partition of a static global size has static shard sizes, and while tracing it may also hold the symbol
        of this rank's local shard size.
        """
        if self.known_sizes is None or isinstance(self.traced_local_size, torch.SymInt):
            return True
        recorded = [p for p in (self.moved_from, self.indexed_rows) if p is not None]
        return any(isinstance(p.size, torch.SymInt) or p.has_symbols for p in recorded)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all shards, the outermost mesh dim varying slowest.

        Raises:
            LayoutError: the sizes are unknown while tracing, because one graph serves every layout.
        """
        if self.known_sizes is None:
            raise LayoutError(
                f"the sizes of a {self.kind} partition are not known while tracing: the graph serves every layout. "
                "Read them outside of the compiled function, or use a fixed partition."
            )
        return self.known_sizes

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same size."""
        return len(set(self.sizes)) == 1

    @property
    def imbalance(self) -> float:
        """The size of the largest shard divided by the mean shard size; 1 if the sizes are unknown.

        While tracing, that of a chunk partition is computed from the hint of the global size.
        """
        if self.known_sizes is not None:
            largest, size = max(self.known_sizes), sum(self.known_sizes)
        elif self.kind == "chunk":
            size = compat.size_hint(self.size) // self.scale
            largest = -(-size // math.prod(self.parts))
        else:
            return 1.0
        return largest * math.prod(self.parts) / size if size else 1.0

    def shard_index(self, coordinate: Sequence[int]) -> int:
        """Returns the position in `sizes` of the shard at a mesh coordinate."""
        index = 0
        for mesh_dim, count in zip(self.mesh_dims, self.parts, strict=True):
            index = index * count + coordinate[mesh_dim]
        return index

    def local_size(self, coordinate: Sequence[int]) -> IntLike:
        """Returns the size of the shard at a mesh coordinate; while tracing, of this rank's local shard."""
        if self.traced_local_size is not None:
            return self.traced_local_size
        if self.known_sizes is not None:
            return self.known_sizes[self.shard_index(coordinate)]
        # This holds for a chunk partition as well: a formula of the global size would bake the rank into the graph, and
        # comparisons with it would install guards that hold on some ranks only.
        raise LayoutError(
            f"the size of this rank's local shard of mesh dims {self.mesh_dims} has no symbol in the trace"
        )

    def offset(self, coordinate: Sequence[int]) -> int:
        """Returns the global offset of the shard at a mesh coordinate."""
        self.check_one_segment()
        return sum(self.sizes[: self.shard_index(coordinate)])

    def check_one_segment(self) -> None:
        """Raises unless each shard is a range of consecutive rows.

        Raises:
            LayoutError: leading dims that are not sharded were flattened into the dim, so a shard has several ranges.
        """
        if not is_one(self.num_segments):
            raise LayoutError(
                f"shards of {self.describe()} are not consecutive rows: leading dims that are not sharded were "
                "flattened into the dim. Call this on the tensor before it was flattened, or redistribute() it first"
            )

    def with_indexed_rows(self, rows: Partition) -> Partition:
        """Returns the same shards, recording the partition of the rows that these row indices refer to."""
        return replace(self, indexed_rows=replace(rows, indexed_rows=None, origin=None, unpadded=None, moved_from=None))

    def indexed_rows_of_size(self, size: IntLike) -> Partition | None:
        """Returns the recorded partition of the indexed rows if they number `size`, else None."""
        rows = self.indexed_rows
        return rows if rows is not None and compat.guard_equal(rows.size, size) else None

    def flatten_leading(self, count: IntLike) -> Partition:
        """Returns the partition of the dim after a leading dim of size `count` was flattened into it."""
        if is_one(count):
            return self
        segments = self.num_segments * count
        return replace(self.flatten_trailing(count), num_segments=segments, origin=None, unpadded=None)

    def with_origin(self, base: Partition, start: IntLike, step: int) -> Partition:
        """Returns this partition, recording that its rows are rows ``start, start + step, ...`` of another partition.

        Chains of more than 8 origins are not recorded.
        """
        depth, origin = 1, base.origin
        while origin is not None:
            depth, origin = depth + 1, origin[0].origin
        return self if depth > 8 else replace(self, origin=(base, start, step))

    def unflatten_leading(self, count: IntLike) -> Partition:
        """Inverse of `flatten_leading`: returns the partition after a leading dim of size `count` is split off."""
        if is_one(count):
            return self
        partition = replace(self, num_segments=compat.quotient(self.num_segments, count)).unflatten_trailing(count)
        assert partition is not None, "every shard has equally many rows of each segment"
        return partition

    def coarsen(self) -> Partition | None:
        """Returns the partition after a gather over the innermost mesh dim; None if no mesh dim remains."""
        self.check_one_segment()
        if len(self.mesh_dims) == 1:
            return None
        outer, parts, count = self.mesh_dims[:-1], self.parts[:-1], self.parts[-1]
        if self.kind == "chunk":
            return Partition.chunk(outer, parts, self.size // self.scale).flatten_trailing(self.scale)
        shards = self.known_sizes
        if shards is not None:
            shards = tuple(sum(shards[i : i + count]) for i in range(0, len(shards), count))
        partition = replace(self, mesh_dims=outer, parts=parts, known_sizes=shards, coarsening=self.coarsening * count)
        return replace(partition, traced_local_size=None, origin=None, unpadded=None)

    def flatten_trailing(self, factor: IntLike) -> Partition:
        """Returns the partition of the dim after trailing dims of `factor` elements were flattened into it."""
        if is_one(factor):
            return self
        shards = (
            None
            if self.known_sizes is None or not isinstance(factor, int)
            else tuple(b * factor for b in self.known_sizes)
        )
        shard = self._map_shard(lambda shard: shard * factor)
        partition = replace(
            self, size=self.size * factor, known_sizes=shards, traced_local_size=shard, scale=self.scale * factor
        )
        return replace(partition, origin=self._scaled_origin(factor), unpadded=None)

    def _copy_records_to(self, partition: Partition) -> Partition:
        """Returns another partition of the same rows with the fields that record this one's history."""
        return replace(
            partition,
            moved_from=self.moved_from,
            indexed_rows=self.indexed_rows,
            num_segments=self.num_segments,
            provisional=self.provisional,
        )

    def _scaled_origin(self, factor: IntLike) -> tuple[Partition, IntLike, int] | None:
        """Returns the origin of a scaled partition: consecutive rows stay consecutive; a step other than 1 is lost."""
        if self.origin is None or self.origin[2] != 1:
            return None
        return self.origin[0].flatten_trailing(factor), self.origin[1] * factor, 1

    def _unscaled_origin(self, factor: IntLike) -> tuple[Partition, IntLike, int] | None:
        if self.origin is None or self.origin[2] != 1:
            return None
        base, start = self.origin[0].unflatten_trailing(factor), self.origin[1]
        return None if base is None else (base, start // factor, 1)

    def _map_shard(self, formula: Callable[[IntLike], IntLike]) -> IntLike | None:
        """Applies a formula to the traced size of this rank's local shard, if there is one."""
        shard = self.traced_local_size
        if shard is None or isinstance(shard, int):
            return None if shard is None else formula(shard)
        return compat.from_first_symbols(lambda: formula(shard))

    def unflatten_trailing(self, factor: IntLike) -> Partition | None:
        """Inverse of `flatten_trailing`: returns the partition after trailing dims of `factor` elements are split off.

        Returns None if a shard boundary would fall inside of a row of the leading dim.
        """
        if is_one(factor):
            return self
        if compat.divides(factor * self.num_segments, self.scale):
            shards = None if self.known_sizes is None else tuple(b // factor for b in self.known_sizes)  # type: ignore[misc]
            shard = self._map_shard(lambda shard: shard // factor)
            partition = replace(self, size=self.size // factor, known_sizes=shards, traced_local_size=shard)
            partition = replace(partition, scale=compat.quotient(self.scale, factor))
            return replace(partition, origin=self._unscaled_origin(factor), unpadded=None)
        step = factor * self.num_segments
        if self.known_sizes is None or not isinstance(step, int) or any(b % step for b in self.known_sizes):
            return None
        kind: Kind = "fixed" if self.kind == "chunk" else self.kind
        partition = Partition.of_sizes(self.mesh_dims, self.parts, [b // factor for b in self.known_sizes], kind)
        return self._copy_records_to(partition)

    def prefix(self, depth: int) -> Partition | None:
        """Returns the partition over the first `depth` mesh dims only; None for a depth of 0."""
        partition: Partition | None = self
        while partition is not None and len(partition.mesh_dims) > depth:
            partition = partition.coarsen()
        return partition if depth else None

    def guard_same_shards(
        self, other: Partition | None, coordinate: Sequence[int] | None = None, *, guard_chunk: bool = True
    ) -> bool:
        """Whether both divide a dim into the same shards on the same ranks.

        While tracing, two dynamic partitions are compared by their keys, which installs a guard. Unbacked keys, and a
        dynamic partition compared with one of another kind, count as different, which may cost an exchange.

        Args:
            other: the other partition.
            coordinate: this rank's mesh coordinate. While tracing, a partition may turn out to equal a static one, such
                as that of a parameter. Its local shard size is then specialized as well, so that both fit into one op.
            guard_chunk: whether a trace may install a guard on whether a dynamic partition is torch.chunk's; if not, it
                counts as different.
        """
        if self is other:
            return True
        if other is None or self.mesh_dims != other.mesh_dims or self.parts != other.parts:
            return False
        if self.known_sizes is not None and other.known_sizes is not None:
            return self.known_sizes == other.known_sizes and self.num_segments == other.num_segments
        if not compat.statically_known_true(self.num_segments == other.num_segments):
            return False
        if self.kind == other.kind == "chunk":
            same_scale = compat.statically_known_true(self.scale == other.scale)
            return same_scale and compat.guard_equal(self.size, other.size)
        if self.coarsening != other.coarsening or not compat.statically_known_true(self.scale == other.scale):
            return False
        static, traced = (self, other) if self.known_sizes is not None else (other, self)
        if "chunk" in (self.kind, other.kind):
            dynamic = other if self.kind == "chunk" else self
            if not compat.guard_equal(self.size, other.size) or not (guard_chunk and dynamic.guard_chunked()):
                return False
        elif static.kind == "fixed" and traced.known_sizes is None and isinstance(traced.key, torch.SymInt):
            return False  # a guard would compile one graph for that partition, and another one for all others
        elif not compat.guard_equal(self.key, other.key):
            return False
        if static.known_sizes is not None and coordinate is not None:
            compat.specialise(traced.traced_local_size, static.known_sizes[static.shard_index(coordinate)])
        return True

    def guard_chunked(self) -> bool:
        """Whether the sizes of this dynamic partition are torch.chunk's; while tracing the answer becomes a guard.

        A partition with an unbacked key counts as different.
        """
        if self.kind != "dynamic" or self.coarsening > 1 or compat.is_unbacked(self.key):
            return False
        return bool(self.key % 2 == 1)

    def as_dynamic(self) -> Partition:
        """Returns a dynamic partition of the same sizes, the kind as which a compiled function's inputs are traced."""
        if self.kind != "chunk" or self.known_sizes is None:
            return self
        base = tuple(n // self.scale for n in self.known_sizes)  # type: ignore[misc]
        return replace(self, kind="dynamic", key=key_of(base, self.parts))

    def group_ref(self, coordinate: Sequence[int]) -> GroupPartition:
        """Returns the arguments of a collective over the innermost mesh dim for the group at a mesh coordinate."""
        self.check_one_segment()
        count = self.parts[-1]
        # With one mesh dim there is one group, and the trace stays rank-invariant.
        first = self.shard_index(coordinate) // count * count if len(self.parts) > 1 else 0
        if self.known_sizes is not None and self.kind != "dynamic":
            return GroupPartition(list(self.known_sizes[first : first + count]), CHUNK_KEY, [])
        grouping = [1, 0, self.scale] if self.kind == "chunk" else [self.coarsening, first, self.scale]
        return GroupPartition([], self.key, grouping if grouping != [1, 0, 1] else [])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the sizes of the key along with the fields, because another process may not know the key."""
        sizes = lookup_sizes(self.key) if self.kind == "dynamic" and isinstance(self.key, int) else None
        return _restore, (sizes, *(getattr(self, f.name) for f in fields(self)))

    def describe(self) -> str:
        """Returns the shard sizes as text, e.g. ``[3,5]``; ``[?]`` if they are unknown while tracing."""
        segments = "" if is_one(self.num_segments) else f"{self.num_segments}x"
        return (
            f"{segments}[?]"
            if self.known_sizes is None
            else f"{segments}[{','.join(str(b // self.num_segments) for b in self.known_sizes)}]"
        )


def _restore(sizes: tuple[int, ...] | None, *values: Any) -> Partition:
    """Unpickles a partition, registering the sizes of its key in this process."""
    if sizes is not None:
        remember_key(values[5], sizes)
    return Partition(*values)
