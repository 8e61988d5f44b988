"""Range exchange: each rank fetches a range of rows from their owners; the adjoint adds rows on their owners.

Several such collectives of one group join a bucket, see `shardcompile.collectives.range_bucket`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.descriptor import Descriptor, Joins
from shardcompile.collectives.exchange import Exchange
from shardcompile.collectives.shards import Shards, as_rows, check_shard, new_rows, other_sizes, shards_of_sizes
from shardcompile.collectives.traffic import GroupShards, Load, Member, Traffic, nbytes_with, size_with
from shardcompile.collectives.transport import Message, Range
from shardcompile.sharding import REMEMBERED, GroupPartition, IntLike, chunk_sizes


class Ranges(NamedTuple):
    """Arguments of `fetch_ranges` and `return_ranges`.

    Attributes:
        input: the local shard; of a return the values for the rows that this rank wants.
        dim: the sharded dim.
        total: global size of the dim.
        shard: number of rows in this rank's result.
        src: the partition of the rows.
        dst: the partition whose shards the ranks want.
        reach: empty if the shards of `dst` themselves are wanted. Otherwise `dst` partitions other rows, such as the
            windows of a convolution, and a rank wants what its rows read: of `count` rows, row j reads the rows from
            ``(j * num - before) / den``, rounded up, to ``(j * num + after) / den``, rounded down. The list holds
            `count`, `num`, `den`, `before` and `after`.
        fill: value of rows outside of the dim; None if no such rows are wanted.
        group_name: the process group.
    """

    input: Tensor
    dim: int
    total: IntLike
    shard: IntLike
    src: GroupPartition
    dst: GroupPartition
    reach: list[IntLike]
    fill: float | None
    group_name: str


class RangePlan(NamedTuple):
    """The rows that one rank of a group gives to and takes from the others. It depends on no tensor.

    Attributes:
        me: this rank.
        total: number of rows of all ranks.
        held: the range of rows that this rank holds.
        wanted: the range that it wants; it may reach beyond the dim.
        given: the ranks that want rows of this one, each with the range of these rows in the local shard.
        taken: the ranks that hold rows that this one wants, each with their range among the wanted rows.
        own: the wanted rows that this rank holds itself: their range in the local shard, and among the wanted rows.
        sizes: number of rows that each rank holds, to be stated.
        ends: start and end of the range that each rank wants, to be stated.
    """

    me: int
    total: int
    held: Range
    wanted: Range
    given: Sequence[tuple[int, Range]]
    taken: Sequence[tuple[int, Range]]
    own: tuple[Range, Range]
    sizes: tuple[int, ...]
    ends: tuple[int, ...]

    @staticmethod
    def of(held: Shards, wanted: Shards, me: int) -> RangePlan:
        """Returns the plan for what all ranks hold and want."""
        (first, _), (start, _) = held[me], wanted[me]
        to_peers = [transport.shifted(transport.overlap(held[me], w), -first) for w in wanted]
        from_peers = [transport.shifted(transport.overlap(h, wanted[me]), -start) for h in held]
        given, taken = (
            [(p, r) for p, r in enumerate(rows) if p != me and r[1] > r[0]] for rows in (to_peers, from_peers)
        )
        own = to_peers[me], from_peers[me]
        return RangePlan(me, held[-1][1], held[me], wanted[me], given, taken, own, held.sizes, wanted.ends)

    def stated(self, x: Tensor, dim: int) -> tuple[object, ...]:
        """Returns what the rank states of an exchange by this plan, see `Descriptor.states`."""
        return dim, self.sizes, dim, self.ends, other_sizes(x, dim)


@functools.lru_cache(REMEMBERED)
def _plan_of(
    what: str,
    dim: int,
    total: int,
    held: tuple[int, ...],
    of_rows: tuple[int, ...],
    reach: tuple[int, ...],
    filled: bool,
    me: int,
) -> RangePlan:
    """Returns the plan of a rank. Remembered, since it takes time that grows with the number of ranks.

    Args:
        what: the op, for messages.
        dim: the sharded dim, for messages.
        total: global size of the dim.
        held: shard sizes of the rows.
        of_rows: shard sizes of `Ranges.dst`.
        reach: as in `Ranges`.
        filled: whether rows outside of the dim are wanted.
        me: this rank.
    """
    if reach:
        count, num, den, before, after = reach
        ranges = []
        for first, end in shards_of_sizes(of_rows, count, dim, what):
            start = -((before - first * num) // den)
            last = ((end - 1) * num + after) // den
            ranges.append((start, max(last + 1, start)) if end > first else (0, 0))
        wanted = Shards(ranges)
    else:
        wanted = shards_of_sizes(of_rows, total, dim, what)
    if not filled:
        wanted = Shards((max(i, 0), min(j, total)) for i, j in wanted)
    return RangePlan.of(shards_of_sizes(held, total, dim, what), wanted, me)


def _plan(a: Ranges, group: ProcessGroup, what: str) -> RangePlan:
    total, reach, ranks = int(a.total), tuple(map(int, a.reach)), group.size()
    held, of_rows = a.src.shards(total, ranks), a.dst.shards(reach[0] if reach else total, ranks)
    return _plan_of(what, a.dim, total, held, of_rows, reach, a.fill is not None, group.rank())


def own_rows(a: Ranges) -> tuple[int, int, int]:
    """Returns which rows of the result of `fetch_ranges` this rank holds itself.

    Returns:
        The first of them in the result, the first of them in the local shard, and their number, which may be 0.
    """
    (first, end), (start, _) = _plan(a, compat.process_group(a.group_name), FETCH_RANGES.kind).own
    return (start, first, end - first) if end > first else (0, 0, 0)


def exchange_to_fetch(a: Ranges, out: Tensor | None = None) -> Exchange:
    """Returns this rank's exchange of `fetch_ranges`.

    Args:
        a: the arguments.
        out: a flat tensor to write; None for new memory.
    """
    plan = _plan(a, compat.process_group(a.group_name), FETCH_RANGES.kind)
    return fetch_wanted(FETCH_RANGES.kind, a.input, a.dim, plan, int(a.shard), a.fill, out)


def exchange_to_return(a: Ranges, out: Tensor | None = None) -> Exchange:
    """Returns this rank's exchange of `return_ranges`. The arguments are those of `exchange_to_fetch`."""
    plan = _plan(a, compat.process_group(a.group_name), RETURN_RANGES.kind)
    return return_wanted(RETURN_RANGES.kind, a.input, a.dim, plan, int(a.shard), out)


