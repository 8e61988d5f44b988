"""Shards in the reverse order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.shards import as_rows, new_rows, other_sizes
from shardcompile.collectives.traffic import GroupShards, Member, Traffic, is_number, nbytes_of
from shardcompile.sharding import IntLike


class MirrorShards(NamedTuple):
    """Arguments of `mirror_shards`.

    Attributes:
        input: this rank's local shard.
        dim: that is sharded.
        shard: how many rows this rank gets.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    shard: IntLike
    group_name: str


def _run(a: MirrorShards) -> Tensor:
    """The shard of the rank that is as far from the last one as this rank is from the first."""
    group, x, shard = compat.process_group(a.group_name), a.input, int(a.shard)
    peer = group.size() - 1 - group.rank()
    out = new_rows(x, a.dim, shard)
    rows, target = transport.rows_first(x, a.dim), as_rows(out, x, a.dim, shard)
    # Also by the rank in the middle: ranks count their calls.
    call = MIRROR_SHARDS.enter(group, x.dtype, a.dim, other_sizes(x, a.dim))
    if peer == group.rank():
        target.copy_(rows)
    else:
        transport.complete(out, call, transport.exchange(call, [(peer, rows)], [(peer, target)]))
    return out


def _adjoint(a: MirrorShards, shape: torch.Size, grad: Tensor) -> Tensor:
    return MIRROR_SHARDS.start(a._replace(input=grad, shard=shape[a.dim])).wait()


def _members(a: MirrorShards, n: int | None) -> list[Member]:
    put, get = (GroupShards(None, is_number(size)) for size in (a.input.shape[a.dim], a.shard))
    return [Member(put, get, nbytes_of(a.input))]


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    payload = sum(m.nbytes for m in members)
    return Traffic(payload, n * payload)


MIRROR_SHARDS = Descriptor(
    "mirror_shards",
    MirrorShards,
    _run,
    sizes=lambda a: {a.dim: a.shard},
    adjoint=_adjoint,
    inverse=lambda a, back: a._replace(input=back.input, shard=back.shard),
    members=_members,
    traffic=_traffic,
    states=("dim", "other sizes"),
    of_one_rank=True,
)
