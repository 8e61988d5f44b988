"""The nearest points of each query where the points lie sharded: one shard after the other, with running results.

A rank holds its local shard, one shard of another rank at a time, and its results. Every rank searches each shard for
its own queries; shards travel as they are, straight from their owners.
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
from shardcompile.collectives.shards import check_shard, shards_of, sizes_of
from shardcompile.collectives.traffic import even_gather
from shardcompile.sharding import GroupPartition, IntLike, Partition

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout]
_LIBRARY.define("nearest_here(Tensor points, Tensor queries, int count, float reach) -> Tensor", tags=_TAGS)


class Nearest(NamedTuple):
    """Arguments of the op `nearest`.

    Attributes:
        points: this rank's local shard.
        queries: of this rank.
        count: how many points are wanted.
        reach: none that is farther away.
        total: how many points there are.
        sharded: the shards of points.
        group_name: the ranks.
    """

    points: Tensor
    queries: Tensor
    count: int  # type: ignore[assignment]  # a field in place of a method of tuples that nobody asks for
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
    """The nearest points of each query, in the order of their distances, of equal ones in that of their numbers.

    Args:
        points: this rank's local shard: [m, dims].
        queries: any number of them: [n, dims], of the same dtype.
        count: how many points are wanted.
        reach: none that is farther away.
        sharded: of all points, over one mesh dim; None if this rank has all of them.
        mesh: the mesh.

    Returns:
        Distances and numbers of points: [n, count], infinite and the number of all points where there are no more; and
        how many points are within reach: [n].
    """
    n, points, queries = queries.shape[0], points.detach(), queries.detach()
    if partition is None:
        found = torch.ops.shardcompile.nearest_here(points, queries, count, reach)
    else:
        assert mesh is not None, "a partition is one over a mesh dim"
        (mesh_dim,) = partition.mesh_dims
        ref = partition.group_ref(compat.coordinate(mesh) or ())
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
    held = sizes_of(shards)
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
    states=("sharded of", "dims"),
    of_one_rank=True,
    moves_rows=False,
)

_LIBRARY.impl("nearest_here", _nearest_here, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardcompile::nearest_here", lambda points, queries, count, reach: _fake(queries, count), lib=_LIBRARY
)
