"""One world of process groups after another in a process, with functions that stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardcompile as sc
from tests.support.tiers import often


@contextlib.contextmanager
def world(groups_before: int = 0) -> Iterator[DeviceMesh]:
    """A world of one rank, in which a mesh's groups have other names than in one with other groups before."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        for _ in range(groups_before):
            dist.new_group([0])
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("rows", "others"))["rows"]
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("worlds", often([4, 12], 1))
def test_a_compiled_function_outlives_worlds(worlds: int) -> None:
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return (x @ weight).softmax(0).square().sum()

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(loss, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=2):  # what is kept of earlier worlds reaches that in the third
        for i in range(worlds):
            with world(i % 3) as mesh:
                for rows in (4, 2 + i):
                    full = torch.randn(rows, 3, dtype=torch.float64)
                    weight.grad = None
                    out = run(sc.ShardTensor.from_local(full, mesh, [Shard(0)], {0: [rows]}))
                    out.backward()
                    ours, weight.grad = weight.grad, None
                    expected = loss(full)
                    expected.backward()
                    torch.testing.assert_close(out.full_tensor(), expected)
                    torch.testing.assert_close(ours, weight.grad)
    assert counter.frame_count == worlds


def test_around_graph_breaks_as_well() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return (y.T @ y).softmax(0)

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(broken, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for i in range(4):
            with world(i) as mesh:
                full = torch.randn(4, 3, dtype=torch.float64)
                out = run(sc.ShardTensor.from_local(full, mesh, [Shard(0)], {0: [4]}))
                torch.testing.assert_close(out.full_tensor(), broken(full))
    assert counter.frame_count == 2 * 4


@pytest.mark.parametrize("mesh_is", ["an argument", "from outside", "the current one"])
def test_what_makes_sharded_tensors_inside_is_compiled_for_its_world(mesh_is: str) -> None:
    outside: list[DeviceMesh] = []

    def total(shard: Tensor, mesh: DeviceMesh | None) -> Tensor:
        mesh = outside[-1] if mesh_is == "from outside" else mesh
        return sc.ShardTensor.from_local(shard, mesh, [Shard(0)]).softmax(0).square().sum().full_tensor()

    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(total, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for i in range(4):
            with world(i) as mesh, mesh:  # equal meshes, whose groups have other names
                outside.append(mesh)
                for _ in range(2):
                    shard = torch.randn(4, 3, dtype=torch.float64)
                    out = run(shard, mesh if mesh_is == "an argument" else None)
                    torch.testing.assert_close(out, shard.softmax(0).square().sum())
    assert counter.frame_count == 4


def test_dtensor_forgets_meshes_of_earlier_worlds() -> None:
    for i in range(2):
        with world(i) as mesh:
            sc.ShardTensor.from_local(torch.randn(4, 3), mesh, [Shard(0)])
            x = DTensor.from_local(torch.randn(4, 3), mesh, [Shard(0)])
            out = (x + x).sin()
            assert out.device_mesh.get_group().group_name == mesh.get_group().group_name
            torch.testing.assert_close(out.full_tensor(), (2 * x.to_local()).sin())
