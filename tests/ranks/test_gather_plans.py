"""Rows that other rows name: each travels once to each rank that names it."""

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
from shardcompile.collectives import gather_plans as links_of_rows
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once, world_size
from shardcompile.testing.arrange import lay_out
from tests.support.exchanges import count_bytes
from tests.support.tiers import often

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


class Case(NamedTuple):
    """Rows and an index sharded."""

    sizes: list[int]
    rows: Tensor
    entries: list[int]
    index: Tensor


def case(sizes: list[int], entries: list[int], index: Tensor, seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)
    return Case(sizes, torch.randn(sum(sizes), 3, dtype=torch.float64, generator=draw), entries, index)


def shards(draw: random.Random, size: int, ranks: int) -> list[int]:
    ends = sorted(draw.randint(0, size) for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]


def drawn(ranks: int, seed: int, *shape: int) -> Case:
    """Rows and entries sharded of any sizes; all rows named, or few, or one; no entries at all."""
    draw = random.Random(seed)
    size, entries = draw.choice([1, 2, 7, 12]), draw.choice([0, 1, 5, 20])
    low, high = draw.choice([(-size, size), (0, size), (0, 1), (size - 1, size)])
    index = torch.randint(low, high, (entries, *shape), generator=torch.Generator().manual_seed(seed))
    return case(shards(draw, size, ranks), shards(draw, entries, ranks), index, seed)


def partition(full: Tensor, sizes: list[int], on: DeviceMesh) -> Any:
    return sc.distribute_tensor(full, on, [Shard(0)], sharding_shapes={0: sizes})


def layer(x: Any, links: sc.GatherPlan) -> tuple[Any, Any]:
    rows = links.gather(x)
    return rows, links.scatter_add(rows.sin() * 2)


def step(x: Any, index: Any) -> tuple[Any, ...]:
    links = sc.plan_gather(x, index)
    return *layer(x, links), links.degree


def check(run: Any, of: Case, on: DeviceMesh) -> None:
    """Values, layouts and gradients of `step` against one device."""

    def expected() -> tuple[Tensor, ...]:
        x = of.rows.clone().requires_grad_()
        rows = x[of.index]
        number = of.index.flatten() % max(len(x), 1)
        sums = torch.zeros_like(x).index_add(0, number, (rows.sin() * 2).reshape(-1, 3))
        (rows.square().sum() + sums.cos().sum()).backward()
        return rows.detach(), sums.detach(), torch.bincount(number, minlength=len(x)), x.grad

    x = partition(of.rows, of.sizes, on).requires_grad_()
    rows, sums, degree = run(x, partition(of.index, of.entries, on))
    assert rows.sharding.partitions[0].sizes == tuple(of.entries) and sums.sharding.partitions[0].sizes == tuple(
        of.sizes
    )
    (rows.square().sum() + sums.cos().sum()).backward()
    for ours, theirs in zip((rows, sums, degree, x.grad), once(expected), strict=True):
        torch.testing.assert_close(ours.detach().full_tensor(), theirs, **TIGHT)


@pytest.mark.ranks(1, 3, 4, processes=False)
@pytest.mark.parametrize("shape", [(2,), pytest.param((), marks=pytest.mark.nightly)])
def test_rows_are_taken_and_added(shape: tuple[int, ...]) -> None:
    for seed in range(16):
        check(step, drawn(world_size(), seed, *shape), mesh())


