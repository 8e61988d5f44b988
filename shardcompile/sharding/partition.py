"""Partitions: how one tensor dim is divided into shards over one or several mesh dims.

A partition is the same object on every rank: it holds the sizes of *all* shards. Tracing has three kinds of them:

* ``chunk``: what `torch.chunk` gives for the size, of which each row may have become `scale` elements since; no sizes
  are stored and the size may be symbolic;
* ``fixed``: Python ints, part of what a compiled graph is specialised on;
* ``dynamic``: run-time data. In eager mode the sizes are ints; inside a trace only their `key`, a symbol, is known.
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
    known_sizes,
    nested_chunk_sizes,
    remember_key,
)

Kind = Literal["chunk", "fixed", "dynamic"]


@dataclass(frozen=True)
class Partition:
    """How one tensor dim is divided over mesh dims.

    Attributes:
        kind: ``chunk``, ``fixed`` or ``dynamic``.
        mesh_dims: the mesh dims that divide the dim, outermost first.
        parts: sizes of those mesh dims.
        size: global size of the tensor dim.
        shards: all shard sizes, outermost mesh dim slowest; None if they are not known while tracing.
        key: stands for the sizes inside a graph; `CHUNK_KEY` for a chunk partition.
        shard: while tracing, this rank's local shard size, if the trace has a symbol for it.
        inner: the number of neighbouring shards of `key` that make one shard of this partition.
        scale: elements of this dim for one of `key`'s; more than 1 where trailing dims were flattened into the dim.
            While tracing it may be symbolic, as the sizes of these dims are.
        carrier: while tracing, the tensor whose shape brought the key into the graph; not part of the value.
        origin: for the partition of a slice: the partition of what was sliced, first row and step, by which a gradient
            gets back.
        core: where rows were added around others, as by padding: the others' partition, and the row at which they
            begin.
        makeshift: whether an op asked for it in place of the partition that it was given. Any other partition is
            preferred to it.
        home: for a dim that was sharded in place of another one: the partition that the other one had.
        rows: for what was looked up by row indices: their partition, which new sums over them take over.
        runs: how many equal stretches the dim has, each divided alike: more than 1 if leading dims were flattened into
            it. While tracing it may be symbolic.
    """

    kind: Kind
    mesh_dims: tuple[int, ...]
    parts: tuple[int, ...]
    size: IntLike
    shards: tuple[int, ...] | None
    key: IntLike
    shard: IntLike | None = None
    inner: int = 1
    scale: IntLike = 1
    carrier: object = field(default=None, compare=False, repr=False)
    origin: tuple[Partition, IntLike, int] | None = field(default=None, repr=False)
    core: tuple[Partition, IntLike] | None = field(default=None, repr=False)
    makeshift: bool = field(default=False, repr=False)
    home: Partition | None = field(default=None, repr=False)
    rows: Partition | None = field(default=None, repr=False)
    runs: IntLike = 1

    @staticmethod
    def chunk(mesh_dims: Sequence[int], parts: Sequence[int], size: IntLike) -> Partition:
        """The partition of `torch.chunk`, applied to each mesh dim in turn."""
        shards = nested_chunk_sizes(size, parts) if isinstance(size, int) else None
        return Partition("chunk", tuple(mesh_dims), tuple(parts), size, shards, CHUNK_KEY)

    @staticmethod
    def of_sizes(
        mesh_dims: Sequence[int], parts: Sequence[int], sizes: Sequence[int], kind: Kind = "dynamic"
    ) -> Partition:
        """A partition with the given shard sizes.

        Raises:
            LayoutError: a size is negative, or there are not as many as the mesh has shards.
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
        """A dynamic partition inside a trace, where only the symbols that stand for it are known."""
        return Partition("dynamic", tuple(mesh_dims), tuple(parts), size, None, key, shard)

    @property
    def is_traced(self) -> bool:
        """Whether the sizes are unknown because the partition is part of a trace."""
        return self.shards is None

    @property
    def has_symbols(self) -> bool:
        """Whether it, or a partition that it remembers, is made of symbols.

        A chunk partition of a known size knows its sizes, and in a trace also the symbol of this rank's local shard.
        """
        if self.shards is None or isinstance(self.shard, torch.SymInt):
            return True
        others = [c for c in (self.home, self.rows) if c is not None]
        return any(isinstance(c.size, torch.SymInt) or c.has_symbols for c in others)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all shards, outermost mesh dim slowest.

        Raises:
            LayoutError: inside a trace, where a graph serves every layout.
        """
        if self.shards is None:
            raise LayoutError(
                f"the sizes of a {self.kind} partition are not known while tracing: the graph serves every layout. "
                "Read them outside of the compiled function, or use a fixed partition."
            )
        return self.shards

    @property
    def is_even(self) -> bool:
        """Whether all shards have the same size."""
        return len(set(self.sizes)) == 1

    @property
    def imbalance(self) -> float:
        """How many times the mean the largest shard is; 1 where nobody knows.

        Inside a trace that of a chunked partition is known by the hint of the size.
        """
        if self.shards is not None:
            largest, size = max(self.shards), sum(self.shards)
        elif self.kind == "chunk":
            size = compat.size_hint(self.size) // self.scale
            largest = -(-size // math.prod(self.parts))
        else:
            return 1.0
        return largest * math.prod(self.parts) / size if size else 1.0

    def shard_index(self, coordinate: Sequence[int]) -> int:
        """Position in `sizes` of the shard at a mesh coordinate."""
        index = 0
        for mesh_dim, count in zip(self.mesh_dims, self.parts, strict=True):
            index = index * count + coordinate[mesh_dim]
        return index

    def local_size(self, coordinate: Sequence[int]) -> IntLike:
        """Size of the shard at a mesh coordinate; inside a trace, of this rank's local shard."""
        if self.shard is not None:
            return self.shard
        if self.shards is not None:
            return self.shards[self.shard_index(coordinate)]
        # Not for a chunk partition either. A formula of the size would name the rank in the graph. Comparisons with it
        # would be guards that hold on some ranks only.
        raise LayoutError(
            f"the size of this rank's local shard of mesh dims {self.mesh_dims} has no symbol in the trace"
        )

    def offset(self, coordinate: Sequence[int]) -> int:
        """Where the shard at a mesh coordinate starts in the global dim."""
        self.check_one_segment()
        return sum(self.sizes[: self.shard_index(coordinate)])

    def check_one_segment(self) -> None:
        """Raise where a shard is taken for neighbouring rows and is none.

        Raises:
            LayoutError: the dim was made of others of which not the first is sharded.
        """
        if not is_one(self.runs):
            raise LayoutError(
                f"shards of {self.describe()} are no neighbouring rows: the dim was made of several, of which the "
                "first one is not sharded. Take this of the tensor before it was flattened, or redistribute() it first"
            )

    def naming(self, rows: Partition) -> Partition:
        """The same shards, of row indices that are sharded as `rows`, or of what was looked up by them."""
        return replace(self, rows=replace(rows, rows=None, origin=None, core=None, home=None))

    def named_rows(self, size: IntLike) -> Partition | None:
        """The partition of the rows that were looked up, if there are as many; None if there are not."""
        found = self.rows
        return found if found is not None and compat.same_symbol(found.size, size) else None

    def joined(self, runs: IntLike) -> Partition:
        """The partition of a dim into which a leading one was flattened, of size `runs`."""
        return self if is_one(runs) else replace(self.scaled(runs), runs=self.runs * runs, origin=None, core=None)

    def of_rows(self, base: Partition, start: IntLike, step: int) -> Partition:
        """This sharded, which remembers that its rows are with rows ``start, start + step, ...`` of another one."""
        depth, of = 1, base.origin
        while of is not None:
            depth, of = depth + 1, of[0].origin
        return self if depth > 8 else replace(self, origin=(base, start, step))

    def parted(self, runs: IntLike) -> Partition:
        """The way back: the partition of one of `runs` stretches."""
        if is_one(runs):
            return self
        partition = replace(self, runs=compat.quotient(self.runs, runs)).unscaled(runs)
        assert partition is not None, "a joined dim has as many rows of each stretch"
        return partition

    def coarsen(self) -> Partition | None:
        """The partition that is left when the innermost mesh dim is gathered; None if nothing is."""
        self.check_one_segment()
        if len(self.mesh_dims) == 1:
            return None
        outer, parts, count = self.mesh_dims[:-1], self.parts[:-1], self.parts[-1]
        if self.kind == "chunk":
            return Partition.chunk(outer, parts, self.size // self.scale).scaled(self.scale)
        shards = self.shards
        if shards is not None:
            shards = tuple(sum(shards[i : i + count]) for i in range(0, len(shards), count))
        partition = replace(self, mesh_dims=outer, parts=parts, shards=shards, inner=self.inner * count)
        return replace(partition, shard=None, origin=None, core=None)

    def scaled(self, factor: IntLike) -> Partition:
        """The partition of a dim into which `factor` trailing elements for each of its own were flattened."""
        if is_one(factor):
            return self
        shards = None if self.shards is None or not isinstance(factor, int) else tuple(b * factor for b in self.shards)
        shard = self._shard_as(lambda shard: shard * factor)
        partition = replace(self, size=self.size * factor, shards=shards, shard=shard, scale=self.scale * factor)
        return replace(partition, origin=self._scaled_origin(factor), core=None)

    def _as_known_to(self, partition: Partition) -> Partition:
        """Another partition of the same rows, with what this one remembers."""
        return replace(partition, home=self.home, rows=self.rows, runs=self.runs, makeshift=self.makeshift)

    def _scaled_origin(self, factor: IntLike) -> tuple[Partition, IntLike, int] | None:
        """Rows one after the other stay so when each becomes several."""
        if self.origin is None or self.origin[2] != 1:
            return None
        return self.origin[0].scaled(factor), self.origin[1] * factor, 1

    def _unscaled_origin(self, factor: IntLike) -> tuple[Partition, IntLike, int] | None:
        if self.origin is None or self.origin[2] != 1:
            return None
        base, start = self.origin[0].unscaled(factor), self.origin[1]
        return None if base is None else (base, start // factor, 1)

    def _shard_as(self, formula: Callable[[IntLike], IntLike]) -> IntLike | None:
        shard = self.shard
        if shard is None or isinstance(shard, int):
            return None if shard is None else formula(shard)
        return compat.from_first_symbols(lambda: formula(shard))

    def unscaled(self, factor: IntLike) -> Partition | None:
        """The partition of the leading dim when `factor` trailing elements are split off; None if a shard would
        split.
        """
        if is_one(factor):
            return self
        if compat.divides(factor * self.runs, self.scale):
            shards = None if self.shards is None else tuple(b // factor for b in self.shards)  # type: ignore[misc]
            shard = self._shard_as(lambda shard: shard // factor)
            partition = replace(self, size=self.size // factor, shards=shards, shard=shard)
            partition = replace(partition, scale=compat.quotient(self.scale, factor))
            return replace(partition, origin=self._unscaled_origin(factor), core=None)
        step = factor * self.runs
        if self.shards is None or not isinstance(step, int) or any(b % step for b in self.shards):
            return None
        kind: Kind = "fixed" if self.kind == "chunk" else self.kind
        partition = Partition.of_sizes(self.mesh_dims, self.parts, [b // factor for b in self.shards], kind)
        return self._as_known_to(partition)

    def prefix(self, depth: int) -> Partition | None:
        """The sharded over the first `depth` mesh dims only."""
        partition: Partition | None = self
        while partition is not None and len(partition.mesh_dims) > depth:
            partition = partition.coarsen()
        return partition if depth else None

    def same_shards(
        self, other: Partition | None, coordinate: Sequence[int] | None = None, *, ask_chunked: bool = True
    ) -> bool:
        """Whether both divide a dim into the same shards on the same ranks.

        Inside a trace the answer for two dynamic partitions compares their keys, which installs a guard. Keys that a
        run gives, and a dynamic partition beside one of another kind, count as different: that may cost an exchange.

        Args:
            other: the other partition.
            coordinate: of this rank in the mesh. Inside a trace a partition may turn out to be a known one, as that of
                a parameter. Then its shard is known as well, so that both fit into one op.
            ask_chunked: whether a trace may ask if a dynamic partition is torch.chunk's; if not, it counts as another
                one.
        """
        if self is other:
            return True
        if other is None or self.mesh_dims != other.mesh_dims or self.parts != other.parts:
            return False
        if self.shards is not None and other.shards is not None:
            return self.shards == other.shards and self.runs == other.runs
        if not compat.statically_known_true(self.runs == other.runs):
            return False
        if self.kind == other.kind == "chunk":
            same_scale = compat.statically_known_true(self.scale == other.scale)
            return same_scale and compat.same_symbol(self.size, other.size)
        if self.inner != other.inner or not compat.statically_known_true(self.scale == other.scale):
            return False
        known, traced = (self, other) if self.shards is not None else (other, self)
        if "chunk" in (self.kind, other.kind):
            dynamic = other if self.kind == "chunk" else self
            if not compat.same_symbol(self.size, other.size) or not (ask_chunked and dynamic.guard_chunked()):
                return False
        elif known.kind == "fixed" and traced.shards is None and isinstance(traced.key, torch.SymInt):
            return False  # a guard would have a graph for that one partition, and another for all others
        elif not compat.same_symbol(self.key, other.key):
            return False
        if known.shards is not None and coordinate is not None:
            compat.specialise(traced.shard, known.shards[known.shard_index(coordinate)])
        return True

    def guard_chunked(self) -> bool:
        """Whether the sizes of this dynamic partition are torch.chunk's; inside a trace the answer becomes a guard.

        A partition whose sizes only a run gives counts as another one.
        """
        if self.kind != "dynamic" or self.inner > 1 or compat.is_unbacked(self.key):
            return False
        return bool(self.key % 2 == 1)

    def as_dynamic(self) -> Partition:
        """The same sizes as those of a dynamic partition, as which all inputs of a compiled function are traced."""
        if self.kind != "chunk" or self.shards is None:
            return self
        base = tuple(n // self.scale for n in self.shards)  # type: ignore[misc]
        return replace(self, kind="dynamic", key=key_of(base, self.parts))

    def group_ref(self, coordinate: Sequence[int]) -> GroupPartition:
        """What a collective over the innermost mesh dim needs to know, for the group at a mesh coordinate."""
        self.check_one_segment()
        count = self.parts[-1]
        # With one mesh dim there is one group: a trace that need not know the rank serves all of them.
        first = self.shard_index(coordinate) // count * count if len(self.parts) > 1 else 0
        if self.shards is not None and self.kind != "dynamic":
            return GroupPartition(list(self.shards[first : first + count]), CHUNK_KEY, [])
        grouping = [1, 0, self.scale] if self.kind == "chunk" else [self.inner, first, self.scale]
        return GroupPartition([], self.key, grouping if grouping != [1, 0, 1] else [])

    def __reduce__(self) -> tuple[object, ...]:
        """The sizes that the key stands for come along: another process may not know them."""
        known = known_sizes(self.key) if self.kind == "dynamic" and isinstance(self.key, int) else None
        return _restore, (known, *(getattr(self, f.name) for f in fields(self)))

    def describe(self) -> str:
        """Sizes as text, e.g. ``[3,5]``; ``[?]`` while tracing."""
        runs = "" if is_one(self.runs) else f"{self.runs}x"
        return f"{runs}[?]" if self.shards is None else f"{runs}[{','.join(str(b // self.runs) for b in self.shards)}]"


def _restore(known: tuple[int, ...] | None, *values: Any) -> Partition:
    if known is not None:
        remember_key(values[5], known)
    return Partition(*values)
