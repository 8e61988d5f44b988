"""All-to-all on uneven shards: moves the sharding of a tensor from one dim to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.descriptor import Descriptor, Joins
from shardcompile.collectives.shards import as_rows, check_shard, new_rows, other_sizes, shards_of
from shardcompile.collectives.traffic import Load, Member, Traffic, resharded, sent_and_received, size_with
from shardcompile.sharding import GroupPartition, IntLike


class AllToAllV(NamedTuple):
    """Arguments of `all_to_all_v`.

    Attributes:
        input: the local shard, sharded along `src_dim`.
        src_dim: the dim that is sharded before.
        dst_dim: the dim that is sharded afterwards.
        total: global size of `src_dim`.
        shard: local shard size of `dst_dim` in the result.
        src: the partition of `src_dim`.
        dst: the partition of `dst_dim`.
        group_name: the process group.
    """

    input: Tensor
    src_dim: int
    dst_dim: int
    total: IntLike
    shard: IntLike
    src: GroupPartition
    dst: GroupPartition
    group_name: str


def _run(a: AllToAllV) -> Tensor:
    group, x, total, shard = compat.process_group(a.group_name), a.input, int(a.total), int(a.shard)
    me, what = group.rank(), "all_to_all_v"
    src = shards_of(total, a.src_dim, a.src, group.size(), what)
    dst = shards_of(x.shape[a.dst_dim], a.dst_dim, a.dst, group.size(), what)
    check_shard(x.shape, a.src_dim, src[me], me, what)
    kept = x.narrow(a.dst_dim, dst[me][0], shard)
    out = new_rows(kept, a.src_dim, total)
    target = as_rows(out, kept, a.src_dim, total)
    target[src[me][0] : src[me][1]].copy_(kept.movedim(a.src_dim, 0))
    peers = [p for p in range(group.size()) if p != me]
    sends = [(p, transport.rows_first(x.narrow(a.dst_dim, dst[p][0], dst[p][1] - dst[p][0]), a.src_dim)) for p in peers]
    receives = [(p, target[src[p][0] : src[p][1]]) for p in peers]
    others = other_sizes(x, a.src_dim, a.dst_dim)
    call = ALL_TO_ALL_V.enter(group, x.dtype, a.src_dim, src.sizes, a.dst_dim, dst.sizes, others)
    transport.complete(out, call, transport.exchange(call, sends, receives))
    return out


def _swap(a: AllToAllV, input: Tensor, total: IntLike, shard: IntLike) -> AllToAllV:
    return AllToAllV(input, a.dst_dim, a.src_dim, total, shard, a.dst, a.src, a.group_name)


def _adjoint(a: AllToAllV, shape: torch.Size, grad: Tensor) -> Tensor:
    return ALL_TO_ALL_V.start(_swap(a, grad, shape[a.dst_dim], shape[a.src_dim])).wait()


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    sent, received = sent_and_received(members, n)
    return Traffic(max(*sent, *received), sum(sent))


ALL_TO_ALL_V = Descriptor(
    "all_to_all_v",
    AllToAllV,
    _run,
    sizes=lambda a: {a.src_dim: a.total, a.dst_dim: a.shard},
    adjoint=_adjoint,
    inverse=lambda a, back: _swap(a, back.input, back.total, back.shard),
    members=lambda a, n: [resharded(a.input, (a.src_dim, a.dst_dim), a.total, (a.src, a.dst), n)],
    traffic=_traffic,
    whole=lambda a: size_with(a.input, a.src_dim, a.total),
    source=lambda a: (a.total, a.src),
    joins=Joins("all_to_all_bucket", lambda a: [a.src, a.dst], Load.of_exchange, uneven=True),
    states=("dim", "shard sizes", "to dim", "shard sizes", "other sizes"),
    as_integers=True,
)
