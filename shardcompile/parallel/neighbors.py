"""Neighbours among points that lie sharded.

    distances, numbers = neighbors.knn(queries, points, 16)
    distances, numbers, counts = neighbors.radius(queries, points, 0.1, 32)

Shards of points are searched one after the other, with running results: a rank never holds more than its local shard,
one shard of another rank and its results. All points that there are, are searched, and none twice.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Shard

from shardcompile import compat
from shardcompile.collectives import find_links, nearest, take_rows
from shardcompile.errors import LayoutError
from shardcompile.sharding import Layout, Partition
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.aligned_rows import on_mesh, wrapped
from shardcompile.tensor.autograd import ToLocal, gradient_layout, redistributed


class Nearest(NamedTuple):
    """The nearest points of each query.

    Attributes:
        distances: rising: [n, k], of the dtype of the queries, sharded as they are; infinite where there are fewer
            points.
        numbers: of the points: [n, k], int64; of equally distant ones the lower number first. Where there are fewer
            points than k, their number, which is no point's: to look it up is an error.
    """

    distances: Tensor
    numbers: Tensor


class Within(NamedTuple):
    """The points around each query.

    Attributes:
        distances: as in `Nearest`: [n, max_neighbors].
        numbers: as in `Nearest`.
        counts: how many points are within the radius: [n], int64. Where there are more than `max_neighbors`, the
            nearest ones are kept.
    """

    distances: Tensor
    numbers: Tensor
    counts: Tensor


def knn(queries: Tensor, points: Tensor, k: int) -> Nearest:
    """The k nearest points of each query by Euclidean distance. Distances are differentiable.

    In memory a rank needs one shard of another rank and its results; gradients need the k neighbours of each query,
    too. One graph serves every partition.

    Args:
        queries: [n, dims], sharded along dim 0 or whole.
        points: [m, dims], sharded along dim 0 by one mesh dim or whole; of the dtype of the queries. May be the
            queries: then each point is its own nearest.
        k: how many, at least 1.

    Raises:
        LayoutError: shapes, dtypes or meshes do not fit, or several mesh dims sharded the points along dim 0.
    """
    distances, numbers, _ = _search(queries, points, k, math.inf, "neighbors.knn")
    return Nearest(distances, numbers)


def radius(queries: Tensor, points: Tensor, r: float, max_neighbors: int) -> Within:
    """The points no farther from each query than a radius, the nearest ones first. Distances are differentiable.

    Args:
        queries: as for `knn`.
        points: as for `knn`.
        r: the radius; points at just that distance count.
        max_neighbors: how many are kept of each query's, at least 1.

    Raises:
        LayoutError: as for `knn`.
    """
    return Within(*_search(queries, points, max_neighbors, float(r), "neighbors.radius"))


class _InPlaceOf(torch.autograd.Function):
    """A value that is given the gradient of another that is equal to it but for rounding."""

    @staticmethod
    def forward(ctx: object, value: Tensor, differentiable: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Any:
        return None, grad


def _check(queries: Tensor, points: Tensor, count: int, reach: float, what: str) -> None:
    if queries.ndim != 2 or points.ndim != 2 or not compat.same_symbol(queries.shape[1], points.shape[1]):
        raise LayoutError(
            f"{what} takes queries [n, dims] and points [m, dims], got {tuple(queries.shape)} and {tuple(points.shape)}"
        )
    if queries.dtype != points.dtype or not queries.dtype.is_floating_point:
        raise LayoutError(f"{what} takes points of one dtype of floats, got {queries.dtype} and {points.dtype}")
    if count < 1 or not reach >= 0:
        raise LayoutError(f"{what} looks for at least 1 point within at least 0, got {count} and {reach}")


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _search(queries: Tensor, points: Tensor, count: int, reach: float, what: str) -> tuple[Tensor, ...]:
    _check(queries, points, count, reach, what)
    given = next((x for x in (queries, points) if isinstance(x, ShardTensor)), None)
    if given is None:
        found = nearest(points, queries, count, reach)
        return _differentiable(queries, points, found, None), *found[1:]
    mesh = given._spec.layout.mesh
    points = _rows_only(points, mesh, what)
    partition = points._spec.layout.partitions[0]
    if partition is not None and len(partition.mesh_dims) > 1:
        raise LayoutError(
            f"{what} fetches points along the mesh dim that shards dim 0, and {points._spec.layout.describe()} has "
            "several; redistribute it to Shard(0) on one mesh dim first"
        )
    queries = _rows_only(queries, mesh, what)
    placements = list(queries._spec.layout.placements)
    if (
        partition is not None and not placements[partition.mesh_dims[0]].is_shard()
    ):  # else every rank would search for all of them
        placements[partition.mesh_dims[0]] = Shard(0)
        queries = queries.redistribute(placements=placements)
    layout = queries._spec.layout
    # What ranks with other queries make of the same points are terms of the gradient of those.
    terms = [
        Partial() if p.is_shard() and not own.is_shard() else own
        for p, own in zip(layout.placements, points._spec.layout.placements, strict=True)
    ]
    asking = ToLocal.apply(queries, None)
    shard = ToLocal.apply(points, gradient_layout(points._spec.layout, terms))
    found = nearest(shard, asking, count, reach, partition, mesh)
    distances = _differentiable(asking, shard, found, (partition, layout) if partition is not None else None)
    return tuple(_for_each_query(x, layout) for x in (distances, *found[1:]))


def _rows_only(x: Tensor, mesh: DeviceMesh, what: str) -> ShardTensor:
    """A tensor that is sharded along dim 0 at most."""
    x = on_mesh(x, mesh)
    layout = x._spec.layout.reduced()
    if layout.mesh != mesh:
        raise LayoutError(f"{what}: queries and points lie on different meshes")
    return redistributed(x, layout if layout.partitions[1] is None else layout.gathered(1))


def _for_each_query(local: Tensor, rows: Layout) -> Tensor:
    """Results of each query, sharded as the queries."""
    shape = (rows.shape[0], *local.shape[1:])
    return wrapped(local, Layout.of(rows.mesh, rows.placements, shape, local.dtype, rows.partitions[: local.ndim]))


def _differentiable(
    queries: Tensor, points: Tensor, found: tuple[Tensor, Tensor, Tensor], partition: tuple[Partition, Layout] | None
) -> Tensor:
    """Distances with their gradients, which need the neighbours themselves.

    Args:
        queries: on this rank.
        points: the same.
        found: distances, numbers and counts.
        sharded: of the points, and the layout of the queries; None if this rank has all points.
    """
    distances, numbers, _ = found
    if not (torch.is_grad_enabled() and (queries.requires_grad or points.requires_grad)):
        return distances
    flat = numbers.reshape(-1)
    if partition is None:
        near = torch.cat([points, points.new_zeros([1, points.shape[1]])]).index_select(0, flat)
    else:
        held, layout = partition
        (mesh_dim,) = held.mesh_dims
        about = compat.size_hint(layout.shape[0]) * numbers.shape[1]
        with compat.unrecorded_symbols(flat):
            links = find_links(flat, held, layout.mesh, about, "neighbors.knn", may_miss=True)
        arriving = links.arrived_partition.local_size(compat.coordinate(layout.mesh))
        group_name = compat.group_name_of(layout.mesh, mesh_dim)
        (near,) = take_rows([points], links.asked, links.sent, links.place, arriving, group_name, may_miss=True)
    apart = queries.unsqueeze(1) - near.view([*numbers.shape, points.shape[1]])
    # A point at distance 0 has gradient 0, as in torch; of a norm at 0 the second gradient would not be a number.
    still = distances.isinf() | (distances == 0)
    length = torch.linalg.vector_norm(torch.where(still.unsqueeze(2), 1.0, apart), dim=2)
    return _InPlaceOf.apply(distances, torch.where(still, distances, length))
