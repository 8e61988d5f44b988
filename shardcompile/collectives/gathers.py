"""All-gather and reduce-scatter of uneven shards; each is the adjoint of the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.descriptor import Descriptor, Joins
from shardcompile.collectives.shards import as_rows, check_shard, new_rows, other_sizes, shards_of
from shardcompile.collectives.traffic import gathered, scattered, shards_to_all, size_with
from shardcompile.errors import CollectiveError
from shardcompile.sharding import GroupPartition, IntLike


class AllGatherV(NamedTuple):
    """Arguments of `all_gather_v`, and of `place_shard`.

    Attributes:
        input: the local shard.
        dim: the sharded dim.
        total: global size of the dim.
        partition: the partition of the dim.
        group_name: the process group.
    """

    input: Tensor
    dim: int
    total: IntLike
    partition: GroupPartition
    group_name: str


class ReduceScatterV(NamedTuple):
    """Arguments of `reduce_scatter_v`.

    Attributes:
        input: a term of the reduction.
        dim: the dim to shard.
        shard: local shard size of the result.
        reduce_op: the reduction.
        partition: the partition of the result.
        group_name: the process group.
    """

    input: Tensor
    dim: int
    shard: IntLike
    reduce_op: str
    partition: GroupPartition
    group_name: str


def _gather(a: AllGatherV) -> Tensor:
    group, x, total = compat.process_group(a.group_name), a.input, int(a.total)
    shards = shards_of(total, a.dim, a.partition, group.size(), "all_gather_v")
    check_shard(x.shape, a.dim, shards[group.rank()], group.rank(), "all_gather_v")
    out = new_rows(x, a.dim, total)
    rows = transport.rows_first(x, a.dim)
    held = shards.sizes
    call = ALL_GATHER_V.enter(group, x.dtype, a.dim, held, other_sizes(x, a.dim))
    works = transport.gather_rows(call, rows, held, as_rows(out, x, a.dim, total))
    transport.complete(out, call, works)
    return out


def _scatter(a: ReduceScatterV) -> Tensor:
    x, shard = a.input, int(a.shard)
    transport.check_reduction(a.reduce_op, x.dtype)
    group = compat.process_group(a.group_name)
    shards = shards_of(x.shape[a.dim], a.dim, a.partition, group.size(), "reduce_scatter_v")
    rows = transport.rows_first(x, a.dim)
    out = new_rows(x, a.dim, shard)
    held = shards.sizes
    call = REDUCE_SCATTER_V.enter(group, x.dtype, a.dim, held, other_sizes(x, a.dim), of=a.reduce_op)
    target = as_rows(out, x, a.dim, shard)
    transport.complete(out, call, *transport.reduce_scatter_rows(call, rows, held, a.reduce_op, target))
    return out


def _gather_adjoint(a: AllGatherV, shape: torch.Size, grad: Tensor) -> Tensor:
    back = ReduceScatterV(grad, a.dim, shape[a.dim], "sum", a.partition, a.group_name)
    return REDUCE_SCATTER_V.start(back).wait()


def _scatter_adjoint(a: ReduceScatterV, shape: torch.Size, grad: Tensor) -> Tensor:
    if a.reduce_op not in ("sum", "avg"):
        raise CollectiveError(f"reduce_scatter_v with {a.reduce_op} has no gradient; only sum and avg have")
    if a.reduce_op == "avg":
        grad = grad / compat.process_group(a.group_name).size()
    return ALL_GATHER_V.start(AllGatherV(grad, a.dim, shape[a.dim], a.partition, a.group_name)).wait()


def _partitions(a: Any) -> list[GroupPartition]:
    return [a.partition]


ALL_GATHER_V = Descriptor(
    "all_gather_v",
    AllGatherV,
    _gather,
    sizes=lambda a: {a.dim: a.total},
    adjoint=_gather_adjoint,
    members=lambda a, n: [gathered(a.input, a.dim, a.total, a.partition, n)],
    traffic=shards_to_all,
    whole=lambda a: size_with(a.input, a.dim, a.total),
    source=lambda a: (a.total, a.partition),
    joins=Joins("all_gather_bucket", _partitions, uneven=True),
    states=("dim", "shard sizes", "other sizes"),
    as_integers=True,
)

REDUCE_SCATTER_V = Descriptor(
    "reduce_scatter_v",
    ReduceScatterV,
    _scatter,
    sizes=lambda a: {a.dim: a.shard},
    adjoint=_scatter_adjoint,
    members=lambda a, n: [scattered(a.input, a.dim, a.partition, n)],
    traffic=shards_to_all,
    source=lambda a: (a.input.shape[a.dim], a.partition),
    joins=Joins("reduce_scatter_bucket", _partitions, uneven=True),
    states=("dim", "shard sizes", "other sizes"),
    moves_rows=False,
)
