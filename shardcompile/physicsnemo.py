"""The names of PhysicsNeMo's `domain_parallel`, and its searches of neighbours, for programs that come from there.

    from shardcompile.physicsnemo import ShardTensor, ShardTensorSpec, scatter_tensor, sync_module_over_mesh

Once this is imported, PhysicsNeMo's own ops for neighbours, called with sharded tensors, search as `knn` and
`radius_search` do: shards of points travel, and nothing is gathered.
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
"""What ``x._spec`` is: mesh, placements, tensor_meta, local_shape and sharding_shapes()."""


def knn(points: Tensor, queries: Tensor, k: int, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """The k nearest points of each query, as PhysicsNeMo's `nn.functional.knn`; see `neighbors.knn`.

    Args:
        points: [m, dims].
        queries: [n, dims].
        k: how many.
        implementation: which of PhysicsNeMo's; there is one here.

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
    """The points within a radius of each query, as PhysicsNeMo's `nn.functional.radius_search`.

    Args:
        points: [m, 3], or [batch, m, 3].
        queries: [n, 3], or [batch, n, 3].
        radius: points at just that distance count.
        max_points: how many are kept of each query's, the nearest ones.
        return_dists: whether distances are returned, too.
        return_points: whether the points themselves are returned, too.
        implementation: which of PhysicsNeMo's; there is one here.

    Returns:
        Indices, [n, max_points] or [batch, n, max_points], sharded as the queries, and 0 where there are fewer; then
        the points and the distances that were asked for, which are 0 there.

    Raises:
        UnsupportedOpError: `max_points` is None.
    """
    indices, found, distances, _ = _radius_search(points, queries, radius, max_points, return_dists, return_points)
    results = [x for x in (indices, found, distances) if x is not None]
    return results[0] if len(results) == 1 else tuple(results)


_Found = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""Indices, points, distances, and how many there are: what PhysicsNeMo's op gives."""


def _radius_search(
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
    variant: str | None = None,
) -> _Found:
    if max_points is None:
        layout = layout_if_sharded(queries) or layout_if_sharded(points)
        given = f"{tuple(queries.shape)} queries" if layout is None else layout.describe()
        raise refusal(
            "radius_search(max_points=None)", given, "only a run tells how many pairs there are", "Pass max_points"
        )
    if queries.ndim < 3:
        return _of_one_sample(points, queries, radius, max_points, return_dists, return_points)
    samples = zip(points.unbind(), queries.unbind(), strict=True)
    each = [_of_one_sample(p, q, radius, max_points, return_dists, return_points) for p, q in samples]
    indices, found, distances, counts = (None if x[0] is None else torch.stack(x) for x in zip(*each, strict=True))
    assert indices is not None and counts is not None
    return indices, found, distances, counts


def _of_one_sample(
    points: Tensor, queries: Tensor, radius: float, max_points: int, return_dists: bool, return_points: bool
) -> _Found:
    distances, indices, counts = neighbors.radius(queries, points, radius, max_points)
    is_there = indices < points.shape[0]
    indices = torch.where(is_there, indices, 0)
    found = None
    if return_points:
        rows = points.index_select(0, indices.flatten()).unflatten(0, indices.shape)
        found = torch.where(is_there.unsqueeze(-1), rows, 0.0)
    return indices, found, torch.where(is_there, distances, 0.0) if return_dists else None, counts.clamp(max=max_points)


def _in_place_of(op: str, function: Callable[..., object]) -> None:
    def handle(_func: object, _types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return function(*args, **kwargs)

    ShardTensor.register_named_function_handler(op, handle)


_in_place_of("physicsnemo.knn_cuml.default", knn)
_in_place_of("physicsnemo.knn_scipy.default", knn)
_in_place_of("physicsnemo.radius_search_warp.default", _radius_search)
