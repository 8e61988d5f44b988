"""Data of the demo: a diffusion problem on random planar domains, solved by finite elements.

Each sample is the solution of

    -div(kappa grad u) = f   inside,      u = 0   on the boundary,

on a star-shaped domain with an elliptic hole, by linear (P1) elements on an unstructured triangulation.
Everything follows from integer seeds, so every rank builds the same data without communication. All
lengths are in units of the mean radius of the domain, which is 1.

The module needs numpy and scipy only, and neither torch nor processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse.linalg import spsolve
from scipy.spatial import Delaunay

Array = npt.NDArray[Any]
Field = Callable[[Array], Array]
"""A function of position: points [n, 2] to values [n]."""

FEATURES = ("x", "y", "source", "log_kappa", "wall_distance")
"""The columns of `Sample.features`."""

FEATURE_SCALE = (0.5, 0.5, 3.0, 0.35, 0.15)
"""The divisor of each feature: about its standard deviation over the default samples."""

TARGET_SCALE = 0.2
"""The divisor of `u`: about its standard deviation over the default samples (measured on 200 seeds)."""


@dataclass(frozen=True)
class Mesh:
    """A triangulation of a planar domain.

    Attributes:
        points: positions, float64 [n, 2].
        triangles: three point indices each, int64 [t, 3].
        boundary: True for points on the boundary, bool [n].
    """

    points: Array
    triangles: Array
    boundary: Array


@dataclass(frozen=True)
class Sample:
    """One solved problem, as input and target of a network.

    Attributes:
        points: positions, float32 [n, 2].
        features: the columns named in `FEATURES` over `FEATURE_SCALE`, float32 [n, 5].
        target: the solution over `TARGET_SCALE`, float32 [n].
        triangles: three point indices each, int64 [t, 3]; for drawing.
        boundary: True for points on the boundary, bool [n].
    """

    points: Array
    features: Array
    target: Array
    triangles: Array
    boundary: Array


# ---------------------------------------------------------------------------------------------- samples


def make_sample(seed: int, points: tuple[int, int] = (300, 900)) -> Sample:
    """Draws a domain, a source and a diffusivity from `seed`, and solves the problem.

    Args:
        seed: any non-negative integer; the same seed gives the same sample.
        points: the range of the number of mesh points, which is met within a few percent.
    """
    rng = np.random.default_rng(seed)
    spacing, loops = _random_domain(rng, int(rng.integers(points[0], points[1] + 1)))
    mesh = triangulate(loops, spacing, rng)
    source, log_kappa = _random_source(rng), _random_log_kappa(rng)
    u = solve(mesh, kappa=lambda x: np.exp(log_kappa(x)), source=source)
    x = mesh.points
    columns = np.column_stack([x, source(x), log_kappa(x), _distance(x, _segments(loops))])
    return Sample(
        points=x.astype(np.float32),
        features=(columns / FEATURE_SCALE).astype(np.float32),
        target=(u / TARGET_SCALE).astype(np.float32),
        triangles=mesh.triangles,
        boundary=mesh.boundary,
    )


def _random_domain(rng: np.random.Generator, points: int) -> tuple[float, list[Array]]:
    """The mesh spacing that gives about `points` mesh points, and the boundary loops sampled at it."""
    curves = [_random_star(rng), _random_ellipse(rng)]
    area = _area(curves[0]) - _area(curves[1])
    # A triangular lattice has one point per sqrt(3)/2 spacing^2; the boundary carries half a cell more.
    length = sum(_perimeter(curve) for curve in curves)
    cell = np.sqrt(3) / 2
    # points = area / (cell h^2) + length / (2 h), solved for 1 / h.
    inverse = (-length / 2 + np.sqrt(length**2 / 4 + 4 * points * area / cell)) / (2 * area / cell)
    spacing = float(1 / inverse)
    return spacing, [_resample(curve, spacing) for curve in curves]


def _random_star(rng: np.random.Generator, modes: int = 4) -> Array:
    """A closed curve r(angle) around the origin with radii in [0.75, 1.25], [m, 2]."""
    angle = np.linspace(0, 2 * np.pi, 720, endpoint=False)
    order = np.arange(2, 2 + modes)[:, None]
    amplitude = rng.uniform(0, 1, (modes, 1)) / order
    amplitude *= 0.25 / amplitude.sum()
    wave = np.cos(order * angle + rng.uniform(0, 2 * np.pi, (modes, 1)))
    return _polar(1 + (amplitude * wave).sum(0), angle)


def _random_ellipse(rng: np.random.Generator) -> Array:
    """A closed curve that stays 0.25 away from every `_random_star`, [m, 2]."""
    angle = np.linspace(0, 2 * np.pi, 720, endpoint=False)
    centre = _polar(rng.uniform(0, 0.25), rng.uniform(0, 2 * np.pi))
    axes, turn = rng.uniform(0.12, 0.25, 2), rng.uniform(0, np.pi)
    cos, sin = np.cos(turn), np.sin(turn)
    return centre + axes * _polar(1.0, angle) @ np.array([[cos, sin], [-sin, cos]])


def _random_source(rng: np.random.Generator, bumps: int = 3) -> Field:
    centres = rng.uniform(-0.8, 0.8, (bumps, 2))
    widths = rng.uniform(0.2, 0.4, bumps)
    heights = rng.uniform(4, 10, bumps) * rng.choice([-1, 1], bumps)

    def source(x: Array) -> Array:
        squared = ((x[:, None] - centres) ** 2).sum(-1)
        return np.exp(-squared / (2 * widths**2)) @ heights

    return source


def _random_log_kappa(rng: np.random.Generator) -> Field:
    wave, phase = rng.normal(0, 1.5, 2), rng.uniform(0, 2 * np.pi)
    return lambda x: 0.5 * np.cos(x @ wave + phase)


# ------------------------------------------------------------------------------------------------- mesh


def triangulate(loops: Sequence[Array], spacing: float, rng: np.random.Generator) -> Mesh:
    """Unstructured triangulation of the region between closed loops.

    Args:
        loops: corner points of the boundary curves, each [b, 2], about `spacing` apart; the first is the
            outer boundary, the others are holes. Neighbouring points must not be further apart than
            1.2 `spacing`, or a boundary edge may be missing from the mesh.
        spacing: distance between with_one_segment points.
        rng: moves the interior points off their lattice.
    """
    segments = _segments(loops)
    lattice = _jittered_lattice(loops[0].min(0), loops[0].max(0), spacing, rng)
    # A boundary edge is in a Delaunay mesh if the circle over it is empty, so keep clear of that circle.
    clear = _distance(lattice, segments) > 0.6 * spacing
    interior = lattice[clear & _inside(lattice, segments)]
    points = np.concatenate([*loops, interior])
    boundary = np.arange(len(points)) < len(points) - len(interior)
    triangles = Delaunay(points).simplices.astype(np.int64)
    corners = points[triangles]
    # Points on a straight boundary give triangles without area along the hull.
    keep = _inside(corners.mean(1), segments) & (_areas(corners) > 1e-6 * spacing**2)
    return Mesh(points, triangles[keep], boundary)


def _jittered_lattice(low: Array, high: Array, spacing: float, rng: np.random.Generator) -> Array:
    """Triangular lattice over a box, each point moved by up to a fifth of the spacing, [m, 2]."""
    rows = np.arange(low[1], high[1], spacing * np.sqrt(3) / 2)
    columns = np.arange(low[0], high[0], spacing)
    x = columns[None] + spacing / 2 * (np.arange(len(rows)) % 2)[:, None]
    lattice = np.stack([x, np.broadcast_to(rows[:, None], x.shape)], -1).reshape(-1, 2)
    return lattice + rng.uniform(-0.2, 0.2, lattice.shape) * spacing


def _segments(loops: Sequence[Array]) -> Array:
    """Start and end of every boundary edge, [e, 2, 2]."""
    return np.concatenate([np.stack([loop, np.roll(loop, -1, 0)], 1) for loop in loops])


def _inside(points: Array, segments: Array) -> Array:
    """Even-odd rule: a ray to the right crosses the boundary an odd number of times, bool [n]."""
    start, end = segments[:, 0], segments[:, 1]
    x, y = points[:, :1], points[:, 1:]
    straddles = (start[:, 1] > y) != (end[:, 1] > y)
    rise = np.where(start[:, 1] == end[:, 1], 1.0, end[:, 1] - start[:, 1])
    crossing = start[:, 0] + (y - start[:, 1]) / rise * (end[:, 0] - start[:, 0])
    return (straddles & (x < crossing)).sum(1) % 2 == 1


def _distance(points: Array, segments: Array) -> Array:
    """Distance to the nearest boundary edge, [n]."""
    start, along = segments[:, 0], segments[:, 1] - segments[:, 0]
    offset = points[:, None] - start
    share = ((offset * along).sum(-1) / (along**2).sum(-1)).clip(0, 1)
    return np.linalg.norm(offset - share[..., None] * along, axis=-1).min(1)


def _resample(curve: Array, spacing: float) -> Array:
    """Points at equal arc length along a closed curve, about `spacing` apart, [b, 2]."""
    closed = np.concatenate([curve, curve[:1]])
    arc = np.concatenate([[0], np.linalg.norm(np.diff(closed, axis=0), axis=1).cumsum()])
    at = np.linspace(0, arc[-1], round(arc[-1] / spacing), endpoint=False)
    return np.column_stack([np.interp(at, arc, closed[:, 0]), np.interp(at, arc, closed[:, 1])])


def _polar(radius: Array | float, angle: Array | float) -> Array:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)


def _area(loop: Array) -> float:
    x, y = loop.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


def _perimeter(loop: Array) -> float:
    return float(np.linalg.norm(loop - np.roll(loop, -1, 0), axis=1).sum())


def _areas(corners: Array) -> Array:
    """Areas of triangles given by their corners [t, 3, 2], [t]."""
    a, b = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    return np.abs(a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]) / 2


# ---------------------------------------------------------------------------------------------- solver


def solve(mesh: Mesh, kappa: Field, source: Field) -> Array:
    """Linear finite elements for -div(kappa grad u) = source, u = 0 on the boundary.

    The error in the mean square falls with the second power of the mesh spacing.

    Returns:
        The solution at the mesh points, float64 [n].
    """
    free = np.flatnonzero(~mesh.boundary)
    matrix = stiffness(mesh, kappa(mesh.points[mesh.triangles].mean(1)))[free][:, free]
    load = (mass(mesh) @ source(mesh.points))[free]
    u = np.zeros(len(mesh.points))
    u[free] = spsolve(matrix.tocsc(), load)
    return u


def stiffness(mesh: Mesh, kappa: Array) -> sparse.csr_matrix:
    """Integrals of kappa grad(phi_i) . grad(phi_j), with kappa constant on each triangle.

    Args:
        mesh: the triangulation.
        kappa: diffusivity of each triangle, [t].

    Returns:
        Sparse symmetric [n, n].
    """
    corners = mesh.points[mesh.triangles]
    # The gradient of the hat function of a corner is the opposite edge turned by 90 degrees, over twice the
    # area; the turn drops out of the products.
    edges = np.roll(corners, -1, 1) - np.roll(corners, -2, 1)
    weight = kappa / (4 * _areas(corners))
    return _assemble(mesh, weight[:, None, None] * (edges @ edges.transpose(0, 2, 1)))


def mass(mesh: Mesh) -> sparse.csr_matrix:
    """Integrals of phi_i phi_j: `e @ mass(mesh) @ e` is the squared mean-square norm of `e`. [n, n]."""
    areas = _areas(mesh.points[mesh.triangles])
    return _assemble(mesh, areas[:, None, None] / 12 * (np.ones((3, 3)) + np.eye(3)))


def _assemble(mesh: Mesh, elements: Array) -> sparse.csr_matrix:
    """Sums 3 x 3 element matrices [t, 3, 3], one for each triangle, into the matrix of the mesh."""
    rows = np.repeat(mesh.triangles, 3, axis=1).ravel()
    columns = np.tile(mesh.triangles, (1, 3)).ravel()
    n = len(mesh.points)
    return sparse.coo_matrix((elements.ravel(), (rows, columns)), shape=(n, n)).tocsr()


# ---------------------------------------------------------------------------------------------- partitions


def random_weights(step: int, ranks: int, seed: int = 0, empty_every: int = 5) -> list[float]:
    """Draws the relative shard sizes of one step, which are the same on every rank.

    Args:
        step: the training step.
        ranks: the number of weights.
        seed: the random seed.
        empty_every: at every step of this period one rank gets weight zero; 0 for never.

    Returns:
        One weight per rank, log-normal (two thirds lie within a factor 1.8 of the median).
    """
    rng = np.random.default_rng([seed, step])
    weights = rng.lognormal(0.0, 0.6, ranks)
    empty = int(rng.integers(ranks))
    if ranks > 1 and empty_every and step % empty_every == empty_every - 1:
        weights[empty] = 0.0
    return weights.tolist()


def proportional_sizes(size: int, weights: Sequence[float]) -> list[int]:
    """Returns integers that sum to `size`, each within one of its share; a weight of zero gives zero.

    Raises:
        ValueError: if a weight is negative or not finite, or all are zero.
    """
    given = np.asarray(weights, dtype=np.float64)
    if not (np.isfinite(given).all() and (given >= 0).all() and given.sum() > 0):
        raise ValueError(f"weights must be finite, not negative and not all zero, got {list(weights)}")
    shares = size * given / given.sum()
    sizes = np.floor(shares).astype(int)
    remainder = size - int(sizes.sum())
    sizes[np.argsort(sizes - shares, kind="stable")[:remainder]] += 1
    return sizes.tolist()


def partition(points: npt.ArrayLike, weights: Sequence[float]) -> tuple[Array, list[int]]:
    """Partitions a point cloud into compact parts of uneven size, by recursive coordinate bisection.

    Args:
        points: positions, [n, d].
        weights: relative size of each part; zero gives an empty part.

    Returns:
        order: int64 [n], the points part by part, so `features[order]` has the parts as ranges of rows.
        sizes: number of points of each part.

    Raises:
        ValueError: if a weight is negative or not finite, or all are zero.
    """
    positions = np.asarray(points)
    sizes = proportional_sizes(len(positions), weights)
    return _bisect(positions, np.arange(len(positions), dtype=np.int64), sizes), sizes


def _bisect(points: Array, chosen: Array, sizes: list[int]) -> Array:
    """Orders the `chosen` points so that ranges of `sizes` rows are compact."""
    if len(sizes) == 1 or len(chosen) == 0:
        return chosen
    half = len(sizes) // 2
    positions = points[chosen]
    axis = int(np.argmax(np.ptp(positions, axis=0)))
    sorted_ = chosen[np.argsort(positions[:, axis], kind="stable")]
    middle = sum(sizes[:half])
    low = _bisect(points, sorted_[:middle], sizes[:half])
    high = _bisect(points, sorted_[middle:], sizes[half:])
    return np.concatenate([low, high])


def owners(order: Array, sizes: Sequence[int]) -> Array:
    """Returns the part of each point, in the original order of the points, int64 [n]."""
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owner
