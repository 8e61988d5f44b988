"""Rows that go where data says: `route_rows`, and partitions whose sizes a tensor holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.collectives import routes
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once, rank, world_size
from shardcompile.testing.arrange import lay_out
from shardcompile.testing.rendezvous import RendezvousError
from shardcompile.testing.scheduler import RanksWaitError
from tests.support.exchanges import count_bytes
from tests.support.tiers import often

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


class Case(NamedTuple):
    """Rows sharded, and where they go."""

    sizes: list[int]
    rows: Tensor
    destination: Tensor
    weights: Tensor


def case(sizes: list[int], destination: Tensor, seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=draw)
    weights = torch.rand(destination.shape, dtype=torch.float64, generator=draw)
    return Case(sizes, rows, destination, weights)


def drawn(ranks: int, seed: int, copies: int | None) -> Case:
    """Shards of any sizes; rows that go anywhere, all to one rank, to all ranks but one, nowhere, or are dropped."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 5, 7, 12])
    ends = sorted(draw.randint(0, size) for _ in range(ranks - 1))
    sizes = [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]
    shape = (size,) if copies is None else (size, copies)
    low, high = draw.choice([(0, ranks), (0, ranks), (-1, ranks), (ranks - 1, ranks), (0, max(ranks - 1, 1)), (-1, 0)])
    return case(sizes, torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)), seed)


