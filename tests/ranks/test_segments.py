"""Rows of several stretches: a batch of sharded sequences, flattened, whose shards have some rows of every sequence."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.collectives.segment_exchange import REGROUP_ROWS, Regroup
from shardcompile.sharding import GroupPartition
from shardcompile.testing import mesh, once, rank, world_size
from shardcompile.testing.trial import shard_problems
from tests.support.sent import Sent
from tests.support.tiers import often

PARTITIONS = [[3, 0, 1], [1, 1, 1], [0, 5, 0], [2, 3, 2], [0, 0, 1]]


def partition(full: Tensor, sizes: list[int]) -> sc.ShardTensor:
    shard = full.split(sizes, 1)[rank()].contiguous()
    return sc.ShardTensor.from_local(shard, mesh(), [Shard(1)], {0: sizes})


def sorted_rows(x: Any, ids: Any) -> Any:
    """What experts do: rows in the order of their numbers, something for each in that order, and the way back."""
    names, order = torch.sort(ids.reshape(-1), stable=True)
    rows = x.reshape(-1, x.shape[-1])[order]
    done = rows.cumsum(0) * (names + 1).unsqueeze(1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    return done[back].view(x.shape)


def neighbours(x: Any, ids: Any) -> Any:
    """An op that needs with_one_segment rows, and a view that parts them again."""
    return (x.reshape(-1, x.shape[-1]).cumsum(0).sin() + ids.reshape(-1, 1)).view(x.shape)


def looked_up(x: Any, ids: Any) -> Any:
    """Rows by index of the whole dim, some of them negative, several for one."""
    flat, numbers = x.reshape(-1, x.shape[-1]), ids.reshape(-1)
    table = flat.sin()
    return table[numbers * 2 - 1].cos() + table.index_select(0, numbers.sort().values)


def check(function: Callable[..., Any], batch: int, backend: str | None, partitions: list[list[int]]) -> None:
    run = once(lambda: torch.compile(function, fullgraph=True, backend=backend) if backend else function)
    for sizes in partitions:
        generator = torch.Generator().manual_seed(sum(sizes))
        full = torch.randn(batch, sum(sizes), 2, generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 3, (batch, sum(sizes)), generator=generator).clamp(max=batch * sum(sizes) // 2)
        plain = full.clone().requires_grad_()
        expected = function(plain, ids)
        x = partition(full, sizes).requires_grad_()
        found = run(x, partition(ids, sizes))
        torch.testing.assert_close(found.full_tensor(), expected)
        (expected * expected.detach().cos()).sum().backward()
        (found * found.detach().cos()).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]


@pytest.mark.ranks(4, processes=False)
def test_a_dim_that_is_split_again_has_no_segments() -> None:
    ranks = init_device_mesh("cpu", (2, 2))
    full = torch.randn(2, 2, 2)
    x = sc.distribute_tensor(full, ranks, [Shard(1), Shard(1)], sharding_shapes={1: [0, 0, 2, 0]})
    for out, expected in ((F.instance_norm(x), F.instance_norm(full)), (x.view(1, 4, 2).view(2, 2, 2), full)):
        assert out.sharding == x.sharding and not shard_problems(out)
        torch.testing.assert_close(out.full_tensor(), expected)
    flat = x.view(1, 4, 2)
    assert repr(flat).endswith("in segments)") and flat.sharding.describe() in repr(flat) and not shard_problems(flat)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("function", [sorted_rows, neighbours, looked_up])
@pytest.mark.parametrize(
    ("batch", "backend"), often([(2, None), (2, "aot_eager"), (3, None), (3, "aot_eager"), (2, "inductor")], 1)
)
def test_rows_of_several_stretches(function: Callable[..., Any], batch: int, backend: str | None) -> None:
    check(function, batch, backend, PARTITIONS)


@pytest.mark.ranks(2)
def test_on_processes() -> None:
    check(sorted_rows, 2, "aot_eager", [[3, 1], [0, 5]])


@pytest.mark.ranks(3, processes=False)
def test_no_row_is_gathered() -> None:
    x, ids = torch.randn(2, 40, 8), torch.randint(0, 4, (2, 40))
    with CommDebugMode() as seen:
        sorted_rows(partition(x, [30, 3, 7]), partition(ids, [30, 3, 7]))
    counts = {str(op): n for op, n in seen.get_comm_counts().items()}
    assert counts.pop("shardcompile.all_gather_v") == 3  # samples of what is sorted, and sums of shards for `cumsum`
    assert counts.keys() <= {"shardcompile.exchange_rows", "shardcompile.gather_counts", "shardcompile.fetch_ranges",
                             "shardcompile.fetch_columns", "shardcompile.scan", "shardcompile.regroup_rows"}, counts  # fmt: skip


def numbers_of(sizes: list[int], stretches: int) -> list[Tensor]:
    """By rank the numbers of its rows: of each stretch its part."""
    each = torch.arange(sum(sizes)).view(stretches, -1).split([n // stretches for n in sizes], 1)
    return [part.reshape(-1) for part in each]


@pytest.mark.ranks(2, 3)
def test_rows_go_from_any_stretches_to_any_others() -> None:
    partitions = {2: [[12, 0], [0, 12], [6, 6]], 3: [[6, 0, 6], [0, 12, 0], [6, 12, 6], [0, 0, 0]]}[world_size()]
    group_name = mesh().get_group(0).group_name
    for src, dst in itertools.product(partitions, partitions):
        if sum(src) != sum(dst):
            continue
        for held_in, wanted_in in itertools.product((1, 2, 3, 6), repeat=2):
            for dim, dtype in ((0, torch.float64), (1, torch.complex64)):
                full = torch.arange(sum(src) * 4).view(sum(src), 4).to(dtype)
                full = full if dim == 0 else full.T * (1 + 2j)
                held, wanted = numbers_of(src, held_in)[rank()], numbers_of(dst, wanted_in)[rank()]
                shard, expected = (full.index_select(dim, rows) for rows in (held, wanted))
                shard = shard.conj().resolve_conj().conj()
                sizes = GroupPartition(src, 0, []), GroupPartition(dst, 0, [])
                a = Regroup(shard, dim, sum(src), len(wanted), *sizes, held_in, wanted_in, group_name)
                assert torch.equal(REGROUP_ROWS.start(a).wait(), expected)
                there_and_back = REGROUP_ROWS.inverse(a, a._replace(input=expected, shard=len(held)))
                assert torch.equal(REGROUP_ROWS.start(there_and_back).wait(), shard)


ACROSS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, w: F.layer_norm(x, (4,)),
    "linear": lambda x, w: F.linear(x, w).relu(),
    "square": lambda x, w: x * x,
    "softmax": lambda x, w: x.softmax(-1),
}


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize(
    ("name", "backend"), often(list(itertools.product(ACROSS, ("aot_eager", "inductor", None))), 2)
)
def test_a_join_with_rows_of_another_partition_is_one_exchange_and_none_on_the_way_back(
    name: str, backend: str | None
) -> None:
    """The skip of a U-Net: what comes of a flattened image meets rows that are sharded otherwise."""

    def step(x: Tensor, skip: Tensor, w: Tensor) -> Tensor:
        tokens = ACROSS[name](x.reshape(1, 15, 4), w)
        return torch.cat([tokens, skip], -1).reshape(1, 3, 5, 8).square().sum()

    full, other, w = torch.randn(1, 3, 5, 4), torch.randn(1, 15, 4), torch.randn(4, 4)
    run = once(lambda: torch.compile(step, fullgraph=True, backend=backend) if backend else step)
    for sizes in ([1, 4, 0], [2, 1, 2]):
        x = sc.distribute_tensor(full, mesh(), [Shard(2)], sharding_shapes={0: sizes}).detach().requires_grad_()
        skip = sc.distribute_tensor(other, mesh(), [Shard(1)], sharding_shapes={0: [7, 3, 5]})
        plain = full.clone().requires_grad_()
        run(x, skip, w)  # compiles
        with Sent() as watch:
            out = run(x, skip, w)
            out.backward()
        expected = step(plain, other, w)
        expected.backward()
        torch.testing.assert_close(out.full_tensor(), expected)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        assert [kind for kind in watch.names if kind != "all_reduce"] == ["regroup_rows"], watch.names


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("bad", [8, -9, 12])
def test_a_number_out_of_range_is_told_on_all_ranks(bad: int) -> None:
    """Also one that would be in range in the order in which rows of a shard are neighbours."""
    x = partition(torch.randn(2, 4, 3), [3, 0, 1]).reshape(-1, 3)
    numbers = torch.tensor([0, 1, bad])
    index = sc.ShardTensor.from_local(numbers.split([1, 1, 1])[rank()], mesh(), [Shard(0)])
    with pytest.raises(IndexError, match=rf"rank 2 of the group has {bad}\."):
        x[index]


@pytest.mark.ranks(3, processes=False)
def test_the_exchange_is_a_step_of_a_plan() -> None:
    full = torch.randn(3, 5, 2)
    flat = partition(full, [2, 0, 3]).reshape(-1, 2)
    bring = functools.partial(flat.redistribute, placements=[Shard(0)])
    with CommDebugMode() as seen:
        rows = bring(sharding_shapes={0: [6, 0, 9]})
    assert {str(op): n for op, n in seen.get_comm_counts().items()} == {"shardcompile.regroup_rows": 1}
    torch.testing.assert_close(rows.to_local(), full.reshape(-1, 2).split([6, 0, 9])[rank()])
    assert rows.sharding.describe() == "f32[15, 2] 0: S(0)[6,0,9]"
