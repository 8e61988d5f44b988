"""Distributed samplesort (Frazer and McKellar, "Samplesort", 1970) and top-k along a sharded dim.

Each rank sorts its local rows; samples of all ranks give the splitters; one exchange brings every row to its part of
the sorted order. Equal rows are ordered by their indices, in the samples as well, so that the sort is stable, and a
value that occurs often is split over ranks like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import ordered_ints
from shardcompile.collectives.derived_partitions import derive
from shardcompile.collectives.gathers import ALL_GATHER_V, AllGatherV
from shardcompile.collectives.routes import exchange_rows, gather_counts, partition_of_sizes
from shardcompile.collectives.segment_exchange import global_indices
from shardcompile.sharding import CHUNK_KEY, GroupPartition, Partition


def sort_rows(
    shard: Tensor, partition: Partition, mesh: DeviceMesh, descending: bool
) -> tuple[Tensor, Tensor, Partition]:
    """Sorts the rows of a sharded dim, stably. Four collectives: samples, their indices, counts, and rows.

    Args:
        shard: the local shard: [n].
        partition: the partition of the dim, over one mesh dim; leading dims may have been flattened into it.
        mesh: the mesh.
        descending: whether the largest comes first.

    Returns:
        This rank's part of the sorted rows, the indices that these had, and the partition of the sorted rows, whose
        shard sizes are about equal.
    """
    if shard.dtype in ordered_ints.UNSIGNED:
        rows, indices, sorted_partition = sort_rows(ordered_ints.signed(shard), partition, mesh, descending)
        return ordered_ints.unsigned(rows, shard.dtype), indices, sorted_partition
    (mesh_dim,) = partition.mesh_dims
    group_name, ranks = compat.group_name_of(mesh, mesh_dim), mesh.shape[mesh_dim]
    rows, order = shard.sort(stable=True, descending=descending)
    indices = global_indices(partition, mesh, shard.device).index_select(0, order)
    if ranks == 1:
        return rows, indices, partition
    splitters, splitter_indices = _splitters(rows, indices, ranks, group_name, descending)
    is_after = _comes_before(splitters, rows.unsqueeze(1), descending)
    is_equal = ~is_after & ~_comes_before(rows.unsqueeze(1), splitters, descending)
    target = (is_after | (is_equal & (splitter_indices <= indices.unsqueeze(1)))).sum(1)  # ascending, as rows are
    counts = torch.zeros([ranks], dtype=torch.int64, device=shard.device)
    counts = gather_counts(counts.scatter_add(0, target, torch.ones_like(target)), group_name)
    sorted_partition = partition_of_sizes(counts.sum(0), mesh, [mesh_dim], dim_size=partition.size)
    arriving = sorted_partition.local_size(compat.coordinate(mesh))
    received, origin = exchange_rows([rows, indices], counts, arriving, group_name)
    if not compat.is_one(partition.num_segments):  # with one segment, equal rows arrive ordered by index already
        received, origin = (x.index_select(0, origin.argsort()) for x in (received, origin))
    sorted_rows, order = received.sort(stable=True, descending=descending)
    return sorted_rows, origin.index_select(0, order), sorted_partition


def top_rows(
    shard: Tensor, dim: int, count: int, partition: Partition, mesh: DeviceMesh, largest: bool
) -> tuple[Tensor, Tensor]:
    """Returns the top `count` values along a sharded dim and their indices, sorted, on all ranks. Among equal values
    those with the lowest indices are returned. Two all-gathers of `count` rows per rank.

    Args:
        shard: the local shard.
        dim: the sharded dim.
        count: number of values; at most the global size of the dim.
        partition: the partition of the dim, over one mesh dim.
        mesh: the mesh.
        largest: whether to return the largest values, or else the smallest.
    """
    (mesh_dim,) = partition.mesh_dims
    group_name, ranks = compat.group_name_of(mesh, mesh_dim), mesh.shape[mesh_dim]
    first: Any = derive("offset", [partition], [], partition.size, mesh)[1]
    rows, order = shard.sort(dim=dim, stable=True, descending=largest)
    pad_shape = [count if d == dim else n for d, n in enumerate(shard.shape)]
    rows = torch.cat([rows, rows.new_zeros(pad_shape)], dim).narrow(dim, 0, count)
    indices = torch.cat([order + first, order.new_full(pad_shape, -1)], dim).narrow(dim, 0, count)  # -1: padding
    rows, indices = (_all_of(x, dim, ranks, group_name) for x in (rows, indices))
    order = _order(rows, indices, dim, largest).narrow(dim, 0, count)
    return rows.gather(dim, order), indices.gather(dim, order)


def _all_of(x: Tensor, dim: int, ranks: int, group_name: str) -> Tensor:
    """Gathers shards of one size from all ranks."""
    size = x.shape[dim]
    even = GroupPartition([size] * ranks, CHUNK_KEY, [])
    return ALL_GATHER_V.start(AllGatherV(x, dim, ranks * size, even, group_name)).wait()


def _order(rows: Tensor, indices: Tensor, dim: int, descending: bool) -> Tensor:
    """Returns the stable sort order of gathered rows, with padding (index -1) last.

    The ranks' rows are concatenated in rank order and sorted by index among equals on each rank. Both sorts are stable.
    """
    order = rows.argsort(dim=dim, stable=True, descending=descending)
    is_padding = (indices.gather(dim, order) < 0).to(torch.uint8)
    return order.gather(dim, is_padding.argsort(dim=dim, stable=True))


def _splitters(rows: Tensor, indices: Tensor, ranks: int, group_name: str, descending: bool) -> tuple[Tensor, Tensor]:
    """Returns the splitters, which are the first rows of all parts but the first, and their indices: [ranks - 1].

    Args:
        rows: the local rows, sorted.
        indices: their global indices.
        ranks: size of the group.
        group_name: the process group.
        descending: as in `sort_rows`.
    """
    count: Any = rows.shape[0]
    positions = torch.arange(ranks, device=rows.device) * count // ranks
    local_samples = torch.cat([rows, rows.new_zeros([1])]).index_select(0, positions)
    local_indices = torch.cat([indices, indices.new_full([1], -1)]).index_select(0, positions)  # -1: no rows
    samples, sample_indices = (_all_of(x, 0, ranks, group_name) for x in (local_samples, local_indices))
    order = _order(samples, sample_indices, 0, descending)
    num_valid = (sample_indices >= 0).sum()
    chosen = order.index_select(0, torch.arange(1, ranks, device=rows.device) * num_valid // ranks)
    return samples.index_select(0, chosen), sample_indices.index_select(0, chosen)


def _comes_before(a: Tensor, b: Tensor, descending: bool) -> Tensor:
    """Returns whether `a` sorts before `b`; NaN is the largest value, as in ``torch.sort``."""
    if descending:
        a, b = b, a
    if not a.dtype.is_floating_point:
        return a < b
    return (a < b) | (b.isnan() & ~a.isnan())
