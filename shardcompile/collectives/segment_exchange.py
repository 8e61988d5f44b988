"""Moves the rows of a dim between shards of neighbouring rows and shards that have a part of each of several stretches.

``x.view(-1, channels)`` of a sharded sequence and a batch of n has n stretches: each shard has some rows of every
sequence. Which rows go where follows from the two partitions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.derived_partitions import derive, shard_size
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.shards import as_rows, check_shard, new_rows, other_sizes, shards_of, sizes_of
from shardcompile.collectives.traffic import GroupShards, Member, Traffic, nbytes_with, sent_and_received, size_with
from shardcompile.errors import CollectiveError
from shardcompile.sharding import GroupPartition, IntLike, Partition, neighbouring


class Regroup(NamedTuple):
    """Arguments of `regroup_rows`.

    Attributes:
        input: this rank's local shard.
        dim: of the rows.
        total: how many rows there are.
        shard: how many rows this rank gets.
        src: shard sizes that ranks hold.
        dst: shard sizes that ranks want.
        held_in: how many equal stretches the dim has of which each rank holds a part.
        wanted_in: how many it has of which each rank wants a part.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    total: IntLike
    shard: IntLike
    src: GroupPartition
    dst: GroupPartition
    held_in: IntLike
    wanted_in: IntLike
    group_name: str


@dataclass(frozen=True)
class _Stretches:
    """Where the rows of a partition are.

    Attributes:
        count: how many stretches there are.
        length: of each, in rows.
        edges: where each rank's part of a stretch begins, and where the last one ends: [ranks + 1], int64, on the CPU.
    """

    count: int
    length: int
    edges: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], count: int) -> _Stretches:
        """Those of shards.

        Raises:
            CollectiveError: a shard has no equal part of every stretch.
        """
        if any(n % count for n in sizes):
            raise CollectiveError(f"regroup_rows: shards of {list(sizes)} rows have no equal part of {count} stretches")
        ends = torch.tensor([0, *sizes], device="cpu").cumsum(0) // count
        return cls(count, sum(sizes) // count, ends)

    def rows(self, rank: int) -> Tensor:
        """The numbers of a rank's rows, rising."""
        part = torch.arange(int(self.edges[rank]), int(self.edges[rank + 1]), device="cpu")
        return (torch.arange(self.count, device="cpu").unsqueeze(1) * self.length + part).view(-1)

    def owners(self, numbers: Tensor) -> Tensor:
        """The rank that has each row."""
        return torch.searchsorted(self.edges[:-1], numbers.remainder(max(self.length, 1)), right=True) - 1


class _Plan(NamedTuple):
    """Which rows go where.

    Attributes:
        leaving: the order in which this rank's rows go, those for the first rank first; None for their own.
        sent: how many go to each rank.
        received: how many come from each.
        arriving: for each row that is wanted, its place among those that come; None if they come in their order.
    """

    leaving: Tensor | None
    sent: list[int]
    received: list[int]
    arriving: Tensor | None


@functools.lru_cache(maxsize=256)
def _plan_of(src: tuple[int, ...], dst: tuple[int, ...], held_in: int, wanted_in: int, me: int) -> _Plan:
    """Kept: a program moves rows between the same partitions again and again."""
    before, after = _Stretches.of(src, held_in), _Stretches.of(dst, wanted_in)
    to, of = after.owners(before.rows(me)), before.owners(after.rows(me))
    sent, received = (torch.bincount(ranks, minlength=len(src)).tolist() for ranks in (to, of))
    # Rising numbers go to rising ranks if those have neighbouring rows, and come from such.
    leaving = None if wanted_in == 1 else to.argsort(stable=True)
    arriving = None if held_in == 1 else of.argsort(stable=True).argsort()
    return _Plan(leaving, sent, received, arriving)


def _run(a: Regroup) -> Tensor:
    group, x, dim, total, shard = compat.process_group(a.group_name), a.input, a.dim, int(a.total), int(a.shard)
    held, wanted = (shards_of(total, dim, partition, group.size(), REGROUP_ROWS.kind) for partition in (a.src, a.dst))
    check_shard(x.shape, dim, held[group.rank()], group.rank(), REGROUP_ROWS.kind)
    plan = _plan_of(sizes_of(held), sizes_of(wanted), int(a.held_in), int(a.wanted_in), group.rank())
    leaving = transport.rows_first(x, dim)
    if plan.leaving is not None:
        leaving = leaving.index_select(0, plan.leaving.to(x.device))
    out = new_rows(x, dim, shard)
    target = as_rows(out, x, dim, shard)
    memory = out if plan.arriving is None else scratch.borrow(out.numel(), out)
    came = memory.view(target.shape)
    stated = (dim, sizes_of(held), sizes_of(wanted), int(a.held_in), int(a.wanted_in), other_sizes(x, dim))
    call = REGROUP_ROWS.enter(group, x.dtype, *stated)
    ends = transport.running_ends(plan.sent), transport.running_ends(plan.received)
    works = transport.send_ranges(call, leaving, ends[0], came, ends[1])

    def put_in_order() -> None:
        if plan.arriving is not None:
            torch.index_select(came, 0, plan.arriving.to(x.device), out=target)
            scratch.give_back(memory)

    transport.complete(out, call, works, None if plan.arriving is None else put_in_order)
    return out


def _back(a: Regroup, input: Tensor, shard: IntLike) -> Regroup:
    return a._replace(input=input, shard=shard, src=a.dst, dst=a.src, held_in=a.wanted_in, wanted_in=a.held_in)


def _adjoint(a: Regroup, shape: torch.Size, grad: Tensor) -> Tensor:
    return REGROUP_ROWS.start(_back(a, grad, shape[a.dim])).wait()


def _members(a: Regroup, n: int | None) -> list[Member]:
    put = GroupShards.of(a.src, a.total, a.input.shape[a.dim], n)
    get = GroupShards.of(a.dst, a.total, a.shard, n)
    return [Member(put, get, nbytes_with(a.input, a.dim, a.total))]


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    """As if each rank had something for every other one: stretches are many."""
    sent, received = sent_and_received(members, n)
    (m,) = members
    return Traffic(max(*sent, *received), sum(sent), 2 * m.nbytes / n, 2 * m.nbytes / n)


REGROUP_ROWS: Descriptor[Regroup] = Descriptor(
    "regroup_rows",
    Regroup,
    _run,
    sizes=lambda a: {a.dim: a.shard},
    adjoint=_adjoint,
    inverse=lambda a, back: _back(a, back.input, back.shard),
    members=_members,
    traffic=_traffic,
    whole=lambda a: size_with(a.input, a.dim, a.total),
    source=lambda a: (a.total, a.src),
    states=("dim", "sharded of", "to shards of", "stretches held", "stretches wanted", "other sizes"),
    told=True,
    as_integers=True,
)


def numbers_of_shard(partition: Partition, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """The numbers in the whole dim of the rows of this rank's local shard, rising: [n], int64.

    Args:
        sharded: over one mesh dim.
        mesh: the mesh.
        device: of the result.
    """
    dim_size: Any = partition.size
    size: Any = shard_size(partition, mesh)
    first: Any = derive("located", [neighbouring(partition)], [], dim_size, mesh)[1]
    runs: Any = partition.runs
    if compat.is_one(runs):
        return torch.arange(size, device=device) + first
    stretches = torch.arange(runs, device=device).unsqueeze(1) * (dim_size // runs)
    numbers = stretches + (torch.arange(size // runs, device=device) + first // runs)
    return torch.ops.aten.view.default(numbers, [size])
