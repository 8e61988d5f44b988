"""Sorting rows that lie on several ranks. Each rank sorts what it has; samples of all tell where the sorted order is to
be divided; one exchange brings every row to its part (Frazer and McKellar, "Samplesort", 1970).

Equal rows are ordered by their numbers, in the samples as well. So the order is stable, and a value that occurs often
is divided as any other.
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
from shardcompile.collectives.segment_exchange import numbers_of_shard
from shardcompile.sharding import CHUNK_KEY, GroupPartition, Partition


def sort_rows(
    shard: Tensor, partition: Partition, mesh: DeviceMesh, descending: bool
) -> tuple[Tensor, Tensor, Partition]:
    """The rows of a sharded dim in stable order. Four collectives: samples and their numbers, how many go where, the
    rows.

    Args:
        shard: this rank's: [n].
        sharded: of the dim, over one mesh dim; leading dims may have been flattened into it.
        mesh: the mesh.
        descending: whether the largest comes first.

    Returns:
        This rank's part of the sorted rows, the numbers that these had, and how the sorted rows are sharded then: into
        parts that are about equal.
    """
    if shard.dtype in ordered_ints.UNSIGNED:
        rows, numbers, sorted_partition = sort_rows(ordered_ints.signed(shard), partition, mesh, descending)
        return ordered_ints.unsigned(rows, shard.dtype), numbers, sorted_partition
    (mesh_dim,) = partition.mesh_dims
    group_name, ranks = compat.group_name_of(mesh, mesh_dim), mesh.shape[mesh_dim]
    rows, order = shard.sort(stable=True, descending=descending)
    numbers = numbers_of_shard(partition, mesh, shard.device).index_select(0, order)
    if ranks == 1:
        return rows, numbers, partition
    values, heads = _splitters(rows, numbers, ranks, group_name, descending)
    behind = _comes_before(values, rows.unsqueeze(1), descending)
    same = ~behind & ~_comes_before(rows.unsqueeze(1), values, descending)
    target = (behind | (same & (heads <= numbers.unsqueeze(1)))).sum(1)  # rising, as the rows are in order
    counts = torch.zeros([ranks], dtype=torch.int64, device=shard.device)
    counts = gather_counts(counts.scatter_add(0, target, torch.ones_like(target)), group_name)
    sorted_partition = partition_of_sizes(counts.sum(0), mesh, [mesh_dim], dim_size=partition.size)
    arriving = sorted_partition.local_size(compat.coordinate(mesh))
    came, names = exchange_rows([rows, numbers], counts, arriving, group_name)
    if not compat.is_one(partition.runs):  # otherwise equal ones come in the order of their ranks
        came, names = (x.index_select(0, names.argsort()) for x in (came, names))
    found, order = came.sort(stable=True, descending=descending)
    return found, names.index_select(0, order), sorted_partition


def top_rows(
    shard: Tensor, dim: int, count: int, partition: Partition, mesh: DeviceMesh, largest: bool
) -> tuple[Tensor, Tensor]:
    """The first rows of a sharded dim in order, and their numbers, on all ranks. Two gathers, of `count` rows of each
    rank.

    Args:
        shard: this rank's.
        dim: that is sharded.
        count: how many; at most the dim's size.
        sharded: of the dim, over one mesh dim.
        mesh: the mesh.
        largest: whether the largest comes first, or else the smallest.

    Returns:
        Of equal rows those with the lowest numbers.
    """
    (mesh_dim,) = partition.mesh_dims
    group_name, ranks = compat.group_name_of(mesh, mesh_dim), mesh.shape[mesh_dim]
    first: Any = derive("located", [partition], [], partition.size, mesh)[1]
    rows, order = shard.sort(dim=dim, stable=True, descending=largest)
    filling = [count if d == dim else n for d, n in enumerate(shard.shape)]
    rows = torch.cat([rows, rows.new_zeros(filling)], dim).narrow(dim, 0, count)
    numbers = torch.cat([order + first, order.new_full(filling, -1)], dim).narrow(dim, 0, count)  # -1: of no row
    rows, numbers = (_all_of(x, dim, ranks, group_name) for x in (rows, numbers))
    order = _order(rows, numbers, dim, largest).narrow(dim, 0, count)
    return rows.gather(dim, order), numbers.gather(dim, order)


def _all_of(x: Tensor, dim: int, ranks: int, group_name: str) -> Tensor:
    """The shards of all ranks, which have one size."""
    each = x.shape[dim]
    even = GroupPartition([each] * ranks, CHUNK_KEY, [])
    return ALL_GATHER_V.start(AllGatherV(x, dim, ranks * each, even, group_name)).wait()


def _order(rows: Tensor, numbers: Tensor, dim: int, descending: bool) -> Tensor:
    """How rows are sorted that ranks, one after the other, have put in by their numbers; those with the number -1 last.

    Each sort keeps the order of the one before among what is equal.
    """
    order = rows.argsort(dim=dim, stable=True, descending=descending)
    none = (numbers.gather(dim, order) < 0).to(torch.uint8)
    return order.gather(dim, none.argsort(dim=dim, stable=True))


def _splitters(rows: Tensor, numbers: Tensor, ranks: int, group_name: str, descending: bool) -> tuple[Tensor, Tensor]:
    """The first row of each part but the first, and its number: [ranks - 1].

    Args:
        rows: of this rank, in order.
        numbers: of them.
        ranks: how many there are.
        group_name: the ranks.
        descending: as in `sort_rows`.
    """
    count: Any = rows.shape[0]
    places = torch.arange(ranks, device=rows.device) * count // ranks
    some = torch.cat([rows, rows.new_zeros([1])]).index_select(0, places)
    known = torch.cat([numbers, numbers.new_full([1], -1)]).index_select(0, places)  # -1: of a rank without rows
    values, heads = (_all_of(x, 0, ranks, group_name) for x in (some, known))
    order = _order(values, heads, 0, descending)
    there = (heads >= 0).sum()
    chosen = order.index_select(0, torch.arange(1, ranks, device=rows.device) * there // ranks)
    return values.index_select(0, chosen), heads.index_select(0, chosen)


def _comes_before(a: Tensor, b: Tensor, descending: bool) -> Tensor:
    """Whether `a` is sorted in front of `b`; NaN counts as the largest number, as in ``torch.sort``."""
    if descending:
        a, b = b, a
    if not a.dtype.is_floating_point:
        return a < b
    return (a < b) | (b.isnan() & ~a.isnan())
