"""Ring exchange of shards: each rank of a group gets the shard of the rank `by` positions before it.

A rank holds its local shard and one other at a time, where an all-gather holds all. A control dependency bounds this
memory: a step can be given a tensor `after` which it starts, an edge of the graph that every compiler keeps.
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
from shardcompile.collectives.shards import check_shard, shards_of
from shardcompile.collectives.traffic import GroupShards, Member, Traffic, nbytes_with, size_with
from shardcompile.sharding import DERIVATIONS, GroupPartition, IntLike, Partition


class RingStep(NamedTuple):
    """Arguments of `fetch_shard` and `return_shard`.

    Attributes:
        inputs: local shards, of one dtype; of a return the values for fetched shards.
        dims: sharded dim of each input.
        total: global number of rows.
        shard: number of rows in this rank's results.
        by: distance in ranks over which shards are sent.
        around: whether the ring is closed, so that the first ranks get shards of the last ones.
        partition: the partition of the rows.
        after: a tensor that must be complete before the step starts: a control dependency.
        group_name: the process group.
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
    """Shards of a ring step that has started.

    Attributes:
        flat: the flat tensor that is written: one shard after the other.
        shapes: shapes of the shards.
    """

    flat: Tensor
    shapes: list[list[IntLike]]

    def wait(self) -> list[Tensor]:
        """Waits for the step and returns its shards."""
        flat = wait(self.flat)
        parts = flat.split_with_sizes([math.prod(shape) for shape in self.shapes])  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Ring:
    """The ring of ranks along a mesh dim, each with a shard of rows.

    Args:
        partition: the partition of the rows, over one mesh dim.
        mesh: the mesh.
        around: whether the ring is closed, so that the first ranks get shards of the last ones; otherwise they get
            empty shards.

    Attributes:
        ranks: number of ranks.
    """

    def __init__(self, partition: Partition, mesh: DeviceMesh, *, around: bool) -> None:
        (mesh_dim,) = partition.mesh_dims
        self.ranks = mesh.shape[mesh_dim]
        self._partition, self._mesh, self._around = partition, mesh, around
        self._held = partition.group_partition(compat.coordinate(mesh) or ())
        self._group_name = compat.group_name_of(mesh, mesh_dim)

    def shard(self, by: int) -> tuple[IntLike, IntLike]:
        """Returns the size and the first global row of the shard that this rank gets from `by` positions before it."""
        if by == 0:
            first = derive("offset", [self._partition], [], self._partition.size, self._mesh)[1]
            return shard_size(self._partition, self._mesh), first
        shifted, first = derive(
            "ring_shift", [self._partition], [by, int(self._around)], self._partition.size, self._mesh
        )
        size = shard_size(shifted, self._mesh)
        compat.suggest_hint(size, -(-compat.size_hint(self._partition.size) // self.ranks))
        return size, first

    def fetch(
        self, shards: Sequence[Tensor], dims: Sequence[int], by: int, after: Tensor | None = None
    ) -> PendingShards:
        """Starts to fetch the shards of the rank `by` positions before this one. They are sent in their memory order.

        Args:
            shards: local shards of several tensors, of one dtype and with the same number of rows.
            dims: sharded dim of each.
            by: 1 to ``ranks - 1``.
            after: a tensor that must be complete before the step starts.
        """
        return self._step(FETCH_SHARD, shards, dims, self.shard(by)[0], by, after)

    def give_back(self, shards: Sequence[Tensor], dims: Sequence[int], by: int) -> PendingShards:
        """The adjoint of `fetch`: the values for fetched shards are sent to the owners of the shards.

        A rank whose shards were fetched by no rank receives zeros.
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
    """Returns the shape of a tensor with another size along a dim."""
    return [size if d == dim else n for d, n in enumerate(x.shape)]


def _numel(a: RingStep) -> list[IntLike]:
    """Returns the number of elements that this rank gets, for each tensor."""
    return [math.prod(_with_size(x, d, a.shard)) for x, d in zip(a.inputs, a.dims, strict=True)]


def _step(a: RingStep, of: Descriptor[RingStep], *, back: bool) -> Tensor:
    group, shards = compat.process_group(a.group_name), a.inputs
    me, n = group.rank(), group.size()
    held = shards_of(int(a.total), a.dims[0], a.partition, n, of.kind)

    def neighbour(distance: int) -> int | None:
        rank = me + distance
        return rank % n if a.around or 0 <= rank < n else None

    previous, following = neighbour(-a.by), neighbour(a.by)
    fetched = (0, 0) if previous is None else held[previous]
    for x, dim in zip(shards, a.dims, strict=True):
        check_shard(x.shape, dim, fetched if back else held[me], me, of.kind)
    source, target = (following, previous) if back else (previous, following)
    sizes = [int(numel) for numel in _numel(a)]
    out = shards[0].new_zeros([sum(sizes)]) if source is None else shards[0].new_empty([sum(sizes)])
    widths = [n for x, dim in zip(shards, a.dims, strict=True) for d, n in enumerate(x.shape) if d != dim]
    call = of.enter(group, shards[0].dtype, a.by, held.sizes, tuple(widths))
    # Messages between two ranks arrive in the order in which they are sent.
    sends = [] if target is None else [(target, x.contiguous()) for x in shards]
    receives = [] if source is None else [(source, part) for part in out.split(sizes)]
    transport.complete(out, call, transport.exchange(call, sends, receives))
    return out


def _fake(a: RingStep) -> Tensor:
    return a.inputs[0].new_empty([sum(_numel(a))])


def _fetched(a: RingStep, side: GroupShards) -> GroupShards:
    """Returns the shards after a step: the sizes by the rank that fetched them, not by their owner."""
    if side.sizes is None:
        return side
    return replace(side, sizes=DERIVATIONS["ring_shift"]([side.sizes], a.by, a.around)[0])


def _members(a: RingStep, n: int | None, *, back: bool) -> list[Member]:
    """Returns members with the local shards on one side and the fetched shards on the other."""
    members = []
    for x, dim in zip(a.inputs, a.dims, strict=True):
        put, get = (
            GroupShards.of(a.partition, a.total, n),
            GroupShards.of(a.partition, a.total, n),
        )
        sides = (_fetched(a, put), get) if back else (put, _fetched(a, get))
        members.append(Member(*sides, nbytes_with(x, dim, a.total)))
    return members


def _whole(a: RingStep) -> object:
    return sum(size_with(x, dim, a.total) for x, dim in zip(a.inputs, a.dims, strict=True))  # type: ignore[misc]


def _traffic(nbytes: int, own: GroupShards | None, fetched: GroupShards | None, n: int) -> Traffic:
    """Returns the traffic of the fetched shards; a return moves the same in the other direction."""
    assert own is not None and fetched is not None
    if own.sizes is None or fetched.sizes is None:
        return Traffic(nbytes / n, nbytes)
    rows = max(sum(own.sizes), 1)
    return Traffic(nbytes * max(fetched.sizes) / rows, nbytes * sum(fetched.sizes) / rows)


def _describe(kind: str, *, back: bool) -> Descriptor[RingStep]:
    def traffic(members: Sequence[Member], n: int) -> Traffic:
        first = members[0]
        own, fetched = (first.get, first.put) if back else (first.put, first.get)
        return _traffic(sum(m.nbytes for m in members), own, fetched, n)

    descriptor: Descriptor[RingStep] = Descriptor(
        kind,
        RingStep,
        lambda a: _step(a, descriptor, back=back),
        fake=_fake,
        members=lambda a, n: _members(a, n, back=back),
        traffic=traffic,
        whole=_whole,
        source=lambda a: (a.total, a.partition),
        states=("by", "shard sizes", "other sizes"),
    )
    return descriptor


FETCH_SHARD = _describe("fetch_shard", back=False)
RETURN_SHARD = _describe("return_shard", back=True)
