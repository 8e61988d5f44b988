"""Rows around the shards of a dim whose ends meet, and the way back for sums: each the other's adjoint.

Behind the last row of such a dim comes the first one again. Shards with rows around them are what a stencil reads in a
periodic domain. `torch.roll` gives shards that begin a number of rows earlier or later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.exchange import Exchange
from shardcompile.collectives.ranges import JOINS, traffic
from shardcompile.collectives.shards import as_rows, check_shard, new_rows, other_sizes, shards_of, sizes_of
from shardcompile.collectives.traffic import GroupShards, Member, nbytes_with, size_with
from shardcompile.collectives.transport import Range
from shardcompile.sharding import GroupPartition, IntLike, chunk_sizes


class Around(NamedTuple):
    """Arguments of `fetch_around` and `return_around`.

    Attributes:
        input: this rank's local shard; of a return what belongs to the rows that it wants.
        dim: of the rows.
        before: how many rows in front of its shard a rank wants. If it is negative, that many rows are left out.
        after: the same for rows behind the shard. Around an empty shard lie rows of zeros, so that every rank gets
            ``before + after`` rows more than it holds.
        total: how many rows there are.
        shard: how many rows this rank gets.
        sharded: the shards that ranks hold.
        group_name: the ranks.
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
    """Rows of one rank's shard that another one wants.

    Attributes:
        held: where they lie in the shard.
        got: where they come in what is wanted.
    """

    held: Range
    got: Range


