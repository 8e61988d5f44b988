"""Rows that move around a dim by a number of places: what leaves behind the last block comes in before the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.blocks import as_rows, blocks_of, check_block, new_rows, other_extents, sizes_of
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.traffic import GroupBlocks, Member, Traffic, nbytes_with, size_with
from shardcompile.collectives.transport import Range
from shardcompile.layout import GroupCut, IntLike, chunk_sizes


class RollRows(NamedTuple):
    """Arguments of `roll_rows`.

    Attributes:
        input: this rank's block.
        dim: that is cut.
        shift: by how many places rows move to the end; negative to the front.
        total: how many rows there are.
        block: how many rows this rank holds, and gets.
        cut: the blocks that ranks hold.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    shift: IntLike
    total: IntLike
    block: IntLike
    cut: GroupCut
    group_name: str


def _wanted(block: Range, shift: int, total: int) -> tuple[Range, Range]:
    """Of the rows that come to a block those in front, and those behind that come before them. Either may be empty.

    Args:
        block: first row and end row.
        shift: from 0 to `total`.
        total: how many rows there are.
    """
    start, end = transport.shifted(block, -shift)
    return (max(start, 0), max(end, 0)), (min(start, 0) + total, min(end, 0) + total)


def _run(a: RollRows) -> Tensor:
    """Start to get the rows of this rank's block, by one message from each rank that has some."""
    group, x, dim, total, block = compat.process_group(a.group_name), a.input, a.dim, int(a.total), int(a.block)
    me, ranks = group.rank(), range(group.size())
    held = blocks_of(total, dim, a.cut, group.size(), ROLL_ROWS.kind)
    check_block(x.shape, dim, held[me], me, ROLL_ROWS.kind)
    shift = int(a.shift) % max(total, 1)
    wanted = [_wanted(b, shift, total) for b in held]
    front, behind = wanted[me]
    rows_behind = behind[1] - behind[0]
    out = new_rows(x, dim, block)
    target = as_rows(out, x, dim, block)
    # What one rank sends is one range of what is got, in the order of rows: those in front first. Where some come from
    # behind as well, the two parts change places at the end.
    turned = rows_behind > 0 and front[1] > front[0]
    memory = scratch.borrow(target.numel(), target) if turned else out
    got = memory.view(target.shape)

    def place(p: int) -> Range:
        """Where the rows that rank p holds come."""
        first, last = (transport.overlap(held[p], w) for w in (front, behind))
        start = first[0] - front[0] if first[1] > first[0] else front[1] - front[0] + last[0] - behind[0]
        count = first[1] - first[0] + last[1] - last[0]
        return (start, start + count) if count else (0, 0)

    def part(p: int) -> Tensor:
        """What rank p gets of this rank's rows."""
        ranges = [transport.shifted(transport.overlap(held[me], w), -held[me][0]) for w in wanted[p]]
        rows = [x.narrow(dim, i, j - i) for i, j in ranges if j > i]
        return transport.rows_first(torch.cat(rows, dim) if len(rows) > 1 else (rows or [x.narrow(dim, 0, 0)])[0], dim)

    got[slice(*place(me))].copy_(part(me))
    sends = [(p, part(p)) for p in ranks if p != me]
    receives = [(p, got[slice(*place(p))]) for p in ranks if p != me]
    call = ROLL_ROWS.enter(group, x.dtype, dim, sizes_of(held), shift, other_extents(x, dim))

    def turn() -> None:
        rest = len(got) - rows_behind
        torch.cat([got[rest:], got[:rest]], out=target)
        scratch.give_back(memory)

    transport.complete(out, call, transport.exchange(call, sends, receives), turn if turned else None)
    return out


def _adjoint(a: RollRows, shape: torch.Size, grad: Tensor) -> Tensor:
    return ROLL_ROWS.start(a._replace(input=grad, shift=-a.shift, block=shape[a.dim])).wait()


def _inverse(a: RollRows, back: RollRows) -> RollRows | None:
    """None where a shift is not known while compiling."""
    if not (isinstance(a.shift, int) and isinstance(back.shift, int)):
        return None
    return a._replace(input=back.input, shift=-a.shift, block=back.block)


def _members(a: RollRows, n: int | None) -> list[Member]:
    """Blocks that stay as they are, and of each the rows that leave it."""
    side = GroupBlocks.of(a.cut, a.total, a.input.shape[a.dim], n)
    if n is not None:
        total = compat.size_hint(a.total)
        shift = compat.size_hint(a.shift) % max(total, 1)
        sizes = side.sizes or chunk_sizes(total, n)
        leave = [b - max(b - shift, 0) - (max(b - total + shift, 0) if shift else 0) for b in sizes]
        side = replace(side, assumed=tuple(leave))
    return [Member(side, side, nbytes_with(a.input, a.dim, a.total))]


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    (m,) = members
    assert m.put is not None and m.put.assumed is not None
    leave = m.put.assumed
    rows = max(sum(m.put.sizes or leave), 1)
    return Traffic(m.nbytes * max(leave) / rows, m.nbytes * sum(leave) / rows)


ROLL_ROWS = Descriptor(
    "roll_rows",
    RollRows,
    _run,
    extents=lambda a: {a.dim: a.block},
    adjoint=_adjoint,
    inverse=_inverse,
    members=_members,
    traffic=_traffic,
    whole=lambda a: size_with(a.input, a.dim, a.total),
    source=lambda a: (a.total, a.cut),
    states=("dim", "in blocks of", "by places", "other extents"),
    told=True,
)
