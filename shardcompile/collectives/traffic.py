"""What the ranks put into a collective and get out of it, and what it moves: numbers, the same on every rank.

A collective's cuts tell the bytes that move, and whether blocks may differ between ranks: they may if the sizes are
known and not all equal. The block's own size is never asked, because it may happen to be equal to another's on some
ranks only.

An even collective moves what a ring or pairwise exchange does, which is the least possible (Thakur, Rabenseifner,
Gropp, "Optimization of collective communication operations in MPICH", 2005; nccl-tests, PERFORMANCE.md). Uneven blocks
go one of two ways, see `shardcompile.collectives.transport`. Sent directly, a rank's block goes to each of the n-1
others. Where every rank has its own link, the owner of the largest block decides, with (n-1) max(block). Where all
ranks share one link, the sum decides. Or ranks bring their rows to an even division first, by messages of their own,
and these parts take the ring. Reduced rows go the other way. That takes one more launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives.transport.balance import moved_to_even
from shardcompile.errors import ShardError
from shardcompile.layout import CHUNK_KEY, GroupCut, IntLike

OUTER = "outer"
"""In place of a group's name: ranks differ, but along another mesh dim than that of the group at hand."""


@dataclass(frozen=True)
class GroupBlocks:
    """The blocks that the ranks of a group put in, or get.

    Attributes:
        sizes: in group order; None if they are not known while compiling.
        number: whether the graph has a number for the extent of this rank's block, not a symbol.
        halo: rows that a block may have more than `sizes` says; fewer at the ends of the global extent.
        nested: whether other groups along the same mesh dim have other blocks.
        assumed: what `sizes` are taken for where only a halo moves, so that they hardly matter.
    """

    sizes: tuple[int, ...] | None
    number: bool
    halo: int = 0
    nested: bool = False
    assumed: tuple[int, ...] | None = None

    @staticmethod
    def of(cut: GroupCut, total: object, extent: object, ranks: int | None, halo: int = 0) -> GroupBlocks:
        """The blocks of a cut.

        Args:
            cut: with symbols where the compiler does not know it.
            total: what is cut.
            extent: of this rank's block.
            ranks: in the group; None if that is not known.
            halo: see above.
        """
        nested = bool(cut.grouping) and not cut.sizes and is_number(cut.key)
        return GroupBlocks(_known_sizes(cut, total, ranks), is_number(extent), halo, nested)

    @property
    def uneven(self) -> bool:
        """Whether extents in the graph differ between ranks. The same on all of them."""
        if self.sizes is None:
            return self.number  # symbols have hints that the ranks have in common
        return len(set(self.sizes)) > 1 or (self.halo > 0 and len(self.sizes) > 1)

    def labels(self, group_name: str) -> set[str]:
        """The groups along which the extents may differ."""
        return ({group_name} if self.uneven else set()) | ({OUTER} if self.nested and self.number else set())


@dataclass(frozen=True)
class Member:
    """One tensor of a collective, of which a bucket has several.

    Attributes:
        put: the blocks put in; None if all ranks put in tensors of one shape.
        get: the blocks got; None if all ranks get tensors of one shape.
        nbytes: of the whole tensor, by hints; those of the payload for what has no cut.
        arriving: bytes that each rank gets from others, and sends, if that does not follow from the blocks.
    """

    put: GroupBlocks | None
    get: GroupBlocks | None
    nbytes: int
    arriving: tuple[float, ...] | None = None


def of_any_rows(payload: Tensor, block: object) -> Member:
    """Rows of which the data says where they go: what other ranks put in and get is not known while compiling.

    Args:
        payload: what this rank puts in.
        block: how many rows it gets.
    """
    put, get = GroupBlocks(None, is_number(payload.shape[0])), GroupBlocks(None, is_number(block))
    return Member(put, get, nbytes_of(payload))


def is_number(size: object) -> bool:
    """Whether a size is known while compiling, and no symbol."""
    return isinstance(size, int)


def _known_sizes(cut: GroupCut, total: Any, ranks: int | None) -> tuple[int, ...] | None:
    if cut.sizes:
        return tuple(cut.sizes) if all(map(is_number, cut.sizes)) else None
    if ranks is None or not is_number(cut.key) or (cut.key == CHUNK_KEY and not is_number(total)):
        return None
    try:
        return cut.blocks(total, ranks)
    except (LookupError, ShardError):  # a key of another process
        return None


