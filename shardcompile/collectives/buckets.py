"""Bucketed collectives: several collectives of one group as one, with one message per peer instead of one per peer and
member.

The passes replace single collectives by these. Each rank packs its shards one after the other without padding. The
result is flat and holds the results of the members one after the other, each with the sharded dim first. All-gathers of
several dtypes are gathered as bytes. There are no gradients, since passes run after autograd has been traced.

The partitions of all members are one list, see `shardcompile.sharding.codec`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.shards import check_shard, shards_of
from shardcompile.collectives.traffic import (
    Load,
    exchanged_in_a_bucket,
    gathered,
    gathered_in_a_bucket,
    resharded,
    scattered,
    scattered_in_a_bucket,
    size_with,
)
from shardcompile.diagnosis import Call
from shardcompile.sharding import GroupPartition, IntLike, use_key

_FEW_BYTES = 2**18
"""Up to so many bytes, sending takes less time than handling the members one by one in Python."""

_LONG_UNIT = 64
"""Bytes that can be copied together for about the cost of copying one."""


class AllGatherBucket(NamedTuple):
    """Arguments of `all_gather_bucket`: for each member those of `all_gather_v`."""

    inputs: list[Tensor]
    dims: list[int]
    totals: list[IntLike]
    partitions: list[GroupPartition]
    group_name: str


class ReduceScatterBucket(NamedTuple):
    """Arguments of `reduce_scatter_bucket`: for each member those of `reduce_scatter_v`."""

    inputs: list[Tensor]
    dims: list[int]
    shards: list[IntLike]
    reduce_op: str
    partitions: list[GroupPartition]
    group_name: str


class AllToAllBucket(NamedTuple):
    """Arguments of `all_to_all_bucket`: for each member both dims, global and local size, and both partitions."""

    inputs: list[Tensor]
    dims: list[int]
    sizes: list[IntLike]
    partitions: list[GroupPartition]
    group_name: str


def bucket_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Returns the dtype in which the members are gathered: their common dtype, or uint8 if they differ."""
    return dtypes[0] if len(set(dtypes)) == 1 else torch.uint8


