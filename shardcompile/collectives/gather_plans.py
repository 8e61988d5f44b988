"""Gather plans: distributed gather and scatter-add along a sharded dim by indices, in the inspector / executor scheme.

The inspector (`make_gather_plan`) runs once for an index, such as the edges of a graph: each rank requests the distinct
remote rows that its indices refer to from their owners. The executors then need one exchange each, in which a row is
sent once to each rank that requested it: `take` gathers rows, and `add` scatter-adds values, summed per row before they
are sent. Each is the adjoint of the other. Local rows are not sent.
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
    check_not_negative,
    counts_in_range,
    exchange_rows,
    first_rows,
    gather_counts,
    partition_of_sizes,
)
from shardcompile.compat.own_ops import define_op
from shardcompile.sharding import GroupPartition, IntLike, Partition, write_group_partition
from shardcompile.sharding.codec import partition_schema

Reduction = Literal["sum", "prod", "mean", "amax", "amin", "any"]
"""The reduction of values with the same index, as in ``torch.scatter_reduce``; any: one of the values is kept."""

_ops = torch.ops.shardcompile


class LocalGatherPlan(NamedTuple):
    """The gather plan of an index, as one rank holds it, and its executors.

    Attributes:
        partition: the partition of the rows, over one mesh dim.
        mesh: the mesh.
        asked: rank s requests asked[s, d] distinct rows from rank d: [ranks, ranks], int64, on the CPU.
        sent: local indices of the rows that this rank sends, ordered by destination rank: [a], int64.
        wanted: global indices of the rows that this rank receives, ascending: [b], int64.
        place: for each entry of the index the position of its row in the local shard followed by the received rows:
            [e], int64.
        sent_partition: the partition of the sent rows over the ranks.
        arrived_partition: the partition of the received rows over the ranks.
        least: the least index of each rank that has negative indices, 0 of the others: [ranks], int64, on the CPU; None
            if that is unknown.
    """

    partition: Partition
    mesh: DeviceMesh
    asked: Tensor
    sent: Tensor
    wanted: Tensor
    place: Tensor
    sent_partition: Partition
    arrived_partition: Partition
    least: Tensor | None = None

    def without_negatives(self, call: str) -> LocalGatherPlan:
        """Returns the plan for an op that takes no negative indices.

        Raises:
            RowRangeError: on every rank, if an index is negative on some rank.
        """
        # All executors read `sent`, so that a graph that uses the plan keeps the check.
        return self._replace(sent=_ops.without_negatives(self.sent, self.least, _rule_of(call)))

    @property
    def _num_rows(self) -> Any:
        """The number of local rows."""
        return shard_size(self.partition, self.mesh)

    @property
    def _num_received(self) -> Any:
        """The number of remote rows that the local entries refer to."""
        return shard_size(self.arrived_partition, self.mesh)

    @property
    def _travels(self) -> bool:
        """Whether any row may travel: False only if the number of received rows is statically 0 on all ranks."""
        return not (isinstance(self.arrived_partition.size, int) and self.arrived_partition.size == 0)

    def _exchange(self, rows: Sequence[Tensor], count: IntLike, *, back: bool = False) -> list[Tensor]:
        group_name = compat.group_name_of(self.mesh, self.partition.mesh_dims[0])
        return exchange_rows(rows, self.asked, count, group_name, back=back)

    def take(self, shards: Sequence[Tensor], *, may_miss: bool = False) -> list[Tensor]:
        """Gathers the rows of the index from several tensors by one exchange: [e, ...] of each. Differentiable.

        Args:
            shards: the local shard of each tensor: [n, ...].
            may_miss: whether entries may refer to no row; they get zeros.
        """
        remote = [b[:0] for b in shards]
        if self._travels:
            remote = self._exchange([b.index_select(0, self.sent) for b in shards], self._num_received, back=True)
        padding = [[b.new_zeros([1, *b.shape[1:]])] if may_miss else [] for b in shards]
        return [
            torch.cat([b, c, *z]).index_select(0, self.place) for b, c, z in zip(shards, remote, padding, strict=True)
        ]

    def add(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Sums values with the same index on the owner of the row, for several tensors by one exchange.

        Differentiable.

        Args:
            values: one value for each entry of the index, for each tensor: [e, ...].

        Returns:
            The sums for the local rows of each tensor: [n, ...].
        """
        num_rows, num_remote = self._num_rows, self._num_received if self._travels else 0
        sums = [v.new_zeros([num_rows + num_remote, *v.shape[1:]]).index_add(0, self.place, v) for v in values]
        if not self._travels:
            return sums
        remote = [s.narrow(0, num_rows, num_remote) for s in sums]
        returned = self._exchange(remote, self.sent.shape[0])
        return [s.narrow(0, 0, num_rows).index_add(0, self.sent, h) for s, h in zip(sums, returned, strict=True)]

    def named(self) -> Tensor:
        """Returns which local rows the index of any rank refers to: [n], bool. No communication."""
        num_rows = self._num_rows
        used = torch.zeros([num_rows + self._num_received], dtype=torch.bool, device=self.place.device)
        return used.scatter(0, self.place, True).narrow(0, 0, num_rows).scatter(0, self.sent, True)

    def reduce(self, rows: Tensor, values: Tensor, reduce: Reduction, include_self: bool) -> Tensor:
        """Reduces values into the rows that their indices refer to, on the owners of the rows, by one exchange.

        Args:
            rows: the local rows: [n, ...].
            values: one value for each entry of the index: [e, ...].
            reduce: the reduction.
            include_self: whether the old value of a row takes part. Rows without values stay as they are.
        """
        num_rows, num_remote = self._num_rows, self._num_received
        kind = "sum" if reduce == "mean" else reduce
        terms = [(values, kind)]
        if reduce == "mean":
            terms.append((torch.ones_like(self.place), "sum"))
        neutral = [v.new_full([num_rows + num_remote, *v.shape[1:]], _neutral(k, v.dtype)) for v, k in terms]
        partial = [_reduced(n, self.place, v, k) for n, (v, k) in zip(neutral, terms, strict=True)]
        returned = self._exchange([o.narrow(0, num_rows, num_remote) for o in partial], self.sent.shape[0])
        pairs = zip(partial, returned, terms, strict=True)
        reduced, *counts = [_reduced(o.narrow(0, 0, num_rows), self.sent, h, k) for o, h, (_, k) in pairs]
        has_values = self.named().view(_column(rows))
        if include_self:
            reduced = _COMBINE[kind](rows, reduced)
        if counts:
            reduced = reduced / (counts[0] + int(include_self)).view(_column(rows))
        return torch.where(has_values, reduced, rows)


