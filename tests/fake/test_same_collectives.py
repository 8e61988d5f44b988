"""Ranks that would start different collectives are found without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.inspect.offline import OfflineError, trace_offline
from shardcompile.sharding import Layout, MeshShape, Partition
from shardcompile.testing import same_collectives_on_every_rank
from shardcompile.testing.same_collectives import _selected


def rows(mesh: DeviceMesh, sizes: list[int]) -> Tensor:
    return sc.ShardTensor.from_local(torch.randn(sizes[mesh.get_local_rank()], 4), mesh, [Shard(0)], {0: sizes})


def loss_of(function: Callable[[DeviceMesh, Tensor], Tensor]) -> Any:
    """A `build` for a function of rows, of which rank 2 has none."""

    def build(mesh: DeviceMesh) -> Any:
        sizes = [3 * r + 1 if r != 2 else 0 for r in range(mesh.size())]
        weight = nn.Parameter(torch.randn(4, 4))
        return (lambda x: function(mesh, x @ weight)), (rows(mesh, sizes),)

    return build


def test_the_collectives_of_all_ranks_are_returned() -> None:
    build = loss_of(lambda mesh, x: x.square().mean())
    records = same_collectives_on_every_rank(build, 4)
    assert [(r.kind, r.ranks, r.global_bytes) for r in records] == [("all_reduce", (0, 1, 2, 3), 64)]  # of the weight
    (record,) = same_collectives_on_every_rank(build, 64, ranks=[5, 63])
    assert record.ranks == tuple(range(64))


def test_a_decision_of_one_rank_is_named_with_both_lines() -> None:
    def function(mesh: DeviceMesh, x: Tensor) -> Tensor:
        y = x.sum(0)
        if mesh.get_local_rank() == 2:
            y = y + x.amax(0)  # planted
        return y.sum()

    with pytest.raises(AssertionError) as raised:
        same_collectives_on_every_rank(loss_of(function), 4)
    text = str(raised.value)
    assert text.startswith("ranks 0 and 2 start different collectives, and would wait for each other without end."), (
        text
    )
    assert "They differ in number " in text and "rank 0: " in text and "rank 2: all_reduce float32" in text, text
    assert "test_same_collectives.py" in text, text
    same_collectives_on_every_rank(loss_of(function), 4, ranks=[0, 1, 3])


def test_a_size_of_one_rank_that_decides_is_found() -> None:
    def build(mesh: DeviceMesh) -> Any:
        x = rows(mesh, [5, 5, 5])
        if x.to_local().shape[0] == 5 and mesh.get_local_rank() == 1:
            return (lambda x: x.redistribute(placements=[Replicate()]).to_local().sum()), (x,)
        return (lambda x: x.sum().full_tensor()), (x,)

    with pytest.raises(AssertionError, match=r"(?s)ranks 0 and 1 .*rank 0: all_reduce.*rank 1: all_gather"):
        same_collectives_on_every_rank(build, 3, backward=False)


def test_a_rank_that_cannot_be_traced_is_named() -> None:
    def function(mesh: DeviceMesh, x: Tensor) -> Tensor:
        return x.sum() if mesh.get_local_rank() != 1 else x.reshape(3, 3, 3).sum()

    with pytest.raises(AssertionError, match="rank 1 cannot be traced, though rank 0 can: "):
        same_collectives_on_every_rank(loss_of(function), 3)


def test_ranks_of_a_mesh_are_compared_in_the_groups_that_they_share() -> None:
    def build(planted: bool) -> Any:
        def on_mesh(mesh: DeviceMesh) -> Any:
            x = sc.rand(6, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)])
            along = 1 if planted and list(mesh.get_coordinate()) == [1, 1] else 0
            return (lambda x: x.sum(along).square().sum().full_tensor()), (x,)

        return on_mesh

    options: Any = {"mesh_shape": (2, 2), "backward": False}
    assert same_collectives_on_every_rank(build(False), 4, **options)
    with pytest.raises(AssertionError, match="ranks 1 and 3 start different collectives"):
        same_collectives_on_every_rank(build(True), 4, **options)


def test_of_many_ranks_some_are_picked() -> None:
    mesh = MeshShape((64,))
    partition = Partition.of_sizes([0], [64], [5] * 20 + [0] + [5] * 20 + [99] + [5] * 22)
    layout = Layout.of(mesh, [Shard(0)], (partition.size, 3), torch.float32, [partition, None])
    assert _selected((64,), [layout]) == [0, 1, 20, 32, 41, 63]
    assert _selected((4, 8), []) == [0, 1, 4, 7, 8, 16, 24, 31]
    assert _selected((8,), []) == list(range(8))


def test_misuses() -> None:
    with pytest.raises(ValueError, match="ranks is empty"):
        same_collectives_on_every_rank(loss_of(lambda mesh, x: x), 2, ranks=[])
    with pytest.raises(OfflineError, match="there is no rank 7"):
        same_collectives_on_every_rank(loss_of(lambda mesh, x: x), 2, ranks=[7])


@pytest.mark.parametrize(
    "part",
    [(3, 4, 4, 5), *(pytest.param(p, marks=pytest.mark.nightly) for p in [(0, 3, 0, 4), (0, 2, 2, 4)])],
    ids=str,
)
def test_lookups_by_parts_of_an_index_of_known_partition(part: tuple[int, int, int, int]) -> None:
    """On a rank that has none of either, or all of both, the parts are the same to its graph; on others they are not."""
    a, b, c, d = part

    def build(mesh: DeviceMesh) -> Any:
        index = sc.ShardTensor.from_local(torch.arange(5), mesh, [Replicate()])

        def lookups(x: Tensor, index: sc.ShardTensor) -> Tensor:
            numbers = index.redistribute(placements=[Shard(0)])  # [3, 2]
            return x[numbers[a:b]].sum() + x[numbers[c:d]].sum()

        return lookups, (rows(mesh, [4, 5]), index)

    same_collectives_on_every_rank(build, 2)


def test_shards_of_known_partition_that_are_joined_stay_so_where_one_is_empty() -> None:
    def build(mesh: DeviceMesh) -> Any:
        whole = sc.ShardTensor.from_local(torch.randn(5, 4), mesh, [Replicate()])

        def joined(x: Tensor, whole: sc.ShardTensor) -> Tensor:
            shard = whole.redistribute(placements=[Shard(0)]).to_local()  # [3, 2]
            ends = torch.cat([shard[:1], shard[2:], shard[:1] * 2])
            return x.sum() + x.square().mean() + sc.ShardTensor.from_local(ends.sum(0), mesh, [Replicate()]).sum()

        return joined, (rows(mesh, [4, 5]), whole)

    ops = []
    for rank in range(2):
        traced = trace_offline(build, world_size=2, rank=rank, device="cpu")
        ops.append([str(n.target) for n in traced.forward.graph.nodes if n.op == "call_function"])
    assert ops[0].count("aten.cat.default") == 1, ops[0]
    assert ops[0] == ops[1]


def test_the_gradient_of_best_rows_moves_nothing() -> None:
    records = same_collectives_on_every_rank(loss_of(lambda mesh, x: x.topk(1, 0).values.square().sum()), 4)
    moved = [(r.kind, r.global_bytes) for r in records]
    assert moved == [("all_gather_bucket", 4 * 4 * (8 + 4)), ("all_reduce", 64)], moved  # the best ones; of the weight
