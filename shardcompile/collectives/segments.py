"""Reorders rows into the global order of segments of which every rank of a group holds a part.

The rows that a mask selects from ``x[batch, sequence]`` with a sharded sequence have one segment for each sample: in
row-major order the rows of all ranks for the first sample come first, then those for the second one, and so on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.routes import exchange_rows
from shardcompile.compat.own_ops import define_op
from shardcompile.sharding import IntLike


class SegmentOrder(NamedTuple):
    """The exchange that brings rows into the global order of their segments. Shard sizes do not change.

    Attributes:
        counts: counts[s, d] rows go from rank s to rank d: [ranks, ranks], int64, on the CPU.
        places: for each row in the order of the segments its position among the received rows: [shard], int64.
        shard: local number of rows.
        group_name: the process group.
    """

    counts: Tensor
    places: Tensor
    shard: IntLike
    group_name: str

    def ordered(self, rows: Tensor) -> Tensor:
        """Brings rows in segment order on each rank into the global segment order: [shard, ...]. Differentiable."""
        (arrived,) = exchange_rows([rows], self.counts, self.shard, self.group_name)
        return arrived.index_select(0, self.places)

    def returned(self, rows: Tensor) -> Tensor:
        """The inverse of `ordered`. Differentiable."""
        arrived = rows.new_empty(rows.shape).index_copy(0, self.places, rows)
        return exchange_rows([arrived], self.counts, self.shard, self.group_name, back=True)[0]


def order_of_segments(parts: Tensor, like: Tensor, shard: IntLike, group_name: str) -> SegmentOrder:
    """Computes the exchange for rows of these segments. No communication.

    Args:
        parts: rank r holds parts[r, s] rows of segment s, ordered by segment: [ranks, segments], int64, on the CPU,
            rank-invariant.
        like: a tensor on the device of the rows.
        shard: local number of rows, ``parts[rank].sum()``.
        group_name: the process group.
    """
    counts, places = torch.ops.shardcompile.order_segments(parts, like, shard, group_name)
    return SegmentOrder(counts, places, shard, group_name)


def _order_segments(parts: Tensor, like: Tensor, shard: int, group_name: str) -> tuple[Tensor, Tensor]:
    ranks, segments = parts.shape
    ends = parts.t().reshape(-1).cumsum(0)  # of all parts, ordered by segment, then rank
    starts = ends - parts.t().reshape(-1)
    ranges = transport.running_ends(parts.sum(1).tolist())

    def held(first: int, end: int) -> Tensor:
        """Returns the number of rows of each part with a global position from `first` to `end`: [segments, ranks]."""
        return (ends.clamp(first, end) - starts.clamp(first, end)).view(segments, ranks)

    counts = torch.stack([held(*r).sum(0) for r in ranges], 1)
    mine = held(*ranges[compat.process_group(group_name).rank()])
    arriving = mine.t().reshape(-1)  # received rows are ordered by source rank
    begins = (arriving.cumsum(0) - arriving).view(ranks, segments).t().reshape(-1)
    lengths = mine.reshape(-1)
    shifts = begins - (lengths.cumsum(0) - lengths)
    places = torch.arange(shard, device="cpu") + torch.repeat_interleave(shifts, lengths, output_size=shard)
    return counts, places.to(like.device)


def _fake_order(parts: Tensor, like: Tensor, shard: IntLike, group_name: str) -> tuple[Tensor, Tensor]:
    ranks = compat.process_group(group_name).size()
    return parts.new_empty([ranks, ranks]), like.new_empty([shard], dtype=torch.int64)


define_op(
    "order_segments(Tensor parts, Tensor like, SymInt shard, str group_name) -> (Tensor, Tensor)",
    _order_segments,
    _fake_order,
)