def pieces(holder: Range, wants: Range, before: int, after: int, total: int) -> list[Piece]:
    """The rows of a shard that the rank with another shard wants, in the order in which that one has them.

    >>> pieces((3, 5), (0, 3), 1, 2, 5)  # of five rows: the last one in front, and those behind
    [Piece(held=(1, 2), got=(0, 1)), Piece(held=(0, 2), got=(4, 6))]

    Args:
        holder: first row and end row of the shard.
        wants: of the other shard.
        before: see `Around`.
        after: see `Around`.
        total: how many rows there are.
    """
    start, end = wants[0] - before, wants[1] + after
    if wants[1] == wants[0] or end <= start:
        return []
    found = []
    for turn in range(start // total, (end - 1) // total + 1):
        first, last = transport.overlap(transport.shifted(holder, turn * total), (start, end))
        if last > first:
            at = first - turn * total - holder[0]
            found.append(Piece((at, at + last - first), (first - start, last - start)))
    return found


class _Plan(NamedTuple):
    """Which rows go where.

    Attributes:
        held: the shards.
        given: by rank what it wants of this rank's local shard.
        taken: by rank what this rank wants of its shard.
        around: how many rows this rank has with those around it.
    """

    held: list[Range]
    given: list[list[Piece]]
    taken: list[list[Piece]]
    around: int

    @staticmethod
    def of(a: Around, ranks: int, me: int, what: str) -> _Plan:
        reach = (int(a.before), int(a.after), int(a.total))
        held = shards_of(reach[2], a.dim, a.partition, ranks, what)
        given = [pieces(held[me], other, *reach) for other in held]
        taken = [pieces(other, held[me], *reach) for other in held]
        return _Plan(held, given, taken, held[me][1] - held[me][0] + reach[0] + reach[1])


def exchange_to_fetch(a: Around, out: Tensor | None = None) -> Exchange:
    """A rank's part in `fetch_around`: to get the rows of its shard and those around it.

    Args:
        a: the arguments.
        out: flat, to be written; None for new memory.
    """
    group, x, dim, shard = compat.process_group(a.group_name), a.input, a.dim, int(a.shard)
    me, others = group.rank(), [p for p in range(group.size()) if p != group.rank()]
    plan = _Plan.of(a, group.size(), me, FETCH_AROUND.kind)
    check_shard(x.shape, dim, plan.held[me], me, FETCH_AROUND.kind)
    out = new_rows(x, dim, shard) if out is None else out
    if plan.held[me][0] == plan.held[me][1]:
        out.zero_()
    target = as_rows(out, x, dim, shard)
    for piece in plan.given[me]:
        target[slice(*piece.got)].copy_(x.movedim(dim, 0)[slice(*piece.held)])
    # Two messages between the same ranks come in the order in which they go.
    sends = [(p, _rows(x, dim, piece.held)) for p in others for piece in plan.given[p]]
    receives = [(p, target[slice(*piece.got)]) for p in others for piece in plan.taken[p]]
    return Exchange(out, sends, receives, _stated(a, plan))


def exchange_to_return(a: Around, out: Tensor | None = None) -> Exchange:
    """A rank's part in `return_around`: to send rows to those that hold them, where they are added.

    Arguments are as of `exchange_to_fetch`.
    """
    group, x, dim, shard = compat.process_group(a.group_name), a.input, a.dim, int(a.shard)
    me, others = group.rank(), [p for p in range(group.size()) if p != group.rank()]
    plan = _Plan.of(a, group.size(), me, RETURN_AROUND.kind)
    check_shard(x.shape, dim, (0, plan.around), me, RETURN_AROUND.kind)
    out = (new_rows(x, dim, shard) if out is None else out).zero_()
    target = as_rows(out, x, dim, shard)
    for piece in plan.taken[me]:
        target[slice(*piece.held)].add_(x.movedim(dim, 0)[slice(*piece.got)])
    width = target.shape[1:].numel()
    arriving = [(p, piece) for p in others for piece in plan.given[p]]
    memory = [scratch.borrow((piece.held[1] - piece.held[0]) * width, target) for _, piece in arriving]
    parts = [m.view(-1, *target.shape[1:]) for m in memory]
    sends = [(p, _rows(x, dim, piece.got)) for p in others for piece in plan.taken[p]]

    def accumulate() -> None:
        for (_, piece), part in zip(arriving, parts, strict=True):
            target[slice(*piece.held)].add_(part)
        scratch.give_back(*memory)

    receives = [(p, part) for (p, _), part in zip(arriving, parts, strict=True)]
    return Exchange(out, sends, receives, _stated(a, plan), accumulate)


def _stated(a: Around, plan: _Plan) -> tuple[object, ...]:
    return a.dim, sizes_of(plan.held), a.before, a.after, other_sizes(a.input, a.dim)


def _rows(x: Tensor, dim: int, rows: Range) -> Tensor:
    return transport.rows_first(x.narrow(dim, rows[0], rows[1] - rows[0]), dim)


def _is_roll(a: Around) -> bool:
    """Whether each row is wanted once: what is added at home then is one row each."""
    return compat.same_symbol(a.after, -a.before)


def _adjoint_of_fetch(a: Around, shape: torch.Size, grad: Tensor) -> Tensor:
    back = a._replace(input=grad, shard=shape[a.dim])
    if _is_roll(a):
        return FETCH_AROUND.start(back._replace(before=a.after, after=a.before)).wait()
    return RETURN_AROUND.start(back).wait()


def _adjoint_of_return(a: Around, shape: torch.Size, grad: Tensor) -> Tensor:
    return FETCH_AROUND.start(a._replace(input=grad, shard=shape[a.dim])).wait()


def _inverse(a: Around, back: Around) -> Around | None:
    """None where rows are wanted twice, or it is not known while compiling how many."""
    numbers = (a.before, a.after, back.before, back.after)
    if not all(isinstance(n, int) for n in numbers) or a.after != -a.before:
        return None
    return a._replace(input=back.input, before=a.after, after=a.before, shard=back.shard)


def _member(a: Around, n: int | None, held: IntLike, wanted: IntLike) -> tuple[GroupShards, GroupShards, Member]:
    """The shards that ranks hold, what they want, and both as those of a fetch."""
    before, after, total = map(compat.size_hint, (a.before, a.after, a.total))
    home = GroupShards.of(a.partition, a.total, held, n)
    away = GroupShards.of(a.partition, a.total, wanted, n, max(before + after, 0))
    nbytes, arriving = nbytes_with(a.input, a.dim, a.total), None
    if n is not None:
        shards = transport.running_ends(home.sizes or chunk_sizes(total, n))
        kept = [sum(p.got[1] - p.got[0] for p in pieces(b, b, before, after, total)) for b in shards]
        come = [max(b - a + before + after, 0) - k if b > a else 0 for (a, b), k in zip(shards, kept, strict=True)]
        arriving = tuple(rows * nbytes / max(total, 1) for rows in come)
    return home, away, Member(home, away, nbytes, arriving)


def _fetch_members(a: Around, n: int | None) -> list[Member]:
    _, _, member = _member(a, n, a.input.shape[a.dim], a.shard)
    return [member]


def _return_members(a: Around, n: int | None) -> list[Member]:
    home, away, member = _member(a, n, a.shard, a.input.shape[a.dim])
    return [replace(member, put=away, get=home)]


def _describe(
    kind: str,
    exchange: Callable[[Around], Exchange],
    adjoint: Callable[[Around, torch.Size, Tensor], Tensor],
    members: Callable[[Around, int | None], list[Member]],
    inverse: Callable[[Around, Around], Around | None] | None = None,
) -> Descriptor[Around]:
    descriptor: Descriptor[Around] = Descriptor(
        kind,
        Around,
        lambda a: exchange(a).start(descriptor, a.group_name),
        sizes=lambda a: {a.dim: a.shard},
        adjoint=adjoint,
        inverse=inverse,
        members=members,
        traffic=traffic,
        joins=JOINS,
        whole=lambda a: size_with(a.input, a.dim, a.total),
        source=lambda a: (a.total, a.partition),
        states=("dim", "sharded of", "rows in front", "rows behind", "other sizes"),
        told=True,
    )
    return descriptor


FETCH_AROUND = _describe("fetch_around", exchange_to_fetch, _adjoint_of_fetch, _fetch_members, _inverse)
RETURN_AROUND = _describe("return_around", exchange_to_return, _adjoint_of_return, _return_members)
