"""Rows that other rows name by their numbers, as the nodes of a graph by its edges: each one travels once to each rank
that names it.

Every rank tells the owners which rows it needs, each number once; that is worked out here once for an index. After that
one exchange brings the rows (`take_rows`), and one exchange brings sums of what is meant for them home (`add_rows`).
The two are each other's adjoint. What a rank names of its own rows does not travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.derived_partitions import shard_size
from shardcompile.collectives.routes import (
    counts_in_range,
    exchange_rows,
    first_rows,
    gather_counts,
    partition_of_sizes,
)
from shardcompile.sharding import GroupPartition, IntLike, Partition, write_partition
from shardcompile.sharding.arguments import partition_schema

Reduction = Literal["sum", "prod", "mean", "amax", "amin", "any"]
"""What becomes of several entries that are meant for one row, as ``torch.scatter_reduce`` has it; any: one of them."""

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_LIBRARY.define(
    f"name_rows(Tensor index, SymInt size, {partition_schema()}, str group_name, bool wraps, bool may_miss) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout],
)
_ops = torch.ops.shardcompile


class Links(NamedTuple):
    """Which rows travel for an index, on one rank.

    Attributes:
        asked: asked[s, d] rows are named on rank s and held by rank d: [ranks, ranks], int64, on the CPU.
        sent: of each row that this rank sends its number in the shard: [a], int64, in the order of the ranks that ask.
        wanted: of each row that comes here its number in the whole dim: [b], int64, rising.
        place: of each entry of the index its row among those of the shard, then those that come: [e], int64.
        sent_partition: how the rows that are sent are spread over the ranks.
        arrived_partition: the same of those that come.
    """

    asked: Tensor
    sent: Tensor
    wanted: Tensor
    place: Tensor
    sent_partition: Partition
    arrived_partition: Partition


def find_links(
    index: Tensor,
    partition: Partition,
    mesh: DeviceMesh,
    about: IntLike,
    call: str,
    *,
    wraps: bool = True,
    may_miss: bool = False,
) -> Links:
    """Which rows of a sharded dim have to travel. Two collectives: how many, and their numbers.

    Args:
        index: this rank's entries: [e]; row indices in the whole dim.
        sharded: of the dim, over one mesh dim.
        mesh: the mesh.
        about: how many entries there are on all ranks, as a rule.
        call: the op or the function, for the message.
        wraps: negative numbers count from the end of the dim; otherwise they are out of range.
        may_miss: an entry may also be the size of the dim, which names no row: it is placed behind all rows.

    Raises:
        RowRangeError: on every rank, before a row is moved, if an entry is out of range on some rank.
    """
    (mesh_dim,) = partition.mesh_dims
    group_name, here = compat.group_name_of(mesh, mesh_dim), compat.coordinate(mesh)
    ref = write_partition(partition.group_ref(here or ()))
    said, numbers, within, place = _ops.name_rows(index, partition.size, *ref, group_name, wraps, may_miss)
    rule = f"{call}: an index names rows of the tensor, and so is less than their number"
    asked = gather_counts(said, group_name, rule)
    likely = compat.size_hint(about)
    sent_partition = partition_of_sizes(asked.sum(0), mesh, [mesh_dim], about=likely)
    arrived_partition = partition_of_sizes(asked.sum(1), mesh, [mesh_dim], about=likely)
    leaving, arriving = sent_partition.local_size(here), arrived_partition.local_size(here)
    if may_miss:
        behind: Any = shard_size(partition, mesh)
        place = torch.where(place < 0, behind + arriving, place)
    (sent,) = exchange_rows([first_rows(within, arriving)], asked, leaving, group_name)
    return Links(asked, sent, first_rows(numbers, arriving), place, sent_partition, arrived_partition)


def _name_rows(
    index: Tensor,
    size: int,
    sizes: list[int],
    key: int,
    grouping: list[int],
    group_name: str,
    wraps: bool,
    may_miss: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What this rank's entries name. One op, since compilers take long over so many small ones.

    Returns:
        How many rows of each rank have to come, as `counts_in_range` tells it: [ranks].
        Their numbers, rising, then zeros: [e + 1].
        Their numbers in the shards that hold them, then zeros: [e + 1].
        The place of each entry, as in `Links`; -1 if it names no row: [e].
    """
    group, entries, device = compat.process_group(group_name), index.shape[0], index.device
    shards = GroupPartition(sizes, key, grouping).shards(size, group.size())
    ranges = transport.running_ends(shards)
    starts = torch.tensor([start for start, _ in ranges], device=device)
    first, end = ranges[group.rank()]
    number = (torch.where(index < 0, index + size, index) if wraps else index).long()
    bad = (number < 0) | (number > size if may_miss else number >= size)
    mine = (number >= first) & (number < end)
    ordered, order = torch.where(mine | bad, size, number).sort()
    heads = torch.ones_like(mine)  # the first entry of each row that has to come
    heads[1:] = ordered[1:] != ordered[:-1]
    heads &= ordered < size
    slots = heads.cumsum(0) - 1
    owner = torch.searchsorted(starts, ordered, right=True) - 1
    counts = starts.new_zeros([group.size() + 1]).index_add_(0, owner.where(heads, group.size()), heads.long())
    target = slots.where(heads, entries)
    numbers = number.new_zeros([entries + 1]).scatter_(0, target, ordered.where(heads, 0))
    within = number.new_zeros([entries + 1]).scatter_(0, target, (ordered - starts[owner]).where(heads, 0))
    place = torch.empty_like(slots).index_copy_(0, order, slots).add_(end - first).where(~mine, number - first)
    if may_miss:
        place.masked_fill_(number == size, -1)
    return counts_in_range(counts[:-1], index.long(), bad), numbers, within, place


