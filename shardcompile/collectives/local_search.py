"""Nearest-neighbour search within one shard of points, with running results over several shards.

On CPUs distances are compared in float64, elsewhere in the dtype of the points. They are those of `torch.cdist` without
matrix products, which computes each pair by itself, so that they do not depend on the shard that holds a point. On
CPUs, and if scipy is installed, its k-d trees find the candidates among points of few dims. A point at distance NaN is
no neighbour.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TILE = 1 << 18
"""Number of distances that are held at a time."""

_TREE_TILE = 1 << 14
"""The same for candidates from trees. A dozen tensors have this size, so it is small compared to a shard of points."""

_LEAF = 64
"""Leaf size of trees: larger than scipy's default for smaller trees, which are searched as fast."""

_FEW_DIMS = 8
"""Up to so many dims trees are used; with more they visit most of the points."""


@dataclass(frozen=True)
class Found:
    """Running results of a search, stored in one tensor.

    Attributes:
        flat: the storage of all results: [n * (2 * count + 1)], int64.
        distances: distances of the nearest points, ascending: [n, count], float64; infinite where there is none yet.
        indices: global indices of these points: [n, count]; `total` where there is none yet.
        within: number of points within reach: [n].
        total: number of points in all shards.
    """

    flat: Tensor
    distances: Tensor
    indices: Tensor
    within: Tensor
    total: int

    @staticmethod
    def none(queries: Tensor, count: int, total: int) -> Found:
        """Returns the results before the first shard is searched."""
        n = queries.shape[0]
        flat = torch.zeros([n * (2 * count + 1)], dtype=torch.int64, device=queries.device)
        found = Found(flat, *parts(flat, n, count), total)
        found.distances.fill_(math.inf)
        found.indices.fill_(total)
        return found

    def merge(self, rows: slice, distances: Tensor, indices: Tensor, within: Tensor) -> None:
        """Merges candidates of some queries into the results; infinite distances mark missing candidates.

        Args:
            rows: the range of queries.
            distances: distances of the candidates: [rows, any number].
            indices: global indices of the candidates, in the same shape.
            within: number of points within reach: [rows].
        """
        count = self.distances.shape[1]
        all_distances = torch.cat([self.distances[rows], distances], 1)
        all_indices = torch.cat([self.indices[rows], torch.where(distances.isinf(), self.total, indices)], 1)
        all_distances, all_indices = _in_order(all_distances, all_indices)
        self.distances[rows] = all_distances[:, :count]
        self.indices[rows] = all_indices[:, :count]
        self.within[rows] += within


