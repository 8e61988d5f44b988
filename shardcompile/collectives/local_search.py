"""The nearest points of queries within one shard, and running results over several shards.

On CPUs numbers are compared in float64, elsewhere in what they are. Distances are those of `torch.cdist` without matrix
products, of each pair by itself: they do not depend on the shard that a point lies in. Where scipy is installed, its
trees find the candidates among points of few dims on CPUs. A point whose distance is not a number is no neighbour.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_TILE = 1 << 18
"""How many distances are held at a time."""

_TREE_TILE = 1 << 14
"""The same, where trees give candidates. A dozen tensors are made of them, so it is small beside a shard of points."""

_LEAF = 64
"""Points that a tree does not divide further: a smaller tree, which is searched as fast."""

_FEW_DIMS = 8
"""Trees visit most of the points in spaces of more dims."""


@dataclass(frozen=True)
class Found:
    """Running results, which lie in one tensor.

    Attributes:
        flat: all of them: [n * (2 * count + 1)], int64.
        distances: rising: [n, count], float64; infinite where nothing has been found.
        numbers: of the points: [n, count]; that of all points where nothing has been found.
        within: how many points are within reach: [n].
        total: how many points there are in all shards.
    """

    flat: Tensor
    distances: Tensor
    numbers: Tensor
    within: Tensor
    total: int

    @staticmethod
    def none(queries: Tensor, count: int, total: int) -> Found:
        """Before the first shard."""
        n = queries.shape[0]
        flat = torch.zeros([n * (2 * count + 1)], dtype=torch.int64, device=queries.device)
        found = Found(flat, *parts(flat, n, count), total)
        found.distances.fill_(math.inf)
        found.numbers.fill_(total)
        return found

    def merge(self, rows: slice, distances: Tensor, numbers: Tensor, within: Tensor) -> None:
        """Add what has been found for some queries; what is infinitely far away has not been found.

        Args:
            rows: the queries.
            distances: [rows, any number].
            numbers: the same shape.
            within: [rows].
        """
        count = self.distances.shape[1]
        near = torch.cat([self.distances[rows], distances], 1)
        which = torch.cat([self.numbers[rows], torch.where(distances.isinf(), self.total, numbers)], 1)
        near, which = _in_order(near, which)
        self.distances[rows] = near[:, :count]
        self.numbers[rows] = which[:, :count]
        self.within[rows] += within


def parts(flat: Tensor, n: Any, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distances, numbers and how many are within reach, of which `Found.flat` is made; views."""
    distances, numbers = (flat.narrow(0, i * n * count, n * count) for i in range(2))
    within = flat.narrow(0, 2 * n * count, n)
    return distances.view(torch.float64).view(n, count), numbers.view(n, count), within


@dataclass(frozen=True)
class Shard_:
    """Points that can be searched.

    Attributes:
        points: [m, dims].
        first: the number of the first one.
        tree: of scipy; None where all distances are worked out.
    """

    points: Tensor
    first: int
    tree: Any


def searchable(points: Tensor, first: int) -> Shard_:
    """A shard of points, with a tree where trees help."""
    few = 1 <= points.shape[1] <= _FEW_DIMS and points.shape[0] > 0
    make = _tree_of_scipy() if few and points.device.type == "cpu" else None
    tree = None
    if make is not None and _are_finite(points):
        tree = make(points.detach().to(torch.float64).numpy(), leafsize=_LEAF)
    return Shard_(points, first, tree)


def _are_finite(x: Tensor) -> bool:
    """Whether all numbers are finite. To ask `isfinite` of each would copy them."""
    return not x.numel() or all(bool(end.isfinite()) for end in torch.aminmax(x))  # both ends are NaN if a number is


