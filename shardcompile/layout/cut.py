"""Cuts: how one tensor dim is divided into blocks over one or several mesh dims.

A cut is the same object on every rank: it holds the sizes of *all* blocks. Tracing has three kinds of them:

* ``chunk``: what `torch.chunk` gives for the extent, of which each row may have become `scale` elements since; no sizes
  are stored and the extent may be symbolic;
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
from shardcompile.layout.sizes import (
    CHUNK_KEY,
    GroupCut,
    IntLike,
    key_of,
    known_sizes,
    nested_chunk_sizes,
    remember_key,
)

Kind = Literal["chunk", "fixed", "dynamic"]


@dataclass(frozen=True)
class Cut:
    """How one tensor dim is divided over mesh dims.

    Attributes:
        kind: ``chunk``, ``fixed`` or ``dynamic``.
        mesh_dims: the mesh dims that divide the dim, outermost first.
        parts: extents of those mesh dims.
        extent: global extent of the tensor dim.
        blocks: sizes of all blocks, outermost mesh dim slowest; None if they are not known while tracing.
        key: stands for the sizes inside a graph; `CHUNK_KEY` for a chunk cut.
        block: while tracing, this rank's block size, if the trace has a symbol for it.
        inner: the number of neighbouring blocks of `key` that make one block of this cut.
        scale: elements of this dim for one of `key`'s; more than 1 where trailing dims were flattened into the dim.
            While tracing it may be symbolic, as the sizes of these dims are.
        carrier: while tracing, the tensor whose shape brought the key into the graph; not part of the value.
        origin: for the cut of a slice: the cut of what was sliced, first row and step, by which a gradient gets back.
        core: where rows were added around others, as by padding: the others' cut, and the row at which they begin.
        makeshift: whether an op asked for it in place of the cut that it was given. Any other cut is preferred to it.
        home: for a dim that was cut in place of another one: the cut that the other one had.
        rows: for what was looked up by numbers of rows: their cut, which new sums over them take over.
        runs: how many equal stretches the dim has, each divided alike: more than 1 if leading dims were flattened into
            it. While tracing it may be symbolic.
    """

    kind: Kind
    mesh_dims: tuple[int, ...]
    parts: tuple[int, ...]
    extent: IntLike
    blocks: tuple[int, ...] | None
    key: IntLike
    block: IntLike | None = None
    inner: int = 1
    scale: IntLike = 1
    carrier: object = field(default=None, compare=False, repr=False)
    origin: tuple[Cut, IntLike, int] | None = field(default=None, repr=False)
    core: tuple[Cut, IntLike] | None = field(default=None, repr=False)
    makeshift: bool = field(default=False, repr=False)
    home: Cut | None = field(default=None, repr=False)
    rows: Cut | None = field(default=None, repr=False)
    runs: IntLike = 1

    @staticmethod
    def chunk(mesh_dims: Sequence[int], parts: Sequence[int], extent: IntLike) -> Cut:
        """The cut of `torch.chunk`, applied to each mesh dim in turn."""
        blocks = nested_chunk_sizes(extent, parts) if isinstance(extent, int) else None
        return Cut("chunk", tuple(mesh_dims), tuple(parts), extent, blocks, CHUNK_KEY)

    @staticmethod
    def of_sizes(mesh_dims: Sequence[int], parts: Sequence[int], sizes: Sequence[int], kind: Kind = "dynamic") -> Cut:
        """A cut with the given block sizes.

        Raises:
            LayoutError: a size is negative, or there are not as many as the mesh has blocks.
        """
        blocks = tuple(int(s) for s in sizes)
        wanted = math.prod(parts)
        if len(blocks) != wanted:
            raise LayoutError(
                f"a dim sharded by mesh dims {tuple(mesh_dims)} of extents {tuple(parts)} needs {wanted} block "
                f"sizes, got {len(blocks)}: {blocks}"
            )
        if any(b < 0 for b in blocks):
            raise LayoutError(f"block sizes must not be negative, got {blocks}")
        return Cut(kind, tuple(mesh_dims), tuple(parts), sum(blocks), blocks, key_of(blocks, parts))

    @staticmethod
    def traced(mesh_dims: Sequence[int], parts: Sequence[int], extent: IntLike, key: IntLike, block: IntLike) -> Cut:
        """A dynamic cut inside a trace, where only the symbols that stand for it are known."""
        return Cut("dynamic", tuple(mesh_dims), tuple(parts), extent, None, key, block)

    @property
    def is_traced(self) -> bool:
        """Whether the sizes are unknown because the cut is part of a trace."""
        return self.blocks is None

    @property
    def has_symbols(self) -> bool:
        """Whether it, or a cut that it remembers, is made of symbols.

        A chunk cut of a known extent knows its sizes, and in a trace also the symbol of this rank's block.
        """
        if self.blocks is None or isinstance(self.block, torch.SymInt):
            return True
        others = [c for c in (self.home, self.rows) if c is not None]
        return any(isinstance(c.extent, torch.SymInt) or c.has_symbols for c in others)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all blocks, outermost mesh dim slowest.

        Raises:
            LayoutError: inside a trace, where a graph serves every layout.
        """
        if self.blocks is None:
            raise LayoutError(
                f"the sizes of a {self.kind} cut are not known while tracing: the graph serves every layout. "
                "Read them outside of the compiled function, or use a fixed cut."
            )
        return self.blocks

    @property
    def is_even(self) -> bool:
        """Whether all blocks have the same size."""
        return len(set(self.sizes)) == 1

    @property
    def imbalance(self) -> float:
        """How many times the mean the largest shard is; 1 where nobody knows.

        Inside a trace that of a chunked partition is known by the hint of the size.
        """
        if self.blocks is not None:
            largest, size = max(self.blocks), sum(self.blocks)
        elif self.kind == "chunk":
            size = compat.size_hint(self.extent) // self.scale
            largest = -(-size // math.prod(self.parts))
        else:
            return 1.0
        return largest * math.prod(self.parts) / size if size else 1.0

    def block_index(self, coordinate: Sequence[int]) -> int:
        """Position in `sizes` of the block at a mesh coordinate."""
        index = 0
        for mesh_dim, count in zip(self.mesh_dims, self.parts, strict=True):
            index = index * count + coordinate[mesh_dim]
        return index

    def local_size(self, coordinate: Sequence[int]) -> IntLike:
        """Size of the block at a mesh coordinate; inside a trace, of this rank's block."""
        if self.block is not None:
            return self.block
        if self.blocks is not None:
            return self.blocks[self.block_index(coordinate)]
        # Not for a chunk cut either. A formula of the extent would name the rank in the graph. Comparisons with it
        # would be guards that hold on some ranks only.
        raise LayoutError(f"the size of this rank's block of mesh dims {self.mesh_dims} has no symbol in the trace")

    def offset(self, coordinate: Sequence[int]) -> int:
        """Where the block at a mesh coordinate starts in the global dim."""
        self.check_in_one_piece()
        return sum(self.sizes[: self.block_index(coordinate)])

    def check_in_one_piece(self) -> None:
        """Raise where a block is taken for neighbouring rows and is none.

        Raises:
            LayoutError: the dim was made of others of which not the first is cut.
        """
        if not is_one(self.runs):
            raise LayoutError(
                f"blocks of {self.describe()} are no neighbouring rows: the dim was made of several, of which the "
                "first one is not cut. Take this of the tensor before it was flattened, or redistribute() it first"
            )

    def naming(self, rows: Cut) -> Cut:
        """The same blocks, of numbers of rows that are cut as `rows`, or of what was looked up by them."""
        return replace(self, rows=replace(rows, rows=None, origin=None, core=None, home=None))

    def named_rows(self, extent: IntLike) -> Cut | None:
        """The cut of the rows that were looked up, if there are as many; None if there are not."""
        found = self.rows
        return found if found is not None and compat.same_symbol(found.extent, extent) else None

    def joined(self, runs: IntLike) -> Cut:
        """The cut of a dim into which a leading one was flattened, of extent `runs`."""
        return self if is_one(runs) else replace(self.scaled(runs), runs=self.runs * runs, origin=None, core=None)

    def of_rows(self, base: Cut, start: IntLike, step: int) -> Cut:
        """This cut, which remembers that its rows are with rows ``start, start + step, ...`` of another one."""
        depth, of = 1, base.origin
        while of is not None:
            depth, of = depth + 1, of[0].origin
        return self if depth > 8 else replace(self, origin=(base, start, step))

    def parted(self, runs: IntLike) -> Cut:
        """The way back: the cut of one of `runs` stretches."""
        if is_one(runs):
            return self
        cut = replace(self, runs=compat.quotient(self.runs, runs)).unscaled(runs)
        assert cut is not None, "a joined dim has as many rows of each stretch"
        return cut

    def coarsen(self) -> Cut | None:
        """The cut that is left when the innermost mesh dim is gathered; None if nothing is."""
        self.check_in_one_piece()
        if len(self.mesh_dims) == 1:
            return None
        outer, parts, count = self.mesh_dims[:-1], self.parts[:-1], self.parts[-1]
        if self.kind == "chunk":
            return Cut.chunk(outer, parts, self.extent // self.scale).scaled(self.scale)
        blocks = self.blocks
        if blocks is not None:
            blocks = tuple(sum(blocks[i : i + count]) for i in range(0, len(blocks), count))
        cut = replace(self, mesh_dims=outer, parts=parts, blocks=blocks, inner=self.inner * count)
        return replace(cut, block=None, origin=None, core=None)

    def scaled(self, factor: IntLike) -> Cut:
        """The cut of a dim into which `factor` trailing elements for each of its own were flattened."""
        if is_one(factor):
            return self
        blocks = None if self.blocks is None or not isinstance(factor, int) else tuple(b * factor for b in self.blocks)
        block = self._block_as(lambda block: block * factor)
        cut = replace(self, extent=self.extent * factor, blocks=blocks, block=block, scale=self.scale * factor)
        return replace(cut, origin=self._scaled_origin(factor), core=None)

    def _as_known_to(self, cut: Cut) -> Cut:
        """Another cut of the same rows, with what this one remembers."""
        return replace(cut, home=self.home, rows=self.rows, runs=self.runs, makeshift=self.makeshift)

    def _scaled_origin(self, factor: IntLike) -> tuple[Cut, IntLike, int] | None:
        """Rows one after the other stay so when each becomes several."""
        if self.origin is None or self.origin[2] != 1:
            return None
        return self.origin[0].scaled(factor), self.origin[1] * factor, 1

    def _unscaled_origin(self, factor: IntLike) -> tuple[Cut, IntLike, int] | None:
        if self.origin is None or self.origin[2] != 1:
            return None
        base, start = self.origin[0].unscaled(factor), self.origin[1]
        return None if base is None else (base, start // factor, 1)

    def _block_as(self, formula: Callable[[IntLike], IntLike]) -> IntLike | None:
        block = self.block
        if block is None or isinstance(block, int):
            return None if block is None else formula(block)
        return compat.from_first_symbols(lambda: formula(block))

    def unscaled(self, factor: IntLike) -> Cut | None:
        """The cut of the leading dim when `factor` trailing elements are split off; None if a block would split."""
        if is_one(factor):
            return self
        if compat.divides(factor * self.runs, self.scale):
            blocks = None if self.blocks is None else tuple(b // factor for b in self.blocks)  # type: ignore[misc]
            block = self._block_as(lambda block: block // factor)
            cut = replace(self, extent=self.extent // factor, blocks=blocks, block=block)
            cut = replace(cut, scale=compat.quotient(self.scale, factor))
            return replace(cut, origin=self._unscaled_origin(factor), core=None)
        step = factor * self.runs
        if self.blocks is None or not isinstance(step, int) or any(b % step for b in self.blocks):
            return None
        kind: Kind = "fixed" if self.kind == "chunk" else self.kind
        cut = Cut.of_sizes(self.mesh_dims, self.parts, [b // factor for b in self.blocks], kind)
        return self._as_known_to(cut)

    def prefix(self, depth: int) -> Cut | None:
        """The cut over the first `depth` mesh dims only."""
        cut: Cut | None = self
        while cut is not None and len(cut.mesh_dims) > depth:
            cut = cut.coarsen()
        return cut if depth else None

    def same_blocks(
        self, other: Cut | None, coordinate: Sequence[int] | None = None, *, ask_chunked: bool = True
    ) -> bool:
        """Whether both divide a dim into the same blocks on the same ranks.

        Inside a trace the answer for two dynamic cuts compares their keys, which installs a guard. Keys that a run
        gives, and a dynamic cut beside one of another kind, count as different: that may cost an exchange.

        Args:
            other: the other cut.
            coordinate: of this rank in the mesh. Inside a trace a cut may turn out to be a known one, as that of a
                parameter. Then its block is known as well, so that both fit into one op.
            ask_chunked: whether a trace may ask if a dynamic cut is torch.chunk's; if not, it counts as another one.
        """
        if self is other:
            return True
        if other is None or self.mesh_dims != other.mesh_dims or self.parts != other.parts:
            return False
        if self.blocks is not None and other.blocks is not None:
            return self.blocks == other.blocks and self.runs == other.runs
        if not compat.statically_known_true(self.runs == other.runs):
            return False
        if self.kind == other.kind == "chunk":
            same_scale = compat.statically_known_true(self.scale == other.scale)
            return same_scale and compat.same_symbol(self.extent, other.extent)
        if self.inner != other.inner or not compat.statically_known_true(self.scale == other.scale):
            return False
        known, traced = (self, other) if self.blocks is not None else (other, self)
        if "chunk" in (self.kind, other.kind):
            dynamic = other if self.kind == "chunk" else self
            if not compat.same_symbol(self.extent, other.extent) or not (ask_chunked and dynamic.guard_chunked()):
                return False
        elif known.kind == "fixed" and traced.blocks is None and isinstance(traced.key, torch.SymInt):
            return False  # a guard would have a graph for that one cut, and another for all others
        elif not compat.same_symbol(self.key, other.key):
            return False
        if known.blocks is not None and coordinate is not None:
            compat.specialise(traced.block, known.blocks[known.block_index(coordinate)])
        return True

    def guard_chunked(self) -> bool:
        """Whether the sizes of this dynamic partition are torch.chunk's; inside a trace the answer becomes a guard.

        A partition whose sizes only a run gives counts as another one.
        """
        if self.kind != "dynamic" or self.inner > 1 or compat.is_unbacked(self.key):
            return False
        return bool(self.key % 2 == 1)

    def as_dynamic(self) -> Cut:
        """The same sizes as those of a dynamic partition, as which all inputs of a compiled function are traced."""
        if self.kind != "chunk" or self.blocks is None:
            return self
        base = tuple(n // self.scale for n in self.blocks)  # type: ignore[misc]
        return replace(self, kind="dynamic", key=key_of(base, self.parts))

    def group_ref(self, coordinate: Sequence[int]) -> GroupCut:
        """What a collective over the innermost mesh dim needs to know, for the group at a mesh coordinate."""
        self.check_in_one_piece()
        count = self.parts[-1]
        # With one mesh dim there is one group: a trace that need not know the rank serves all of them.
        first = self.block_index(coordinate) // count * count if len(self.parts) > 1 else 0
        if self.blocks is not None and self.kind != "dynamic":
            return GroupCut(list(self.blocks[first : first + count]), CHUNK_KEY, [])
        grouping = [1, 0, self.scale] if self.kind == "chunk" else [self.inner, first, self.scale]
        return GroupCut([], self.key, grouping if grouping != [1, 0, 1] else [])

    def __reduce__(self) -> tuple[object, ...]:
        """The sizes that the key stands for come along: another process may not know them."""
        known = known_sizes(self.key) if self.kind == "dynamic" and isinstance(self.key, int) else None
        return _restore, (known, *(getattr(self, f.name) for f in fields(self)))

    def describe(self) -> str:
        """Sizes as text, e.g. ``[3,5]``; ``[?]`` while tracing."""
        runs = "" if is_one(self.runs) else f"{self.runs}x"
        return f"{runs}[?]" if self.blocks is None else f"{runs}[{','.join(str(b // self.runs) for b in self.blocks)}]"


def _restore(known: tuple[int, ...] | None, *values: Any) -> Cut:
    if known is not None:
        remember_key(values[5], known)
    return Cut(*values)