def parts(flat: Tensor, n: Any, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the parts of `Found.flat` as views: distances, indices of points, and counts of points within reach."""
    distances, indices = (flat.narrow(0, i * n * count, n * count) for i in range(2))
    within = flat.narrow(0, 2 * n * count, n)
    return distances.view(torch.float64).view(n, count), indices.view(n, count), within


@dataclass(frozen=True)
class SearchableShard:
    """A shard of points prepared for search.

    Attributes:
        points: [m, dims].
        first: global index of the first point.
        tree: a k-d tree of scipy; None where all distances are computed.
    """

    points: Tensor
    first: int
    tree: Any


def searchable(points: Tensor, first: int) -> SearchableShard:
    """Prepares a shard of points for search, with a tree where trees help."""
    few = 1 <= points.shape[1] <= _FEW_DIMS and points.shape[0] > 0
    make = _tree_of_scipy() if few and points.device.type == "cpu" else None
    tree = None
    if make is not None and _are_finite(points):
        tree = make(points.detach().to(torch.float64).numpy(), leafsize=_LEAF)
    return SearchableShard(points, first, tree)


def _are_finite(x: Tensor) -> bool:
    """Returns whether all elements are finite, without the copy that `isfinite` makes."""
    return not x.numel() or all(bool(end.isfinite()) for end in torch.aminmax(x))  # both are NaN if an element is


def search(found: Found, shard: SearchableShard, queries: Tensor, reach: float) -> None:
    """Adds the nearest points of a shard to running results.

    Args:
        found: the results.
        shard: the points.
        queries: [n, dims].
        reach: the largest distance of a neighbour.
    """
    count, num_points = found.distances.shape[1], shard.points.shape[0]
    if not num_points:
        return
    by_tree = shard.tree is not None and _are_finite(queries)
    step = max(1, _TREE_TILE // ((count + 1) * 4) if by_tree else _TILE // num_points)
    for start in range(0, queries.shape[0], step):
        rows = slice(start, min(start + step, queries.shape[0]))
        tile = queries[rows].to(_dtype_to_compare(queries))
        found.merge(rows, *(_by_tree if by_tree else _by_brute_force)(shard, tile, count, reach))


def _dtype_to_compare(x: Tensor) -> torch.dtype:
    if x.device.type == "cpu":
        return torch.float64
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def _distances(queries: Tensor, points: Tensor) -> Tensor:
    return torch.cdist(queries, points.to(queries.dtype), compute_mode="donot_use_mm_for_euclid_dist")


def _in_order(distances: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts each row by distance, and equal distances by index."""
    order = indices.argsort(1)
    sorted_distances = distances.gather(1, order)
    sorted_distances, second = sorted_distances.sort(dim=1, stable=True)
    return sorted_distances, indices.gather(1, order).gather(1, second)


def _by_brute_force(shard: SearchableShard, queries: Tensor, count: int, reach: float) -> tuple[Tensor, Tensor, Tensor]:
    distances = _distances(queries, shard.points)
    within = (distances <= reach).sum(1)
    distances = torch.where(distances <= reach, distances, math.inf)
    num_kept = min(count, distances.shape[1])
    farthest = distances.kthvalue(num_kept, 1, keepdim=True).values
    # Among points as far away as the last one the lowest indices win, which topk does not guarantee.
    nearer, tied = distances < farthest, distances == farthest
    room = num_kept - nearer.sum(1, keepdim=True)
    chosen = nearer | (tied & (tied.cumsum(1) <= room))
    indices = chosen.nonzero()[:, 1].view(-1, num_kept)
    return distances.gather(1, indices), indices + shard.first, within


def _by_tree(shard: SearchableShard, queries: Tensor, count: int, reach: float) -> tuple[Tensor, Tensor, Tensor]:
    num_points = shard.points.shape[0]
    points = queries.numpy()
    # One more than needed: if it is as near as the last one, there may be more such ties.
    wanted = list(range(1, min(count + 1, num_points) + 1))
    limit = math.nextafter(reach, math.inf) * (1 + 1e-12)
    found, indices = (torch.from_numpy(a) for a in shard.tree.query(points, wanted, distance_upper_bound=limit))
    distances = _candidate_distances(shard, queries, indices, reach)
    within = distances.isfinite().sum(1)
    if len(wanted) > count:
        tied = found[:, -1].isfinite() & (found[:, -1] <= found[:, -2] * (1 + 1e-12))
        ties = tied.nonzero().flatten()
        if len(ties):
            distances, indices = _add_ties(shard, queries, ties, distances, indices, found[ties, -1], reach)
        if math.isfinite(reach):
            full = (within > count).nonzero().flatten()
            if len(full):
                counts = torch.as_tensor(shard.tree.query_ball_point(points[full.numpy()], reach, return_length=True))
                within = within.index_put((full,), torch.maximum(counts, within[full]))
        else:
            within = torch.full_like(within, num_points)
    return distances, indices + shard.first, within


def _candidate_distances(shard: SearchableShard, queries: Tensor, indices: Tensor, reach: float) -> Tensor:
    """Returns the distances to candidates, infinite beyond reach and where the tree found none."""
    num_points = shard.points.shape[0]
    points = shard.points[indices.clamp(max=num_points - 1)]
    distances = _distances(queries.unsqueeze(1), points).squeeze(1)
    return torch.where((indices < num_points) & (distances <= reach), distances, math.inf)


def _add_ties(
    shard: SearchableShard,
    queries: Tensor,
    ties: Tensor,
    distances: Tensor,
    indices: Tensor,
    radius: Tensor,
    reach: float,
) -> tuple[Tensor, Tensor]:
    """Adds all points that are as far away as the last candidate to the candidates of some queries."""
    num_points = shard.points.shape[0]
    lists = shard.tree.query_ball_point(queries[ties].numpy(), (radius * (1 + 1e-9)).numpy())
    width = max(indices.shape[1], *map(len, lists))
    all_indices = indices.new_full([indices.shape[0], width], num_points)
    all_indices[:, : indices.shape[1]] = indices
    for row, tied_points in zip(ties.tolist(), lists, strict=True):
        all_indices[row, : len(tied_points)] = torch.tensor(tied_points)
        all_indices[row, len(tied_points) :] = num_points
    all_distances = distances.new_full(all_indices.shape, math.inf)
    all_distances[:, : distances.shape[1]] = distances
    all_distances[ties] = _candidate_distances(shard, queries[ties], all_indices[ties], reach)
    return all_distances, all_indices


@functools.cache
def _tree_of_scipy() -> Any:
    """Returns the constructor of k-d trees; None without scipy."""
    try:
        # scipy is optional.
        from scipy.spatial import cKDTree
    except ImportError:
        return None
    return cKDTree
