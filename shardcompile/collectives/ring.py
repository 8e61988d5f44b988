"""Blocks that travel a number of ranks on: each rank of a group gets the block of the one `by` places before it.

A rank holds its own block and one other at a time, where a gather holds all. So that no step begins before there is
room for what it brings, it can be told `after` which tensor it starts; a graph then has an edge that every compiler
keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.blocks import blocks_of, check_block, sizes_of
from shardcompile.collectives.derived_cuts import block_size, derive
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.pending import Pending
from shardcompile.collectives.traffic import Member, Side, Traffic, nbytes_with, size_with
from shardcompile.layout import DERIVATIONS, Cut, GroupCut, IntLike


class RingStep(NamedTuple):
    """Arguments of `fetch_block` and `return_block`.

    Attributes:
        input: this rank's block; of a return rows for the block that came.
        dim: of the rows.
        total: how many rows there are.
        block: how many rows this rank gets.
        by: how many places the block travels.
        around: whether the first ranks get blocks of the last ones.
        cut: the blocks.
        after: what has to be there before it starts.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    total: IntLike
    block: IntLike
    by: int
    around: bool
    cut: GroupCut
    after: Tensor | None
    group_name: str


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

    def fetch(self, rows: Tensor, by: int, after: Tensor | None = None) -> Pending:
        """Start to get the block of the rank `by` places before this one.

        Args:
            rows: this rank's block: [n, ...].
            by: 1 to ``ranks - 1``.
            after: what has to be there before it starts.
        """
        size, _ = self.block(by)
        return self._step(FETCH_BLOCK, rows, size, by, after)

    def give_back(self, rows: Tensor, by: int, after: Tensor | None = None) -> Pending:
        """The adjoint of `fetch`: rows for a block that came go to the rank that it came from.

        A rank whose block nobody got receives zeros.
        """
        return self._step(RETURN_BLOCK, rows, self.block(0)[0], by, after)

    def _step(self, of: Descriptor[RingStep], rows: Tensor, size: IntLike, by: int, after: Tensor | None) -> Pending:
        total, around = self._cut.extent, self._around
        return of.start(RingStep(rows, 0, total, size, by, around, self._held, after, self._group_name))


def _step(a: RingStep, of: Descriptor[RingStep], *, back: bool) -> Tensor:
    group, x, block = compat.process_group(a.group_name), a.input, int(a.block)
    me, n = group.rank(), group.size()
    held = blocks_of(int(a.total), a.dim, a.cut, n, of.kind)

    def other(distance: int) -> int | None:
        rank = me + distance
        return rank % n if a.around or 0 <= rank < n else None

    before, behind = other(-a.by), other(a.by)
    fetched = (0, 0) if before is None else held[before]
    check_block(x.shape, a.dim, fetched if back else held[me], me, of.kind)
    source, target = (behind, before) if back else (before, behind)
    rows = transport.rows_first(x, a.dim)
    size = block * math.prod(rows.shape[1:])
    out = x.new_zeros([size]) if source is None else x.new_empty([size])
    call = of.enter(group, x.dtype, a.by, sizes_of(held), tuple(rows.shape[1:]))
    sends = [] if target is None else [(target, rows)]
    receives = [] if source is None else [(source, out)]
    transport.complete(out, call, transport.exchange(call, sends, receives))
    return out


def _sides(a: RingStep, n: int | None) -> tuple[Side, Side]:
    """The blocks that go where their cut says, and those that do not know it: put in, and got."""
    return Side.of(a.cut, a.total, a.input.shape[a.dim], n), Side.of(a.cut, a.total, a.block, n)


def _away(a: RingStep, side: Side) -> Side:
    """Blocks that are on other ranks than their own."""
    if side.sizes is None:
        return side
    return replace(side, sizes=DERIVATIONS["shifted"]([side.sizes], a.by, a.around)[0])


def _fetch_members(a: RingStep, n: int | None) -> list[Member]:
    put, get = _sides(a, n)
    return [Member(put, _away(a, get), nbytes_with(a.input, a.dim, a.total))]


def _return_members(a: RingStep, n: int | None) -> list[Member]:
    put, get = _sides(a, n)
    return [Member(_away(a, put), get, nbytes_with(a.input, a.dim, a.total))]


def _traffic(nbytes: int, own: Side | None, away: Side | None, n: int) -> Traffic:
    """What ranks have of other ranks' blocks has come, or goes back."""
    assert own is not None and away is not None
    if own.sizes is None or away.sizes is None:
        return Traffic(nbytes / n, nbytes)
    rows = max(sum(own.sizes), 1)
    return Traffic(nbytes * max(away.sizes) / rows, nbytes * sum(away.sizes) / rows)


def _fetch_traffic(members: Sequence[Member], n: int) -> Traffic:
    (m,) = members
    return _traffic(m.nbytes, m.put, m.get, n)


def _return_traffic(members: Sequence[Member], n: int) -> Traffic:
    (m,) = members
    return _traffic(m.nbytes, m.get, m.put, n)


FETCH_BLOCK: Descriptor[RingStep] = Descriptor(
    "fetch_block",
    RingStep,
    lambda a: _step(a, FETCH_BLOCK, back=False),
    extents=lambda a: {a.dim: a.block},
    members=_fetch_members,
    traffic=_fetch_traffic,
    whole=lambda a: size_with(a.input, a.dim, a.total),
    source=lambda a: (a.total, a.cut),
    states=("by", "in blocks of", "other extents"),
    told=True,
)

RETURN_BLOCK: Descriptor[RingStep] = Descriptor(
    "return_block",
    RingStep,
    lambda a: _step(a, RETURN_BLOCK, back=True),
    extents=lambda a: {a.dim: a.block},
    members=_return_members,
    traffic=_return_traffic,
    whole=lambda a: size_with(a.input, a.dim, a.total),
    source=lambda a: (a.total, a.cut),
    states=("by", "in blocks of", "other extents"),
    told=True,
)
