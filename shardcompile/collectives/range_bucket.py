"""Several fetches of rows, or returns, between the same ranks as one collective: halos, slices, rolls.

What a pass puts in place of single collectives. Nothing is packed: messages go as they lie, and arrive in place. The
result holds the members one after the other, each as its own collective would have given it, flat and rows first. No
gradients: passes run when these are traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardcompile.collectives import halo_exchange, ranges
from shardcompile.collectives.descriptor import Descriptor, rows_of
from shardcompile.collectives.exchange import Exchange
from shardcompile.collectives.halo_exchange import FETCH_AROUND, RETURN_AROUND, Around
from shardcompile.collectives.ranges import FETCH_RANGES, RETURN_RANGES, Ranges
from shardcompile.collectives.traffic import Member
from shardcompile.sharding import GroupPartition, IntLike


class RangeBucket(NamedTuple):
    """Arguments of `range_bucket`: those of its members, one member after the other.

    Attributes:
        inputs: the payloads.
        kinds: of the members, with spaces between them.
        dims: of the rows.
        numbers: the row indices that a record has, in its order, and what follows from ``reach``.
        counts: how many numbers each member has.
        fills: what rows outside of the dim hold; empty if no member wants any.
        partitions: the partitions that a record has, in its order.
        group_name: the ranks.
    """

    inputs: list[Tensor]
    kinds: str
    dims: list[int]
    numbers: list[IntLike]
    counts: list[int]
    fills: list[float]
    partitions: list[GroupPartition]
    group_name: str


Record = Ranges | Around
"""Arguments of a member."""


class _Form(NamedTuple):
    """How a kind takes part.

    Attributes:
        of: the collective.
        exchange: a rank's part in it.
        numbers: names of the row indices.
        partitions: names of the partitions.
    """

    of: Descriptor[Any]
    exchange: Callable[[Any, Tensor | None], Exchange]
    numbers: tuple[str, ...]
    partitions: tuple[str, ...]


_RANGES = ("total", "shard"), ("src", "dst")
_AROUND = ("before", "after", "total", "shard"), ("partition",)
_FORMS = {
    form.of.kind: form
    for form in (
        _Form(FETCH_RANGES, ranges.exchange_to_fetch, *_RANGES),
        _Form(RETURN_RANGES, ranges.exchange_to_return, *_RANGES),
        _Form(FETCH_AROUND, halo_exchange.exchange_to_fetch, *_AROUND),
        _Form(RETURN_AROUND, halo_exchange.exchange_to_return, *_AROUND),
    )
}


def is_filled(record: Record) -> bool:
    """Whether a member wants rows outside of the dim. In a bucket all do, or none does."""
    return isinstance(record, Ranges) and record.fill is not None


def together(kinds: Sequence[str], records: Sequence[Record]) -> RangeBucket:
    """The arguments of a bucket.

    Args:
        kinds: of the members.
        records: their arguments, of one group.
    """
    numbers, counts, fills, partitions = [], [], [], []
    for kind, record in zip(kinds, records, strict=True):
        form = _FORMS[kind]
        own = [getattr(record, name) for name in form.numbers]
        if isinstance(record, Ranges):
            own += record.reach
            fills += [] if record.fill is None else [record.fill]
        numbers += own
        counts.append(len(own))
        partitions += [getattr(record, name) for name in form.partitions]
    inputs, dims = [record.input for record in records], [record.dim for record in records]
    return RangeBucket(inputs, " ".join(kinds), dims, numbers, counts, fills, partitions, records[0].group_name)


def members_of(a: RangeBucket) -> list[tuple[_Form, Record]]:
    """How each member takes part, and its arguments."""
    numbers, fills, partitions = iter(a.numbers), iter(a.fills), iter(a.partitions)
    found: list[tuple[_Form, Record]] = []
    for x, kind, dim, count in zip(a.inputs, a.kinds.split(), a.dims, a.counts, strict=True):
        form = _FORMS[kind]
        own = [next(numbers) for _ in range(count)]
        named, reach = dict(zip(form.numbers, own[: len(form.numbers)], strict=True)), own[len(form.numbers) :]
        named |= {name: next(partitions) for name in form.partitions}  # type: ignore[misc]
        if form.of.arguments is Around:
            record: Record = Around(x, dim, **named, group_name=a.group_name)  # type: ignore[arg-type]
        else:
            fill = next(fills) if a.fills else None
            record = Ranges(x, dim, **named, reach=reach, fill=fill, group_name=a.group_name)  # type: ignore[arg-type]
        found.append((form, record))
    return found


def _shape(form: _Form, record: Record) -> tuple[Any, ...]:
    """Of a member's result, rows first."""
    return rows_of(record.input.shape, form.of.sizes(record))[0]  # type: ignore[misc]


def _run(a: RangeBucket) -> Tensor:
    members = members_of(a)
    lengths = [math.prod(map(int, _shape(*member))) for member in members]
    out = a.inputs[0].new_empty([sum(lengths)])
    parts = out.split(lengths)
    exchanges = [form.exchange(record, part) for (form, record), part in zip(members, parts, strict=True)]
    last_steps = [e.then for e in exchanges if e.then is not None]

    def finish() -> None:
        for step in last_steps:
            step()

    # Two messages between the same ranks come in the order in which they go: that of the members.
    whole = Exchange(
        out,
        [message for e in exchanges for message in e.sends],
        [message for e in exchanges for message in e.receives],
        (tuple(n for e in exchanges for n in _flat(e.stated)),),
        finish if last_steps else None,
    )
    return whole.start(RANGE_BUCKET, a.group_name)


def _flat(stated: Sequence[object]) -> list[object]:
    return [n for each in stated for n in (each if isinstance(each, tuple) else (each,))]


def _fake(a: RangeBucket) -> Tensor:
    return a.inputs[0].new_empty([sum(math.prod(_shape(*member)) for member in members_of(a))])


def _members(a: RangeBucket, n: int | None) -> list[Member]:
    return [m for form, record in members_of(a) for m in form.of.members_of(record, n)]


RANGE_BUCKET = Descriptor(
    "range_bucket",
    RangeBucket,
    _run,
    fake=_fake,
    members=_members,
    traffic=ranges.traffic,
    whole=lambda a: sum(form.of.whole(record) for form, record in members_of(a)),  # type: ignore[misc]
    states=("members",),
    told=True,
)