def there(of: Case, ranks: int) -> tuple[Tensor, Tensor]:
    """The rows that arrive, in order, on one device; and the numbers of their copies."""
    flat = of.destination.flatten()
    copies = of.destination.numel() // max(of.destination.shape[0], 1)
    numbers = torch.cat([(flat == d).nonzero().flatten() for d in range(ranks)])
    return of.rows[numbers // copies], numbers


def and_back(of: Case, rows: Tensor, weights: Tensor, ranks: int) -> Tensor:
    numbers = there(of, ranks)[1]
    copies = rows.new_zeros(of.destination.numel(), 3).index_copy(0, numbers, rows)
    return (copies.view(len(of.rows), -1, 3) * weights.view(len(of.rows), -1, 1)).sum(1)


def step(x: Tensor, destination: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    rows, route = sc.route_rows(x, destination)
    return rows, route.combine(rows.sin() * 2, weights=weights)


def check(run: Any, of: Case, on: DeviceMesh) -> None:
    """Values, layouts and gradients of `step` against one device."""
    ranks = on.size()

    def expected() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, weights = of.rows.clone().requires_grad_(), of.weights.clone().requires_grad_()
        rows = there(of._replace(rows=x), ranks)[0]
        home = and_back(of, rows.sin() * 2, weights, ranks)
        (rows.square().sum() + home.cos().sum()).backward()
        return rows.detach(), home.detach(), x.grad, weights.grad

    def partition(full: Tensor) -> Any:
        return sc.distribute_tensor(full, on, [Shard(0)], sharding_shapes={0: of.sizes})

    x, weights = partition(of.rows).requires_grad_(), partition(of.weights).requires_grad_()
    rows, home = run(x, partition(of.destination), weights)
    arrived = tuple(int((of.destination == d).sum()) for d in range(ranks))
    assert rows.sharding.partitions[0].sizes == arrived and home.sharding.partitions[0].sizes == tuple(of.sizes)
    (rows.square().sum() + home.cos().sum()).backward()
    wanted = once(expected)
    for ours, theirs in zip((rows, home, x.grad, weights.grad), wanted, strict=True):
        torch.testing.assert_close(ours.detach().full_tensor(), theirs, **TIGHT)


@pytest.mark.ranks(1, 3, processes=False)
@pytest.mark.parametrize("copies", often([2, None, 1], 1))
def test_rows_go_and_come_back(copies: int | None) -> None:
    for seed in range(40):
        check(step, drawn(world_size(), seed, copies), mesh())


def one_graph(backend: str, cases: Iterator[Case]) -> None:
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    first = next(cases)
    check(compiled, first, mesh())
    check(compiled, next(cases), mesh())  # a size that changes compiles once more, as everywhere
    before = once(graphs_compiled)
    for of in cases:
        check(compiled, of, mesh())
    assert graphs_compiled() == before


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize(
    ("backend", "copies", "count"),
    often([("aot_eager", 2, 30), ("eager", 2, 10), ("aot_eager", 1, 1000), ("inductor", 2, 1000)], 2),
)
def test_one_graph_serves_every_routing(backend: str, copies: int, count: int) -> None:
    worked = [c for c in (drawn(3, seed, copies) for seed in range(2 * count)) if len(c.rows) > 1]
    one_graph(backend, iter(worked[:count]))


@pytest.mark.ranks(3, timeout=300)
def test_rows_move_on_gloo_through_inductor() -> None:
    one_graph("inductor", (case(s, d) for s, d in _PLAIN))


_PLAIN = [
    ([3, 0, 4], torch.tensor([2, 0, 1, 1, 2, 2, 0])),
    ([1, 4, 1], torch.tensor([0, 0, 0, 0, 0, 0])),
    ([5, 0, 0], torch.tensor([1, -1, 2, 2, -1])),
    ([0, 2, 6], torch.tensor([-1] * 8)),
]


@pytest.mark.ranks(3, processes=False)
def test_exactly_the_rows_that_go_elsewhere_move(monkeypatch: pytest.MonkeyPatch) -> None:
    of = case([3, 0, 4], torch.tensor([[2, 0], [1, -1], [1, 2], [0, 0], [2, 2], [0, 1], [-1, -1]]))
    owners = [0, 0, 0, 2, 2, 2, 2]
    moved = sum(d not in (-1, o) for o, row in zip(owners, of.destination.tolist(), strict=True) for d in row)
    sent = count_bytes(monkeypatch)
    check(step, of, mesh())
    # There and back, and the same for gradients.
    assert sum(sent) == 4 * moved * of.rows[0].numel() * 8, (sum(sent), moved)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("backend", often([None, "aot_eager"], 1))
def test_an_exchange_in_which_all_rows_stay_sends_nothing(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    full, owner = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), [0, 0, 0, 2, 2]
    sizes = {0: [3, 0, 2]}
    x, to = (sc.distribute_tensor(t, mesh(), [Shard(0)], sharding_shapes=sizes) for t in (full, torch.tensor(owner)))
    x.requires_grad_()

    def run(x: Any, to: Any) -> Any:
        rows, route = sc.route_rows(x, to)
        return route.combine(rows.sin()) * x

    def refused(*args: object) -> Any:
        raise AssertionError("rows are sent")

    once(lambda: monkeypatch.setattr(routes, "_start", refused))
    out = (run if backend is None else torch.compile(run, fullgraph=True, backend=backend))(x, to)
    out.sum().backward()
    torch.testing.assert_close(out.full_tensor(), full.sin() * full)
    torch.testing.assert_close(x.grad.full_tensor(), full.cos() * full + full.sin())


@pytest.mark.ranks(3)
def test_several_tensors_travel_in_one_exchange() -> None:  # on gloo a message can be waited for once
    sizes, destination = [3, 0, 4], torch.tensor([2, 0, 1, 1, 2, 2, 0])
    full = torch.randn(7, 3, dtype=torch.float64)
    others = [torch.arange(7, dtype=torch.int32), torch.rand(7, 2, 2) > 0.5, torch.randn(7, 0), full.to(torch.bfloat16)]
    numbers = there(case(sizes, destination), 3)[1]

    def partition(x: Tensor) -> Any:
        return sc.distribute_tensor(x, mesh(), [Shard(0)], sharding_shapes={0: sizes})

    def both(x: Any, d: Any, *rest: Any) -> Any:
        *rows, route = sc.route_rows(x, d, *rest)
        return rows, route.combine(rows[0] * 2, rows[1])

    for run in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        x = partition(full).requires_grad_()
        rows, home = run(x, partition(destination), *map(partition, others))
        for ours, theirs in zip(rows, [full, *others], strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours.detach().full_tensor(), theirs[numbers])
        assert torch.equal(home[0].detach().full_tensor(), full * 2) and torch.equal(home[1].full_tensor(), others[0])
        used = home[0].sin().sum() + rows[0].square().sum()
        (used + sum(r.double().sum() for r in rows[1:] if r.requires_grad)).backward()  # all of them: pytorch#172556
        torch.testing.assert_close(x.grad.full_tensor(), 2 * (2 * full).cos() + 2 * full, **TIGHT)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_each_copy_of_a_row_has_an_entry_of_its_own(compiled: bool) -> None:
    of = case([3, 0, 4], torch.tensor([[2, 0], [1, -1], [1, 2], [0, 0], [2, 2], [0, 1], [-1, -1]]))
    numbers = there(of, 3)[1]
    full = torch.randn(7, 2, 3, dtype=torch.float64)

    def run(x: Any, d: Any, e: Any) -> Any:
        rows, entries, route = sc.route_rows(x, d, each=[e])
        return rows, entries, route.send(each=[e * 2])

    x, d, e = (
        sc.distribute_tensor(t, mesh(), [Shard(0)], sharding_shapes={0: of.sizes})
        for t in (of.rows, of.destination, full)
    )
    rows, entries, twice = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, d, e)
    assert torch.equal(rows.full_tensor(), of.rows[numbers // 2])
    assert torch.equal(entries.full_tensor(), full.flatten(0, 1)[numbers])
    assert torch.equal(twice.full_tensor(), 2 * full.flatten(0, 1)[numbers])
    with pytest.raises(sc.LayoutError, match="no entry for each of 2 copies"):
        sc.route_rows(x, d, each=[x])


@pytest.mark.ranks(3, processes=False)
def test_a_route_is_kept_and_used_again() -> None:
    sizes = [3, 0, 4]
    destination = torch.tensor([2, 0, 1, 1, 2, 2, 0])
    full = torch.randn(7, 2)
    d = sc.distribute_tensor(destination, mesh(), [Shard(0)], sharding_shapes={0: sizes})
    x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes})
    numbers = there(case(sizes, destination), 3)[1]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def found(x: Any, d: Any) -> Any:
        return sc.route_rows(x, d)[1]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: Any, route: sc.Route) -> Any:
        return route.combine(route.send(x) + 1)

    for route in (sc.route_rows(x, d)[1], found(x, d)):
        assert torch.equal(route.send(x).full_tensor(), full[numbers])
        assert torch.equal(route.source.full_tensor(), torch.tensor([0, 0, 0, 2, 2, 2, 2])[numbers])
        assert torch.equal(layer(layer(x, route), route).full_tensor(), full + 2)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_mesh_dim_of_the_route_partitions_elsewhere_is_brought_to_the_rows(compiled: bool) -> None:
    d = sc.distribute_tensor(torch.tensor([2, 0, 1, 1, -1, 2, 0]), mesh(), [Shard(0)])
    rows = sc.distribute_tensor(torch.randn(7, 5), mesh(), [Shard(0)])

    def run(x: Any, d: Any, columns: Any) -> Any:
        return sc.route_rows(x, d)[1].send(x, columns)

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    sent, moved = run(rows, d, rows.redistribute(placements=[Shard(1)]))
    assert torch.equal(sent.full_tensor(), moved.full_tensor())


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("other", often([Partial(), Shard(1), Replicate()], 1), ids=str)
def test_rows_that_are_laid_out_over_another_mesh_dim_as_well(other: Any, compiled: bool) -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.randn(7, 3, dtype=torch.float64)
    destination = torch.tensor([1, 0, 0, 1, -1, 1, 0])
    x = lay_out(full, on, [other, Shard(0)], {1: [5, 2]} | ({0: [2, 1]} if other.is_shard() else {}), seed=0)
    d = sc.distribute_tensor(destination, on, [Shard(0), Replicate()])  # brought to where the rows are

    def run(x: Any, d: Any) -> tuple[Any, Any]:
        rows, route = sc.route_rows(x, d)
        return rows, route.combine(rows * 3)

    rows, home = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, d)
    numbers = there(case([5, 2], destination), 2)[1]
    assert rows.sharding.partitions[0].mesh_dims == (1,) and rows.sharding.partitions[0].sizes == (3, 3)
    torch.testing.assert_close(rows.full_tensor(), full[numbers], **TIGHT)
    torch.testing.assert_close(home.full_tensor(), torch.where(destination[:, None] < 0, 0.0, full * 3), **TIGHT)


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_destinations_that_every_rank_has(compiled: bool) -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full, destination = torch.randn(7, 3, dtype=torch.float64), torch.tensor([1, 0, 0, 1, -1, 1, 0])
    x = lay_out(full, on, [Replicate(), Shard(0)], {1: [5, 2]}, seed=0)
    run = torch.compile(sc.route_rows, fullgraph=True, backend="aot_eager") if compiled else sc.route_rows
    rows, _ = run(x, destination)
    torch.testing.assert_close(rows.full_tensor(), full[there(case([5, 2], destination), 2)[1]], **TIGHT)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_destination_that_is_no_rank_is_refused_on_all_ranks(compiled: bool) -> None:
    x = sc.randn(7, 2, device_mesh=mesh(), placements=[Shard(0)])

    def run(x: Any, d: Any) -> Any:
        return sc.route_rows(x, d)[0]

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    for bad in (3, -2, 2**40):
        d = sc.distribute_tensor(torch.tensor([0, 1, 2, 0, bad, 1, 1]), mesh(), [Shard(0)])
        with pytest.raises(sc.CollectiveError, match=rf"ranks 0 to 2 of the mesh dim.*rank 1 of the group has {bad}\."):
            run(x, d)
    assert run(x, d * 0).full_tensor().shape == (7, 2)


