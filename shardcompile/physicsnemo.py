"""The API of PhysicsNeMo's `domain_parallel` and its neighbor searches, for programs that were written for it.

    from shardcompile.physicsnemo import ShardTensor, ShardTensorSpec, scatter_tensor, sync_module_over_mesh

Importing this module also makes PhysicsNeMo's own neighbor search ops, called with sharded tensors, run as `knn` and
`radius_search` do: ranks exchange one shard of points at a time, and no tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.api import scatter_tensor as scatter_tensor
from shardcompile.errors import refusal
from shardcompile.parallel import neighbors
from shardcompile.parallel.replicas import sync_module_over_mesh as sync_module_over_mesh
from shardcompile.sharded import layout_if_sharded
from shardcompile.sharding import Spec
from shardcompile.tensor import ShardTensor as ShardTensor
from shardcompile.tensor.promotion import TensorPromotionMode as TensorPromotionMode

ShardTensorSpec = Spec
"""The type of ``x._spec``: mesh, placements, tensor_meta, local_shape and sharding_shapes()."""


def knn(points: Tensor, queries: Tensor, k: int, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """Returns the k nearest points of each query, as PhysicsNeMo's `nn.functional.knn`; see `neighbors.knn`.

    Args:
        points: [m, dims].
        queries: [n, dims].
        k: number of neighbors.
        implementation: ignored; PhysicsNeMo has several implementations, this library has one.

    Returns:
        Indices and distances, [n, k], the nearest first, sharded as the queries.
    """
    distances, indices = neighbors.knn(queries, points, k)
    return indices, distances


def radius_search(
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Returns the points within a radius of each query, as PhysicsNeMo's `nn.functional.radius_search`.

    Args:
        points: [m, 3], or [batch, m, 3].
        queries: [n, 3], or [batch, n, 3].
        radius: points at exactly that distance are included.
        max_points: most points that are kept for each query, the nearest ones.
        return_dists: whether distances are returned, too.
        return_points: whether the points themselves are returned, too.
        implementation: ignored; PhysicsNeMo has several implementations, this library has one.

    Returns:
        Indices, [n, max_points] or [batch, n, max_points], sharded as the queries; 0 where there are fewer points.
        Then, if requested, the points and the distances, which are also 0 there.

    Raises:
        UnsupportedOpError: `max_points` is None.
    """
    indices, neighbor_points, distances, _ = _radius_search(
        points, queries, radius, max_points, return_dists, return_points
    )
    results = [x for x in (indices, neighbor_points, distances) if x is not None]
    return results[0] if len(results) == 1 else tuple(results)


_SearchResult = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""Indices, points, distances and counts: the results of PhysicsNeMo's op."""


def _radius_search(
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
    variant: str | None = None,
) -> _SearchResult:
    if max_points is None:
        layout = layout_if_sharded(queries) or layout_if_sharded(points)
        given = f"{tuple(queries.shape)} queries" if layout is None else layout.describe()
        raise refusal(
            "radius_search(max_points=None)", given, "the number of pairs is data-dependent", "Pass max_points"
        )
    if queries.ndim < 3:
        return _search_sample(points, queries, radius, max_points, return_dists, return_points)
    samples = zip(points.unbind(), queries.unbind(), strict=True)
    results = [_search_sample(p, q, radius, max_points, return_dists, return_points) for p, q in samples]
    stacked = (None if x[0] is None else torch.stack(x) for x in zip(*results, strict=True))
    indices, neighbor_points, distances, counts = stacked
    assert indices is not None and counts is not None
    return indices, neighbor_points, distances, counts


def _search_sample(
    points: Tensor, queries: Tensor, radius: float, max_points: int, return_dists: bool, return_points: bool
) -> _SearchResult:
    distances, indices, counts = neighbors.radius(queries, points, radius, max_points)
    is_valid = indices < points.shape[0]
    indices = torch.where(is_valid, indices, 0)
    neighbor_points = None
    if return_points:
        rows = points.index_select(0, indices.flatten()).unflatten(0, indices.shape)
        neighbor_points = torch.where(is_valid.unsqueeze(-1), rows, 0.0)
    distances_or_none = torch.where(is_valid, distances, 0.0) if return_dists else None
    return indices, neighbor_points, distances_or_none, counts.clamp(max=max_points)


def _replace_op(op: str, function: Callable[..., object]) -> None:
    def handle(_func: object, _types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return function(*args, **kwargs)

    ShardTensor.register_named_function_handler(op, handle)


_replace_op("physicsnemo.knn_cuml.default", knn)
_replace_op("physicsnemo.knn_scipy.default", knn)
_replace_op("physicsnemo.radius_search_warp.default", _radius_search)
