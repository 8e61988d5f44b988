"""Neighbours among points sharded, against scipy and torch on all points."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardcompile as sc
from shardcompile.collectives import local_search, transport
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once, world_size
from tests.support.tiers import often

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


class Case(NamedTuple):
    """Queries and points sharded."""

    queries: Tensor
    asking: list[int]
    points: Tensor
    sizes: list[int]


def shards(draw: random.Random, size: int, ranks: int) -> list[int]:
    ends = sorted(draw.randint(0, size) for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]


def drawn(ranks: int, seed: int, dims: int = 3, on_grid: bool = False) -> Case:
    """Shards of any sizes; on a grid many points are equally far away, or the same."""
    draw, values = random.Random(seed), torch.Generator().manual_seed(seed)
    n, m = draw.choice([1, 5, 30]), draw.choice([1, 6, 50])
    queries, points = (torch.randn(e, dims, dtype=torch.float64, generator=values) for e in (n, m))
    if on_grid:
        queries, points = queries.round(), points.round()
    return Case(queries, shards(draw, n, ranks), points, shards(draw, m, ranks))


def exact(queries: Tensor, points: Tensor, k: int, reach: float = torch.inf) -> tuple[Tensor, Tensor, Tensor]:
    """All distances on one device, in order of distance and number, with what is missing at the end."""
    whole = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
    near, numbers = torch.where(whole <= reach, whole, torch.inf).sort(dim=1, stable=True)
    near = torch.cat([near, near.new_full([len(near), k], torch.inf)], 1)[:, :k]
    numbers = torch.cat([numbers, numbers.new_full([len(near), k], len(points))], 1)[:, :k]
    return near, torch.where(near.isinf(), len(points), numbers), (whole <= reach).sum(1)


def partition(full: Tensor, sizes: list[int], on: DeviceMesh) -> Any:
    return sc.distribute_tensor(full, on, [Shard(0)], sharding_shapes={0: sizes})


def nearest(queries: Any, points: Any) -> Any:
    return *sc.neighbors.knn(queries, points, 4), None


def around(queries: Any, points: Any) -> Any:
    return sc.neighbors.radius(queries, points, 1.0, 3)


def check(run: Any, of: Case, k: int, reach: float) -> None:
    """Values, layouts and gradients against one device."""

    def expected() -> Any:
        queries, points = of.queries.clone().requires_grad_(), of.points.clone().requires_grad_()
        near, numbers, counts = exact(queries.detach(), points.detach(), k, reach)
        real = near.isfinite()
        apart = queries.unsqueeze(1) - points[torch.where(real, numbers, 0)]
        (torch.where(real, apart.norm(dim=2), 0) * torch.arange(1, k + 1)).sin().sum().backward()
        return near, numbers, counts, queries.grad, points.grad

    queries = partition(of.queries, of.asking, mesh()).requires_grad_()
    points = partition(of.points, of.sizes, mesh()).requires_grad_()
    near, numbers, counts = run(queries, points)
    assert near.sharding.partitions[0].sizes == tuple(of.asking)
    used = torch.where(near.isinf(), 0, near) * torch.arange(1, k + 1)
    used.sin().sum().backward()
    wanted = once(expected)
    torch.testing.assert_close(near.detach().full_tensor(), wanted[0], **TIGHT)
    assert torch.equal(numbers.full_tensor(), wanted[1])
    assert counts is None or torch.equal(counts.full_tensor(), wanted[2])
    torch.testing.assert_close(queries.grad.full_tensor(), wanted[3], **TIGHT)
    torch.testing.assert_close(points.grad.full_tensor(), wanted[4], **TIGHT)


@pytest.mark.ranks(1, 3, processes=False)
@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("on_grid", [False, True])
def test_neighbours_are_those_of_all_points(trees: bool, on_grid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not trees:
        once(lambda: monkeypatch.setattr(local_search, "_tree_of_scipy", lambda: None))
    for seed in range(8):
        of = drawn(world_size(), seed, on_grid=on_grid)
        check(nearest, of, 4, torch.inf)
        check(around, of, 3, 1.0)


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize(
    ("backend", "run", "count"),
    often([("aot_eager", around, 6), ("aot_eager", nearest, 20), ("inductor", around, 20)], 1),
)
def test_one_graph_serves_every_partition(backend: str, run: Any, count: int) -> None:
    cases = [c for c in (drawn(3, seed) for seed in range(8 * count)) if len(c.queries) > 1 and len(c.points) > 1]
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    k, reach = (3, 1.0) if run is around else (4, torch.inf)
    check(compiled, cases[0], k, reach)
    for of in cases[1:4]:  # sizes that change compile once more, as everywhere
        check(compiled, of, k, reach)
    before = once(graphs_compiled)
    for of in cases[4 : 4 + count]:
        check(compiled, of, k, reach)
    assert graphs_compiled() == before


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("backend", often(["eager", "inductor"], 1))
def test_shards_travel_on_gloo(backend: str) -> None:
    of = drawn(3, 4)
    check(
        torch.compile(nearest, fullgraph=True, backend=backend),
        of._replace(sizes=[len(of.points) - 2, 0, 2]),
        4,
        torch.inf,
    )


@pytest.mark.ranks(4, timeout=300, processes=False)
def test_100000_points_have_the_neighbours_that_scipy_finds() -> None:
    sizes, count = [50_000, 0, 30_000, 20_000], 100_000
    full = once(lambda: torch.rand(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    points = partition(full, sizes, mesh())
    near, numbers = sc.neighbors.knn(points, points, 8)
    told = once(lambda: cKDTree(full.numpy()).query(full.numpy(), 8))
    assert torch.equal(numbers.full_tensor(), torch.from_numpy(told[1]))
    torch.testing.assert_close(near.full_tensor(), torch.from_numpy(told[0]), **TIGHT)


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an op returns, but for views of one."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known, self.bytes = {x.untyped_storage().data_ptr() for x in known}, 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, t.numel() * t.itemsize)
        return out


def test_no_tensor_of_a_search_by_trees_comes_near_its_shard() -> None:
    points = torch.rand(40_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = local_search.Found.none(points, 16, len(points))
    with _Largest(found.flat, points) as largest:
        local_search.search(found, local_search.searchable(points, 0), points, torch.inf)
    assert torch.equal(found.indices[:, 0], torch.arange(len(points)))
    assert 0 < largest.bytes <= points.nbytes // 8


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("of_queries", [False, True])
def test_numbers_that_are_not_finite_have_no_neighbours(value: float, of_queries: bool) -> None:
    queries, points = torch.arange(12.0).view(4, 3).double(), torch.arange(18.0).view(6, 3).double()
    (queries if of_queries else points)[1, 2] = value
    found = sc.neighbors.knn(queries, points, 3)
    near, numbers, _ = exact(queries, points, 3)
    assert torch.equal(found.distances, near) and torch.equal(found.indices, numbers)


@pytest.mark.ranks(4, processes=False)
def test_a_rank_holds_one_shard_of_another_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [6, 0, 9, 5]
    received = once(list)
    real = transport.exchange

    def counted(call: Any, sends: Any, receives: Any) -> Any:
        if call.entry.kind == "nearest":
            assert len(sends) <= 1 and len(receives) <= 1
            received.append(
                (torch.distributed.get_rank(), sum(t.numel() for _, t in receives), receives[0][1].data_ptr())
            )
        return real(call, sends, receives)

    once(lambda: monkeypatch.setattr(transport, "exchange", counted))
    full = torch.randn(20, 3, dtype=torch.float64)
    points = partition(full, sizes, mesh())
    sc.neighbors.knn(points, points, 2).distances.full_tensor()
    for r in range(4):
        mine = [(n, at) for who, n, at in received if who == r]
        assert sum(n for n, _ in mine) == 3 * (20 - sizes[r])  # each point of others once
        assert len({at for n, at in mine if n}) == 1  # into the same memory


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_fewer_bits(dtype: torch.dtype) -> None:
    of = drawn(3, 4)
    queries, points = of.queries.to(dtype), of.points.to(dtype)
    near, numbers = sc.neighbors.knn(partition(queries, of.asking, mesh()), partition(points, of.sizes, mesh()), 4)
    expected = exact(queries.double(), points.double(), 4)
    assert near.dtype is dtype and torch.equal(numbers.full_tensor(), expected[1])
    assert torch.equal(near.full_tensor(), expected[0].to(dtype))


@pytest.mark.ranks(3, processes=False)
def test_many_dims_and_what_is_not_a_number() -> None:
    of = drawn(3, 4, dims=20)
    check(nearest, of, 4, torch.inf)
    low = drawn(3, 4)
    points = low.points.clone()
    points[3, 1], points[5, 0] = torch.nan, torch.inf
    near, numbers = sc.neighbors.knn(
        partition(low.queries, low.asking, mesh()), partition(points, low.sizes, mesh()), len(points)
    )
    good = [i for i in range(len(points)) if i not in (3, 5)]
    wanted, among, _ = exact(low.queries, points[good], len(good))
    assert torch.equal(numbers.full_tensor()[:, : len(good)], torch.tensor(good)[among])
    torch.testing.assert_close(near.full_tensor()[:, : len(good)], wanted, **TIGHT)
    assert bool((numbers.full_tensor()[:, len(good) :] == len(points)).all())


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("compiled", often([False, True], 1))
def test_layouts_of_queries_and_points(compiled: bool) -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full, others = torch.randn(9, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    near, numbers, _ = exact(full, others, 4)

    def run(q: Any, p: Any) -> Any:
        return sc.neighbors.knn(q, p, 4)

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    plain_q, plain_p = full.clone().requires_grad_(), others.clone().requires_grad_()
    (plain_q.unsqueeze(1) - plain_p[numbers]).norm(dim=2).sin().sum().backward()
    whole, rows, columns = Replicate(), Shard(0), Shard(1)
    cases = [([whole, rows], [rows, whole]), ([whole, rows], [whole, whole]), ([rows, columns], [columns, rows])]
    for q_placed, p_placed in cases[2:] if compiled else cases:
        q = sc.distribute_tensor(full, on, q_placed).requires_grad_()
        p = sc.distribute_tensor(others, on, p_placed).requires_grad_()
        found = run(q, p)
        assert torch.equal(found.indices.full_tensor(), numbers), (q_placed, p_placed)
        found.distances.sin().sum().backward()
        torch.testing.assert_close(found.distances.detach().full_tensor(), near, **TIGHT)
        torch.testing.assert_close(q.grad.full_tensor(), plain_q.grad, **TIGHT)
        torch.testing.assert_close(p.grad.full_tensor(), plain_p.grad, **TIGHT)
    terms = sc.ShardTensor.from_local(full / 2, on, [Partial(), whole])
    assert torch.equal(sc.neighbors.knn(terms, others, 4).indices.full_tensor(), numbers)
    assert torch.equal(sc.neighbors.knn(full, others, 4).indices, numbers)  # all of it plain
    both = sc.distribute_tensor(others, on, [rows, rows])
    with pytest.raises(sc.LayoutError, match="several; redistribute it"):
        sc.neighbors.knn(full, both, 2)


@pytest.mark.ranks(2, processes=False)
def test_second_gradients_and_bad_arguments() -> None:
    full = torch.randn(5, 2, dtype=torch.float64)
    x = partition(full, [5, 0], mesh()).requires_grad_()
    (first,) = torch.autograd.grad(sc.neighbors.knn(x, x, 3).distances[:, 1:].square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)

    def on_one_device() -> Tensor:
        plain = full.clone().requires_grad_()
        numbers = exact(full, full, 3)[1][:, 1:]
        far = (plain.unsqueeze(1) - plain[numbers]).square().sum()
        (once_,) = torch.autograd.grad(far, plain, create_graph=True)
        return torch.autograd.grad(once_.square().sum(), plain)[0]

    torch.testing.assert_close(second.full_tensor(), on_one_device(), **TIGHT)
    for queries, points, k, message in (
        (full, full[:, :1], 1, r"queries \[n, dims\]"),
        (full, full.float(), 1, "same floating-point dtype"),
        (full.long(), full.long(), 1, "same floating-point dtype"),
        (full, full, 0, "at least 1 neighbor"),
    ):
        with pytest.raises(sc.LayoutError, match=message):
            sc.neighbors.knn(partition(queries, [3, 2], mesh()), points, k)
    with pytest.raises(sc.LayoutError, match="radius of at least 0"):
        sc.neighbors.radius(x, x, -1.0, 2)
    assert np.isinf(sc.neighbors.radius(full, full + 9, 0.1, 2).distances.numpy()).all()


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "neighbors.md"


def code_of_the_guide() -> dict[str, Any]:
    named: dict[str, Any] = {}
    for shard in re.finditer(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(shard[1], GUIDE, "exec"), named)
    return named


@pytest.mark.ranks(3, processes=False)
def test_the_code_of_the_guide() -> None:
    named, sizes = code_of_the_guide(), [5, 0, 4]
    draw = torch.Generator().manual_seed(0)
    points, features, weight = (torch.randn(*s, dtype=torch.float64, generator=draw) for s in ((9, 3), (9, 4), (8, 6)))
    near = features[exact(points, points, 3)[1]]
    here = features.unsqueeze(1).expand_as(near)
    expected = (torch.cat([here, near - here], 2) @ weight).relu().amax(1)
    found = named["edge_conv"](partition(points, sizes, mesh()), partition(features, sizes, mesh()), weight, 3)
    torch.testing.assert_close(found.full_tensor(), expected, **TIGHT)
    field = torch.randn(9, 3, 4, dtype=torch.float64, generator=draw)
    padded = torch.nn.functional.pad(field, [1] * 6)
    warmed = named["heat"](partition(field, sizes, mesh()))
    torch.testing.assert_close(warmed.full_tensor(), field + 0.1 * named["laplacian"](padded), **TIGHT)
    q, k, v = (torch.randn(9, 2, 3, dtype=torch.float64, generator=draw) for _ in range(3))
    seen = named["neighbourhood_attention"](*(partition(t, sizes, mesh()) for t in (q, k, v)))
    torch.testing.assert_close(seen.full_tensor(), named["attention"](q, k, v), **TIGHT)