def _pieces(x: Tensor, dim: int, ranges: Sequence[tuple[int, Range]]) -> list[Message]:
    """Returns pieces of a tensor for other ranks. Only these are made contiguous: a halo is small beside a shard."""
    return [(p, transport.rows_first(x.narrow(dim, a, b - a), dim)) for p, (a, b) in ranges]


def fetch_wanted(
    what: str, x: Tensor, dim: int, plan: RangePlan, shard: int, fill: float | None = None, out: Tensor | None = None
) -> Exchange:
    """Returns this rank's exchange in which each rank fetches a range of rows from their owners.

    Args:
        what: the op, for messages.
        x: the local shard.
        dim: the sharded dim.
        plan: the rows that move.
        shard: number of rows that this rank wants.
        fill: value of rows outside of the dim; None if no such rows are wanted.
        out: a flat tensor for the rows; None for new memory.
    """
    (start, end), total = plan.wanted, plan.total
    check_shard(x.shape, dim, plan.held, plan.me, what)
    out = new_rows(x, dim, shard) if out is None else out
    target = as_rows(out, x, dim, shard)
    if fill is not None and start < 0:
        target[:-start].fill_(fill)
    if fill is not None and end > total:
        target[max(total - start, 0) :].fill_(fill)
    source, place = plan.own
    target[slice(*place)].copy_(x.movedim(dim, 0)[slice(*source)])
    receives = [(p, target[a:b]) for p, (a, b) in plan.taken]
    return Exchange(out, _pieces(x, dim, plan.given), receives, plan.stated(x, dim))


def return_wanted(what: str, x: Tensor, dim: int, plan: RangePlan, shard: int, out: Tensor | None = None) -> Exchange:
    """Returns this rank's exchange of the adjoint of `fetch_wanted`: rows are sent to their owners and added there.

    Args:
        what: the op, for messages.
        x: the values for the rows that this rank wants.
        dim: the sharded dim.
        plan: as for `fetch_wanted`.
        shard: local number of rows.
        out: a flat tensor for the sums; None for new memory.
    """
    check_shard(x.shape, dim, plan.wanted, plan.me, what)
    out = new_rows(x, dim, shard) if out is None else out
    target = as_rows(out, x, dim, shard)
    (first, end), source = plan.own
    target[:first].zero_()
    target[first:end].copy_(x.movedim(dim, 0)[slice(*source)])
    target[end:].zero_()
    width = target.shape[1:].numel()
    memory = [scratch.borrow((b - a) * width, target) for _, (a, b) in plan.given]
    parts = [m.view(b - a, *target.shape[1:]) for m, (_, (a, b)) in zip(memory, plan.given, strict=True)]

    def accumulate() -> None:
        for part, (_, (a, b)) in zip(parts, plan.given, strict=True):
            target[a:b].add_(part)
        scratch.give_back(*memory)

    receives = [(p, part) for part, (p, _) in zip(parts, plan.given, strict=True)]
    return Exchange(out, _pieces(x, dim, plan.taken), receives, plan.stated(x, dim), accumulate if parts else None)


def _inverse(a: Ranges, back: Ranges) -> Ranges | None:
    """Returns None where `reach` is set: windows may overlap, so that there is no inverse."""
    return None if a.reach else a._replace(input=back.input, shard=back.shard, src=a.dst, dst=a.src)


def _fetch_members(a: Ranges, n: int | None) -> list[Member]:
    get = _wanted_side(a, n)
    return [Member(_held_side(a, n, get), get, nbytes_with(a.input, a.dim, a.total))]