def search(found: Found, shard: Shard_, queries: Tensor, reach: float) -> None:
    """Add the nearest points of a shard to running results.

    Args:
        found: the results.
        shard: the points.
        queries: [n, dims].
        reach: how far away points may be.
    """
    count, many = found.distances.shape[1], shard.points.shape[0]
    if not many:
        return
    by_tree = shard.tree is not None and _are_finite(queries)
    step = max(1, _TREE_TILE // ((count + 1) * 4) if by_tree else _TILE // many)
    for start in range(0, queries.shape[0], step):
        rows = slice(start, min(start + step, queries.shape[0]))
        some = queries[rows].to(_dtype_to_compare(queries))
        found.merge(rows, *(_by_tree if by_tree else _by_all)(shard, some, count, reach))


def _dtype_to_compare(x: Tensor) -> torch.dtype:
    if x.device.type == "cpu":
        return torch.float64
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def _distances(queries: Tensor, points: Tensor) -> Tensor:
    return torch.cdist(queries, points.to(queries.dtype), compute_mode="donot_use_mm_for_euclid_dist")


def _in_order(distances: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Each row by distance, equal distances by index."""
    order = numbers.argsort(1)
    near = distances.gather(1, order)
    near, last = near.sort(dim=1, stable=True)
    return near, numbers.gather(1, order).gather(1, last)


def _by_all(shard: Shard_, queries: Tensor, count: int, reach: float) -> tuple[Tensor, Tensor, Tensor]:
    distances = _distances(queries, shard.points)
    within = (distances <= reach).sum(1)
    distances = torch.where(distances <= reach, distances, math.inf)
    kept = min(count, distances.shape[1])
    farthest = distances.kthvalue(kept, 1, keepdim=True).values
    # Of those as far away as the last one the first ones count, which topk does not promise.
    nearer, level = distances < farthest, distances == farthest
    room = kept - nearer.sum(1, keepdim=True)
    chosen = nearer | (level & (level.cumsum(1) <= room))
    at = chosen.nonzero()[:, 1].view(-1, kept)
    return distances.gather(1, at), at + shard.first, within


def _by_tree(shard: Shard_, queries: Tensor, count: int, reach: float) -> tuple[Tensor, Tensor, Tensor]:
    many = shard.points.shape[0]
    asked = queries.numpy()
    # One more than is wanted: where that one is as near as the last, there may be others.
    wanted = list(range(1, min(count + 1, many) + 1))
    limit = math.nextafter(reach, math.inf) * (1 + 1e-12)
    told, at = (torch.from_numpy(a) for a in shard.tree.query(asked, wanted, distance_upper_bound=limit))
    distances = _of_candidates(shard, queries, at, reach)
    within = distances.isfinite().sum(1)
    if len(wanted) > count:
        level = told[:, -1].isfinite() & (told[:, -1] <= told[:, -2] * (1 + 1e-12))
        crowded = level.nonzero().flatten()
        if len(crowded):
            distances, at = _widen(shard, queries, crowded, distances, at, told[crowded, -1], reach)
        if math.isfinite(reach):
            full = (within > count).nonzero().flatten()
            if len(full):
                counts = torch.as_tensor(shard.tree.query_ball_point(asked[full.numpy()], reach, return_length=True))
                within = within.index_put((full,), torch.maximum(counts, within[full]))
        else:
            within = torch.full_like(within, many)
    return distances, at + shard.first, within


def _of_candidates(shard: Shard_, queries: Tensor, at: Tensor, reach: float) -> Tensor:
    """Distances to candidates. They are infinite beyond reach, and where a tree has given none."""
    many = shard.points.shape[0]
    points = shard.points[at.clamp(max=many - 1)]
    distances = _distances(queries.unsqueeze(1), points).squeeze(1)
    return torch.where((at < many) & (distances <= reach), distances, math.inf)


def _widen(
    shard: Shard_, queries: Tensor, crowded: Tensor, distances: Tensor, at: Tensor, told: Tensor, reach: float
) -> tuple[Tensor, Tensor]:
    """Candidates for some queries, and all points that are as far away as the last one."""
    many = shard.points.shape[0]
    lists = shard.tree.query_ball_point(queries[crowded].numpy(), (told * (1 + 1e-9)).numpy())
    wide = max(at.shape[1], *map(len, lists))
    more = at.new_full([at.shape[0], wide], many)
    more[:, : at.shape[1]] = at
    for row, numbers in zip(crowded.tolist(), lists, strict=True):
        more[row, : len(numbers)] = torch.tensor(numbers)
        more[row, len(numbers) :] = many
    far = distances.new_full(more.shape, math.inf)
    far[:, : distances.shape[1]] = distances
    far[crowded] = _of_candidates(shard, queries[crowded], more[crowded], reach)
    return far, more


@functools.cache
def _tree_of_scipy() -> Any:
    """What makes a tree of points; None without scipy."""
    try:
        # An optional package.
        from scipy.spatial import cKDTree
    except ImportError:
        return None
    return cKDTree
