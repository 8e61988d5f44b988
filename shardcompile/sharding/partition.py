"""`Partition`: how one tensor dim is divided into shards over one or several mesh dims.

A partition is rank-invariant: it holds the sizes of *all* shards. Its value is mesh dims and shard sizes; partitions
with equal values are equal. Besides, it has a `TraceState`, which is how a graph refers to these sizes, and a
`Provenance`, which is what it was derived from and why it was chosen. Its kind is one of three, which differ while
tracing:

* ``chunk``: the shard sizes follow from the global size as in `torch.chunk`, times `TraceState.scale`. The global size
  may be symbolic.
* ``fixed``: the shard sizes are static ints, on which a compiled graph is specialised.
* ``dynamic``: the shard sizes are run-time data. In eager mode they are ints; while tracing only their key, a symbol,
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
from shardcompile.sharding.provenance import NO_PROVENANCE, Provenance
from shardcompile.sharding.sizes import (
    CHUNK_KEY,
    GroupPartition,
    IntLike,
    key_of,
    lookup_sizes,
    nested_chunk_sizes,
    remember_key,
    sizes_of_key,
)

Kind = Literal["chunk", "fixed", "dynamic"]


def _unless_ranks_differ(sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns shard sizes; None while compiling if they differ: as numbers they would give every rank its own graph."""
    return None if compat.is_compiling() and len(set(sizes)) > 1 else sizes


@dataclass(frozen=True)
class TraceState:
    """How a graph refers to the shard sizes of a partition; eager code has the key and the scale as well.

    Attributes:
        key: an integer that identifies shard sizes inside a graph; `CHUNK_KEY` for a chunk partition.
        coarsening: the number of adjacent shards of `key` that form one shard of the partition.
        scale: the number of elements of the dim per element of `key`'s sizes; more than 1 if trailing dims were
            flattened into the dim. While tracing it may be symbolic, like the sizes of those dims.
        local_size: while tracing, the size of this rank's local shard, if the trace has a symbol for it.
        keys_tensor: while tracing, the tensor whose shape carries the key into the graph; ignored by comparisons.
    """

    key: IntLike = CHUNK_KEY
    coarsening: int = 1
    scale: IntLike = 1
    local_size: IntLike | None = None
    keys_tensor: object = field(default=None, compare=False, repr=False)


CHUNKED = TraceState()
"""The state of a chunk partition: a graph computes the shard sizes from the global size."""