@pytest.mark.ranks(3, processes=False)
def test_what_does_not_fit_is_refused() -> None:
    x = sc.randn(7, 2, device_mesh=mesh(), placements=[Shard(0)])
    d = sc.zeros(7, device_mesh=mesh(), placements=[Shard(0)], dtype=torch.int64)
    whole = x.redistribute(placements=[Replicate()])
    for bad_x, bad_d, message in (
        (whole, d, r"has none; redistribute it to Shard\(0\)"),
        (x.to_local(), d, "takes sharded tensors"),
        (x, d.double(), "which are integers"),
        (x, d[:6], "does not belong to the rows"),
        (x, torch.zeros(6, dtype=torch.int64), "does not belong to the rows"),
        (x, d.view(7, 1, 1), r"\[n\] or \[n, k\]"),
    ):
        with pytest.raises(sc.LayoutError, match=message):
            sc.route_rows(bad_x, bad_d)
    rows, route = sc.route_rows(x, d)
    with pytest.raises(sc.LayoutError, match="does not have the rows of the route"):
        route.combine(rows[:6])
    with pytest.raises(sc.LayoutError, match="weights have the shape of the destinations"):
        route.combine(rows, weights=sc.randn(7, 2, device_mesh=mesh(), placements=[Shard(0)]))