def nbytes_of(value: Tensor) -> int:
    """Bytes of a tensor by hints."""
    total = value.dtype.itemsize
    for size in value.shape:
        total *= size if type(size) is int else compat.size_hint(size)
    return total


def nbytes_with(value: Tensor, dim: int, extent: IntLike) -> int:
    """Bytes of a tensor, had it this extent along a dim, by hints."""
    total = value.dtype.itemsize * compat.size_hint(extent)
    for d, size in enumerate(value.shape):
        total *= 1 if d == dim else compat.size_hint(size)
    return total


def size_of(value: Tensor) -> Any:
    """Bytes of a tensor; may be symbolic."""
    return math.prod(value.shape) * value.dtype.itemsize


def size_with(value: Tensor, dim: int, extent: Any) -> object:
    """Bytes of a tensor, had it this extent along a dim; may be symbolic."""
    return math.prod((extent, *(s for d, s in enumerate(value.shape) if d != dim))) * value.dtype.itemsize


def shares(side: GroupBlocks | None, ranks: int) -> list[float]:
    """The part of a whole that each rank holds; equal parts where the sizes are not known while compiling."""
    if side is None or side.sizes is None or len(side.sizes) != ranks or not sum(side.sizes):
        return [1 / ranks] * ranks
    whole = sum(side.sizes)
    return [min(s + side.halo, whole) / whole if s else 0.0 for s in side.sizes]


# What tensors are to the ranks, for more than one kind of collective.


def gathered(x: Tensor, dim: int, total: IntLike, cut: GroupCut, ranks: int | None) -> Member:
    """Blocks become whole."""
    return Member(GroupBlocks.of(cut, total, x.shape[dim], ranks), None, nbytes_with(x, dim, total))


def scattered(x: Tensor, dim: int, block: object, cut: GroupCut, ranks: int | None) -> Member:
    """A whole becomes blocks."""
    return Member(None, GroupBlocks.of(cut, x.shape[dim], block, ranks), nbytes_of(x))


def turned(
    x: Tensor, dims: Sequence[int], extents: Sequence[IntLike], cuts: Sequence[GroupCut], ranks: int | None
) -> Member:
    """Blocks of one dim become blocks of another."""
    (src_dim, dst_dim), (total, block), (src, dst) = dims, extents, cuts
    put = GroupBlocks.of(src, total, x.shape[src_dim], ranks)
    get = GroupBlocks.of(dst, x.shape[dst_dim], block, ranks)
    return Member(put, get, nbytes_with(x, src_dim, total))


@dataclass(frozen=True)
class Traffic:
    """What a collective moves.

    Attributes:
        busiest: bytes that the rank sends or receives that has most to.
        total: bytes that all ranks send.
        packed: bytes that the busiest rank reads and writes in its own memory before anything is sent.
        unpacked: the same after everything has come, when the collective is awaited.
        ring: the traffic of a second way, by a ring. Ranks that have a link each take the sooner of the two ways.
        messages: whether the ranks exchange messages before or after the ring, which takes one more launch.
    """

    busiest: float
    total: float
    packed: float = 0.0
    unpacked: float = 0.0
    ring: Traffic | None = None
    messages: bool = False


