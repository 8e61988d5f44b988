"""Halo exchange along a periodic dim: fetches the rows around each shard, and its adjoint, which adds them back.

In a periodic dim the first row follows the last one. A stencil reads shards with such halos; `torch.roll` reads shards
that begin some rows earlier or later, which is a halo exchange with a negative halo on one side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.exchange import Exchange
from shardcompile.collectives.ranges import JOINS, traffic
from shardcompile.collectives.shards import Shards, as_rows, check_shard, new_rows, other_sizes, shards_of_sizes
from shardcompile.collectives.traffic import GroupShards, Member, nbytes_with, size_with
from shardcompile.collectives.transport import Range
from shardcompile.sharding import REMEMBERED, GroupPartition, IntLike, chunk_sizes


class HaloExchange(NamedTuple):
    """Arguments of `fetch_around` and `return_around`.

    Attributes:
        input: the local shard; of a return the values for the shard with its halo.
        dim: the sharded dim.
        before: number of halo rows before the shard. If it is negative, that many rows of the shard are left out.
        after: number of halo rows after the shard, or negative likewise. The halo of an empty shard is zeros, so that
            every rank gets ``before + after`` rows more than it holds.
        total: global size of the dim.
        shard: number of rows in this rank's result.
        partition: the partition of the dim.
        group_name: the process group.
    """

    input: Tensor
    dim: int
    before: IntLike
    after: IntLike
    total: IntLike
    shard: IntLike
    partition: GroupPartition
    group_name: str


class Piece(NamedTuple):
    """A range of rows of one rank's shard that another rank wants.

    Attributes:
        held: the range in the shard of the holder.
        got: the range in the shard with halo of the receiver.
    """

    held: Range
    got: Range


def pieces(holder: Range, wants: Range, before: int, after: int, total: int) -> list[Piece]:
    """Returns the rows of a shard that the rank with another shard wants, in the order in which it receives them.

    >>> pieces((3, 5), (0, 3), 1, 2, 5)  # of five rows: the last one before the shard, and the two after it
    [Piece(held=(1, 2), got=(0, 1)), Piece(held=(0, 2), got=(4, 6))]

    Args:
        holder: the global range of the holder's shard.
        wants: the global range of the receiver's shard.
        before: see `HaloExchange`.
        after: see `HaloExchange`.
        total: global number of rows.
    """
    start, end = wants[0] - before, wants[1] + after
    if wants[1] == wants[0] or end <= start:
        return []
    found = []
    for period in range(start // total, (end - 1) // total + 1):
        first, last = transport.overlap(transport.shifted(holder, period * total), (start, end))
        if last > first:
            offset = first - period * total - holder[0]
            found.append(Piece((offset, offset + last - first), (first - start, last - start)))
    return found


class _Plan(NamedTuple):
    """The rows that this rank sends to and receives from the others, and those that it keeps.

    Attributes:
        held: the global ranges of all shards.
        given: the pieces of the local shard that other ranks want, each with the rank.
        taken: the pieces of other ranks' shards that this rank wants, each with the rank.
        own: the pieces of the local shard that this rank wants.
        around: number of local rows including the halo.
    """

    held: Shards
    given: list[tuple[int, Piece]]
    taken: list[tuple[int, Piece]]
    own: list[Piece]
    around: int


def _plan(a: HaloExchange, group: ProcessGroup, what: str) -> _Plan:
    total = int(a.total)
    sizes = a.partition.shards(total, group.size())
    return _plan_of(what, a.dim, total, sizes, int(a.before), int(a.after), group.rank())


@functools.lru_cache(REMEMBERED)
def _plan_of(what: str, dim: int, total: int, sizes: tuple[int, ...], before: int, after: int, me: int) -> _Plan:
    """Returns the plan of a rank. Remembered, since it takes time that grows with the number of ranks."""
    held = shards_of_sizes(sizes, total, dim, what)
    mine = held[me]
    others = [(p, shard) for p, shard in enumerate(held) if p != me]
    given = [(p, piece) for p, other in others for piece in pieces(mine, other, before, after, total)]
    taken = [(p, piece) for p, other in others for piece in pieces(other, mine, before, after, total)]
    own = pieces(mine, mine, before, after, total)
    return _Plan(held, given, taken, own, mine[1] - mine[0] + before + after)


def exchange_to_fetch(a: HaloExchange, out: Tensor | None = None) -> Exchange:
    """Returns this rank's exchange of `fetch_around`, which fetches the shard with its halo.

    Args:
        a: the arguments.
        out: a flat tensor to write; None for new memory.
    """
    group, x, dim, shard = compat.process_group(a.group_name), a.input, a.dim, int(a.shard)
    me, plan = group.rank(), _plan(a, group, FETCH_HALO.kind)
    check_shard(x.shape, dim, plan.held[me], me, FETCH_HALO.kind)
    out = new_rows(x, dim, shard) if out is None else out
    if plan.held[me][0] == plan.held[me][1]:
        out.zero_()
    target = as_rows(out, x, dim, shard)
    for piece in plan.own:
        target[slice(*piece.got)].copy_(x.movedim(dim, 0)[slice(*piece.held)])
    # Messages between two ranks arrive in the order in which they are sent.
    sends = [(p, _rows(x, dim, piece.held)) for p, piece in plan.given]
    receives = [(p, target[slice(*piece.got)]) for p, piece in plan.taken]
    return Exchange(out, sends, receives, _stated(a, plan))


def exchange_to_return(a: HaloExchange, out: Tensor | None = None) -> Exchange:
    """Returns this rank's exchange of `return_around`, which adds halo rows on the ranks that hold them.

    The arguments are those of `exchange_to_fetch`.
    """
    group, x, dim, shard = compat.process_group(a.group_name), a.input, a.dim, int(a.shard)
    me, plan = group.rank(), _plan(a, group, RETURN_HALO.kind)
    check_shard(x.shape, dim, (0, plan.around), me, RETURN_HALO.kind)
    out = (new_rows(x, dim, shard) if out is None else out).zero_()
    target = as_rows(out, x, dim, shard)
    for piece in plan.own:
        target[slice(*piece.held)].add_(x.movedim(dim, 0)[slice(*piece.got)])
    width = target.shape[1:].numel()
    memory = [scratch.borrow((piece.held[1] - piece.held[0]) * width, target) for _, piece in plan.given]
    parts = [m.view(-1, *target.shape[1:]) for m in memory]
    sends = [(p, _rows(x, dim, piece.got)) for p, piece in plan.taken]

    def accumulate() -> None:
        for (_, piece), part in zip(plan.given, parts, strict=True):
            target[slice(*piece.held)].add_(part)
        scratch.give_back(*memory)

    receives = [(p, part) for (p, _), part in zip(plan.given, parts, strict=True)]
    return Exchange(out, sends, receives, _stated(a, plan), accumulate if parts else None)


def _stated(a: HaloExchange, plan: _Plan) -> tuple[object, ...]:
    return a.dim, plan.held.sizes, a.before, a.after, other_sizes(a.input, a.dim)


def _rows(x: Tensor, dim: int, rows: Range) -> Tensor:
    return transport.rows_first(x.narrow(dim, rows[0], rows[1] - rows[0]), dim)


def _is_roll(a: HaloExchange) -> bool:
    """Returns whether each row is wanted exactly once, so that the adjoint needs no addition."""
    return compat.guard_equal(a.after, -a.before)


def _adjoint_of_fetch(a: HaloExchange, shape: torch.Size, grad: Tensor) -> Tensor:
    back = a._replace(input=grad, shard=shape[a.dim])
    if _is_roll(a):
        return FETCH_HALO.start(back._replace(before=a.after, after=a.before)).wait()
    return RETURN_HALO.start(back).wait()


def _adjoint_of_return(a: HaloExchange, shape: torch.Size, grad: Tensor) -> Tensor:
    return FETCH_HALO.start(a._replace(input=grad, shard=shape[a.dim])).wait()


def _inverse(a: HaloExchange, back: HaloExchange) -> HaloExchange | None:
    """Returns None where rows are wanted twice, or where the size of the halo is not static."""
    numbers = (a.before, a.after, back.before, back.after)
    if not all(isinstance(n, int) for n in numbers) or a.after != -a.before:
        return None
    return a._replace(input=back.input, before=a.after, after=a.before, shard=back.shard)


def _member(a: HaloExchange, n: int | None) -> tuple[GroupShards, GroupShards, Member]:
    """Returns the shards that ranks hold, the shards with halos, and both as the `Member` of a fetch."""
    before, after, total = map(compat.size_hint, (a.before, a.after, a.total))
    held_side = GroupShards.of(a.partition, a.total, n)
    wanted_side = GroupShards.of(a.partition, a.total, n, max(before + after, 0))
    nbytes, arriving = nbytes_with(a.input, a.dim, a.total), None
    if n is not None:
        shards = transport.running_ends(held_side.sizes or chunk_sizes(total, n))
        kept = [sum(p.got[1] - p.got[0] for p in pieces(b, b, before, after, total)) for b in shards]
        remote = [max(b - a + before + after, 0) - k if b > a else 0 for (a, b), k in zip(shards, kept, strict=True)]
        arriving = tuple(rows * nbytes / max(total, 1) for rows in remote)
    return held_side, wanted_side, Member(held_side, wanted_side, nbytes, arriving)


def _fetch_members(a: HaloExchange, n: int | None) -> list[Member]:
    _, _, member = _member(a, n)
    return [member]


def _return_members(a: HaloExchange, n: int | None) -> list[Member]:
    held_side, wanted_side, member = _member(a, n)
    return [replace(member, put=wanted_side, get=held_side)]


def _describe(
    kind: str,
    exchange: Callable[[HaloExchange], Exchange],
    adjoint: Callable[[HaloExchange, torch.Size, Tensor], Tensor],
    members: Callable[[HaloExchange, int | None], list[Member]],
    inverse: Callable[[HaloExchange, HaloExchange], HaloExchange | None] | None = None,
) -> Descriptor[HaloExchange]:
    descriptor: Descriptor[HaloExchange] = Descriptor(
        kind,
        HaloExchange,
        lambda a: exchange(a).start(descriptor, a.group_name),
        sizes=lambda a: {a.dim: a.shard},
        adjoint=adjoint,
        inverse=inverse,
        members=members,
        traffic=traffic,
        joins=JOINS,
        whole=lambda a: size_with(a.input, a.dim, a.total),
        source=lambda a: (a.total, a.partition),
        states=("dim", "shard sizes", "rows before", "rows after", "other sizes"),
    )
    return descriptor


FETCH_HALO = _describe("fetch_around", exchange_to_fetch, _adjoint_of_fetch, _fetch_members, _inverse)
RETURN_HALO = _describe("return_around", exchange_to_return, _adjoint_of_return, _return_members)