def _width(shape: Sequence[Any], itemsize: int, dtype: torch.dtype, *without: int) -> Any:
    """Returns the number of `dtype` elements in one row: the product of all dims but `without`."""
    return math.prod(s for d, s in enumerate(shape) if d not in without) * (itemsize // dtype.itemsize)


@dataclass(frozen=True)
class _Plan:
    """How a bucket is divided into pieces, one per member and rank. Lengths are in elements of the bucket's dtype.

    Attributes:
        counts: counts[member][rank].
        by_rank: counts[rank][member].
        shares: total of each rank over all members.
        unit: a common divisor of all counts.
        order: indices of units of the gathered buffer (ordered by rank, then member) in the order of the result
            (ordered by member, then rank), int32; None where the pieces are better concatenated one by one.
    """

    counts: list[list[int]]
    by_rank: list[list[int]]
    shares: list[int]
    unit: int
    order: Tensor | None


_Key = tuple[tuple[int, ...], int, tuple[int, ...]]
"""A hashable partition."""


def _keys(partitions: Sequence[GroupPartition]) -> tuple[_Key, ...]:
    for c in partitions:
        use_key(int(c.key))
    return tuple([(tuple(c.sizes), int(c.key), tuple(c.grouping)) for c in partitions])


@functools.lru_cache(maxsize=512)
def _plan_of(
    what: str,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    dtype: torch.dtype,
    dims: tuple[int, ...],
    totals: tuple[int, ...] | None,
    partitions: tuple[_Key, ...],
    ranks: int,
    holder: int | None,
) -> _Plan:
    """Divides a bucket into pieces, after checking the input shapes against the layouts.

    Cached, because dividing a bucket of many small members takes longer than sending it.

    Args:
        what: the op, for messages.
        shapes: shapes of the inputs.
        dtypes: dtypes of the inputs.
        dtype: dtype of the bucket.
        dims: sharded dim of each member.
        totals: global sizes of these dims; None to take them from the inputs.
        partitions: partitions of the members.
        ranks: size of the group.
        holder: this rank if the inputs are local shards; None if they are full tensors.
    """
    counts = []
    for n, (shape, dim, (sizes, key, grouping)) in enumerate(zip(shapes, dims, partitions, strict=True)):
        partition = GroupPartition(list(sizes), key, list(grouping))
        shards = shards_of(shape[dim] if totals is None else totals[n], dim, partition, ranks, what)
        if holder is not None:
            check_shard(shape, dim, shards[holder], holder, what)
        width = _width(shape, dtypes[n].itemsize, dtype, dim)
        counts.append([(b - a) * width for a, b in shards])
    by_rank = [list(column) for column in zip(*counts, strict=True)]
    shares = [sum(row) for row in by_rank]
    unit = math.gcd(*(n for row in counts for n in row)) or 1
    few, long = sum(shares) * dtype.itemsize <= _FEW_BYTES * ranks, unit * dtype.itemsize >= _LONG_UNIT
    order = _order(counts, unit) if few and long and holder is not None else None
    return _Plan(counts, by_rank, shares, unit, order)


def _order(counts: Sequence[Sequence[int]], unit: int) -> Tensor:
    """Returns the indices that reorder units from (rank, member) order to (member, rank) order."""
    lengths = torch.tensor(counts, device="cpu") // unit
    by_rank = lengths.t().reshape(-1)
    starts = (by_rank.cumsum(0) - by_rank).view(lengths.t().shape).t().reshape(-1)
    lengths = lengths.view(-1)
    ends = lengths.cumsum(0)
    moved = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return (torch.arange(len(moved), device="cpu") + moved).int()


def _rows(x: Tensor, dim: int) -> Tensor:
    """Returns the elements of a tensor as a flat tensor, with `dim` outermost."""
    return transport.rows_first(x, dim).view(-1)


def _transpose(pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Flattens pieces[a][b] into one list in the order (b, a)."""
    return [piece for column in zip(*pieces, strict=True) for piece in column]


def _gather(a: AllGatherBucket) -> Tensor:
    group, inputs = compat.process_group(a.group_name), a.inputs
    dtypes = [x.dtype for x in inputs]
    dtype = bucket_dtype(dtypes)
    plan = _plan_of(
        "all_gather_bucket",
        tuple([x.shape for x in inputs]),
        tuple(dtypes),
        dtype,
        tuple(a.dims),
        tuple(map(int, a.totals)),
        _keys(a.partitions),
        group.size(),
        group.rank(),
    )
    share = plan.shares[group.rank()]
    if share * dtype.itemsize <= _FEW_BYTES and not any(a.dims) and len(set(dtypes)) == 1:
        packed = compat.flatten_together(inputs).resolve_conj().resolve_neg()
        borrowed = []
    else:
        rows = [_rows(x, d) for x, d in zip(inputs, a.dims, strict=True)]
        packed = _pack([x if x.dtype == dtype else transport.as_bytes(x) for x in rows], share)
        borrowed = [packed]
    gathered = scratch.borrow(sum(plan.shares), packed)
    borrowed.append(gathered)
    call = ALL_GATHER_BUCKET.enter(group, packed.dtype, tuple(plan.shares))
    if plan.order is not None and packed.device.type == "cpu":
        works = transport.gather_rows(call, packed, plan.shares, gathered)
        return _order_later(call, works, gathered, plan.order, plan.unit, borrowed)
    works = transport.gather_rows(call, packed, plan.shares, gathered, keep_own=False)
    return _unpack_later(call, works, packed, gathered, plan.shares, plan.by_rank, borrowed)


def _pack(pieces: list[Tensor], numel: int) -> Tensor:
    """Concatenates flat pieces into borrowed memory.

    Args:
        pieces: flat tensors of one dtype.
        numel: number of elements in all of them.
    """
    return torch.cat(pieces, out=scratch.borrow(numel, pieces[0]))


def _unpack_later(
    call: Call,
    works: Sequence[Work],
    own: Tensor,
    received: Tensor,
    shares: Sequence[int],
    by_rank: Sequence[Sequence[int]],
    borrowed: Sequence[Tensor],
) -> Tensor:
    """Returns the result of a bucket, complete after its wait: the received pieces, member after member.

    Args:
        call: the recorded call that the messages belong to.
        works: works that write into `received`.
        own: the share of this rank.
        received: the shares of all ranks, one after the other; the range of this rank is not read.
        shares: number of elements in the share of each rank.
        by_rank: by_rank[rank][member] of these belong to a member.
        borrowed: scratch memory to give back in the end.
    """
    out = torch.empty_like(received)
    shards = list(received.split(shares))
    shards[call.group.rank()] = own
    pieces = _transpose([shard.split(counts) for shard, counts in zip(shards, by_rank, strict=True)])

    return _fill_later(out, call, works, lambda: torch.cat(pieces, out=out), borrowed)


def _order_later(
    call: Call, works: Sequence[Work], received: Tensor, order: Tensor, unit: int, borrowed: Sequence[Tensor]
) -> Tensor:
    """Like `_unpack_later`, but reorders units by one `index_select`, whatever the number of pieces."""
    out = torch.empty_like(received)

    def unpack() -> None:
        torch.index_select(received.view(-1, unit), 0, order, out=out.view(-1, unit))

    return _fill_later(out, call, works, unpack, borrowed)


def _fill_later(
    out: Tensor, call: Call, works: Sequence[Work], fill: Callable[[], object] | None, borrowed: Sequence[Tensor]
) -> Tensor:
    """Returns `out`, complete after its wait, which runs `fill` after the works and gives back borrowed memory."""

    def finish() -> None:
        if fill is not None:
            fill()
        scratch.give_back(*borrowed)

    transport.complete(out, call, works, finish)
    return out


def _scatter(a: ReduceScatterBucket) -> Tensor:
    inputs = a.inputs
    transport.check_reduction(a.reduce_op, inputs[0].dtype)
    group = compat.process_group(a.group_name)
    plan = _plan_of(
        "reduce_scatter_bucket",
        tuple([x.shape for x in inputs]),
        tuple([x.dtype for x in inputs]),
        inputs[0].dtype,
        tuple(a.dims),
        None,
        _keys(a.partitions),
        group.size(),
        None,
    )
    members = [_rows(x, d).split(counts) for x, d, counts in zip(inputs, a.dims, plan.counts, strict=True)]
    packed = _pack(_transpose(members), sum(plan.shares))
    out = packed.new_empty([plan.shares[group.rank()]])
    call = REDUCE_SCATTER_BUCKET.enter(group, packed.dtype, tuple(plan.shares), of=a.reduce_op)
    works, reduce = transport.reduce_scatter_rows(call, packed, plan.shares, a.reduce_op, out)
    return _fill_later(out, call, works, reduce, [packed])


def _exchange(a: AllToAllBucket) -> Tensor:
    group, inputs, partitions, what = compat.process_group(a.group_name), a.inputs, a.partitions, "all_to_all_bucket"
    me, ranks = group.rank(), range(group.size())
    stated: list[int] = []
    sent: list[list[Tensor]] = [[] for _ in ranks]
    received: list[list[int]] = [[] for _ in ranks]
    for n, x in enumerate(inputs):
        src_dim, dst_dim = a.dims[2 * n : 2 * n + 2]
        total, shard = map(int, a.sizes[2 * n : 2 * n + 2])
        src = shards_of(total, src_dim, partitions[2 * n], group.size(), what)
        dst = shards_of(x.shape[dst_dim], dst_dim, partitions[2 * n + 1], group.size(), what)
        check_shard(x.shape, src_dim, src[me], me, what)
        stated += [src_dim, dst_dim, *src.ends, *dst.ends]
        width = _width(x.shape, x.dtype.itemsize, x.dtype, src_dim, dst_dim) * shard
        for r in ranks:
            part = x.narrow(dst_dim, dst[r][0], dst[r][1] - dst[r][0])
            sent[r].append(transport.rows_first(part, src_dim).view(-1))
            received[r].append((src[r][1] - src[r][0]) * width)
    to_peers = transport.running_ends([sum(p.numel() for p in row) for row in sent])
    shares = [sum(row) for row in received]
    parts = scratch.borrow(sum(shares), inputs[0])
    packed = _pack([p for row in sent for p in row], to_peers[-1][1])
    call = ALL_TO_ALL_BUCKET.enter(group, packed.dtype, tuple(stated))
    works = transport.send_ranges(call, packed, to_peers, parts, transport.running_ends(shares), keep_own=False)
    own = packed[slice(*to_peers[me])]
    return _unpack_later(call, works, own, parts, shares, received, [packed, parts])


def _fake_gather(a: AllGatherBucket) -> Tensor:
    dtype = bucket_dtype([x.dtype for x in a.inputs])
    rows = zip(a.inputs, a.dims, a.totals, strict=True)
    numel = sum(t * _width(x.shape, x.dtype.itemsize, dtype, d) for x, d, t in rows)
    return a.inputs[0].new_empty([numel], dtype=dtype)


def _fake_scatter(a: ReduceScatterBucket) -> Tensor:
    rows = zip(a.inputs, a.dims, a.shards, strict=True)
    return a.inputs[0].new_empty([sum(b * _width(x.shape, x.dtype.itemsize, x.dtype, d) for x, d, b in rows)])


def _split_members(a: AllToAllBucket) -> list[tuple[Tensor, list[int], list[Any], list[GroupPartition]]]:
    """Returns the tensor, dims, sizes and partitions of each member."""
    return [
        (x, a.dims[i : i + 2], a.sizes[i : i + 2], a.partitions[i : i + 2])
        for i, x in zip(range(0, len(a.dims), 2), a.inputs, strict=True)
    ]


def _fake_exchange(a: AllToAllBucket) -> Tensor:
    members = _split_members(a)
    lengths = (math.prod(sizes) * _width(x.shape, x.dtype.itemsize, x.dtype, *dims) for x, dims, sizes, _ in members)
    return a.inputs[0].new_empty([sum(lengths)])


ALL_GATHER_BUCKET = Descriptor(
    "all_gather_bucket",
    AllGatherBucket,
    _gather,
    fake=_fake_gather,
    members=lambda a, n: [gathered(*row, n) for row in zip(a.inputs, a.dims, a.totals, a.partitions, strict=True)],
    traffic=lambda members, n: gathered_in_a_bucket(Load.of_shards(members, n)),
    whole=lambda a: sum(size_with(*row) for row in zip(a.inputs, a.dims, a.totals, strict=True)),
    states=("shares",),
)

REDUCE_SCATTER_BUCKET = Descriptor(
    "reduce_scatter_bucket",
    ReduceScatterBucket,
    _scatter,
    fake=_fake_scatter,
    members=lambda a, n: [scattered(*row, n) for row in zip(a.inputs, a.dims, a.partitions, strict=True)],
    traffic=lambda members, n: scattered_in_a_bucket(Load.of_shards(members, n)),
    states=("shares",),
    moves_rows=False,
)

ALL_TO_ALL_BUCKET = Descriptor(
    "all_to_all_bucket",
    AllToAllBucket,
    _exchange,
    fake=_fake_exchange,
    members=lambda a, n: [
        resharded(x, dims, sizes[0], partitions, n) for x, dims, sizes, partitions in _split_members(a)
    ],
    traffic=lambda members, n: exchanged_in_a_bucket(Load.of_exchange(members, n)),
    whole=lambda a: sum(size_with(x, dims[0], sizes[0]) for x, dims, sizes, _ in _split_members(a)),
    states=("shares",),
)
