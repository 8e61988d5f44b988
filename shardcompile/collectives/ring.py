"""Blocks that travel a number of ranks on: each rank of a group gets the block of the one `by` places before it.

A rank holds its own block and one other at a time, where a gather holds all. So that no step begins before there is
room for what it brings, it can be told `after` which tensor it starts; a graph then has an edge that every compiler
keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.blocks import blocks_of, check_block, sizes_of
from shardcompile.collectives.derived_cuts import block_size, derive
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.pending import wait
from shardcompile.collectives.traffic import GroupBlocks, Member, Traffic, nbytes_with, size_with
from shardcompile.layout import DERIVATIONS, Cut, GroupCut, IntLike


class RingStep(NamedTuple):
    """Arguments of `fetch_block` and `return_block`.

    Attributes:
        inputs: this rank's blocks, of one dtype; of a return what is for blocks that came.
        dims: of the rows of each.
        total: how many rows there are.
        block: how many rows this rank gets.
        by: how many places the blocks travel.
        around: whether the first ranks get blocks of the last ones.
        cut: the blocks.
        after: what has to be there before it starts.
        group_name: the ranks.
    """

    inputs: list[Tensor]
    dims: list[int]
    total: IntLike
    block: IntLike
    by: int
    around: bool
    cut: GroupCut
    after: Tensor | None
    group_name: str


@dataclass(frozen=True)
class PendingBlocks:
    """Blocks that are on their way.

    Attributes:
        flat: what is written: one block after the other.
        shapes: of the blocks.
    """

    flat: Tensor
    shapes: list[list[IntLike]]

    def wait(self) -> list[Tensor]:
        """The blocks, once they are there."""
        flat = wait(self.flat)
        parts = flat.split_with_sizes([math.prod(shape) for shape in self.shapes])  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Ring:
    """The ranks along a mesh dim, of which each has a block of rows.

    Args:
        cut: of the rows, over one mesh dim.
        mesh: the mesh.
        around: whether the first ranks get blocks of the last ones; otherwise they get empty blocks.

    Attributes:
        ranks: how many there are.
    """

    def __init__(self, cut: Cut, mesh: DeviceMesh, *, around: bool) -> None:
        (mesh_dim,) = cut.mesh_dims
        self.ranks = mesh.shape[mesh_dim]
        self._cut, self._mesh, self._around = cut, mesh, around
        self._held = cut.group_ref(compat.coordinate(mesh) or ())
        self._group_name = compat.group_name_of(mesh, mesh_dim)

    def block(self, by: int) -> tuple[IntLike, IntLike]:
        """How many rows the block has that a rank gets, and which row of the whole dim is its first."""
        if by == 0:
            first = derive("located", [self._cut], [], self._cut.extent, self._mesh)[1]
            return block_size(self._cut, self._mesh), first
        shifted, first = derive("shifted", [self._cut], [by, int(self._around)], self._cut.extent, self._mesh)
        size = block_size(shifted, self._mesh)
        compat.suggest_hint(size, -(-compat.size_hint(self._cut.extent) // self.ranks))
        return size, first

    def fetch(
        self, blocks: Sequence[Tensor], dims: Sequence[int], by: int, after: Tensor | None = None
    ) -> PendingBlocks:
        """Start to get the blocks of the rank `by` places before this one. They travel as they are stored.

        Args:
            blocks: this rank's, of one dtype: several tensors with as many rows.
            dims: of the rows of each.
            by: 1 to ``ranks - 1``.
            after: what has to be there before it starts.
        """
        return self._step(FETCH_BLOCK, blocks, dims, self.block(by)[0], by, after)

    def give_back(self, blocks: Sequence[Tensor], dims: Sequence[int], by: int) -> PendingBlocks:
        """The adjoint of `fetch`: rows for blocks that came go to the rank that they came from.

        A rank whose blocks nobody got receives zeros.
        """
        return self._step(RETURN_BLOCK, blocks, dims, self.block(0)[0], by, None)

    def _step(
        self,
        of: Descriptor[RingStep],
        blocks: Sequence[Tensor],
        dims: Sequence[int],
        size: IntLike,
        by: int,
        after: Tensor | None,
    ) -> PendingBlocks:
        total, around = self._cut.extent, self._around
        step = RingStep(list(blocks), list(dims), total, size, by, around, self._held, after, self._group_name)
        return PendingBlocks(of.call(step), [_with_extent(x, d, size) for x, d in zip(blocks, dims, strict=True)])


def _with_extent(x: Tensor, dim: int, extent: IntLike) -> list[IntLike]:
    """The shape of a tensor, had it this extent along a dim."""
    return [extent if d == dim else n for d, n in enumerate(x.shape)]


def _numel(a: RingStep) -> list[IntLike]:
    """Elements of what this rank gets, for each tensor."""
    return [math.prod(_with_extent(x, d, a.block)) for x, d in zip(a.inputs, a.dims, strict=True)]


def _step(a: RingStep, of: Descriptor[RingStep], *, back: bool) -> Tensor:
    group, blocks = compat.process_group(a.group_name), a.inputs
    me, n = group.rank(), group.size()
    held = blocks_of(int(a.total), a.dims[0], a.cut, n, of.kind)

    def other(distance: int) -> int | None:
        rank = me + distance
        return rank % n if a.around or 0 <= rank < n else None

    before, behind = other(-a.by), other(a.by)
    fetched = (0, 0) if before is None else held[before]
    for x, dim in zip(blocks, a.dims, strict=True):
        check_block(x.shape, dim, fetched if back else held[me], me, of.kind)
    source, target = (behind, before) if back else (before, behind)
    sizes = [int(numel) for numel in _numel(a)]
    out = blocks[0].new_zeros([sum(sizes)]) if source is None else blocks[0].new_empty([sum(sizes)])
    widths = [n for x, dim in zip(blocks, a.dims, strict=True) for d, n in enumerate(x.shape) if d != dim]
    call = of.enter(group, blocks[0].dtype, a.by, sizes_of(held), tuple(widths))
    # Messages between two ranks of one call arrive in the order in which they are sent.
    sends = [] if target is None else [(target, x.contiguous()) for x in blocks]
    receives = [] if source is None else [(source, part) for part in out.split(sizes)]
    transport.complete(out, call, transport.exchange(call, sends, receives))
    return out


def _fake(a: RingStep) -> Tensor:
    return a.inputs[0].new_empty([sum(_numel(a))])


def _away(a: RingStep, side: GroupBlocks) -> GroupBlocks:
    """Blocks that are on other ranks than their own: they do not know their cut."""
    if side.sizes is None:
        return side
    return replace(side, sizes=DERIVATIONS["shifted"]([side.sizes], a.by, a.around)[0])


def _members(a: RingStep, n: int | None, *, back: bool) -> list[Member]:
    """Blocks that go where their cut says, and away from there, or back."""
    members = []
    for x, dim in zip(a.inputs, a.dims, strict=True):
        put, get = GroupBlocks.of(a.cut, a.total, x.shape[dim], n), GroupBlocks.of(a.cut, a.total, a.block, n)
        sides = (_away(a, put), get) if back else (put, _away(a, get))
        members.append(Member(*sides, nbytes_with(x, dim, a.total)))
    return members


def _whole(a: RingStep) -> object:
    return sum(size_with(x, dim, a.total) for x, dim in zip(a.inputs, a.dims, strict=True))  # type: ignore[misc]


def _traffic(nbytes: int, own: GroupBlocks | None, away: GroupBlocks | None, n: int) -> Traffic:
    """What ranks have of other ranks' blocks has come, or goes back."""
    assert own is not None and away is not None
    if own.sizes is None or away.sizes is None:
        return Traffic(nbytes / n, nbytes)
    rows = max(sum(own.sizes), 1)
    return Traffic(nbytes * max(away.sizes) / rows, nbytes * sum(away.sizes) / rows)


def _fetch_traffic(members: Sequence[Member], n: int) -> Traffic:
    return _traffic(sum(m.nbytes for m in members), members[0].put, members[0].get, n)


def _return_traffic(members: Sequence[Member], n: int) -> Traffic:
    return _traffic(sum(m.nbytes for m in members), members[0].get, members[0].put, n)


FETCH_BLOCK: Descriptor[RingStep] = Descriptor(
    "fetch_block",
    RingStep,
    lambda a: _step(a, FETCH_BLOCK, back=False),
    fake=_fake,
    members=lambda a, n: _members(a, n, back=False),
    traffic=_fetch_traffic,
    whole=_whole,
    source=lambda a: (a.total, a.cut),
    states=("by", "in blocks of", "other extents"),
    told=True,
)

RETURN_BLOCK: Descriptor[RingStep] = Descriptor(
    "return_block",
    RingStep,
    lambda a: _step(a, RETURN_BLOCK, back=True),
    fake=_fake,
    members=lambda a, n: _members(a, n, back=True),
    traffic=_return_traffic,
    whole=_whole,
    source=lambda a: (a.total, a.cut),
    states=("by", "in blocks of", "other extents"),
    told=True,
)