@pytest.mark.ranks(3, processes=False)
def test_another_route_on_one_rank_is_an_error_on_all() -> None:
    x = sc.randn(7, 2, device_mesh=mesh(), placements=[Shard(0)])
    d = sc.zeros(7, device_mesh=mesh(), placements=[Shard(0)], dtype=torch.int64)
    route = sc.route_rows(x, d)[1]
    if rank() == 1:
        counts = route.counts.clone()
        counts[0, 0], counts[0, 2] = 2, 1
        route = route._replace(counts=counts)
    with pytest.raises((RendezvousError, RanksWaitError), match="no rank can go on"):
        route.send(x).full_tensor()


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("backend", [None, *often(["eager", "aot_eager", "inductor"], 1)])
def test_a_tensor_says_the_sizes_of_shards(backend: str | None) -> None:
    on = mesh()

    def moved(x: Any, sizes: Tensor) -> Any:
        return x.softmax(0).redistribute(sharding_shapes={0: sizes}) * 2

    def made(shard: Tensor, sizes: Tensor) -> Any:
        return sc.ShardTensor.from_local(shard, on, [Shard(0)], {0: sizes}).softmax(0)

    if backend is not None:
        moved, made = (torch.compile(f, fullgraph=True, backend=backend, dynamic=True) for f in (moved, made))
    for now, then in (([3, 0, 4], [2, 2, 3]), ([1, 1, 6], [8, 0, 0]), ([4, 5, 6], [0, 15, 0])):
        full = torch.randn(sum(now), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        plain = full.clone().requires_grad_()
        (plain.softmax(0) * 2).square().sum().backward()
        x = sc.distribute_tensor(full, on, [Shard(0)], sharding_shapes={0: now}).requires_grad_()
        y = moved(x, torch.tensor(then))
        assert y.sharding.partitions[0].sizes == tuple(then)
        y.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **TIGHT)
        shard = full.split(now)[rank()].clone().requires_grad_()
        z = made(shard, torch.tensor(now))
        assert z.sharding.partitions[0].sizes == tuple(now)
        (2 * z).square().sum().backward()
        torch.testing.assert_close(shard.grad, plain.grad.split(now)[rank()], **TIGHT)
    with pytest.raises(sc.ShardError, match=r"add up to 3, but the dim has size 15"):
        moved(x, torch.tensor([1, 1, 1]))
    with pytest.raises(sc.ShardError, match=r"must not be negative"):
        moved(x, torch.tensor([8, 8, -1]))
    for wrong, message in ((torch.tensor([8.0, 7, 0]), "integers"), (torch.tensor([8, 7]), "needs 3 shard")):
        with pytest.raises(sc.ShardError, match=message):
            x.redistribute(sharding_shapes={0: wrong})
