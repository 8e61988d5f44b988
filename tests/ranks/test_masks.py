"""Rows that a mask keeps stay where they are, and what is counted is counted where it lies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once
from tests.support.sent import Sent
from tests.support.tiers import often, spread

TIGHT = {"rtol": 1e-12, "atol": 1e-12}

KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[x[:, 0] > 0],
    "elements": lambda x: x[x > 0.3],
    "masked_select": lambda x: x.masked_select(x < 0.1),
    "column": lambda x: torch.masked_select(x[:, 1], x[:, 0] > 0),
    "numbers": lambda x: (x > 0).nonzero().to(x.dtype) * x.sum(),
    "columns of numbers": lambda x: torch.nonzero(x > 0, as_tuple=True)[1] * x.sum(),
    "twice": lambda x: (lambda y: y[y[:, 1] > 0])(x[x[:, 0] > 0]),
    "then softmax": lambda x: x[x[:, 0] > 0].softmax(0),
    "then flipped": lambda x: x[x[:, 0] > 0].flip(0),
    "then a product": lambda x: x[x[:, 0] > 0] @ x.mT @ x,
    "then joined": lambda x: torch.cat([x[x[:, 0] > 0], x]),
    "rows of three dims": lambda x: x.unflatten(1, (2, 2))[x[:, 0] > 0].flatten(1),
}


def inputs() -> list[tuple[list[int], Tensor]]:
    """Shards, and rows of which some are kept, all, none, or those of one rank."""
    torch.manual_seed(0)
    some = torch.randn(7, 4, dtype=torch.float64)
    one = some.abs().neg()
    one[4:] *= -1
    return [
        ([3, 0, 4], some),
        ([1, 5, 1], -some),
        ([2, 2, 3], some.abs()),
        ([4, 1, 2], one),
        ([0, 7, 0], torch.randn(7, 4, dtype=torch.float64)),
        ([6, 1, 2], torch.randn(9, 4, dtype=torch.float64)),
        ([2, 2, 3], -some.abs()),
    ]


def check(run: Any, plain: Callable[[Tensor], Tensor], sizes: list[int], full: Tensor) -> Any:
    def expected() -> tuple[Tensor, Tensor]:
        x = full.clone().requires_grad_()
        y = plain(x)
        y.sin().sum().backward()
        return y.detach(), x.grad

    x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes}).requires_grad_()
    y = run(x)
    y.sin().sum().backward()
    for ours, theirs in zip((y.detach(), x.grad), once(expected), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, **TIGHT)
    return y


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", KEPT)
def test_rows_that_a_mask_keeps(name: str) -> None:
    for sizes, full in inputs():
        check(KEPT[name], KEPT[name], sizes, full)


_OFTEN = ("then softmax", "numbers")
_COMPILED = [(name, "aot_eager") for name in (*_OFTEN, *(n for n in KEPT if n not in _OFTEN))]
_COMPILED += [(name, "inductor") for name in KEPT]


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(("name", "backend"), often(_COMPILED, len(_OFTEN)))
def test_one_graph_serves_every_mask(name: str, backend: str) -> None:
    compiled = torch.compile(KEPT[name], fullgraph=True, backend=backend, dynamic=True)
    worked = [(s, f) for s, f in inputs() if len(f) == 7]
    check(compiled, KEPT[name], *worked[0])
    before = once(graphs_compiled)
    for sizes, full in worked[1:]:
        check(compiled, KEPT[name], sizes, full)
    assert graphs_compiled() == before


@pytest.mark.ranks(3, processes=False)
def test_rows_stay_on_their_ranks() -> None:
    full = torch.arange(14.0).view(7, 2)
    x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: [3, 0, 4]})
    plain = torch.tensor([True, False, True, False, True, False, False])
    mask = sc.distribute_tensor(plain, mesh(), [Shard(0)], sharding_shapes={0: [0, 7, 0]})
    for given in (plain, mask):
        y = x[given]
        assert y.sharding.partitions[0].sizes == (2, 0, 1) and torch.equal(y.full_tensor(), full[plain])
    numbers = (x > 5).nonzero()
    assert numbers.sharding.partitions[0].sizes == (0, 0, 8) and torch.equal(
        numbers.full_tensor(), (full > 5).nonzero()
    )


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("columns", [Replicate(), Shard(1)], ids=str)
def test_rows_of_a_tensor_that_two_mesh_dims_partition(columns: Any) -> None:
    on = init_device_mesh("cpu", (2, 2))
    full = torch.randn(7, 4)
    x = sc.distribute_tensor(full, on, [Shard(0), Replicate()], sharding_shapes={0: [5, 2]})
    x = x.redistribute(placements=[Shard(0), columns])
    mask = full[:, 0] > 0
    y = x[sc.distribute_tensor(mask, on, [Replicate(), Shard(0)])]
    assert y.placements == (Shard(0), columns)
    assert torch.equal(y.full_tensor(), full[mask])


@pytest.mark.ranks(3, processes=False)
def test_a_value_is_written_where_a_mask_says() -> None:
    for sizes, full in inputs():
        rows, elements = full[:, 0] > 0, full > 0.2
        for mask in (rows, elements):
            x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes})
            given = sc.distribute_tensor(mask, mesh(), [Shard(0)], sharding_shapes={0: sizes})
            expected = full.clone()
            expected[mask] = 3.0
            x[given] = 3.0
            assert x.sharding.partitions[0].sizes == tuple(sizes) and torch.equal(x.full_tensor(), expected)


@pytest.mark.ranks(3, processes=False)
def test_counts_are_added_up() -> None:
    for sizes, full in inputs():
        numbers, weights = (full[:, 0] * 3).long().abs(), full[:, 1]
        x, n, w = (
            sc.distribute_tensor(t, mesh(), [Shard(0)], sharding_shapes={0: sizes}) for t in (full, numbers, weights)
        )
        for ours, theirs, pending in (
            (n.bincount(), numbers.bincount(), False),
            (n.bincount(minlength=20), numbers.bincount(minlength=20), False),
            (n.bincount(w), numbers.bincount(weights), False),
            (x.histc(5, -1, 1), full.histc(5, -1, 1), True),
            (x.histc(5), full.histc(5), False),
            ((0 * x).histc(4), (0 * full).histc(4), False),
        ):
            # Where a trace could not count shards by themselves, counts are reduced at once, as there.
            assert ours.sharding.is_partial == pending
            torch.testing.assert_close(ours.full_tensor(), theirs, **TIGHT)
        with pytest.raises(RuntimeError, match="non-negative"):
            (n - 100).bincount()
        for bad in (torch.nan, torch.inf):
            with pytest.raises(RuntimeError, match="finite"):
                (x * bad).histc(5)


@pytest.mark.ranks(3, processes=False)
def test_comparing_all_elements_gathers_none() -> None:
    for sizes, full in inputs():
        x = sc.distribute_tensor(full.clone(), mesh(), [Shard(0)], sharding_shapes={0: sizes})
        near, far, gap = x + 1e-9, x + 1, x.detach().clone()
        gap[-1] = torch.nan
        with Sent() as watch:
            told = [torch.allclose(x, near), torch.allclose(x, full + 0), torch.equal(x, full), torch.equal(x, x + 0)]
            assert told == [True] * 4
            told = [torch.allclose(x, far), torch.equal(x, far), torch.allclose(gap, gap), torch.equal(gap, gap + 0)]
            assert told == [False] * 4
            assert torch.allclose(gap, gap, equal_nan=True) and torch.allclose(x, far, atol=1.1)
        assert not any("gather" in name for name in watch.names), watch.names
        assert torch.allclose(x, sc.distribute_tensor(full, mesh(), [Shard(0)]))


SIZED_BY_RUN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elements": lambda x, m: x[m],
    "masked_select": lambda x, m: torch.masked_select(x, m),
    "rows": lambda x, m: x[m[:, 0]],
    "columns": lambda x, m: x[:, m[0]],
    "numbers": lambda x, m: m.nonzero(),
    "columns of numbers": lambda x, m: torch.where(m)[1],
    "distinct rows": lambda x, m: x.detach().round().unique(dim=0),
    "distinct values": lambda x, m: x.detach().round().unique(return_inverse=True, return_counts=True)[2],
    "rows that are repeated": lambda x, m: x.repeat_interleave(m[:, 0].long(), 0),
    "columns that are repeated": lambda x, m: x.repeat_interleave(m[0].long() + 1, 1),
    "counts": lambda x, m: torch.bincount(m.long().flatten()),
}


_SIZED = [(Shard(1), "aot_eager", name) for name in ("elements", "columns of numbers")]
_SIZED += [
    case
    for case in itertools.product((Shard(1), Shard(0), Replicate()), ("aot_eager", "inductor"), SIZED_BY_RUN)
    if case not in _SIZED
]


@pytest.mark.ranks(3, processes=False, timeout=300)
@pytest.mark.parametrize(("placement", "backend", "name"), often(_SIZED, 2), ids=str)
def test_sizes_that_a_run_gives_of_what_is_partition_otherwise(placement: Any, backend: str, name: str) -> None:
    run = torch.compile(lambda x, m: SIZED_BY_RUN[name](x, m) * 2, fullgraph=True, backend=backend)
    for seed, grad in ((0, False), (1, False), (2, True), (3, True)):
        draw = torch.Generator().manual_seed(seed)
        full = torch.randn(5, 4, dtype=torch.float64, generator=draw).requires_grad_(grad)
        mask = torch.rand(5, 4, generator=draw) > 0.5
        x, m = (sc.distribute_tensor(t.detach(), mesh(), [placement]) for t in (full, mask))
        x.requires_grad_(grad)
        found, expected = run(x, m), SIZED_BY_RUN[name](full, mask) * 2
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
        if expected.requires_grad:
            found.sin().sum().backward()
            expected.sin().sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), full.grad)


_ASK_IF_FEW: dict[str, Callable[[Tensor], Tensor]] = {
    "sums so far": lambda x: x.cumsum(0),
    "sums of columns so far": lambda x: x.cumsum(1),
    "logarithms of sums so far": lambda x: x.logcumsumexp(0),
    "logarithms of sums of columns so far": lambda x: x.logcumsumexp(1),
    "logarithms of sums": lambda x: x.logsumexp(0),
    "maxima so far of what is rolled": lambda x: x.roll(1, 0).cummax(0)[0],
    "distances": lambda x: torch.cdist(x, x).sum(0),
}
"""What asks, or has a gradient that asks, whether there are any rows at all. Only a run can tell."""


@pytest.mark.ranks(3, processes=False, timeout=300)
@pytest.mark.parametrize(
    "name, backend", often([(n, b) for b in ("aot_eager", "inductor") for n in spread(_ASK_IF_FEW, 3)], 3)
)
def test_what_asks_if_there_are_few_rows(name: str, backend: str) -> None:
    once(torch._dynamo.reset)
    full = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def kept(x: Any, mask: Any) -> Any:
        return _ASK_IF_FEW[name](x[mask] * 2)

    run = torch.compile(kept, fullgraph=True, backend=backend)
    before = once(graphs_compiled)
    for rows in ([0, 2, 3, 5, 6, 8], [], [7], list(range(9)), [1, 6]):
        mask = torch.zeros(9, dtype=torch.bool).index_fill(0, torch.tensor(rows, dtype=torch.int64), True)
        plain = full.clone().requires_grad_()
        x, m = (sc.distribute_tensor(t, mesh(), [Shard(0)], sharding_shapes={0: [4, 0, 5]}) for t in (full, mask))
        x.requires_grad_()
        out, expected = run(x, m), kept(plain, mask)
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        out.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **TIGHT)
    assert once(graphs_compiled) - before == 1


@pytest.mark.ranks(3, processes=False, timeout=300)
def test_a_program_that_asks_if_there_are_rows_is_told_so() -> None:
    """Which way it takes is not for the library to say."""
    once(torch._dynamo.reset)
    full, mask = torch.randn(9, 3), torch.arange(9) > 9
    x, m = (sc.distribute_tensor(t, mesh(), [Shard(0)], sharding_shapes={0: [4, 0, 5]}) for t in (full, mask))

    def asks(x: Any, mask: Any) -> Any:
        kept = x[mask]
        return kept + 1 if kept.numel() == 0 else kept * 2

    with pytest.raises(torch._dynamo.exc.UserError, match="Could not guard on data-dependent expression"):
        torch.compile(asks, fullgraph=True, backend="aot_eager")(x, m)