@dataclass(frozen=True)
class Load:
    """What each rank has of the tensors of a collective, in bytes: a row for blocks, two for an exchange.

    Attributes:
        nbytes: nbytes[row, rank]: of blocks the rank's own; of an exchange what it sends, and what it receives.
    """

    nbytes: np.ndarray

    @staticmethod
    def of_blocks(members: Sequence[Member], n: int, times: int = 1) -> Load:
        """The traffic of blocks that become whole, or of a whole that becomes blocks. A member without blocks counts as
        divided evenly.

        Args:
            members: of a collective.
            n: ranks in the group.
            times: how many of a member make the whole: `n` where a member is a block.
        """
        return Load(np.sum([np.array([shares(m.put or m.get, n)]) * (times * m.nbytes) for m in members], axis=0))

    @staticmethod
    def of_even_blocks(members: Sequence[Member], n: int) -> Load:
        """The traffic of blocks of one size. `nbytes` of a member are those of a block."""
        return Load.of_blocks(members, n, n)

    @staticmethod
    def of_exchange(members: Sequence[Member], n: int) -> Load:
        """The traffic of blocks of one dim that become blocks of another."""
        return Load(np.array(sent_and_received(members, n)))

    @staticmethod
    def together(loads: Sequence[Load]) -> Load:
        """The traffic of several collectives."""
        return Load(np.sum([load.nbytes for load in loads], axis=0))

    @property
    def largest(self) -> float:
        """The bytes of the rank that has most."""
        return float(self.nbytes.max())

    @property
    def whole(self) -> float:
        """The bytes of all ranks."""
        return float(self.nbytes[0].sum())

    @property
    def ranks(self) -> int:
        """How many there are."""
        return int(self.nbytes.shape[1])


def sent_and_received(members: Sequence[Member], n: int) -> tuple[list[float], list[float]]:
    """Bytes by rank where blocks are turned: rank p sends the part of its block that belongs to rank q's."""
    sent, received = [0.0] * n, [0.0] * n
    for m in members:
        for r, (put, get) in enumerate(zip(shares(m.put, n), shares(m.get, n), strict=True)):
            sent[r] += m.nbytes * put * (1 - get)
            received[r] += m.nbytes * get * (1 - put)
    return sent, received


def gathered_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed, and what has come unpacked."""
    copied = 2 * load.largest, 2 * load.whole
    return _all_to_all_ranks(load.nbytes[0], *copied, around_a_ring=copied)


def scattered_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed. The sum of n terms comes out in its place, or the sum itself."""
    packed = 2 * load.whole
    return _all_to_all_ranks(load.nbytes[0], packed, (load.ranks + 1) * load.largest, around_a_ring=(packed, 0.0))


def exchanged_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed, and what has come unpacked."""
    return Traffic(load.largest, load.whole, 2 * load.largest, 2 * load.largest)


def reduced_in_a_bucket(load: Load, passes: int) -> Traffic:
    """What torch's even collectives move of tensors that were joined: once to reduce, twice to tell everybody."""
    n, whole = load.ranks, load.whole
    return Traffic(passes * (n - 1) / n * whole, passes * (n - 1) * whole, 2 * whole)


def blocks_to_all(members: Sequence[Member], n: int) -> Traffic:
    """Each block goes to the n-1 others. The same backwards, and the sum of n terms, where ranks get blocks."""
    held = Load.of_blocks(members, n).nbytes[0]
    reduced = (n + 1) * float(held.max()) if members[0].get is not None else 0.0
    return _all_to_all_ranks(held, 0.0, reduced)


def _all_to_all_ranks(
    held: np.ndarray, packed: float, unpacked: float, around_a_ring: tuple[float, float] = (0.0, 0.0)
) -> Traffic:
    """The traffic where all ranks get, or reduce, all blocks.

    Args:
        held: bytes of each rank's block.
        packed: see `Traffic`, where blocks are sent.
        unpacked: the same.
        around_a_ring: these two, where a ring moves an even division of the blocks.
    """
    n, whole, largest = len(held), float(held.sum()), float(held.max())
    even = largest * n <= whole * (1 + 1e-9)  # sums of floats
    through = (n - 1) / n * whole + (0.0 if even else moved_to_even(held))
    ring = Traffic(through, (n - 1) * whole, *around_a_ring, messages=not even)
    return Traffic((n - 1) * largest, (n - 1) * whole, packed, unpacked, ring)


def even_gather(members: Sequence[Member], n: int) -> Traffic:
    """Equal blocks: `nbytes` are those of one block."""
    whole = n * sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * whole, (n - 1) * whole)


def even_scatter(members: Sequence[Member], n: int) -> Traffic:
    """Terms of one shape, of which every rank gets an equal part."""
    whole = sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * whole, (n - 1) * whole)


def even_exchange(members: Sequence[Member], n: int) -> Traffic:
    """The traffic of an even exchange: each rank keeps one part in n of its payload."""
    payload = sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * payload, (n - 1) * payload)