def one_graph(backend: str, cases: Iterator[Case]) -> None:
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    check(compiled, next(cases), mesh())
    check(compiled, next(cases), mesh())  # a size that changes compiles once more, as everywhere
    before = once(graphs_compiled)
    for of in cases:
        check(compiled, of, mesh())
    assert graphs_compiled() == before


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize(
    ("backend", "shape", "count"), often([("aot_eager", (), 12), ("aot_eager", (2,), 40), ("inductor", (), 200)], 1)
)
def test_one_graph_serves_every_index(backend: str, shape: tuple[int, ...], count: int) -> None:
    worked = [c for c in (drawn(3, s, *shape) for s in range(6 * count)) if len(c.rows) > 1 and len(c.index) > 1]
    one_graph(backend, iter(worked[:count]))


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("backend", often(["eager", "inductor"], 1))
def test_rows_move_on_gloo(backend: str) -> None:
    indices = [
        ([5, 0, 2], [2, 3, 0], torch.tensor([6, 0, 3, 3, 5])),
        ([2, 1, 3], [0, 0, 4], torch.tensor([0, 0, 0, 2])),
        ([0, 0, 3], [4, 2, 1], torch.tensor([0, 1, 2, 0, 1, 2, 0])),
        ([4, 4, 4], [3, 3, 3], torch.tensor([0, 1, 3, 4, 5, 7, 8, 9, 11])),  # nothing moves
    ]
    one_graph(backend, (case(*i) for i in indices))


@pytest.mark.ranks(3, processes=False)
def test_each_distinct_row_of_others_travels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = case([5, 0, 2], [4, 5, 2], torch.tensor([0, 6, 6, 6, 1, 1, 0, 6, 1, 6, 5]))
    owners = torch.tensor([0, 0, 0, 0, 0, 2, 2])
    named = [set(shard.tolist()) for shard in of.index.split(of.entries)]
    distinct = sum(int(owners[n]) != r for r, numbers in enumerate(named) for n in numbers)
    sent = count_bytes(monkeypatch)
    x = partition(of.rows, of.sizes, mesh()).requires_grad_()
    links = sc.plan_gather(x, partition(of.index, of.entries, mesh()))
    once(sent.clear)
    layers, h = 3, x
    for _ in range(layers):
        h = links.gather(h).relu()
        h = links.scatter_add(h)
    # Rows and sums of rows, and the same for gradients.
    h.sum().backward()
    assert distinct == 4 and sum(sent) == distinct * 3 * 8 * layers * 2 * 2, (sum(sent), distinct)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("backend", often(["none", "aot_eager"], 2))
def test_links_to_own_rows_alone_exchange_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = case([4, 0, 3], [3, 0, 4], torch.tensor([3, 0, 3, 4, 6, 4, 4]))
    x = partition(of.rows, of.sizes, mesh()).requires_grad_()
    links = sc.plan_gather(x, partition(of.index, of.entries, mesh()))

    def refused(*args: Any, **named: Any) -> Any:
        raise AssertionError("rows are exchanged, though none have to travel")

    x.detach().sum().item()  # every rank has made its links
    once(lambda: monkeypatch.setattr(links_of_rows, "exchange_rows", refused))
    run = layer if backend == "none" else torch.compile(layer, fullgraph=True, backend=backend)
    rows, sums = run(x, links)
    (rows.square().sum() + sums.cos().sum()).backward()

    def expected() -> tuple[Tensor, ...]:
        whole = of.rows.clone().requires_grad_()
        taken = whole[of.index]
        added = torch.zeros_like(whole).index_add(0, of.index, taken.sin() * 2)
        (taken.square().sum() + added.cos().sum()).backward()
        return taken.detach(), added.detach(), whole.grad

    for ours, theirs in zip((rows, sums, x.grad), once(expected), strict=True):
        torch.testing.assert_close(ours.detach().full_tensor(), theirs, **TIGHT)


