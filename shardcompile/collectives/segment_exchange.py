"""Redistributes the rows of a dim between partitions with different numbers of segments.

``x.view(-1, channels)`` of a batch of n sequences sharded along the sequence has n segments, and each rank holds a part
of every segment. A partition of contiguous rows has one segment. Which rows go where follows from the two partitions.
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
from shardcompile.collectives.shards import as_rows, check_shard, new_rows, other_sizes, shards_of
from shardcompile.collectives.traffic import GroupShards, Member, Traffic, nbytes_with, sent_and_received, size_with
from shardcompile.errors import CollectiveError
from shardcompile.sharding import GroupPartition, IntLike, Partition, with_one_segment


class Regroup(NamedTuple):
    """Arguments of `regroup_rows`.

    Attributes:
        input: the local shard.
        dim: the sharded dim.
        total: global size of the dim.
        shard: number of rows in this rank's result.
        src: the partition of the input.
        dst: the partition of the result.
        held_in: number of equal segments of the input's partition.
        wanted_in: number of equal segments of the result's partition.
        group_name: the process group.
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
class _Segments:
    """The segments of a partition, and the part of each that a rank holds.

    Attributes:
        count: number of segments.
        length: length of each segment in rows.
        edges: offsets in a segment where the part of each rank begins, and where the last one ends: [ranks + 1], int64,
            on the CPU.
    """

    count: int
    length: int
    edges: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], count: int) -> _Segments:
        """Returns the segments for these shard sizes.

        Raises:
            CollectiveError: a shard size is not divisible by the number of segments.
        """
        if any(n % count for n in sizes):
            raise CollectiveError(f"regroup_rows: shard sizes {list(sizes)} are not divisible by {count} segments")
        ends = torch.tensor([0, *sizes], device="cpu").cumsum(0) // count
        return cls(count, sum(sizes) // count, ends)

    def rows(self, rank: int) -> Tensor:
        """Returns the global indices of a rank's rows, ascending."""
        part = torch.arange(int(self.edges[rank]), int(self.edges[rank + 1]), device="cpu")
        return (torch.arange(self.count, device="cpu").unsqueeze(1) * self.length + part).view(-1)

    def owners(self, rows: Tensor) -> Tensor:
        """Returns the rank that holds each row."""
        return torch.searchsorted(self.edges[:-1], rows.remainder(max(self.length, 1)), right=True) - 1


class _Plan(NamedTuple):
    """Which rows go where.

    Attributes:
        leaving: permutation that orders the local rows by destination; None if they are in this order.
        sent: number of rows to send to each rank.
        received: number of rows to receive from each rank.
        arriving: for each row of the result its position among the received rows; None if they are in order.
    """

    leaving: Tensor | None
    sent: list[int]
    received: list[int]
    arriving: Tensor | None


@functools.lru_cache(maxsize=256)
def _plan_of(src: tuple[int, ...], dst: tuple[int, ...], held_in: int, wanted_in: int, me: int) -> _Plan:
    """Plans the exchange. Cached, since a program moves rows between the same partitions repeatedly."""
    before, after = _Segments.of(src, held_in), _Segments.of(dst, wanted_in)
    dst_ranks, src_ranks = after.owners(before.rows(me)), before.owners(after.rows(me))
    sent, received = (torch.bincount(ranks, minlength=len(src)).tolist() for ranks in (dst_ranks, src_ranks))
    # Ascending rows go to ascending ranks if the result has one segment; the same holds for the sources.
    leaving = None if wanted_in == 1 else dst_ranks.argsort(stable=True)
    arriving = None if held_in == 1 else src_ranks.argsort(stable=True).argsort()
    return _Plan(leaving, sent, received, arriving)


def _run(a: Regroup) -> Tensor:
    group, x, dim, total, shard = compat.process_group(a.group_name), a.input, a.dim, int(a.total), int(a.shard)
    held, wanted = (shards_of(total, dim, partition, group.size(), REGROUP_ROWS.kind) for partition in (a.src, a.dst))
    check_shard(x.shape, dim, held[group.rank()], group.rank(), REGROUP_ROWS.kind)
    plan = _plan_of(held.sizes, wanted.sizes, int(a.held_in), int(a.wanted_in), group.rank())
    leaving = transport.rows_first(x, dim)
    if plan.leaving is not None:
        leaving = leaving.index_select(0, plan.leaving.to(x.device))
    out = new_rows(x, dim, shard)
    target = as_rows(out, x, dim, shard)
    memory = out if plan.arriving is None else scratch.borrow(out.numel(), out)
    received = memory.view(target.shape)
    stated = (dim, held.sizes, wanted.sizes, int(a.held_in), int(a.wanted_in), other_sizes(x, dim))
    call = REGROUP_ROWS.enter(group, x.dtype, *stated)
    ends = transport.running_ends(plan.sent), transport.running_ends(plan.received)
    works = transport.send_ranges(call, leaving, ends[0], received, ends[1])

    def reorder() -> None:
        if plan.arriving is not None:
            torch.index_select(received, 0, plan.arriving.to(x.device), out=target)
            scratch.give_back(memory)

    transport.complete(out, call, works, None if plan.arriving is None else reorder)
    return out


def _back(a: Regroup, input: Tensor, shard: IntLike) -> Regroup:
    return a._replace(input=input, shard=shard, src=a.dst, dst=a.src, held_in=a.wanted_in, wanted_in=a.held_in)


def _adjoint(a: Regroup, shape: torch.Size, grad: Tensor) -> Tensor:
    return REGROUP_ROWS.start(_back(a, grad, shape[a.dim])).wait()


def _members(a: Regroup, n: int | None) -> list[Member]:
    put = GroupShards.of(a.src, a.total, n)
    get = GroupShards.of(a.dst, a.total, n)
    return [Member(put, get, nbytes_with(a.input, a.dim, a.total))]


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    """Returns the traffic, estimated as if each rank sends to every other one, as with many segments."""
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
    states=("dim", "shard sizes", "to shard sizes", "segments held", "segments wanted", "other sizes"),
    as_integers=True,
)


def global_indices(partition: Partition, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Returns the global indices of the rows of the local shard, ascending: [n], int64.

    Args:
        partition: a partition over one mesh dim.
        mesh: the mesh.
        device: device of the result.
    """
    dim_size: Any = partition.size
    size: Any = shard_size(partition, mesh)
    first: Any = derive("offset", [with_one_segment(partition)], [], dim_size, mesh)[1]
    segments: Any = partition.num_segments
    if compat.is_one(segments):
        return torch.arange(size, device=device) + first
    segment_starts = torch.arange(segments, device=device).unsqueeze(1) * (dim_size // segments)
    indices = segment_starts + (torch.arange(size // segments, device=device) + first // segments)
    return torch.ops.aten.view.default(indices, [size])