def _fake_names(
    index: Tensor, size: IntLike, sizes: object, key: object, grouping: object, group_name: str, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks, entries = compat.process_group(group_name).size(), index.shape[0]
    return (
        index.new_empty([ranks], dtype=torch.int64),
        index.new_empty([entries + 1], dtype=torch.int64),
        index.new_empty([entries + 1], dtype=torch.int64),
        index.new_empty([entries], dtype=torch.int64),
    )


_LIBRARY.impl("name_rows", _name_rows, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::name_rows", _fake_names, lib=_LIBRARY)


def rows_travel(came: Partition) -> bool:
    """Whether rows travel, as far as is known: of a dim without rows every rank knows that none do.

    Args:
        came: how the rows that come are spread over the ranks.
    """
    return not (isinstance(came.size, int) and came.size == 0)


def take_rows(
    shards: Sequence[Tensor],
    asked: Tensor,
    sent: Tensor,
    place: Tensor,
    arriving: IntLike,
    group_name: str,
    *,
    may_miss: bool = False,
    travels: bool = True,
) -> list[Tensor]:
    """The rows that an index names, those of all tensors by one exchange. Differentiable.

    Args:
        shards: this rank's rows of each tensor: [n, ...].
        asked: as in `Links`.
        sent: as in `Links`.
        place: as in `Links`.
        arriving: how many rows come.
        group_name: the ranks.
        may_miss: there are entries that name no row, which get zeros.
        travels: whether any rank names rows of another, see `rows_travel`.

    Returns:
        Of each: [e, ...].
    """
    leaving = [b.index_select(0, sent) for b in shards] if travels else []
    came = exchange_rows(leaving, asked, arriving, group_name, back=True) if travels else [b[:0] for b in shards]
    nothing = [[b.new_zeros([1, *b.shape[1:]])] if may_miss else [] for b in shards]
    return [torch.cat([b, c, *z]).index_select(0, place) for b, c, z in zip(shards, came, nothing, strict=True)]


def add_rows(
    values: Sequence[Tensor],
    asked: Tensor,
    sent: Tensor,
    place: Tensor,
    shard: IntLike,
    arriving: IntLike,
    group_name: str,
    *,
    travels: bool = True,
) -> list[Tensor]:
    """Sums of what is meant for each row, at home, those of all tensors by one exchange. Differentiable.

    Args:
        values: for each entry of the index: [e, ...].
        asked: as in `Links`.
        sent: as in `Links`.
        place: as in `Links`.
        shard: how many rows this rank has.
        arriving: how many of others it names.
        group_name: the ranks.
        travels: whether any rank names rows of another, see `rows_travel`.

    Returns:
        Of each: [shard, ...].
    """
    if not travels:
        return [v.new_zeros([shard, *v.shape[1:]]).index_add(0, place, v) for v in values]
    sums = [v.new_zeros([shard + arriving, *v.shape[1:]]).index_add(0, place, v) for v in values]
    away = [s.narrow(0, shard, arriving) for s in sums]
    home = exchange_rows(away, asked, sent.shape[0], group_name)
    return [s.narrow(0, 0, shard).index_add(0, sent, h) for s, h in zip(sums, home, strict=True)]


def named_rows(sent: Tensor, place: Tensor, shard: IntLike, arriving: IntLike) -> Tensor:
    """Which of this rank's rows an index names on any rank: [shard], bool. Nothing travels.

    Args:
        sent: as in `Links`.
        place: as in `Links`.
        shard: how many rows this rank has.
        arriving: how many of others it names.
    """
    own: Any = shard
    here = torch.zeros([own + arriving], dtype=torch.bool, device=place.device).scatter(0, place, True)
    return here.narrow(0, 0, own).scatter(0, sent, True)


def reduce_rows(
    rows: Tensor,
    values: Tensor,
    reduce: Reduction,
    include_self: bool,
    asked: Tensor,
    sent: Tensor,
    place: Tensor,
    shard: IntLike,
    arriving: IntLike,
    group_name: str,
) -> Tensor:
    """Rows, each reduced with what is meant for it, at home, by one exchange.

    Args:
        rows: this rank's: [shard, ...].
        values: for each entry of the index: [e, ...].
        reduce: the reduction.
        include_self: whether a row that something is meant for counts itself; one that nothing is meant for stays.
        asked: as in `Links`.
        sent: as in `Links`.
        place: as in `Links`.
        shard: how many rows this rank has.
        arriving: how many of others it names.
        group_name: the ranks.
    """
    size: Any = shard
    came: Any = arriving
    kind = "sum" if reduce == "mean" else reduce
    terms = [(values, kind)]
    if reduce == "mean":
        terms.append((torch.ones_like(place), "sum"))
    own = [_reduced(v.new_full([size + came, *v.shape[1:]], _neutral(k, v.dtype)), place, v, k) for v, k in terms]
    home = exchange_rows([o.narrow(0, size, came) for o in own], asked, sent.shape[0], group_name)
    pairs = zip(own, home, terms, strict=True)
    found, *counts = [_reduced(o.narrow(0, 0, size), sent, h, k) for o, h, (_, k) in pairs]
    named = named_rows(sent, place, shard, arriving).view(_column(rows))
    if include_self:
        found = _COMBINE[kind](rows, found)
    if counts:
        found = found / (counts[0] + int(include_self)).view(_column(rows))
    return torch.where(named, found, rows)


def _column(rows: Tensor) -> list[int]:
    """The shape of one number for each row."""
    return [rows.shape[0], *[1] * (rows.ndim - 1)]


def _reduced(rows: Tensor, place: Tensor, values: Tensor, reduce: str) -> Tensor:
    numbers = place.view([place.shape[0], *[1] * (values.ndim - 1)]).expand_as(values)
    return rows.scatter(0, numbers, values) if reduce == "any" else rows.scatter_reduce(0, numbers, values, reduce)


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "amax": torch.maximum,
    "amin": torch.minimum,
}


def _neutral(reduce: str, dtype: torch.dtype) -> float:
    """What changes nothing."""
    if reduce in ("sum", "prod", "any"):
        return int(reduce == "prod")
    if dtype.is_floating_point:
        return -math.inf if reduce == "amax" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max
