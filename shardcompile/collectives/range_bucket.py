"""Bucketed range exchanges: several fetches or returns of rows (halos, slices, rolls) as one collective.

A pass replaces single collectives by these. Nothing is packed: messages are sent from and received into their places.
The result is flat and holds the results of the members one after the other, each with the sharded dim first. There are
no gradients, since passes run after autograd has been traced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardcompile.collectives import halo_exchange, ranges
from shardcompile.collectives.descriptor import Descriptor, rows_of
from shardcompile.collectives.exchange import Exchange
from shardcompile.collectives.halo_exchange import FETCH_HALO, RETURN_HALO, HaloExchange
from shardcompile.collectives.ranges import FETCH_RANGES, RETURN_RANGES, Ranges
from shardcompile.collectives.traffic import Member
from shardcompile.sharding import GroupPartition, IntLike


class RangeBucket(NamedTuple):
    """Arguments of `range_bucket`: those of its members, one member after the other.

    Attributes:
        inputs: the payloads.
        kinds: kinds of the members, separated by spaces.
        dims: sharded dims of the members.
        numbers: the ints of each member's record in the order of its fields, then its ``reach``.
        counts: how many of `numbers` each member has.
        fills: value of the rows outside of the dim, for each member; empty if no member wants such rows.
        partitions: the partitions of each member's record in the order of its fields.
        group_name: the process group.
    """

    inputs: list[Tensor]
    kinds: str
    dims: list[int]
    numbers: list[IntLike]
    counts: list[int]
    fills: list[float]
    partitions: list[GroupPartition]
    group_name: str


Record = Ranges | HaloExchange
"""The arguments of a member."""


class _MemberKind(NamedTuple):
    """How collectives of one kind take part in a bucket.

    Attributes:
        of: the collective.
        exchange: returns this rank's exchange in it.
        numbers: names of the record's int fields.
        partitions: names of the record's partition fields.
    """

    of: Descriptor[Any]
    exchange: Callable[[Any, Tensor | None], Exchange]
    numbers: tuple[str, ...]
    partitions: tuple[str, ...]


_RANGES = ("total", "shard"), ("src", "dst")
_HALO = ("before", "after", "total", "shard"), ("partition",)
_MEMBER_KINDS = {
    spec.of.kind: spec
    for spec in (
        _MemberKind(FETCH_RANGES, ranges.exchange_to_fetch, *_RANGES),
        _MemberKind(RETURN_RANGES, ranges.exchange_to_return, *_RANGES),
        _MemberKind(FETCH_HALO, halo_exchange.exchange_to_fetch, *_HALO),
        _MemberKind(RETURN_HALO, halo_exchange.exchange_to_return, *_HALO),
    )
}


def is_filled(record: Record) -> bool:
    """Returns whether a member wants rows outside of the dim. In a bucket all members do, or none does."""
    return isinstance(record, Ranges) and record.fill is not None


def together(kinds: Sequence[str], records: Sequence[Record]) -> RangeBucket:
    """Returns the arguments of a bucket.

    Args:
        kinds: kinds of the members.
        records: arguments of the members, which have one process group.
    """
    numbers, counts, fills, partitions = [], [], [], []
    for kind, record in zip(kinds, records, strict=True):
        spec = _MEMBER_KINDS[kind]
        own = [getattr(record, name) for name in spec.numbers]
        if isinstance(record, Ranges):
            own += record.reach
            fills += [] if record.fill is None else [record.fill]
        numbers += own
        counts.append(len(own))
        partitions += [getattr(record, name) for name in spec.partitions]
    inputs, dims = [record.input for record in records], [record.dim for record in records]
    return RangeBucket(inputs, " ".join(kinds), dims, numbers, counts, fills, partitions, records[0].group_name)


def members_of(a: RangeBucket) -> list[tuple[_MemberKind, Record]]:
    """Returns the kind and the arguments of each member."""
    numbers, fills, partitions = iter(a.numbers), iter(a.fills), iter(a.partitions)
    found: list[tuple[_MemberKind, Record]] = []
    for x, kind, dim, count in zip(a.inputs, a.kinds.split(), a.dims, a.counts, strict=True):
        spec = _MEMBER_KINDS[kind]
        own = [next(numbers) for _ in range(count)]
        named, reach = dict(zip(spec.numbers, own[: len(spec.numbers)], strict=True)), own[len(spec.numbers) :]
        named |= {name: next(partitions) for name in spec.partitions}  # type: ignore[misc]
        if spec.of.arguments is HaloExchange:
            record: Record = HaloExchange(x, dim, **named, group_name=a.group_name)  # type: ignore[arg-type]
        else:
            fill = next(fills) if a.fills else None
            record = Ranges(x, dim, **named, reach=reach, fill=fill, group_name=a.group_name)  # type: ignore[arg-type]
        found.append((spec, record))
    return found


def _shape(spec: _MemberKind, record: Record) -> tuple[Any, ...]:
    """Returns the shape of a member's result, with the sharded dim outermost."""
    return rows_of(record.input.shape, spec.of.sizes(record))[0]  # type: ignore[misc]


def _run(a: RangeBucket) -> Tensor:
    members = members_of(a)
    lengths = [math.prod(map(int, _shape(*member))) for member in members]
    out = a.inputs[0].new_empty([sum(lengths)])
    parts = out.split(lengths)
    exchanges = [spec.exchange(record, part) for (spec, record), part in zip(members, parts, strict=True)]
    last_steps = [e.then for e in exchanges if e.then is not None]

    def finish() -> None:
        for step in last_steps:
            step()

    # Messages between two ranks arrive in the order in which they are sent: that of the members.
    combined = Exchange(
        out,
        [message for e in exchanges for message in e.sends],
        [message for e in exchanges for message in e.receives],
        (tuple(itertools.chain.from_iterable(_flat(e.stated) for e in exchanges)),),
        finish if last_steps else None,
    )
    return combined.start(RANGE_BUCKET, a.group_name)


def _flat(stated: Sequence[object]) -> Iterator[object]:
    return itertools.chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in stated)


def _fake(a: RangeBucket) -> Tensor:
    return a.inputs[0].new_empty([sum(math.prod(_shape(*member)) for member in members_of(a))])


def _members(a: RangeBucket, n: int | None) -> list[Member]:
    return [m for spec, record in members_of(a) for m in spec.of.members_of(record, n)]


RANGE_BUCKET = Descriptor(
    "range_bucket",
    RangeBucket,
    _run,
    fake=_fake,
    members=_members,
    traffic=ranges.traffic,
    whole=lambda a: sum(spec.of.whole(record) for spec, record in members_of(a)),  # type: ignore[misc]
    states=("members",),
)
