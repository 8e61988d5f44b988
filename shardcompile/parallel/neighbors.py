"""Exact nearest neighbor search among sharded points.

    distances, indices = neighbors.knn(queries, points, 16)
    distances, indices, counts = neighbors.radius(queries, points, 0.1, 32)

Each rank searches the shards of points one after the other and updates its running results, so it never holds more than
its local shard, one shard of another rank and its results. Every point is searched exactly once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Shard

from shardcompile import compat
from shardcompile.collectives import make_gather_plan, nearest
from shardcompile.errors import LayoutError
from shardcompile.sharding import Layout, Partition
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.aligned_rows import on_mesh, wrapped
from shardcompile.tensor.autograd import ToLocal, gradient_layout, redistributed


class Nearest(NamedTuple):
    """The nearest points of each query.

    Attributes:
        distances: in increasing order: [n, k], of the dtype of the queries, sharded as the queries; infinite where
            there are fewer than k points.
        indices: the indices of the points: [n, k], int64; among equally distant points the lower index comes first.
            Where there are fewer than k points it is the number of points, which is out of range as an index.
    """

    distances: Tensor
    indices: Tensor


class Within(NamedTuple):
    """The points within a radius of each query.

    Attributes:
        distances: as in `Nearest`: [n, max_neighbors].
        indices: as in `Nearest`.
        counts: number of points within the radius: [n], int64. Where it exceeds `max_neighbors`, the nearest points are
            kept.
    """

    distances: Tensor
    indices: Tensor
    counts: Tensor


def knn(queries: Tensor, points: Tensor, k: int) -> Nearest:
    """Returns the k nearest points of each query by Euclidean distance. Distances are differentiable.

    Beside its local shards a rank needs memory for one shard of another rank and for its results; gradients also need
    the k neighbors of each query. One graph serves every partition.

    Args:
        queries: [n, dims], sharded along dim 0 or replicated.
        points: [m, dims], sharded along dim 0 by one mesh dim or replicated; of the dtype of the queries. May be the
            queries: then each point is its own nearest.
        k: number of neighbors, at least 1.

    Raises:
        LayoutError: shapes, dtypes or meshes do not fit, or several mesh dims shard the points along dim 0.
    """
    distances, indices, _ = _search(queries, points, k, math.inf, "neighbors.knn")
    return Nearest(distances, indices)


def radius(queries: Tensor, points: Tensor, r: float, max_neighbors: int) -> Within:
    """Returns the points within a radius of each query, the nearest ones first. Distances are differentiable.

    Args:
        queries: as for `knn`.
        points: as for `knn`.
        r: the radius; points at exactly that distance are included.
        max_neighbors: most points that are kept for each query, at least 1.

    Raises:
        LayoutError: as for `knn`.
    """
    return Within(*_search(queries, points, max_neighbors, float(r), "neighbors.radius"))


class _WithGradientOf(torch.autograd.Function):
    """Returns a value, with the gradient of a differentiable one that equals it up to rounding."""

    @staticmethod
    def forward(ctx: object, value: Tensor, differentiable: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Any:
        return None, grad


def _check(queries: Tensor, points: Tensor, count: int, radius: float, what: str) -> None:
    if queries.ndim != 2 or points.ndim != 2 or not compat.guard_equal(queries.shape[1], points.shape[1]):
        raise LayoutError(
            f"{what} takes queries [n, dims] and points [m, dims], got {tuple(queries.shape)} and {tuple(points.shape)}"
        )
    if queries.dtype != points.dtype or not queries.dtype.is_floating_point:
        raise LayoutError(
            f"{what} takes queries and points of the same floating-point dtype, got {queries.dtype} and {points.dtype}"
        )
    if count < 1 or not radius >= 0:
        raise LayoutError(f"{what} needs at least 1 neighbor and a radius of at least 0, got {count} and {radius}")


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _search(queries: Tensor, points: Tensor, count: int, radius: float, what: str) -> tuple[Tensor, ...]:
    _check(queries, points, count, radius, what)
    sharded = next((x for x in (queries, points) if isinstance(x, ShardTensor)), None)
    if sharded is None:
        found = nearest(points, queries, count, radius)
        return _differentiable(queries, points, found, None), *found[1:]
    mesh = sharded._spec.layout.mesh
    points = _sharded_by_rows(points, mesh, what)
    partition = points._spec.layout.partitions[0]
    if partition is not None and len(partition.mesh_dims) > 1:
        raise LayoutError(
            f"{what} fetches points along the mesh dim that shards dim 0, and {points._spec.layout.describe()} has "
            "several; redistribute it to Shard(0) on one mesh dim first"
        )
    queries = _sharded_by_rows(queries, mesh, what)
    placements = list(queries._spec.layout.placements)
    # Replicated queries would be searched for on every rank.
    if partition is not None and not placements[partition.mesh_dims[0]].is_shard():
        placements[partition.mesh_dims[0]] = Shard(0)
        queries = queries.redistribute(placements=placements)
    layout = queries._spec.layout
    # Where queries are sharded and points are replicated, each rank computes one term of the gradient of the points.
    grad_placements = [
        Partial() if of_queries.is_shard() and not of_points.is_shard() else of_points
        for of_queries, of_points in zip(layout.placements, points._spec.layout.placements, strict=True)
    ]
    local_queries = ToLocal.apply(queries, None)
    local_points = ToLocal.apply(points, gradient_layout(points._spec.layout, grad_placements))
    found = nearest(local_points, local_queries, count, radius, partition, mesh)
    planned = (partition, layout) if partition is not None else None
    distances = _differentiable(local_queries, local_points, found, planned)
    return tuple(_wrap_per_query(x, layout) for x in (distances, *found[1:]))


def _sharded_by_rows(x: Tensor, mesh: DeviceMesh, what: str) -> ShardTensor:
    """Redistributes a tensor so that no dim but dim 0 is sharded."""
    x = on_mesh(x, mesh)
    layout = x._spec.layout.reduced()
    if layout.mesh != mesh:
        raise LayoutError(f"{what}: queries and points lie on different meshes")
    return redistributed(x, layout if layout.partitions[1] is None else layout.gathered(1))


def _wrap_per_query(local: Tensor, queries: Layout) -> Tensor:
    """Wraps local results, one for each query, as a tensor that is sharded as the queries."""
    shape = (queries.shape[0], *local.shape[1:])
    partitions = queries.partitions[: local.ndim]
    return wrapped(local, Layout.of(queries.mesh, queries.placements, shape, local.dtype, partitions))


def _differentiable(
    queries: Tensor, points: Tensor, found: tuple[Tensor, Tensor, Tensor], partition: tuple[Partition, Layout] | None
) -> Tensor:
    """Makes the distances differentiable. If a gradient is needed, this gathers the neighbors of each query.

    Args:
        queries: this rank's local shard.
        points: this rank's local shard.
        found: distances, indices and counts.
        partition: the partition of the points, and the layout of the queries; None if this rank has all points.
    """
    distances, indices, _ = found
    if not (torch.is_grad_enabled() and (queries.requires_grad or points.requires_grad)):
        return distances
    flat = indices.reshape(-1)
    if partition is None:
        near = torch.cat([points, points.new_zeros([1, points.shape[1]])]).index_select(0, flat)
    else:
        of_points, layout = partition
        about = compat.size_hint(layout.shape[0]) * indices.shape[1]
        with compat.unrecorded_symbols(flat):
            plan = make_gather_plan(flat, of_points, layout.mesh, about, "neighbors.knn", may_miss=True)
        (near,) = plan.take([points], may_miss=True)
    difference = queries.unsqueeze(1) - near.view([*indices.shape, points.shape[1]])
    # A point at distance 0 has gradient 0, as in torch. The second derivative of the norm at 0 would be NaN.
    is_constant = distances.isinf() | (distances == 0)
    norm = torch.linalg.vector_norm(torch.where(is_constant.unsqueeze(2), 1.0, difference), dim=2)
    return _WithGradientOf.apply(distances, torch.where(is_constant, distances, norm))
