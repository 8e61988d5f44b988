"""Reflects shards over the ranks: each rank gets the shard of the rank at the opposite end of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.shards import as_rows, new_rows, other_sizes
from shardcompile.collectives.traffic import Member, Traffic, of_any_rows
from shardcompile.sharding import IntLike


class ReflectShards(NamedTuple):
    """Arguments of `reflect_shards`.

    Attributes:
        input: the local shard.
        dim: the sharded dim.
        shard: number of rows in this rank's result.
        group_name: the process group.
    """

    input: Tensor
    dim: int
    shard: IntLike
    group_name: str


def _run(a: ReflectShards) -> Tensor:
    """Exchanges shards with rank ``n - 1 - rank``. The rows of a shard keep their order."""
    group, x, shard = compat.process_group(a.group_name), a.input, int(a.shard)
    peer = group.size() - 1 - group.rank()
    out = new_rows(x, a.dim, shard)
    rows, target = transport.rows_first(x, a.dim), as_rows(out, x, a.dim, shard)
    # Also on the rank in the middle: the calls of all ranks are counted.
    call = REFLECT_SHARDS.enter(group, x.dtype, a.dim, other_sizes(x, a.dim))
    if peer == group.rank():
        target.copy_(rows)
    else:
        transport.complete(out, call, transport.exchange(call, [(peer, rows)], [(peer, target)]))
    return out


def _adjoint(a: ReflectShards, shape: torch.Size, grad: Tensor) -> Tensor:
    return REFLECT_SHARDS.start(a._replace(input=grad, shard=shape[a.dim])).wait()


def _members(a: ReflectShards, n: int | None) -> list[Member]:
    return [of_any_rows(a.input)]


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    payload = sum(m.nbytes for m in members)
    return Traffic(payload, n * payload)


REFLECT_SHARDS = Descriptor(
    "reflect_shards",
    ReflectShards,
    _run,
    sizes=lambda a: {a.dim: a.shard},
    adjoint=_adjoint,
    inverse=lambda a, back: a._replace(input=back.input, shard=back.shard),
    members=_members,
    traffic=_traffic,
    states=("dim", "other sizes"),
    of_one_rank=True,
)
