"""Rows in order, and products of groups of rows, along a sharded dim."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once, world_size
from tests.support.tiers import often

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def partition(full: Tensor, sizes: list[int]) -> Any:
    return sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes})


def shards(draw: random.Random, size: int, ranks: int) -> list[int]:
    ends = sorted(draw.randint(0, size) for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]


def rows(seed: int, size: int) -> Tensor:
    """Numbers all different, few different ones, all the same, NaN and infinities among them, whole ones, booleans."""
    draw = torch.Generator().manual_seed(seed)
    kind = seed % 6
    if kind == 5:
        return torch.randint(0, 2, (size,), generator=draw).bool()
    if kind in (1, 2):
        return torch.randint(0, 4 if kind == 1 else 1, (size,), generator=draw)
    found = torch.randn(size, dtype=torch.float64, generator=draw)
    if kind == 3:
        found[::3], found[1::5], found[2::7] = torch.nan, torch.inf, -torch.inf
    return found.round() if kind == 4 else found


@pytest.mark.ranks(1, 3, 4, processes=False)
def test_rows_are_sorted_in_stable_order() -> None:
    for seed in range(48):
        draw = random.Random(seed)
        size = draw.choice([1, 2, 7, 40])
        full, descending = rows(seed, size), bool(seed % 2)
        sizes = shards(draw, size, world_size())
        x = partition(full, sizes)
        values, numbers = x.sort(stable=True, descending=descending)
        expected = full.sort(stable=True, descending=descending)
        assert values.sharding.partitions[0].sizes == tuple(sizes) == numbers.sharding.partitions[0].sizes
        torch.testing.assert_close(values.full_tensor(), expected.values, equal_nan=True, rtol=0, atol=0)
        assert torch.equal(numbers.full_tensor(), expected.indices), (seed, sizes)
        assert torch.equal(x.argsort(stable=True, descending=descending).full_tensor(), expected.indices)


def ordered(x: Any) -> Any:
    values, numbers = x.sort(stable=True)
    back = torch.empty_like(numbers)
    back[numbers] = torch.arange(numbers.shape[0])
    return (values * 2).sin(), values[back] * 3


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize("backend", often(["", "aot_eager", "inductor"], 2))
def test_one_graph_sorts_any_partition(backend: str) -> None:
    run = torch.compile(ordered, fullgraph=True, backend=backend) if backend else ordered
    before = 0
    for seed, (size, sizes) in enumerate([(9, [5, 0, 4]), (6, [1, 1, 4]), (8, [0, 0, 8]), (7, [3, 3, 1])]):
        full = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        plain, x = full.clone().requires_grad_(), partition(full, sizes).requires_grad_()
        before = once(graphs_compiled) if seed == 2 else before
        found, expected = run(x), ordered(plain)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach(), **TIGHT)
        (found[0].sum() + found[1].square().sum()).backward()
        (expected[0].sum() + expected[1].square().sum()).backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **TIGHT)
    assert graphs_compiled() == before


def product(x: Any, mats: Any, offs: Any) -> Any:
    return torch.nn.functional.grouped_mm(x, mats, offs=offs)


@pytest.mark.ranks(4, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("compiled", "experts"), often([(False, ""), (False, "a"), (True, "a"), (False, "b"), (True, ""), (True, "b")], 4)
)
def test_groups_of_rows_are_multiplied_where_they_lie(compiled: bool, experts: str) -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    draw = torch.Generator().manual_seed(0)
    # Whole numbers, so small that sums of their products are exact in bfloat16, the only dtype that torch compiles.
    full, mats, weight = (
        torch.randint(-2, 3, shape, generator=draw).to(torch.bfloat16) for shape in ((14, 8), (5, 8, 8), (14, 8))
    )
    run = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    for ends in ([3, 3, 9, 13, 14], [0, 0, 0, 14, 14], [14] * 5, [2, 4, 6, 8, 14]):
        offs = torch.tensor(ends, dtype=torch.int32)
        a, b = full.clone().requires_grad_(), mats.clone().requires_grad_()
        expected = product(a, b, offs)
        (expected * weight).sum().backward()
        x = sc.distribute_tensor(full, on, [Shard(0), Replicate()], sharding_shapes={0: [13, 1]}).requires_grad_()
        where = [Shard(0) if experts == m else Replicate() for m in "ab"]
        sizes = {"ab".index(experts): [1, 4]} if experts else None
        own = sc.distribute_tensor(mats, on, where, sharding_shapes=sizes).requires_grad_()
        out = run(x, own, offs)
        (out * weight).sum().backward()
        assert torch.equal(out.detach().full_tensor(), expected.detach())
        assert torch.equal(x.grad.full_tensor(), a.grad)
        assert torch.equal(own.grad.full_tensor(), b.grad)


def columns(seed: int, size: int) -> Tensor:
    """Two columns, of which one has an infinity and NaN in it."""
    return torch.stack([rows(6 * seed, size), rows(6 * seed + 3, size)], 1)


@pytest.mark.ranks(3, 4, processes=False)
@pytest.mark.parametrize("largest", [True, False])
def test_the_best_rows_of_each_rank_meet(largest: bool) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        full, count = columns(seed, 40), draw.choice([0, 1, 2, 5])
        x = partition(full, shards(draw, 40, world_size()))
        values, numbers = x.topk(count, 0, largest)
        assert values.placements == (Replicate(),)
        # The order among equal rows, which torch leaves open, is that of their numbers.
        expected = full.sort(dim=0, stable=True, descending=largest)
        torch.testing.assert_close(values.to_local(), expected.values[:count], equal_nan=True, rtol=0, atol=0)
        assert torch.equal(numbers.to_local(), expected.indices[:count]), seed
        assert not seed % 6 or values.stride() == full.topk(count, 0, largest).values.stride()


def best(x: Any) -> Tensor:
    values, numbers = x.topk(2, 0)
    return (values * (1 + numbers)).sin() + x.sin().topk(1, dim=0, largest=False, sorted=False)[0]


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize("backend", often(["", "aot_eager", "inductor"], 2))
def test_one_graph_finds_the_best_rows_of_any_partition(backend: str) -> None:
    run = torch.compile(best, fullgraph=True, backend=backend) if backend else best
    before = 0
    for seed, (size, sizes) in enumerate([(19, [15, 0, 4]), (26, [1, 1, 24]), (18, [0, 0, 18]), (17, [3, 13, 1])]):
        full = torch.randn(size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        plain, x = full.clone().requires_grad_(), partition(full, sizes).requires_grad_()
        before = once(graphs_compiled) if seed == 2 else before
        found = run(x)
        found.square().sum().backward()
        expected = best(plain)
        expected.square().sum().backward()
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach(), **TIGHT)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **TIGHT)
        assert x.grad.sharding.partitions[0].sizes == tuple(sizes)
    assert not backend or once(graphs_compiled) == before


@pytest.mark.ranks(3, processes=False)
def test_more_best_rows_than_are_worth_it_and_than_there_are() -> None:
    full = torch.randn(7, dtype=torch.float64)
    x = partition(full, [0, 6, 1])
    for count in (2, 7):  # candidates of all ranks are more than the rows
        values, numbers = x.topk(count)
        torch.testing.assert_close(values.full_tensor(), full.topk(count).values, rtol=0, atol=0)
        assert torch.equal(numbers.full_tensor(), full.topk(count).indices)
    with pytest.raises(RuntimeError, match="not in range"):
        x.topk(8)
    with pytest.raises(RuntimeError):  # in the words of torch's fake kernel, which are none
        partition(torch.randn(40), [0, 39, 1]).topk(-1)