@dataclass(frozen=True, eq=False)
class Partition:
    """How one tensor dim is divided into shards over mesh dims.

    Two partitions are equal if they divide the dim into the same shards over the same mesh dims. Kind, trace state and
    provenance play no part in that. A partition whose sizes are symbols equals only itself, so that a comparison
    installs no guard; `guard_same_shards` compares these.

    Attributes:
        kind: ``chunk``, ``fixed`` or ``dynamic``.
        mesh_dims: the mesh dims that shard the tensor dim, outermost first.
        parts: the sizes of those mesh dims.
        size: the global size of the tensor dim.
        known_sizes: all shard sizes, the outermost mesh dim varying slowest; None if they are unknown while tracing.
        num_segments: the number of equal segments of the dim, each divided in the same way; more than 1 if leading dims
            were flattened into the dim. While tracing it may be symbolic.
        trace: how a graph refers to the shard sizes.
        provenance: what the partition was derived from, and why it was chosen.
    """

    kind: Kind
    mesh_dims: tuple[int, ...]
    parts: tuple[int, ...]
    size: IntLike
    known_sizes: tuple[int, ...] | None
    num_segments: IntLike = 1
    trace: TraceState = CHUNKED
    provenance: Provenance = field(default=NO_PROVENANCE, repr=False)

    @staticmethod
    def chunk(mesh_dims: Sequence[int], parts: Sequence[int], size: IntLike) -> Partition:
        """Returns the partition that `torch.chunk` gives, applied to each mesh dim in turn."""
        shards = _unless_ranks_differ(nested_chunk_sizes(size, parts)) if isinstance(size, int) else None
        return Partition("chunk", tuple(mesh_dims), tuple(parts), size, shards)

    @staticmethod
    def of_sizes(
        mesh_dims: Sequence[int], parts: Sequence[int], sizes: Sequence[int], kind: Kind = "dynamic"
    ) -> Partition:
        """Returns the partition with the given shard sizes.

        Raises:
            LayoutError: a size is negative, or the number of sizes differs from the number of shards.
        """
        shards = tuple(map(int, sizes))
        wanted = math.prod(parts)
        if len(shards) != wanted:
            raise LayoutError(
                f"a dim sharded by mesh dims {tuple(mesh_dims)} of sizes {tuple(parts)} needs {wanted} shard "
                f"sizes, got {len(shards)}: {shards}"
            )
        if min(shards, default=0) < 0:
            raise LayoutError(f"shard sizes must not be negative, got {shards}")
        trace, known = TraceState(key_of(shards, parts)), _unless_ranks_differ(shards)
        return Partition(kind, tuple(mesh_dims), tuple(parts), sum(shards), known, trace=trace)

    @staticmethod
    def traced(
        mesh_dims: Sequence[int], parts: Sequence[int], size: IntLike, key: IntLike, local_size: IntLike
    ) -> Partition:
        """Returns a dynamic partition of a trace, in which only the symbols of its sizes are known."""
        trace = TraceState(key, local_size=local_size)
        return Partition("dynamic", tuple(mesh_dims), tuple(parts), size, None, trace=trace)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Partition) or self.is_traced or other.is_traced:
            return False
        return self.value == other.value

    def __hash__(self) -> int:
        return object.__hash__(self) if self.is_traced else hash(self.value)

    @property
    def value(self) -> tuple[object, ...]:
        """Mesh dims, their sizes, the shard sizes and the number of segments: what `==` compares."""
        return self.mesh_dims, self.parts, self.known_sizes, self.num_segments

    @property
    def identity(self) -> tuple[object, ...]:
        """All that the partition holds, hashable and comparable: the key of caches of what depends on all of it."""
        return self.kind, *self.value, self.size, self.trace, self.provenance.identity

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
        traced = self.known_sizes is None or isinstance(self.trace.local_size, torch.SymInt)
        return traced or self.provenance.has_symbols

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
    def static_sizes(self) -> tuple[int, ...] | None:
        """The sizes of all shards where no symbol stands for them; while compiling also if they differ.

        None if they are unknown, or the key is of another process.
        """
        trace = self.trace
        if self.known_sizes is not None or not all(type(n) is int for n in (self.size, trace.key, trace.scale)):
            return self.known_sizes
        if self.kind != "chunk":
            is_known = lookup_sizes(trace.key) is not None  # type: ignore[arg-type]
            return sizes_of_key(trace.key, trace.coarsening, trace.scale) if is_known else None  # type: ignore[arg-type]
        return nested_chunk_sizes(self.size, self.parts, trace.scale)  # type: ignore[arg-type]

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
            size = compat.size_hint(self.size) // self.trace.scale
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
        if self.trace.local_size is not None:
            return self.trace.local_size
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

    def with_trace(self, **changes: Any) -> Partition:
        """Returns the partition with changed fields of its `TraceState`."""
        return replace(self, trace=replace(self.trace, **changes))

    def with_provenance(self, **changes: Any) -> Partition:
        """Returns the partition with changed fields of its `Provenance`."""
        return replace(self, provenance=replace(self.provenance, **changes))

    def with_slice(self, base: Partition, start: IntLike, step: int) -> Partition:
        """Returns this partition, recording that its rows are rows ``start, start + step, ...`` of another partition.

        Chains of more than 8 slices are not recorded.
        """
        return replace(self, provenance=self.provenance.with_slice(base, start, step))

    def with_indexed_rows(self, rows: Partition) -> Partition:
        """Returns the same shards, recording the partition of the rows that these row indices refer to."""
        kept = Provenance(provisional=rows.provenance.provisional)
        return self.with_provenance(indexed_rows=replace(rows, provenance=kept))

    def indexed_rows_of_size(self, size: IntLike) -> Partition | None:
        """Returns the recorded partition of the indexed rows if they number `size`, else None."""
        rows = self.provenance.indexed_rows
        return rows if rows is not None and compat.guard_equal(rows.size, size) else None

    def flatten_leading(self, count: IntLike) -> Partition:
        """Returns the partition of the dim after a leading dim of size `count` was flattened into it."""
        if is_one(count):
            return self
        segments = self.num_segments * count
        partition = replace(self.flatten_trailing(count), num_segments=segments)
        return replace(partition, provenance=partition.provenance.of_other_rows())

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
            scale = self.trace.scale
            return Partition.chunk(outer, parts, self.size // scale).flatten_trailing(scale)
        shards = self.known_sizes
        if shards is not None:
            shards = tuple(sum(shards[i : i + count]) for i in range(0, len(shards), count))
        trace = replace(self.trace, coarsening=self.trace.coarsening * count, local_size=None)
        provenance = self.provenance.of_other_rows()
        return replace(self, mesh_dims=outer, parts=parts, known_sizes=shards, trace=trace, provenance=provenance)

    def flatten_trailing(self, factor: IntLike) -> Partition:
        """Returns the partition of the dim after trailing dims of `factor` elements were flattened into it."""
        if is_one(factor):
            return self
        shards = (
            None
            if self.known_sizes is None or not isinstance(factor, int)
            else tuple(b * factor for b in self.known_sizes)
        )
        local_size = self._map_local_size(lambda size: size * factor)
        trace = replace(self.trace, local_size=local_size, scale=self.trace.scale * factor)
        provenance = self.provenance.flatten_trailing(factor)
        return replace(self, size=self.size * factor, known_sizes=shards, trace=trace, provenance=provenance)

    def _map_local_size(self, formula: Callable[[IntLike], IntLike]) -> IntLike | None:
        """Applies a formula to the traced size of this rank's local shard, if there is one."""
        size = self.trace.local_size
        if size is None or isinstance(size, int):
            return None if size is None else formula(size)
        return compat.from_first_symbols(lambda: formula(size))

    def unflatten_trailing(self, factor: IntLike) -> Partition | None:
        """Inverse of `flatten_trailing`: returns the partition after trailing dims of `factor` elements are split off.

        Returns None if a shard boundary would fall inside of a row of the leading dim.
        """
        if is_one(factor):
            return self
        if compat.divides(factor * self.num_segments, self.trace.scale):
            shards = None if self.known_sizes is None else tuple(b // factor for b in self.known_sizes)  # type: ignore[misc]
            local_size = self._map_local_size(lambda size: size // factor)
            trace = replace(self.trace, local_size=local_size, scale=compat.quotient(self.trace.scale, factor))
            provenance = self.provenance.unflatten_trailing(factor)
            return replace(self, size=self.size // factor, known_sizes=shards, trace=trace, provenance=provenance)
        step = factor * self.num_segments
        if self.known_sizes is None or not isinstance(step, int) or any(b % step for b in self.known_sizes):
            return None
        kind: Kind = "fixed" if self.kind == "chunk" else self.kind
        partition = Partition.of_sizes(self.mesh_dims, self.parts, [b // factor for b in self.known_sizes], kind)
        provenance = self.provenance.of_other_rows()
        return replace(partition, num_segments=self.num_segments, provenance=provenance)

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
            coordinate: this rank's mesh coordinate. While tracing, a partition may turn out to equal one of known, even
                sizes, such as that of a parameter. Its local shard size is then specialized as well, so that both fit
                into one op.
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
        mine, others = self.static_sizes, other.static_sizes
        if mine is not None and others is not None:
            return mine == others
        same_scale = compat.statically_known_true(self.trace.scale == other.trace.scale)
        if self.kind == other.kind == "chunk":
            return same_scale and compat.guard_equal(self.size, other.size)
        if self.trace.coarsening != other.trace.coarsening or not same_scale:
            return False
        static, traced = (self, other) if self.known_sizes is not None else (other, self)
        if "chunk" in (self.kind, other.kind):
            dynamic = other if self.kind == "chunk" else self
            if not compat.guard_equal(self.size, other.size) or not (guard_chunk and dynamic.guard_chunked()):
                return False
        elif "fixed" in (self.kind, other.kind):
            return False  # a guard would compile one graph for that partition, and another one for all others
        elif not compat.guard_equal(self.trace.key, other.trace.key):
            return False
        if static.known_sizes is not None and coordinate is not None:
            compat.specialise(traced.trace.local_size, static.known_sizes[static.shard_index(coordinate)])
        return True

    def guard_chunked(self) -> bool:
        """Whether the sizes of this dynamic partition are torch.chunk's; while tracing the answer becomes a guard.

        A partition with an unbacked key counts as different.
        """
        if self.kind != "dynamic" or self.trace.coarsening > 1 or compat.is_unbacked(self.trace.key):
            return False
        return bool(self.trace.key % 2 == 1)

    def as_dynamic(self) -> Partition:
        """Returns a dynamic partition of the same sizes, the kind as which a compiled function's inputs are traced."""
        if self.kind != "chunk" or self.known_sizes is None:
            return self
        base = tuple(n // self.trace.scale for n in self.known_sizes)  # type: ignore[misc]
        return replace(self, kind="dynamic", trace=replace(self.trace, key=key_of(base, self.parts)))

    def group_partition(self, coordinate: Sequence[int]) -> GroupPartition:
        """Returns the arguments of a collective over the innermost mesh dim for the group at a mesh coordinate."""
        self.check_one_segment()
        count = self.parts[-1]
        # With one mesh dim there is one group, and the trace stays rank-invariant.
        first = self.shard_index(coordinate) // count * count if len(self.parts) > 1 else 0
        sizes = self.static_sizes if self.kind == "fixed" else self.known_sizes
        if sizes is not None and self.kind != "dynamic":
            return GroupPartition(list(sizes[first : first + count]), CHUNK_KEY, [])
        trace = self.trace
        grouping = [1, 0, trace.scale] if self.kind == "chunk" else [trace.coarsening, first, trace.scale]
        return GroupPartition([], trace.key, grouping if grouping != [1, 0, 1] else [])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the sizes of the key along with the fields, because another process may not know the key."""
        key = self.trace.key
        sizes = lookup_sizes(key) if self.kind == "dynamic" and isinstance(key, int) else None
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
    partition = Partition(*values)
    if sizes is not None:
        remember_key(partition.trace.key, sizes)  # type: ignore[arg-type]
    return partition