def _return_members(a: Ranges, n: int | None) -> list[Member]:
    put = _wanted_side(a, n)
    return [Member(put, _held_side(a, n, put), nbytes_with(a.input, a.dim, a.total))]


def _wanted_side(a: Ranges, n: int | None) -> GroupShards:
    """Returns the shards of wanted rows: those of `dst`, or what they read, as shards with a halo."""
    if not a.reach:
        return GroupShards.of(a.dst, a.total, n)
    count, num, den, before, after = map(compat.size_hint, a.reach)
    side = GroupShards.of(a.dst, count, n)
    rows = compat.size_hint(a.total)
    sizes, halo = side.sizes, -(-(before + after) // den)
    if sizes is None:
        return replace(side, halo=halo, assumed=None if n is None else chunk_sizes(rows, n))
    ends = [min(end * num // den, rows) for end in itertools.accumulate(sizes[:-1])]
    return replace(side, sizes=tuple(b - a for a, b in itertools.pairwise([0, *ends, rows])), halo=halo)


def _held_side(a: Ranges, n: int | None, wanted: GroupShards) -> GroupShards:
    side = GroupShards.of(a.src, a.total, n)
    return replace(side, assumed=wanted.assumed) if side.sizes is None else side


def load(members: Sequence[Member], n: int) -> Load:
    """Returns the bytes that each rank sends to others and receives from them."""
    return Load(np.sum([_moved(m, n) for m in members], axis=0))


def _moved(m: Member, n: int) -> np.ndarray:
    """Returns the bytes that each rank sends and receives for one member: [2, n]."""
    if m.arriving is not None:
        return np.array([m.arriving, m.arriving])
    assert m.put is not None and m.get is not None
    narrow, wide = (m.put, m.get) if m.get.halo or not m.put.halo else (m.get, m.put)
    held, wanted = narrow.sizes or narrow.assumed, wide.sizes or wide.assumed
    if held is None or wanted is None:
        # Unbacked partitions: all but one part in n may have to move.
        return np.full((2, n), (n - 1) / n * m.nbytes / n)
    taken, given = _moved_rows(held, wanted, wide.halo)
    moved = [given, taken] if narrow is m.put else [taken, given]
    return np.array(moved) * (m.nbytes / max(sum(held), 1))


def traffic(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic of the rows that ranks want and do not hold."""
    return moved(load(members, n))


def moved(load: Load) -> Traffic:
    """Returns the traffic of a load that is sent and received in place, without packing."""
    return Traffic(load.largest, load.whole)


def _moved_rows(held: Sequence[int], wanted: Sequence[int], halo: int) -> tuple[list[int], list[int]]:
    """Returns the rows that each rank receives from others and sends to others. Half of a halo is on either side."""
    before, after = halo - halo // 2, halo // 2
    total = sum(held)
    own = transport.running_ends(held)
    taken, given = [0] * len(held), [0] * len(held)
    first = 0
    for r, (start, end) in enumerate(transport.running_ends(wanted)):
        if end == start:
            continue
        start, end = max(start - before, 0), min(end + after, total)
        while first and own[first][0] > start:
            first -= 1
        while own[first][1] <= start:
            first += 1
        for p in range(first, len(own)):
            a, b = own[p]
            if a >= end:
                break
            rows = min(b, end) - max(a, start)
            if p != r and rows > 0:
                taken[r] += rows
                given[p] += rows
    return taken, given


JOINS: Joins[Any] = Joins("range_bucket", load=load, uneven=True)
"""How these collectives, and those of `shardcompile.collectives.halo_exchange`, take part in a bucket."""


def _describe(
    kind: str,
    exchange: Callable[[Ranges], Exchange],
    adjoint: Callable[[], Descriptor[Ranges]],
    members: Callable[[Ranges, int | None], list[Member]],
    inverse: Callable[[Ranges, Ranges], Ranges | None] | None = None,
) -> Descriptor[Ranges]:
    descriptor: Descriptor[Ranges] = Descriptor(
        kind,
        Ranges,
        lambda a: exchange(a).start(descriptor, a.group_name),
        sizes=lambda a: {a.dim: a.shard},
        adjoint=lambda a, shape, grad: adjoint().start(a._replace(input=grad, shard=shape[a.dim])).wait(),
        inverse=inverse,
        members=members,
        traffic=traffic,
        whole=lambda a: size_with(a.input, a.dim, a.total),
        source=lambda a: (a.total, a.src),
        joins=JOINS,
        states=("dim", "shard sizes", "to dim", "ranges", "other sizes"),
        as_integers=exchange is exchange_to_fetch,  # a return adds
    )
    return descriptor


FETCH_RANGES = _describe("fetch_ranges", exchange_to_fetch, lambda: RETURN_RANGES, _fetch_members, _inverse)
RETURN_RANGES: Descriptor[Ranges] = _describe(
    "return_ranges", exchange_to_return, lambda: FETCH_RANGES, _return_members
)
