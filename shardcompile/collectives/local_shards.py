"""Takes the local shard of a full tensor, and places it into a full tensor of zeros. No communication."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.gathers import AllGatherV
from shardcompile.collectives.shards import shards_of, with_size
from shardcompile.collectives.traffic import gathered, scattered
from shardcompile.sharding import GroupPartition, IntLike


class TakeShard(NamedTuple):
    """Arguments of `take_shard`.

    Attributes:
        input: the full tensor.
        dim: the dim to shard.
        shard: local shard size.
        partition: the partition of the dim.
        group_name: the process group.
    """

    input: Tensor
    dim: int
    shard: IntLike
    partition: GroupPartition
    group_name: str


def _take(a: TakeShard) -> Tensor:
    group = compat.process_group(a.group_name)
    shards = shards_of(a.input.shape[a.dim], a.dim, a.partition, group.size(), "take_shard")
    own = a.input.narrow(a.dim, shards[group.rank()][0], a.shard)
    return own.clone(memory_format=torch.contiguous_format)


def _place(a: AllGatherV) -> Tensor:
    group = compat.process_group(a.group_name)
    shards = shards_of(int(a.total), a.dim, a.partition, group.size(), "place_shard")
    out = a.input.new_zeros(with_size(a.input, a.dim, a.total))
    out.narrow(a.dim, shards[group.rank()][0], a.input.shape[a.dim]).copy_(a.input)
    return out


def _take_adjoint(a: TakeShard, shape: torch.Size, grad: Tensor) -> Tensor:
    back = AllGatherV(grad, a.dim, shape[a.dim], a.partition, a.group_name)
    return PLACE_SHARD.call(back)  # type: ignore[no-any-return]


def _place_adjoint(a: AllGatherV, shape: torch.Size, grad: Tensor) -> Tensor:
    back = TakeShard(grad, a.dim, shape[a.dim], a.partition, a.group_name)
    return TAKE_SHARD.call(back)  # type: ignore[no-any-return]


TAKE_SHARD = Descriptor(
    "take_shard",
    TakeShard,
    _take,
    fake=lambda a: a.input.new_empty(with_size(a.input, a.dim, a.shard)),
    adjoint=_take_adjoint,
    members=lambda a, n: [scattered(a.input, a.dim, a.partition, n)],
    communicates=False,
    as_integers=True,
)

PLACE_SHARD = Descriptor(
    "place_shard",
    AllGatherV,
    _place,
    fake=lambda a: a.input.new_empty(with_size(a.input, a.dim, a.total)),
    adjoint=_place_adjoint,
    members=lambda a, n: [gathered(a.input, a.dim, a.total, a.partition, n)],
    communicates=False,
    as_integers=True,
)
