"""Shards that travel a number of ranks on: each rank of a group gets the shard of the one `by` places before it.

A rank holds its local shard and one other at a time, where a gather holds all. So that no step begins before there is
room for what it brings, it can be told `after` which tensor it starts; a graph then has an edge that every compiler
keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.derived_partitions import derive, shard_size
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.pending import wait
from shardcompile.collectives.shards import check_shard, shards_of, sizes_of
from shardcompile.collectives.traffic import GroupShards, Member, Traffic, nbytes_with, size_with
from shardcompile.sharding import DERIVATIONS, GroupPartition, IntLike, Partition


class RingStep(NamedTuple):
    """Arguments of `fetch_shard` and `return_shard`.

    Attributes:
        inputs: this rank's shards, of one dtype; of a return what is for shards that came.
        dims: of the rows of each.
        total: how many rows there are.
        shard: how many rows this rank gets.
        by: how many places the shards travel.
        around: whether the first ranks get shards of the last ones.
        sharded: the shards.
        after: what has to be there before it starts.
        group_name: the ranks.
    """

    inputs: list[Tensor]
    dims: list[int]
    total: IntLike
    shard: IntLike
    by: int
    around: bool
    partition: GroupPartition
    after: Tensor | None
    group_name: str


@dataclass(frozen=True)
class PendingShards:
    """Shards that are on their way.

    Attributes:
        flat: what is written: one shard after the other.
        shapes: of the shards.
    """

    flat: Tensor
    shapes: list[list[IntLike]]

    def wait(self) -> list[Tensor]:
        """The shards, once they are there."""
        flat = wait(self.flat)
        parts = flat.split_with_sizes([math.prod(shape) for shape in self.shapes])  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Ring:
    """The ranks along a mesh dim, of which each has a shard of rows.

    Args:
        sharded: of the rows, over one mesh dim.
        mesh: the mesh.
        around: whether the first ranks get shards of the last ones; otherwise they get empty shards.

    Attributes:
        ranks: how many there are.
    """

    def __init__(self, partition: Partition, mesh: DeviceMesh, *, around: bool) -> None:
        (mesh_dim,) = partition.mesh_dims
        self.ranks = mesh.shape[mesh_dim]
        self._partition, self._mesh, self._around = partition, mesh, around
        self._held = partition.group_ref(compat.coordinate(mesh) or ())
        self._group_name = compat.group_name_of(mesh, mesh_dim)

    def shard(self, by: int) -> tuple[IntLike, IntLike]:
        """How many rows the shard has that a rank gets, and which row of the whole dim is its first."""
        if by == 0:
            first = derive("located", [self._partition], [], self._partition.size, self._mesh)[1]
            return shard_size(self._partition, self._mesh), first
        shifted, first = derive("shifted", [self._partition], [by, int(self._around)], self._partition.size, self._mesh)
        size = shard_size(shifted, self._mesh)
        compat.suggest_hint(size, -(-compat.size_hint(self._partition.size) // self.ranks))
        return size, first

    def fetch(
        self, shards: Sequence[Tensor], dims: Sequence[int], by: int, after: Tensor | None = None
    ) -> PendingShards:
        """Start to get the shards of the rank `by` places before this one. They travel as they are stored.

        Args:
            shards: this rank's, of one dtype: several tensors with as many rows.
            dims: of the rows of each.
            by: 1 to ``ranks - 1``.
            after: what has to be there before it starts.
        """
        return self._step(FETCH_SHARD, shards, dims, self.shard(by)[0], by, after)

    def give_back(self, shards: Sequence[Tensor], dims: Sequence[int], by: int) -> PendingShards:
        """The adjoint of `fetch`: rows for shards that came go to the rank that they came from.

        A rank whose shards nobody got receives zeros.
        """
        return self._step(RETURN_SHARD, shards, dims, self.shard(0)[0], by, None)

    def _step(
        self,
        of: Descriptor[RingStep],
        shards: Sequence[Tensor],
        dims: Sequence[int],
        size: IntLike,
        by: int,
        after: Tensor | None,
    ) -> PendingShards:
        total, around = self._partition.size, self._around
        step = RingStep(list(shards), list(dims), total, size, by, around, self._held, after, self._group_name)
        return PendingShards(of.call(step), [_with_size(x, d, size) for x, d in zip(shards, dims, strict=True)])


def _with_size(x: Tensor, dim: int, size: IntLike) -> list[IntLike]:
    """The shape of a tensor, had it this size along a dim."""
    return [size if d == dim else n for d, n in enumerate(x.shape)]


def _numel(a: RingStep) -> list[IntLike]:
    """Elements of what this rank gets, for each tensor."""
    return [math.prod(_with_size(x, d, a.shard)) for x, d in zip(a.inputs, a.dims, strict=True)]


def _step(a: RingStep, of: Descriptor[RingStep], *, back: bool) -> Tensor:
    group, shards = compat.process_group(a.group_name), a.inputs
    me, n = group.rank(), group.size()
    held = shards_of(int(a.total), a.dims[0], a.partition, n, of.kind)

    def other(distance: int) -> int | None:
        rank = me + distance
        return rank % n if a.around or 0 <= rank < n else None

    before, behind = other(-a.by), other(a.by)
    fetched = (0, 0) if before is None else held[before]
    for x, dim in zip(shards, a.dims, strict=True):
        check_shard(x.shape, dim, fetched if back else held[me], me, of.kind)
    source, target = (behind, before) if back else (before, behind)
    sizes = [int(numel) for numel in _numel(a)]
    out = shards[0].new_zeros([sum(sizes)]) if source is None else shards[0].new_empty([sum(sizes)])
    widths = [n for x, dim in zip(shards, a.dims, strict=True) for d, n in enumerate(x.shape) if d != dim]
    call = of.enter(group, shards[0].dtype, a.by, sizes_of(held), tuple(widths))
    # Messages between two ranks of one call arrive in the order in which they are sent.
    sends = [] if target is None else [(target, x.contiguous()) for x in shards]
    receives = [] if source is None else [(source, part) for part in out.split(sizes)]
    transport.complete(out, call, transport.exchange(call, sends, receives))
    return out


def _fake(a: RingStep) -> Tensor:
    return a.inputs[0].new_empty([sum(_numel(a))])


def _away(a: RingStep, side: GroupShards) -> GroupShards:
    """Shards that are on other ranks than their own: they do not know their partition."""
    if side.sizes is None:
        return side
    return replace(side, sizes=DERIVATIONS["shifted"]([side.sizes], a.by, a.around)[0])


def _members(a: RingStep, n: int | None, *, back: bool) -> list[Member]:
    """Shards that go where their partition says, and away from there, or back."""
    members = []
    for x, dim in zip(a.inputs, a.dims, strict=True):
        put, get = (
            GroupShards.of(a.partition, a.total, x.shape[dim], n),
            GroupShards.of(a.partition, a.total, a.shard, n),
        )
        sides = (_away(a, put), get) if back else (put, _away(a, get))
        members.append(Member(*sides, nbytes_with(x, dim, a.total)))
    return members


def _whole(a: RingStep) -> object:
    return sum(size_with(x, dim, a.total) for x, dim in zip(a.inputs, a.dims, strict=True))  # type: ignore[misc]


def _traffic(nbytes: int, own: GroupShards | None, away: GroupShards | None, n: int) -> Traffic:
    """What ranks have of other ranks' shards has come, or goes back."""
    assert own is not None and away is not None
    if own.sizes is None or away.sizes is None:
        return Traffic(nbytes / n, nbytes)
    rows = max(sum(own.sizes), 1)
    return Traffic(nbytes * max(away.sizes) / rows, nbytes * sum(away.sizes) / rows)


def _fetch_traffic(members: Sequence[Member], n: int) -> Traffic:
    return _traffic(sum(m.nbytes for m in members), members[0].put, members[0].get, n)


def _return_traffic(members: Sequence[Member], n: int) -> Traffic:
    return _traffic(sum(m.nbytes for m in members), members[0].get, members[0].put, n)


FETCH_SHARD: Descriptor[RingStep] = Descriptor(
    "fetch_shard",
    RingStep,
    lambda a: _step(a, FETCH_SHARD, back=False),
    fake=_fake,
    members=lambda a, n: _members(a, n, back=False),
    traffic=_fetch_traffic,
    whole=_whole,
    source=lambda a: (a.total, a.partition),
    states=("by", "sharded of", "other sizes"),
    told=True,
)

RETURN_SHARD: Descriptor[RingStep] = Descriptor(
    "return_shard",
    RingStep,
    lambda a: _step(a, RETURN_SHARD, back=True),
    fake=_fake,
    members=lambda a, n: _members(a, n, back=True),
    traffic=_return_traffic,
    whole=_whole,
    source=lambda a: (a.total, a.partition),
    states=("by", "sharded of", "other sizes"),
    told=True,
)
