"""Moves the rows of a dim between blocks of neighbouring rows and blocks that have a part of each of several stretches.

``x.view(-1, channels)`` of a cut sequence and a batch of n has n stretches: each block has some rows of every sequence.
Which rows go where follows from the two cuts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.blocks import as_rows, blocks_of, check_block, new_rows, other_extents, sizes_of
from shardcompile.collectives.derived_cuts import block_size, derive
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.traffic import GroupBlocks, Member, Traffic, nbytes_with, sent_and_received, size_with
from shardcompile.errors import CollectiveError
from shardcompile.layout import Cut, GroupCut, IntLike, neighbouring


class Regroup(NamedTuple):
    """Arguments of `regroup_rows`.

    Attributes:
        input: this rank's block.
        dim: of the rows.
        total: how many rows there are.
        block: how many rows this rank gets.
        src: sizes of the blocks that ranks hold.
        dst: sizes of the blocks that ranks want.
        held_in: how many equal stretches the dim has of which each rank holds a part.
        wanted_in: how many it has of which each rank wants a part.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    total: IntLike
    block: IntLike
    src: GroupCut
    dst: GroupCut
    held_in: IntLike
    wanted_in: IntLike
    group_name: str


@dataclass(frozen=True)
class _Stretches:
    """Where the rows of a cut are.

    Attributes:
        count: how many stretches there are.
        length: of each, in rows.
        edges: where each rank's part of a stretch begins, and where the last one ends: [ranks + 1], int64, on the CPU.
    """

    count: int
    length: int
    edges: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], count: int) -> _Stretches:
        """Those of blocks.

        Raises:
            CollectiveError: a block has no equal part of every stretch.
        """
        if any(n % count for n in sizes):
            raise CollectiveError(f"regroup_rows: blocks of {list(sizes)} rows have no equal part of {count} stretches")
        ends = torch.tensor([0, *sizes], device="cpu").cumsum(0) // count
        return cls(count, sum(sizes) // count, ends)

    def rows(self, rank: int) -> Tensor:
        """The numbers of a rank's rows, rising."""
        part = torch.arange(int(self.edges[rank]), int(self.edges[rank + 1]), device="cpu")
        return (torch.arange(self.count, device="cpu").unsqueeze(1) * self.length + part).view(-1)

    def owners(self, numbers: Tensor) -> Tensor:
        """The rank that has each row."""
        return torch.searchsorted(self.edges[:-1], numbers.remainder(max(self.length, 1)), right=True) - 1


class _Plan(NamedTuple):
    """Which rows go where.

    Attributes:
        leaving: the order in which this rank's rows go, those for the first rank first; None for their own.
        sent: how many go to each rank.
        received: how many come from each.
        arriving: for each row that is wanted, its place among those that come; None if they come in their order.
    """

    leaving: Tensor | None
    sent: list[int]
    received: list[int]
    arriving: Tensor | None


@functools.lru_cache(maxsize=256)
def _plan_of(src: tuple[int, ...], dst: tuple[int, ...], held_in: int, wanted_in: int, me: int) -> _Plan:
    """Kept: a program moves rows between the same cuts again and again."""
    before, after = _Stretches.of(src, held_in), _Stretches.of(dst, wanted_in)
    to, of = after.owners(before.rows(me)), before.owners(after.rows(me))
    sent, received = (torch.bincount(ranks, minlength=len(src)).tolist() for ranks in (to, of))
    # Rising numbers go to rising ranks if those have neighbouring rows, and come from such.
    leaving = None if wanted_in == 1 else to.argsort(stable=True)
    arriving = None if held_in == 1 else of.argsort(stable=True).argsort()
    return _Plan(leaving, sent, received, arriving)


def _run(a: Regroup) -> Tensor:
    group, x, dim, total, block = compat.process_group(a.group_name), a.input, a.dim, int(a.total), int(a.block)
    held, wanted = (blocks_of(total, dim, cut, group.size(), REGROUP_ROWS.kind) for cut in (a.src, a.dst))
    check_block(x.shape, dim, held[group.rank()], group.rank(), REGROUP_ROWS.kind)
    plan = _plan_of(sizes_of(held), sizes_of(wanted), int(a.held_in), int(a.wanted_in), group.rank())
    leaving = transport.rows_first(x, dim)
    if plan.leaving is not None:
        leaving = leaving.index_select(0, plan.leaving.to(x.device))
    out = new_rows(x, dim, block)
    target = as_rows(out, x, dim, block)
    memory = out if plan.arriving is None else scratch.borrow(out.numel(), out)
    came = memory.view(target.shape)
    stated = (dim, sizes_of(held), sizes_of(wanted), int(a.held_in), int(a.wanted_in), other_extents(x, dim))
    call = REGROUP_ROWS.enter(group, x.dtype, *stated)
    ends = transport.running_ends(plan.sent), transport.running_ends(plan.received)
    works = transport.send_ranges(call, leaving, ends[0], came, ends[1])

    def put_in_order() -> None:
        if plan.arriving is not None:
            torch.index_select(came, 0, plan.arriving.to(x.device), out=target)
            scratch.give_back(memory)

    transport.complete(out, call, works, None if plan.arriving is None else put_in_order)
    return out


def _back(a: Regroup, input: Tensor, block: IntLike) -> Regroup:
    return a._replace(input=input, block=block, src=a.dst, dst=a.src, held_in=a.wanted_in, wanted_in=a.held_in)


def _adjoint(a: Regroup, shape: torch.Size, grad: Tensor) -> Tensor:
    return REGROUP_ROWS.start(_back(a, grad, shape[a.dim])).wait()


def _members(a: Regroup, n: int | None) -> list[Member]:
    put = GroupBlocks.of(a.src, a.total, a.input.shape[a.dim], n)
    get = GroupBlocks.of(a.dst, a.total, a.block, n)
    return [Member(put, get, nbytes_with(a.input, a.dim, a.total))]


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    """As if each rank had something for every other one: stretches are many."""
    sent, received = sent_and_received(members, n)
    (m,) = members
    return Traffic(max(*sent, *received), sum(sent), 2 * m.nbytes / n, 2 * m.nbytes / n)


REGROUP_ROWS: Descriptor[Regroup] = Descriptor(
    "regroup_rows",
    Regroup,
    _run,
    extents=lambda a: {a.dim: a.block},
    adjoint=_adjoint,
    inverse=lambda a, back: _back(a, back.input, back.block),
    members=_members,
    traffic=_traffic,
    whole=lambda a: size_with(a.input, a.dim, a.total),
    source=lambda a: (a.total, a.src),
    states=("dim", "in blocks of", "to blocks of", "stretches held", "stretches wanted", "other extents"),
    told=True,
    as_integers=True,
)


def numbers_of_block(cut: Cut, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """The numbers in the whole dim of the rows of this rank's block, rising: [n], int64.

    Args:
        cut: over one mesh dim.
        mesh: the mesh.
        device: of the result.
    """
    extent: Any = cut.extent
    size: Any = block_size(cut, mesh)
    first: Any = derive("located", [neighbouring(cut)], [], extent, mesh)[1]
    runs: Any = cut.runs
    if compat.is_one(runs):
        return torch.arange(size, device=device) + first
    stretches = torch.arange(runs, device=device).unsqueeze(1) * (extent // runs)
    numbers = stretches + (torch.arange(size // runs, device=device) + first // runs)
    return torch.ops.aten.view.default(numbers, [size])