def make_gather_plan(
    index: Tensor,
    partition: Partition,
    mesh: DeviceMesh,
    about: IntLike,
    call: str,
    *,
    may_miss: bool = False,
) -> LocalGatherPlan:
    """Makes the gather plan of an index along a sharded dim. Two collectives: request counts, and requested indices.

    Args:
        index: this rank's global row indices: [e]. Negative ones count from the end of the dim.
        partition: the partition of the dim, over one mesh dim.
        mesh: the mesh.
        about: hint of the number of entries on all ranks.
        call: the op or the function, for messages.
        may_miss: whether an entry may also equal the size of the dim, which refers to no row: its place is after all
            local and received rows.

    Raises:
        RowRangeError: on every rank, before a row is moved, if an index is out of range on some rank.
    """
    (mesh_dim,) = partition.mesh_dims
    group_name, coordinate = compat.group_name_of(mesh, mesh_dim), compat.coordinate(mesh)
    ref = write_group_partition(partition.group_partition(coordinate or ()))
    counts, distinct, local_indices, place = _ops.name_rows(index, partition.size, *ref, group_name, may_miss)
    ranks = mesh.shape[mesh_dim]
    gathered = gather_counts(counts, group_name, _rule_of(call))
    asked, least = gathered.narrow(1, 0, ranks).contiguous(), gathered.select(1, ranks)
    hint = compat.size_hint(about)
    sent_partition = partition_of_sizes(asked.sum(0), mesh, [mesh_dim], about=hint)
    arrived_partition = partition_of_sizes(asked.sum(1), mesh, [mesh_dim], about=hint)
    num_sent, arriving = sent_partition.local_size(coordinate), arrived_partition.local_size(coordinate)
    if may_miss:
        local_rows: Any = shard_size(partition, mesh)
        place = torch.where(place < 0, local_rows + arriving, place)
    (sent,) = exchange_rows([first_rows(local_indices, arriving)], asked, num_sent, group_name)
    wanted = first_rows(distinct, arriving)
    return LocalGatherPlan(partition, mesh, asked, sent, wanted, place, sent_partition, arrived_partition, least)


