"""What the host reads in a graph for a GPU: numbers that it has itself, so that it never waits for the device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.fx import Graph

import shardcompile as sc
from shardcompile.inspect.offline import offline_world, trace_offline
from shardcompile.ops.attention import kernels
from shardcompile.passes.graph.collective import collectives
from tests.support.tiers import often

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="no GPU, and no C++ compiler (c++, g++, clang++) to build what stands in for it",
)


def read_by_the_host(graph: Graph) -> list[str]:
    """Types of the devices of what is read as a number."""
    read = torch.ops.aten._local_scalar_dense.default
    return [n.args[0].meta["val"].device.type for n in graph.nodes if n.target is read]  # type: ignore[union-attr]


def shards(stated: bool) -> Callable[[DeviceMesh], Any]:
    """Shards that become a sharded tensor inside: of sizes that are inputs, or that the ranks ask one another for."""

    def build(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
        rank, device = mesh.get_local_rank(), mesh.device_type
        layer = nn.Linear(8, 8).to(device)
        others = [torch.randn(5 + r, 1, device=device) for r in range(mesh.size())]

        def function(x: Tensor, *others: Tensor) -> Tensor:
            sizes: Any = {0: [x.shape[0] for x in others]} if stated else "infer"
            y = sc.ShardTensor.from_local(x, mesh, [Shard(0)], sizes)
            return layer(y).relu().redistribute(placements=[Replicate()]).to_local().sum()  # type: ignore[no-any-return]

        inputs = (torch.randn(5 + rank, 8, device=device), *others)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)  # sizes that are numbers need no op
        return function, inputs

    return build


@pytest.mark.parametrize("stated", often([True, False], 1))
def test_size_and_key_of_a_partition_are_on_the_host(stated: bool) -> None:
    trace = trace_offline(shards(stated), world_size=3, device="cuda")
    targets = [str(n.target) for n in trace.forward.graph.nodes]
    assert any(("state_partition" if stated else "gather_partition") in t for t in targets)
    assert read_by_the_host(trace.forward.graph)
    assert set(read_by_the_host(trace.forward.graph)) == {"cpu"}
    assert trace.backward is not None
    assert set(read_by_the_host(trace.backward.graph)) <= {"cpu"}


@pytest.mark.parametrize("attention", often(["ring", "gather", "heads"], 1))
def test_attention_reads_nothing_from_the_device(attention: str) -> None:
    def build(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
        sizes = {0: [7 + 3 * r for r in range(mesh.size())]}
        rows, device = sizes[0][mesh.get_local_rank()], mesh.device_type
        q, k, v = (
            sc.ShardTensor.from_local(torch.randn(1, 4, rows, 8, device=device), mesh, [Shard(2)], sizes)
            for _ in range(3)
        )
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        return (lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, is_causal=True)), inputs

    with sc.config.patch(attention=attention):
        trace = trace_offline(build, world_size=3, device="cuda")
    assert trace.backward is not None
    for graph in (trace.forward.graph, trace.backward.graph):
        assert set(read_by_the_host(graph)) <= {"cpu"}
    assert collectives(trace.forward.graph)


@pytest.mark.parametrize(
    ("dtype", "mask"),
    [(torch.bfloat16, None), (torch.float32, None), (torch.float32, "added"), (torch.bfloat16, "bools")],
)
def test_kernels_of_a_shard_can_be_captured(dtype: torch.dtype, mask: str | None) -> None:
    """On fake tensors what reads a number from the device fails; sizes and where a shard lies decide alone."""
    shapes = (1, 4, 8, 16), (1, 2, 10, 16), (1, 2, 10, 16)
    with offline_world(2, device="cuda"), FakeTensorMode():
        q, k, v = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes)
        given = {None: None, "added": torch.randn(1, 1, 8, 10, device="cuda", dtype=dtype)}
        m = given.get(mask, torch.ones(1, 1, 8, 10, device="cuda", dtype=torch.bool))
        for causal, shift in [(False, 0)] if mask else [(False, 0), (True, 0), (True, 3), (True, -3)]:
            rest = (q, k, v, m, causal, shift, 0.25)
            out, denominator = kernels._attend(*rest)
            more, _ = kernels._attend_more(out.float(), denominator, *rest)
            grads = kernels._attend_backward(out, q, k, v, out, denominator, m, causal, shift, 0.25)
            assert out.shape == more.shape == q.shape
            assert tuple(g.shape for g in grads) == shapes
    for op in (kernels.attend, kernels.attend_more, kernels.attend_backward):
        assert torch.Tag.cudagraph_unsafe not in op.tags
