"""Brings rows into the order of segments of which every rank of a group holds a part.

What a mask keeps of ``x[batch, sequence]``, where the sequence is sharded, has one segment for each sample: row-major
order has all ranks' rows of the first sample first, then those of the second one, and so on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.routes import exchange_rows
from shardcompile.sharding import IntLike

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_LIBRARY.define(
    "order_segments(Tensor parts, Tensor like, SymInt shard, str group_name) -> (Tensor, Tensor)",
    tags=[torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout],
)


class SegmentOrder(NamedTuple):
    """The exchange that brings rows into the order of their segments. No rank's number of rows changes.

    Attributes:
        counts: counts[s, d] rows go from rank s to rank d: [ranks, ranks], int64, on the CPU.
        places: of each row in the order of the segments its place among those that arrive: [shard], int64.
        shard: how many rows this rank has.
        group_name: the ranks.
    """

    counts: Tensor
    places: Tensor
    shard: IntLike
    group_name: str

    def ordered(self, rows: Tensor) -> Tensor:
        """Rows in the order of each rank's segments, brought into that of all: [shard, ...]. Differentiable."""
        (arrived,) = exchange_rows([rows], self.counts, self.shard, self.group_name)
        return arrived.index_select(0, self.places)

    def returned(self, rows: Tensor) -> Tensor:
        """The way back from `ordered`. Differentiable."""
        arrived = rows.new_empty(rows.shape).index_copy(0, self.places, rows)
        return exchange_rows([arrived], self.counts, self.shard, self.group_name, back=True)[0]


def order_of_segments(parts: Tensor, like: Tensor, shard: IntLike, group_name: str) -> SegmentOrder:
    """The exchange for rows of these segments. Nothing is sent to know it.

    Args:
        parts: parts[r, s] rows of segment s are on rank r, its rows being in the order of the segments:
            [ranks, segments], int64, on the CPU, the same on every rank.
        like: a tensor on the device of the rows.
        shard: how many rows this rank has, ``parts[rank].sum()``.
        group_name: the ranks.
    """
    counts, places = torch.ops.shardcompile.order_segments(parts, like, shard, group_name)
    return SegmentOrder(counts, places, shard, group_name)


def _order_segments(parts: Tensor, like: Tensor, shard: int, group_name: str) -> tuple[Tensor, Tensor]:
    ranks, segments = parts.shape
    ends = parts.t().reshape(-1).cumsum(0)  # of the parts in the order of the segments
    starts = ends - parts.t().reshape(-1)
    ranges = transport.running_ends(parts.sum(1).tolist())

    def held(first: int, end: int) -> Tensor:
        """How many rows of each part are among those from `first` to `end`: [segments, ranks]."""
        return (ends.clamp(first, end) - starts.clamp(first, end)).view(segments, ranks)

    counts = torch.stack([held(*r).sum(0) for r in ranges], 1)
    mine = held(*ranges[compat.process_group(group_name).rank()])
    arriving = mine.t().reshape(-1)  # rows come in the order of the ranks that send them
    begins = (arriving.cumsum(0) - arriving).view(ranks, segments).t().reshape(-1)
    lengths = mine.reshape(-1)
    shifts = begins - (lengths.cumsum(0) - lengths)
    places = torch.arange(shard, device="cpu") + torch.repeat_interleave(shifts, lengths, output_size=shard)
    return counts, places.to(like.device)


def _fake_order(parts: Tensor, like: Tensor, shard: IntLike, group_name: str) -> tuple[Tensor, Tensor]:
    ranks = compat.process_group(group_name).size()
    return parts.new_empty([ranks, ranks]), like.new_empty([shard], dtype=torch.int64)


_LIBRARY.impl("order_segments", _order_segments, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::order_segments", _fake_order, lib=_LIBRARY)
