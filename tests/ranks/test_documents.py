"""Attention within packed documents, and partitions that balance it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.collectives import transport
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh
from shardcompile.testing.scheduler import RanksWaitError
from tests.support.pages import DOCS, code_blocks, run_blocks
from tests.support.tiers import often

ROWS, HEADS = Shard(0), Shard(1)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int], causal: bool, scale: float | None) -> Tensor:
    """Products in float64, a document after the other."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    found = []
    for a, b in itertools.pairwise(ends):
        some = (x[a:b].transpose(0, 1) for x in (q, k, v))
        found.append(nnf.scaled_dot_product_attention(*some, is_causal=causal, scale=scale).transpose(0, 1))
    return torch.cat(found)


def drawn_sizes(draw: random.Random, rows: int, ranks: int) -> list[int]:
    ends = [0, *sorted(draw.choices(range(rows + 1), k=ranks - 1)), rows]
    return [b - a for a, b in itertools.pairwise(ends)]


def documents(draw: random.Random, rows: int, count: int) -> list[int]:
    return [0, *sorted(draw.choices(range(rows + 1), k=count - 1)), rows]


def step(function: Any, values: Sequence[Tensor], ends: Tensor) -> tuple[Tensor, ...]:
    """The result, and the gradients of a weighted sum of it."""
    result = function(*values, ends)
    weights = torch.arange(result.numel(), dtype=result.dtype).view(result.shape).sin()
    if isinstance(result, sc.ShardTensor):
        weights = sc.distribute_tensor(weights, result.device_mesh, [Replicate()] * result.device_mesh.ndim)
    grads = torch.autograd.grad((result * weights).sum(), values)
    return tuple(x.full_tensor() if isinstance(x, sc.ShardTensor) else x for x in (result.detach(), *grads))


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("backend", "count"),
    often([("eager", 25), ("aot_eager", 8), ("inductor", 8), ("eager", 250), ("aot_eager", 250)], 2),
)
def test_any_partition_and_documents_by_one_graph(causal: bool, backend: str, count: int) -> None:
    draw = random.Random(f"{causal} {backend}")
    torch.manual_seed(0)
    groups = draw.choice([1, 2])
    scale = draw.choice([None, 0.4])

    def function(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return sc.varlen_attention(q.sin(), k, v.cos(), ends, causal=causal, scale=scale) * 2

    def reference(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return one_by_one(q.sin(), k, v.cos(), ends.tolist(), causal, scale) * 2

    torch._dynamo.reset()
    compiled = function if backend == "eager" else torch.compile(function, fullgraph=True, backend=backend)
    before = graphs_compiled()
    for _ in range(count):
        rows = draw.randint(2, 17)
        q, k, v = (torch.randn(rows, 2 * g, n, dtype=torch.float64) for g, n in ((groups, 4), (1, 4), (1, 3)))
        ends = torch.tensor(documents(draw, rows, 5))
        wanted = step(reference, [x.requires_grad_() for x in (q, k, v)], ends)
        sizes = drawn_sizes(draw, rows, 3)
        partition = [
            sc.distribute_tensor(x.detach(), mesh(), [ROWS], sharding_shapes={0: sizes}).requires_grad_()
            for x in (q, k, v)
        ]
        found = step(compiled, partition, ends)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
    assert backend == "eager" or graphs_compiled() - before == 1


@pytest.mark.ranks(4, mesh=(2, 2), timeout=300, processes=False)
@pytest.mark.parametrize(
    "placements", often([[ROWS, HEADS], [Shard(2), ROWS], [HEADS, ROWS], [Replicate(), HEADS]], 2), ids=str
)
def test_two_mesh_dims(placements: list[Any]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 3, 4, dtype=torch.float64) for _ in range(3))
    ends = torch.tensor([0, 0, 5, 7])

    def function(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return sc.varlen_attention(q, k, v, ends, causal=True)

    wanted = step(
        lambda q, k, v, ends: one_by_one(q, k, v, ends.tolist(), True, None),
        [x.requires_grad_() for x in (q, k, v)],
        ends,
    )
    partition = [sc.distribute_tensor(x.detach(), mesh(), placements).requires_grad_() for x in (q, k, v)]
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        for a, b in zip(step(call, partition, ends), wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_plain_tensors() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, h, n, dtype=torch.float64).requires_grad_() for h, n in ((4, 4), (2, 4), (2, 3)))
    ends = torch.tensor([0, 4, 4, 9])
    wanted = step(lambda q, k, v, ends: one_by_one(q, k, v, ends.tolist(), True, None), [q, k, v], ends)
    for a, b in zip(step(lambda *x: sc.varlen_attention(*x, causal=True), [q, k, v], ends), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.ranks(3, timeout=300)
def test_on_real_ranks_through_the_backend() -> None:
    torch.manual_seed(0)
    draw = random.Random(0)

    def function(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
        return sc.varlen_attention(q, k, v, ends, causal=True)

    compiled = torch.compile(function, fullgraph=True, backend="shardcompile")
    for _ in range(3):
        rows = draw.randint(5, 17)
        q, k, v = (torch.randn(rows, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
        ends = torch.tensor(documents(draw, rows, 4))
        wanted = step(lambda q, k, v, ends: one_by_one(q, k, v, ends.tolist(), True, None), [q, k, v], ends)
        sizes = {0: drawn_sizes(draw, rows, 3)}
        partition = [
            sc.distribute_tensor(x.detach(), mesh(), [ROWS], sharding_shapes=sizes).requires_grad_() for x in (q, k, v)
        ]
        for a, b in zip(step(compiled, partition, ends), wanted, strict=True):
            torch.testing.assert_close(a, b)


# What moves


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("causal", [True, False])
def test_the_rows_that_documents_have_elsewhere_and_no_others(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, sizes = [137, 2041, 89, 7, 400], [700, 0, 1600, 374]
    received: list[tuple[int, int]] = []
    exchange = transport.exchange

    def noted(call: Any, sends: Any, receives: Any) -> Any:
        received.extend((call.group.rank(), t.numel()) for _, t in receives)
        return exchange(call, sends, receives)

    rank, rows = mesh().get_local_rank(), sum(lengths)
    q, k, v = (sc.ShardTensor.from_local(torch.randn(sizes[rank], 2, 4), mesh(), [ROWS], {0: sizes}) for _ in range(3))
    ends = [0, *itertools.accumulate(lengths)]
    monkeypatch.setattr(transport, "exchange", noted)
    sc.varlen_attention(q, k, v, torch.tensor(ends), causal=causal)
    monkeypatch.undo()
    own = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    needed = {
        j
        for a, b in itertools.pairwise(ends)
        for i in range(max(a, own.start), min(b, own.stop))
        for j in ((a, i) if causal else (a, b - 1))  # the ends of what row i sees; what is between them follows
    }
    span = range(min(needed, default=0), max(needed, default=-1) + 1)
    width = 2 * (4 + 4)
    assert sum(n for r, n in received if r == rank) == len(set(span) - set(own)) * width
    assert rows == sum(sizes)


# What is refused


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0, 5], "from 0 to the number of rows, 7"),
        ([1, 7], "from 0 to the number of rows, 7"),
        ([0, 5, 3, 7], "from 0 to the number of rows, 7"),
        ([0.0, 7.0], "integers"),
        ([[0, 7]], "integers"),
    ],
)
def test_documents_that_do_not_fit(ends: Any, message: str) -> None:
    q = sc.distribute_tensor(torch.randn(7, 2, 4), mesh(), [ROWS])
    with pytest.raises(sc.LayoutError, match=message):
        sc.varlen_attention(q, q, q, torch.tensor(ends))


@pytest.mark.ranks(3, processes=False)
def test_shapes_that_do_not_fit() -> None:
    q = sc.distribute_tensor(torch.randn(7, 2, 4), mesh(), [ROWS])
    for other in (torch.randn(6, 2, 4), torch.randn(7, 3, 4), torch.randn(7, 2, 5), torch.randn(7, 8)):
        with pytest.raises(sc.LayoutError, match=r"\[rows, heads, features\]"):
            sc.varlen_attention(q, other, other, torch.tensor([0, 7]))


@pytest.mark.ranks(2, processes=False)
def test_other_documents_on_another_rank() -> None:
    q = sc.distribute_tensor(torch.randn(7, 2, 4), mesh(), [ROWS])
    with pytest.raises(RanksWaitError, match="no rank can go on"):
        sc.varlen_attention(q, q, q, torch.tensor([0, 5 + mesh().get_local_rank(), 7]))


# Partitions


@pytest.mark.parametrize("ranks", [8, 64, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("row_cost", [0.0, 6 * 256.0])
def test_balanced_partitions(ranks: int, causal: bool, row_cost: float) -> None:
    draw = random.Random(ranks)
    for lengths in ([40_000], [draw.randint(1, 4000) for _ in range(60)], [1, 90_000, 1]):
        sizes = sc.balanced_partition(lengths, ranks, causal=causal, row_cost=row_cost)
        assert len(sizes) == ranks and sum(sizes) == sum(lengths) and min(sizes) >= 0
        costs = [row_cost + (i + 1 if causal else n) for n in lengths for i in range(n)]
        ends = [0, *itertools.accumulate(sizes)]
        work = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        mean = sum(costs) / ranks
        assert max(work) <= max(1.05 * mean, mean + max(costs))


def test_partitions_by_hand() -> None:
    assert sc.balanced_partition([7], 3, causal=False) == [3, 3, 1]
    assert sc.balanced_partition([2, 4], 2) == [4, 2]  # rows cost 1 2 | 1 2 3 4: 6 and 7
    assert sc.balanced_partition([], 2) == [0, 0]
    assert sc.balanced_partition([1], 3) == [1, 0, 0]
    assert sc.balanced_partition([3], 1) == [3]
    with pytest.raises(sc.LayoutError, match="at least one rank"):
        sc.balanced_partition([3], 0)
    with pytest.raises(sc.LayoutError, match="not negative"):
        sc.balanced_partition([-3], 2)


GUIDE = code_blocks(DOCS / "long-sequences.md")


@pytest.mark.ranks(4, processes=False)
def test_the_code_of_the_guide() -> None:
    named = run_blocks(GUIDE)
    lengths = [20, 3, 1, 9, 4090, 7]
    documents = [torch.randn(n, 4, dtype=torch.float64) for n in lengths]
    compiled = torch.compile(named["packed_attention"], fullgraph=True, backend="aot_eager")
    batches, graphs = [[20, 3, 1, 9], [4090], [7]], graphs_compiled()
    for (partition, ends), some in zip(named["loader"](documents, mesh(), 4), batches, strict=True):
        assert len(ends) == 33
        assert partition.sharding.partitions[0].sizes == tuple(sc.balanced_partition(some, 4, row_cost=24))
        rows = torch.cat(documents[: len(some)])
        documents = documents[len(some) :]
        torch.testing.assert_close(partition.full_tensor(), rows)
        heads, whole = partition.unflatten(1, (2, 2)), rows.unflatten(1, (2, 2))
        found = compiled(heads, heads, heads, ends).full_tensor()
        torch.testing.assert_close(found, one_by_one(whole, whole, whole, ends.tolist(), True, None))
    assert graphs_compiled() - graphs == mesh().size()  # each rank has the functions of the page itself
