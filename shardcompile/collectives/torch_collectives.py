"""Descriptors of torch's own functional collectives, all of which have even shards.

The all-reduce is described in `shardcompile.collectives.reductions`, together with shardcompile's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile.collectives.descriptor import Descriptor, Joins, payloads_of
from shardcompile.collectives.traffic import (
    Load,
    Member,
    Traffic,
    even_exchange,
    even_gather,
    even_scatter,
    of_any_rows,
    size_of,
)
from shardcompile.sharding import CHUNK_KEY, GroupPartition, IntLike

_c10d = torch.ops._c10d_functional


class AllGather(NamedTuple):
    """Arguments of `all_gather_into_tensor`."""

    input: Tensor
    group_size: int
    group_name: str


class ReduceScatter(NamedTuple):
    """Arguments of `reduce_scatter_tensor`."""

    input: Tensor
    reduce_op: str
    group_size: int
    group_name: str


class AllToAll(NamedTuple):
    """Arguments of `all_to_all_single`."""

    input: Tensor
    output_split_sizes: list[IntLike]
    input_split_sizes: list[IntLike]
    group_name: str


class Broadcast(NamedTuple):
    """Arguments of `broadcast`."""

    input: Tensor
    src: int
    group_name: str


class ShardDimAllToAll(NamedTuple):
    """Arguments of `shard_dim_alltoall`, which DTensor emits for `Shard` to `Shard`."""

    input: Tensor
    gather_dim: int
    shard_dim: int
    group_name: str


def _rows(a: AllGather | ReduceScatter) -> IntLike:
    return a.input.shape[0] if a.input.ndim else 1


def _even(rows: int, ranks: int) -> GroupPartition:
    return GroupPartition([rows] * ranks, CHUNK_KEY, [])


def _of_rows(rows: IntLike, ranks: int) -> tuple[int, GroupPartition] | None:
    """Returns global size and partition of equal shards, if their size is static."""
    return (rows * ranks, _even(rows, ranks)) if isinstance(rows, int) else None


def _gathered_partition(a: AllGather) -> tuple[int, GroupPartition] | None:
    return _of_rows(_rows(a), a.group_size) if len(payloads_of(a)) == 1 else None


def _scattered_partition(a: ReduceScatter) -> tuple[int, GroupPartition] | None:
    return _of_rows(_rows(a) // a.group_size, a.group_size) if len(payloads_of(a)) == 1 else None


def _exchange_members(a: AllToAll, n: int | None) -> list[Member]:
    return [of_any_rows(a.input)]


def _broadcast(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic of a pipelined broadcast: each rank receives the payload and forwards it."""
    whole = sum(m.nbytes for m in members)
    return Traffic(whole, (n - 1) * whole)


ALL_GATHER = Descriptor(
    "all_gather",
    AllGather,
    sizes=lambda a: {0: a.group_size * a.input.shape[0]},
    traffic=even_gather,
    whole=lambda a: a.group_size * sum(size_of(x) for x in payloads_of(a)),
    source=_gathered_partition,
    joins=Joins("all_gather_bucket", lambda a: [_even(a.input.shape[0], a.group_size)], Load.of_even_shards),
    overloads=(
        _c10d.all_gather_into_tensor.default,
        _c10d.all_gather_into_tensor_out.default,
        _c10d.all_gather_into_tensor_coalesced.default,
    ),
)

REDUCE_SCATTER = Descriptor(
    "reduce_scatter",
    ReduceScatter,
    sizes=lambda a: {0: a.input.shape[0] // a.group_size},
    traffic=even_scatter,
    source=_scattered_partition,
    joins=Joins("reduce_scatter_bucket", lambda a: [_even(a.input.shape[0] // a.group_size, a.group_size)]),
    moves_rows=False,
    overloads=(_c10d.reduce_scatter_tensor.default, _c10d.reduce_scatter_tensor_coalesced.default),
)

ALL_TO_ALL = Descriptor(
    "all_to_all",
    AllToAll,
    members=_exchange_members,
    traffic=even_exchange,
    of_one_rank=True,
    overloads=(_c10d.all_to_all_single.default,),
)

BROADCAST = Descriptor(
    "broadcast",
    Broadcast,
    traffic=_broadcast,
    moves_rows=False,
    overloads=(_c10d.broadcast.default, _c10d.broadcast_.default),
)

SHARD_DIM_ALLTOALL = Descriptor("shard_dim_alltoall", ShardDimAllToAll)
"""Has no overloads here: the op includes its wait, and `shardcompile.passes` handles it separately."""
