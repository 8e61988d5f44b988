"""The nearest points of each query where the points lie in blocks: one block after the other, with running results.

A rank holds its own block, one block of another rank at a time, and its results. Every rank searches each block for its
own queries; blocks travel as they are, straight from their owners.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.block_search import Found, parts, search, searchable
from shardcompile.collectives.ops import blocks_of, check_block, wait
from shardcompile.layout import Cut
from shardcompile.watch import enter

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout]
for _schema in (
    "nearest(Tensor points, Tensor queries, int count, float reach, SymInt total, SymInt[] sizes, SymInt key, "
    "int[] nest, str group_name) -> Tensor",
    "nearest_here(Tensor points, Tensor queries, int count, float reach) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_TAGS)

_ops = torch.ops.shardcompile
SEARCHES = (_ops.nearest,)
"""The ops of this module that communicate."""


def nearest(
    points: Tensor,
    queries: Tensor,
    count: int,
    reach: float = math.inf,
    cut: Cut | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest points of each query, in the order of their distances, of equal ones in that of their numbers.

    Args:
        points: this rank's block: [m, dims].
        queries: any number of them: [n, dims], of the same dtype.
        count: how many points are wanted.
        reach: none that is farther away.
        cut: of all points, over one mesh dim; None if this rank has all of them.
        mesh: the mesh.

    Returns:
        Distances and numbers of points: [n, count], infinite and the number of all points where there are no more; and
        how many points are within reach: [n].
    """
    n, points, queries = queries.shape[0], points.detach(), queries.detach()
    if cut is None:
        found = _ops.nearest_here(points, queries, count, reach)
    else:
        assert mesh is not None, "a cut is one over a mesh dim"
        (mesh_dim,) = cut.mesh_dims
        ref = cut.group_ref(compat.coordinate(mesh) or ())
        group_name = compat.group_name_of(mesh, mesh_dim)
        found = _ops.nearest(points, queries, count, reach, cut.extent, ref.sizes, ref.key, ref.nest, group_name)
        found = wait(found)
    distances, numbers, within = parts(found, n, count)
    return distances.to(points.dtype), numbers, within


def _nearest_here(points: Tensor, queries: Tensor, count: int, reach: float) -> Tensor:
    found = Found.none(queries, count, points.shape[0])
    search(found, searchable(points, 0), queries, reach)
    return found.flat


def _nearest(
    points: Tensor,
    queries: Tensor,
    count: int,
    reach: float,
    total: int,
    sizes: list[int],
    key: int,
    nest: list[int],
    group_name: str,
) -> Tensor:
    group = compat.process_group(group_name)
    me, ranks = group.rank(), group.size()
    blocks = blocks_of(total, 0, (sizes, key, nest), ranks, "nearest")
    check_block(points.shape, 0, blocks[me], me, "nearest")
    points = transport.rows_first(points, 0)
    held = tuple([b - a for a, b in blocks])
    call = enter(group, "nearest", points.dtype, ("in blocks of", "dims"), held, points.shape[1])
    found = Found.none(queries, count, total)
    search(found, searchable(points, blocks[me][0]), queries, reach)
    memory = points.new_empty([max((n for r, n in enumerate(held) if r != me), default=0), points.shape[1]])
    for step in range(1, ranks):
        to, source = (me - step) % ranks, (me + step) % ranks
        block = memory[: held[source]]
        works = transport.exchange(call, [(to, points)], [(source, block)])
        transport.CallWork(call, works).wait()
        search(found, searchable(block, blocks[source][0]), queries, reach)
    return found.flat


def _fake(points: Tensor, queries: Tensor, count: int, *_: object) -> Tensor:
    return queries.new_empty([queries.shape[0] * (2 * count + 1)], dtype=torch.int64)


_LIBRARY.impl("nearest_here", _nearest_here, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::nearest_here", _fake, lib=_LIBRARY)
_LIBRARY.impl("nearest", _nearest, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardcompile::nearest", compat.lowered_when_traced(_ops.nearest.default, _fake), lib=_LIBRARY
)
compat.count_as_collective(SEARCHES)