@pytest.mark.ranks(3, processes=False)
def test_links_are_kept_and_several_tensors_travel_together() -> None:
    of = case([5, 0, 2], [4, 1, 2], torch.tensor([0, 6, 6, 2, 1, 0, 5]))
    x, index = partition(of.rows, of.sizes, mesh()), partition(of.index, of.entries, mesh())
    numbers = partition(torch.arange(7), of.sizes, mesh())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def found(x: Any, index: Any) -> sc.GatherPlan:
        return sc.plan_gather(x, index)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x: Any, numbers: Any, links: sc.GatherPlan) -> Any:
        return links.gather(x, numbers)

    for links in (sc.plan_gather(x, index), found(x, index)):
        for run in (both, links.gather):
            rows, named = run(x, numbers, links) if run is both else run(x, numbers)
            assert torch.equal(rows.full_tensor(), of.rows[of.index])
            assert torch.equal(named.full_tensor(), of.index)
        sums, counts = links.scatter_add(rows, named)
        expected = torch.zeros_like(of.rows).index_add(0, of.index, of.rows[of.index])
        torch.testing.assert_close(sums.full_tensor(), expected, **TIGHT)
        assert torch.equal(counts.full_tensor(), torch.bincount(of.index, minlength=7) * torch.arange(7))


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize(
    ("other", "compiled"),
    often([(p, c) for c in (False, True) for p in (Shard(1), Partial(), Replicate())], 4),
)
def test_rows_that_are_laid_out_over_another_mesh_dim_as_well(other: Any, compiled: bool) -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.randn(7, 4, dtype=torch.float64)
    index = torch.tensor([[0, 6], [3, 3], [-1, 1], [5, 5], [2, 0]])
    x = lay_out(full, on, [other, Shard(0)], {1: [5, 2]} | ({0: [2, 2]} if other.is_shard() else {}), seed=0)
    index_partition = sc.distribute_tensor(index, on, [Shard(0), Replicate()])  # brought to where the rows are

    def run(x: Any, index: Any) -> Any:
        links = sc.plan_gather(x, index)
        rows = links.gather(x)
        return rows, links.scatter_add(rows)

    x.requires_grad_()
    rows, sums = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, index_partition)
    torch.testing.assert_close(rows.detach().full_tensor(), full[index], **TIGHT)
    expected = torch.zeros_like(full).index_add(0, index.flatten() % 7, full[index].flatten(0, 1))
    torch.testing.assert_close(sums.detach().full_tensor(), expected, **TIGHT)
    (rows.sum() + sums.sum()).backward()
    counts = torch.bincount(index.flatten() % 7, minlength=7).double().unsqueeze(1).expand(7, 4)
    torch.testing.assert_close(x.grad.full_tensor(), 2 * counts, **TIGHT)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_index_that_is_out_of_range_is_refused_on_all_ranks(compiled: bool) -> None:
    x = sc.randn(7, 2, device_mesh=mesh(), placements=[Shard(0)])

    def run(x: Any, index: Any) -> Any:
        return sc.plan_gather(x, index).gather(x)

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    for bad in (7, -8, 2**40):
        index = partition(torch.tensor([0, 1, 2, bad, 1, 1]), [3, 1, 2], mesh())
        with pytest.raises(
            sc.CollectiveError, match=rf"plan_gather: index out of range.*; rank 1 of the group has {bad}\."
        ):
            run(x, index)
    assert run(x, index * 0).full_tensor().shape == (6, 2)


@pytest.mark.ranks(3, processes=False)
def test_what_does_not_fit_is_refused() -> None:
    x = sc.randn(7, 2, device_mesh=mesh(), placements=[Shard(0)])
    index = sc.zeros(5, device_mesh=mesh(), placements=[Shard(0)], dtype=torch.int64)
    whole = x.redistribute(placements=[Replicate()])
    for bad_x, bad_index, message in (
        (whole, index, r"has none; redistribute it to Shard\(0\)"),
        (x.to_local(), index, "takes sharded tensors"),
        (x, index.double(), "tensor of integers"),
        (x, torch.tensor(3), "of at least one dim"),
    ):
        with pytest.raises(sc.LayoutError, match=message):
            sc.plan_gather(bad_x, bad_index)
    links = sc.plan_gather(x, index)
    with pytest.raises(sc.LayoutError, match="does not have the rows of the route"):
        links.gather(x[:6])
    with pytest.raises(sc.LayoutError, match="does not have the rows of the route"):
        links.scatter_add(x)
    with pytest.raises(sc.LayoutError, match="one value for each entry of the index"):
        sc.plan_gather(x, index.view(5, 1)).scatter_add(x[:5])
