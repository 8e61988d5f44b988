"""Nearest-neighbour search among sharded points: one shard after the other, with running results.

Each rank searches every shard for its own queries. It holds its local shard, one remote shard at a time, and its
results. Shards are sent directly by their owners.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.local_search import Found, parts, search, searchable
from shardcompile.collectives.pending import wait
from shardcompile.collectives.shards import check_shard, shards_of
from shardcompile.collectives.traffic import even_gather
from shardcompile.compat.own_ops import define_op
from shardcompile.sharding import GroupPartition, IntLike, Partition


class Nearest(NamedTuple):
    """Arguments of the op `nearest`.

    Attributes:
        points: the local shard of the points.
        queries: the local queries.
        count: number of neighbours of each query.
        reach: the largest distance of a neighbour.
        total: global number of points.
        partition: the partition of the points.
        group_name: the process group.
    """

    points: Tensor
    queries: Tensor
    count: int  # type: ignore[assignment]  # the field hides `tuple.count`, which is not used
    reach: float
    total: IntLike
    partition: GroupPartition
    group_name: str


def nearest(
    points: Tensor,
    queries: Tensor,
    count: int,
    reach: float = math.inf,
    partition: Partition | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the nearest points of each query, sorted by distance, and equal distances by index.

    Args:
        points: the local shard of the points: [m, dims].
        queries: the local queries: [n, dims], of the same dtype.
        count: number of neighbours of each query.
        reach: the largest distance of a neighbour.
        partition: the partition of the points, over one mesh dim; None if this rank has all of them.
        mesh: the mesh.

    Returns:
        Distances and global indices of the neighbours: [n, count]; infinity and the global number of points where
        there are no more. And the number of points within reach: [n].
    """
    n, points, queries = queries.shape[0], points.detach(), queries.detach()
    if partition is None:
        found = torch.ops.shardcompile.nearest_here(points, queries, count, reach)
    else:
        assert mesh is not None, "a partition needs its mesh"
        (mesh_dim,) = partition.mesh_dims
        ref = partition.group_partition(compat.coordinate(mesh) or ())
        group_name = compat.group_name_of(mesh, mesh_dim)
        arguments = Nearest(points, queries, count, reach, partition.size, ref, group_name)
        found = wait(NEAREST.call(arguments))
    distances, numbers, within = parts(found, n, count)
    return distances.to(points.dtype), numbers, within


def _nearest_here(points: Tensor, queries: Tensor, count: int, reach: float) -> Tensor:
    found = Found.none(queries, count, points.shape[0])
    search(found, searchable(points, 0), queries, reach)
    return found.flat


def _nearest(a: Nearest) -> Tensor:
    group, queries, total = compat.process_group(a.group_name), a.queries, int(a.total)
    me, ranks = group.rank(), group.size()
    shards = shards_of(total, 0, a.partition, ranks, "nearest")
    check_shard(a.points.shape, 0, shards[me], me, "nearest")
    points = transport.rows_first(a.points, 0)
    held = shards.sizes
    call = NEAREST.enter(group, points.dtype, held, points.shape[1])
    found = Found.none(queries, a.count, total)
    search(found, searchable(points, shards[me][0]), queries, a.reach)
    memory = points.new_empty([max((n for r, n in enumerate(held) if r != me), default=0), points.shape[1]])
    for step in range(1, ranks):
        to, source = (me - step) % ranks, (me + step) % ranks
        shard = memory[: held[source]]
        works = transport.exchange(call, [(to, points)], [(source, shard)])
        transport.CallWork(call, works).wait()
        search(found, searchable(shard, shards[source][0]), queries, a.reach)
    return found.flat


def _fake(queries: Tensor, count: int) -> Tensor:
    return queries.new_empty([queries.shape[0] * (2 * count + 1)], dtype=torch.int64)


NEAREST = Descriptor(
    "nearest",
    Nearest,
    _nearest,
    fake=lambda a: _fake(a.queries, a.count),
    traffic=even_gather,
    states=("shard sizes", "dims"),
    of_one_rank=True,
    moves_rows=False,
)

define_op(
    "nearest_here(Tensor points, Tensor queries, int count, float reach) -> Tensor",
    _nearest_here,
    lambda points, queries, count, reach: _fake(queries, count),
)
