"""The demo's data: the solver converges, samples are sound, the partition loses no point."""

from __future__ import annotations

import numpy as np
import pytest

from examples.poisson import poisson


def unit_square(spacing: float) -> poisson.Mesh:
    side = np.arange(0, 1 - spacing / 2, spacing)
    zero, one = np.zeros_like(side), np.ones_like(side)
    edges = [(side, zero), (one, side), (1 - side, one), (zero, 1 - side)]
    loop = np.concatenate([np.column_stack(edge) for edge in edges])
    return poisson.triangulate([loop], spacing, np.random.default_rng(0))


def solution(x: np.ndarray) -> np.ndarray:
    return np.sin(np.pi * x[:, 0]) * np.sin(np.pi * x[:, 1])


def kappa(x: np.ndarray) -> np.ndarray:
    return 1 + x[:, 0]


def source(x: np.ndarray) -> np.ndarray:
    """-div(kappa grad solution)."""
    return 2 * np.pi**2 * kappa(x) * solution(x) - np.pi * np.cos(np.pi * x[:, 0]) * np.sin(np.pi * x[:, 1])


def solver_error(spacing: float, kappa: poisson.Field) -> float:
    mesh = unit_square(spacing)
    error = poisson.solve(mesh, kappa, source) - solution(mesh.points)
    return float(np.sqrt(error @ poisson.mass(mesh) @ error))


def observed_order(kappa: poisson.Field) -> float:
    """Slope of the error over the spacing, both as logarithms."""
    spacings = [1 / 10, 1 / 20, 1 / 40]
    errors = [solver_error(spacing, kappa) for spacing in spacings]
    return float(np.polyfit(np.log(spacings), np.log(errors), 1)[0])


def test_solver_converges_at_second_order() -> None:
    assert 1.8 < observed_order(kappa) < 2.3


def test_the_order_shows_a_wrong_diffusivity() -> None:
    assert observed_order(lambda x: 1.1 * kappa(x)) < 1.0


def test_solver_on_a_ring_agrees_with_the_radial_solution() -> None:
    """-laplace u = 4 between radii 0.5 and 1: u = 1 - r^2 + c log r with c = -0.75 / log 0.5."""
    angle = 2 * np.pi * np.arange(126) / 126
    circle = np.column_stack([np.cos(angle), np.sin(angle)])
    mesh = poisson.triangulate([circle, 0.5 * circle[::2]], 0.05, np.random.default_rng(1))
    u = poisson.solve(mesh, kappa=lambda x: np.ones(len(x)), source=lambda x: np.full(len(x), 4.0))
    radius = np.linalg.norm(mesh.points, axis=1)
    exact = 1 - radius**2 - 0.75 / np.log(0.5) * np.log(radius)
    assert np.abs(u - exact).max() < 0.02 * exact.max()


@pytest.mark.parametrize("seed", range(8))
def test_mesh_fills_its_domain_and_uses_every_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spacing, loops = poisson._random_domain(rng, 400)
    mesh = poisson.triangulate(loops, spacing, rng)
    area = poisson._areas(mesh.points[mesh.triangles]).sum()
    assert area == pytest.approx(poisson._area(loops[0]) - poisson._area(loops[1]), rel=1e-9)
    assert set(mesh.triangles.ravel()) == set(range(len(mesh.points)))
    assert mesh.boundary.sum() == sum(map(len, loops))


def test_sample_is_deterministic_and_well_formed() -> None:
    first, second, other = poisson.make_sample(3), poisson.make_sample(3), poisson.make_sample(4)
    assert np.array_equal(first.features, second.features) and np.array_equal(first.target, second.target)
    assert len(first.points) != len(other.points)
    assert first.features.shape == (len(first.points), len(poisson.FEATURES))
    assert {a.dtype for a in (first.points, first.features, first.target)} == {np.dtype(np.float32)}
    assert np.isfinite(first.features).all() and 0.05 < np.abs(first.target).max() < 20
    assert (first.target[first.boundary] == 0).all()


def test_number_of_points_follows_the_argument() -> None:
    for seed in range(6):
        assert len(poisson.make_sample(seed, points=(500, 500)).points) == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize("weights", [[1], [1, 1], [5, 1, 3], [0.2, 0, 2.5, 1], [0, 0, 1], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("count", [0, 1, 2, 257])
def test_partition_takes_every_point_once(weights: list[float], count: int) -> None:
    points = np.random.default_rng(0).normal(size=(count, 2))
    order, sizes = poisson.partition(points, weights)
    assert sorted(order) == list(range(count)) and sum(sizes) == count
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(size - count * weight / sum(weights)) < 1
        assert weight > 0 or size == 0


def test_parts_are_compact() -> None:
    """Two parts of a long cloud lie side by side, not through each other."""
    points = np.random.default_rng(0).uniform(size=(100, 2)) * [10, 1]
    order, sizes = poisson.partition(points, [1, 3])
    left, right = np.split(points[order, 0], [sizes[0]])
    assert left.max() <= right.min()


def test_owners_undo_the_order() -> None:
    order, sizes = poisson.partition(np.random.default_rng(0).normal(size=(50, 2)), [1, 0, 2])
    owner = poisson.owners(order, sizes)
    assert np.bincount(owner, minlength=3).tolist() == sizes
    assert (np.diff(owner[order]) >= 0).all()


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [1, float("nan")], []])
def test_impossible_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be"):
        poisson.partition(np.zeros((4, 2)), weights)


def test_random_weights_repeat_and_empty_one_rank_now_and_then() -> None:
    drawn = [poisson.random_weights(step, ranks=4, empty_every=3) for step in range(9)]
    assert drawn == [poisson.random_weights(step, ranks=4, empty_every=3) for step in range(9)]
    assert [weights.count(0.0) for weights in drawn] == [0, 0, 1] * 3
    assert len({tuple(weights) for weights in drawn}) == 9
    assert poisson.random_weights(2, ranks=1, empty_every=3)[0] > 0
