"""`route_rows` over two mesh dims: between nodes first, then within."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.inspect.offline import offline_world, trace_step
from shardcompile.passes import Pipeline
from shardcompile.passes.graph.collective import collectives
from shardcompile.testing import once
from tests.support.after_passes import graph_after_passes
from tests.support.exchanges import count_bytes
from tests.support.tiers import often

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
PARTITION = [Shard(0), Shard(0)]


def nodes(outer: int, inner: int) -> DeviceMesh:
    return init_device_mesh("cpu", (outer, inner), mesh_dim_names=("nodes", "places"))


def partition(full: Tensor, on: DeviceMesh, sizes: list[int], **options: Any) -> Any:
    return sc.distribute_tensor(full, on, PARTITION, sharding_shapes={0: sizes}, **options)


def drawn(ranks: int, seed: int, copies: int | None) -> tuple[list[int], Tensor]:
    """Sizes of shards, and destinations: anywhere, all on one rank, all dropped, copies to one node or to one rank."""
    draw = random.Random(seed)
    size = draw.choice([2, 3, 5, 7, 12, 20])
    ends = sorted(draw.randint(0, size) for _ in range(ranks - 1))
    sizes = [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]
    low, high = draw.choice([(0, ranks), (-1, ranks), (-1, ranks), (ranks - 1, ranks), (0, 2), (1, ranks - 1), (-1, 0)])
    shape = (size,) if copies is None else (size, copies)
    return sizes, torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def step(x: Tensor, destination: Tensor, entries: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
    rows, numbers, route = sc.route_rows(x, destination, each=[entries])
    return rows, numbers, route.source, route.combine(rows.sin() * 2, weights=weights)


def check(run: Any, on: DeviceMesh, sizes: list[int], destination: Tensor, weighted: bool = True) -> None:
    """Values, partitions and gradients of `step` against one device."""
    ranks = on.size()
    draw = torch.Generator().manual_seed(1)
    full = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=draw)
    factors = torch.rand(destination.shape, dtype=torch.float64, generator=draw)
    entries = torch.arange(destination.numel()).view(destination.shape)
    copies = destination.shape[1] if destination.ndim == 2 else 1
    numbers = torch.cat([(destination.flatten() == d).nonzero().flatten() for d in range(ranks)])
    owners = torch.arange(ranks).repeat_interleave(torch.tensor(sizes))

    def expected() -> list[Tensor]:
        x, weights = full.clone().requires_grad_(), factors.clone().requires_grad_()
        rows = x[numbers // copies]
        back = rows.new_zeros(destination.numel(), 3).index_copy(0, numbers, rows.sin() * 2).view(-1, copies, 3)
        home = (back * weights.view(-1, copies, 1) if weighted else back).sum(1)
        (rows.square().sum() + home.cos().sum()).backward()
        return [rows.detach(), numbers, owners[numbers // copies], home.detach(), x.grad, weights.grad]

    x, weights = partition(full, on, sizes).requires_grad_(), partition(factors, on, sizes).requires_grad_()
    found = run(x, partition(destination, on, sizes), partition(entries, on, sizes), weights if weighted else None)
    arrived = tuple(int((destination == d).sum()) for d in range(ranks))
    assert [f.sharding.partitions[0].sizes for f in found] == [arrived, arrived, arrived, tuple(sizes)]
    (found[0].square().sum() + found[3].cos().sum()).backward()
    ours = [*found, x.grad, *([weights.grad] if weighted else [])]
    for i, (a, b) in enumerate(zip(ours, once(expected), strict=False)):
        torch.testing.assert_close(a.detach().full_tensor(), b, **TIGHT, msg=lambda m, i=i: f"result {i}: {m}")


@pytest.mark.ranks(4, 6, processes=False)
@pytest.mark.parametrize("copies", often([2, None, 1, 3], 2))
def test_rows_go_and_come_back(copies: int | None) -> None:
    ranks = torch.distributed.get_world_size()
    shapes = [(2, ranks // 2), (ranks // 2, 2), (ranks, 1), (1, ranks)]
    for seed in range(8):
        on = nodes(*shapes[seed % 4])
        check(step, on, *drawn(ranks, seed, copies), weighted=seed != 3)


@pytest.mark.ranks(4, timeout=900, processes=False)
@pytest.mark.parametrize(
    ("backend", "count"), often([("passes", 15), ("aot_eager", 500), ("shardcompile", 100), ("inductor", 100)], 1)
)
def test_one_graph_serves_every_routing(backend: str, count: int) -> None:
    on = nodes(2, 2)
    compiled = torch.compile(step, fullgraph=True, backend=graph_after_passes() if backend == "passes" else backend)
    for seed in range(2):  # a size that changes compiles once more, as everywhere
        check(compiled, on, *drawn(4, seed, 2))
    before = once(graphs_compiled)
    for seed in range(2, count):
        check(compiled, on, *drawn(4, seed, 2))
    assert graphs_compiled() == before


@pytest.mark.ranks(4, timeout=300)
def test_rows_move_on_gloo() -> None:
    on = nodes(2, 2)
    for seed in range(3):
        check(step, on, *drawn(4, seed, 2))


def rows_that_move(sizes: list[int], destination: Tensor) -> int:
    """How many rows leave a rank one way, between nodes of two ranks and within them."""
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).tolist()
    between = within = 0
    for owner, row in zip(owners, destination.tolist(), strict=True):
        home, place = divmod(owner, 2)
        goes = [divmod(d, 2) for d in row if d >= 0]
        between += len({node for node, _ in goes} - {home})
        within += sum(p != place for _, p in goes)
    return between + within


@pytest.mark.ranks(6, processes=False)
def test_a_row_goes_once_to_each_node_and_once_to_each_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    on, sizes = nodes(3, 2), [3, 0, 4, 1, 2, 2]
    destination = torch.randint(-1, 6, (12, 3), generator=torch.Generator().manual_seed(3))
    moved = rows_that_move(sizes, destination)
    x = partition(torch.randn(12, 5, dtype=torch.float64), on, sizes).requires_grad_()
    rows, route = sc.route_rows(x, partition(destination, on, sizes))
    rows.detach().full_tensor()  # all ranks have come to here
    sent = count_bytes(monkeypatch)
    route.combine(route.send(x)).sum().backward()
    x.grad.full_tensor()
    # There and back, and the same for gradients.
    assert sum(sent) == 4 * moved * 5 * 8, (sum(sent), moved)


@pytest.mark.ranks(4, processes=False)
def test_what_has_no_gradient_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    on, sizes = nodes(2, 2), [2, 0, 4, 1]
    destination = torch.arange(14).remainder(5).view(7, 2) - 1
    x = partition(torch.randn(7, 3, dtype=torch.float64), on, sizes).requires_grad_()
    entries = partition(torch.zeros_like(destination), on, sizes)
    rows = sc.route_rows(x, partition(destination, on, sizes), each=[entries])[0]
    rows.detach().full_tensor()  # all ranks have come to here
    sent = count_bytes(monkeypatch)
    torch.autograd.grad(rows.sum(), x)[0].full_tensor()
    assert sum(sent) == rows_that_move(sizes, destination) * 3 * 8


def test_what_takes_the_same_way_travels_together() -> None:
    """The places of copies, rows and weights between nodes.

    Backward, the gradients of weights and of rows stay apart: no bucket that is tried is predicted to be faster.
    """

    def build(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
        def shard(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
            x = sc.ShardTensor.from_local(torch.zeros(*shape, dtype=dtype), mesh, PARTITION, {0: [8] * 6})
            return x.requires_grad_(dtype.is_floating_point)

        def run(x: Any, destination: Any, entries: Any, weights: Any) -> Any:
            found = step(x, destination, entries, weights)
            return found[0].sum() + found[3].sum()

        return run, (shard(8, 5), *(shard(8, 2, dtype=torch.int64) for _ in range(2)), shard(8, 2))

    found = {}
    for off in ([], ["bucket_exchanges"]):
        with offline_world(6, mesh_shape=(3, 2), device="cpu") as world:
            trace = trace_step(world, build, pipeline=Pipeline(off=off))
            graphs = [g.graph for g in (trace.forward, trace.backward) if g is not None]
            exchanges = [[c for c in collectives(g) if c.kind == "exchange_rows"] for g in graphs]
            found[bool(off)] = [len(e) for e in exchanges]
            assert sum(len(c.payloads) for e in exchanges for c in e) == 8 + 5
    assert found == {True: [6, 5], False: [4, 5]}


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_route_is_kept_and_used_again(compiled: bool) -> None:
    on, (sizes, destination) = nodes(2, 2), ([2, 0, 4, 1], torch.tensor([3, 0, 1, 1, 2, 3, 0]))
    x, d = (partition(t, on, sizes) for t in (torch.randn(7, 2), destination))

    def layer(x: Any, route: sc.Route) -> Any:
        return route.combine(route.send(x) + 1)

    found = sc.route_rows
    if compiled:
        layer, found = (torch.compile(f, fullgraph=True, backend="aot_eager") for f in (layer, found))
    route = found(x, d)[1]
    assert torch.equal(layer(layer(x, route), route).full_tensor(), x.full_tensor() + 2)


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_destination_that_is_no_rank_is_refused_on_all_ranks(compiled: bool) -> None:
    on = nodes(2, 2)
    x = sc.randn(7, 2, device_mesh=on, placements=PARTITION)
    run = torch.compile(sc.route_rows, fullgraph=True, backend="aot_eager") if compiled else sc.route_rows
    for at, bad in ((0, 4), (5, -2), (6, 2**40)):
        numbers = torch.zeros(7, dtype=torch.int64)
        numbers[at] = bad
        with pytest.raises(sc.CollectiveError, match=rf"ranks 0 to 3 of the mesh dims.*has {bad}\."):
            run(x, sc.distribute_tensor(numbers, on, PARTITION))
    rows = run(x, sc.zeros(7, device_mesh=on, placements=PARTITION, dtype=torch.int64))[0]
    assert rows.sharding.partitions[0].sizes == (7, 0, 0, 0)


@pytest.mark.ranks(8, processes=False)
def test_three_mesh_dims_are_refused_and_a_third_may_partition_columns() -> None:
    on = init_device_mesh("cpu", (2, 2, 2))
    x = sc.randn(9, 4, device_mesh=on, placements=[Shard(0)] * 3)
    d = sc.zeros(9, device_mesh=on, placements=[Shard(0)] * 3, dtype=torch.int64)
    with pytest.raises(sc.LayoutError, match=r"has 3; redistribute it to Shard\(0\) on one or two mesh dims"):
        sc.route_rows(x, d)
    full = torch.randn(9, 4)
    destination = torch.tensor([3, 1, 0, 0, 2, -1, 1, 1, 3])
    x = sc.distribute_tensor(full, on, [Shard(0), Shard(1), Shard(0)])
    rows, route = sc.route_rows(x, sc.distribute_tensor(destination, on, [Shard(0), Replicate(), Shard(0)]))
    assert torch.equal(rows.full_tensor(), full[torch.cat([(destination == r).nonzero().flatten() for r in range(4)])])
    assert torch.equal(route.combine(rows).full_tensor(), torch.where(destination[:, None] < 0, 0.0, full))