def _rule_of(call: str) -> str:
    return f"{call}: index out of range: indices must be less than the number of rows"


def _name_rows(
    index: Tensor,
    size: int,
    sizes: list[int],
    key: int,
    grouping: list[int],
    group_name: str,
    may_miss: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finds the distinct remote rows of an index. One op, since so many small ones take long to compile.

    Returns:
        The number of rows to request from each rank, then the least index if it is negative and otherwise 0, as
            `counts_in_range` encodes them: [ranks + 1].
        Their global indices, ascending, then zeros: [e + 1].
        Their indices in the local shards of their owners, then zeros: [e + 1].
        The place of each entry, as in `LocalGatherPlan`; -1 if it refers to no row: [e].
    """
    group, entries, device = compat.process_group(group_name), index.shape[0], index.device
    shards = GroupPartition(sizes, key, grouping).shards(size, group.size())
    ranges = transport.running_ends(shards)
    starts = torch.tensor([start for start, _ in ranges], device=device)
    first, end = ranges[group.rank()]
    rows = torch.where(index < 0, index + size, index).long()
    out_of_range = (rows < 0) | (rows > size if may_miss else rows >= size)
    is_local = (rows >= first) & (rows < end)
    sorted_rows, order = torch.where(is_local | out_of_range, size, rows).sort()
    is_first = torch.ones_like(is_local)  # the first entry of each distinct remote row
    is_first[1:] = sorted_rows[1:] != sorted_rows[:-1]
    is_first &= sorted_rows < size
    slots = is_first.cumsum(0) - 1
    owner = torch.searchsorted(starts, sorted_rows, right=True) - 1
    counts = starts.new_zeros([group.size() + 1]).index_add_(0, owner.where(is_first, group.size()), is_first.long())
    target = slots.where(is_first, entries)
    distinct = rows.new_zeros([entries + 1]).scatter_(0, target, sorted_rows.where(is_first, 0))
    local_indices = rows.new_zeros([entries + 1]).scatter_(0, target, (sorted_rows - starts[owner]).where(is_first, 0))
    place = torch.empty_like(slots).index_copy_(0, order, slots).add_(end - first).where(~is_local, rows - first)
    if may_miss:
        place.masked_fill_(rows == size, -1)
    counts[-1] = torch.constant_pad_nd(index.long(), [0, 1]).amin()
    return counts_in_range(counts, index.long(), out_of_range), distinct, local_indices, place


def _fake_names(
    index: Tensor, size: IntLike, sizes: object, key: object, grouping: object, group_name: str, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks, entries = compat.process_group(group_name).size(), index.shape[0]
    return (
        index.new_empty([ranks + 1], dtype=torch.int64),
        index.new_empty([entries + 1], dtype=torch.int64),
        index.new_empty([entries + 1], dtype=torch.int64),
        index.new_empty([entries], dtype=torch.int64),
    )


define_op(
    f"name_rows(Tensor index, SymInt size, {partition_schema()}, str group_name, bool may_miss) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _name_rows,
    _fake_names,
)


def _without_negatives(sent: Tensor, least: Tensor, rule: str) -> Tensor:
    check_not_negative(least, rule)
    return sent.clone()


define_op(
    "without_negatives(Tensor sent, Tensor least, str rule) -> Tensor",
    _without_negatives,
    lambda sent, *_: torch.empty_like(sent),
)


def _column(rows: Tensor) -> list[int]:
    """Returns the shape of one scalar per row, broadcastable to the rows."""
    return [rows.shape[0], *[1] * (rows.ndim - 1)]


def _reduced(rows: Tensor, place: Tensor, values: Tensor, reduce: str) -> Tensor:
    index = place.view([place.shape[0], *[1] * (values.ndim - 1)]).expand_as(values)
    return rows.scatter(0, index, values) if reduce == "any" else rows.scatter_reduce(0, index, values, reduce)


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "amax": torch.maximum,
    "amin": torch.minimum,
}


def _neutral(reduce: str, dtype: torch.dtype) -> float:
    """Returns the identity of a reduction."""
    if reduce in ("sum", "prod", "any"):
        return int(reduce == "prod")
    if dtype.is_floating_point:
        return -math.inf if reduce == "amax" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max
