"""One graph serves every partition of an input, whatever made it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Shard

import shardcompile as sc
from shardcompile import ShardTensor
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import once

CALLS = 40


def _chunked(full: Tensor, mesh: DeviceMesh, placements: list[Placement], _: random.Random) -> ShardTensor:
    return sc.distribute_tensor(full, mesh, placements)


def _from_dtensor(full: Tensor, mesh: DeviceMesh, placements: list[Placement], _: random.Random) -> ShardTensor:
    return ShardTensor.from_dtensor(distribute_tensor(full, mesh, placements))


def _factory(full: Tensor, mesh: DeviceMesh, placements: list[Placement], _: random.Random) -> ShardTensor:
    return sc.full(full.shape, 0.5, dtype=full.dtype, device_mesh=mesh, placements=placements)


def _stated(full: Tensor, mesh: DeviceMesh, placements: list[Placement], draw: random.Random) -> ShardTensor:
    """Sizes drawn at random along the mesh dims that shard each tensor dim."""
    shapes = {}
    for dim, size in enumerate(full.shape):
        mesh_dims = [m for m, p in enumerate(placements) if p == Shard(dim)]
        if mesh_dims:
            parts = torch.Size([mesh.size(m) for m in mesh_dims]).numel()
            ends = sorted(draw.randint(0, size) for _ in range(parts - 1))
            shapes[mesh_dims[-1]] = [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]
    return sc.distribute_tensor(full, mesh, placements, sharding_shapes=shapes)


def _inferred(full: Tensor, mesh: DeviceMesh, placements: list[Placement], draw: random.Random) -> ShardTensor:
    local = _stated(full, mesh, placements, draw).to_local().clone()
    return ShardTensor.from_local(local, mesh, placements)


def _rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[], int]]:
    """A compiled function, and what tells how many graphs have been compiled since."""
    once(torch.compiler.reset)
    before = once(graphs_compiled)
    return torch.compile(function, fullgraph=True, backend="aot_eager"), lambda: once(graphs_compiled) - before


MAKERS: list[Callable[..., ShardTensor]] = [_chunked, _stated, _inferred, _factory, _from_dtensor]


def _one(x: Any, y: Any, w: Tensor) -> Any:
    return torch.softmax(x @ w, 0).cumsum(0)


def _apart(x: Any, y: Any, w: Tensor) -> Any:
    return (x @ w).square().mean() + (y @ w).relu().sum()


def _meeting(x: Any, y: Any, w: Tensor) -> Any:
    return ((x @ w).relu() - y).square().mean()


# For each dim along which two inputs meet: equal partitions need no exchange and others do, a graph each. Two that are
# sharded along the dim that is summed over meet in the gradient of the weight.
GRAPHS = {_one: (1, 1), _apart: (1, 2), _meeting: (2, 4)}
"""How many graphs there may be where rows are sharded, and where columns are as well."""


@pytest.mark.ranks(3, 4, processes=False, timeout=900)
@pytest.mark.parametrize("function", list(GRAPHS), ids=lambda f: f.__name__)
def test_partitions_made_in_five_ways(function: Callable[..., Any]) -> None:
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (3,) if ranks == 3 else (2, 2))
    # Over two mesh dims ranks of one dim have groups of their own, which their graphs name.
    cases = [([Shard(0)] * mesh.ndim, 0, 1 if mesh.ndim == 1 else ranks), ([Shard(0), Shard(1)], 1, 1)]
    for placements, kind, per_graph in cases[: mesh.ndim]:
        compiled, graphs = _compiled(function)
        draw = random.Random(0)
        weight = _rows(4, seed=0)
        for call in range(CALLS):
            n = draw.randint(2, 12) if call % 4 else draw.choice([2, 3, 7])
            full = _rows(n, seed=call)
            # In the first call both are made alike, so that their partitions are equal by chance.
            makers = [MAKERS[call % 5], MAKERS[call * 3 % 5]]
            inputs = [make(full, mesh, placements, draw) for make in makers]
            plain = [x.full_tensor().requires_grad_() for x in inputs]
            inputs = [x.requires_grad_() for x in inputs]
            w, full_w = weight.clone().requires_grad_(), weight.clone().requires_grad_()
            got, want = compiled(*inputs, w), function(*plain, full_w)
            got.square().sum().backward()
            want.square().sum().backward()
            torch.testing.assert_close(got.full_tensor(), want)
            torch.testing.assert_close(w.grad, full_w.grad)
            for x, p in zip(inputs, plain, strict=True):
                if p.grad is not None:
                    assert x.grad.sharding.describe_placements() == x.sharding.describe_placements()
                    torch.testing.assert_close(x.grad.full_tensor(), p.grad)
        assert graphs() <= GRAPHS[function][kind] * per_graph


@pytest.mark.ranks(3, processes=False, timeout=600)
def test_a_trace_asks_whether_an_input_is_chunked_only_where_it_matters() -> None:
    """What the program chunks itself is the input's partition if that is chunked, and needs no exchange then."""
    mesh = init_device_mesh("cpu", (3,))
    compiled, graphs = _compiled(_round_trip)
    draw = random.Random(1)
    for call in range(12):
        x = MAKERS[call % 5](_rows(draw.randint(2, 9), seed=call), mesh, [Shard(0)], draw)
        got, want = compiled(x), _round_trip(x)
        torch.testing.assert_close(got.full_tensor(), want.full_tensor())
        assert got.sharding.describe_placements() == want.sharding.describe_placements()
    assert graphs() == 2


def _round_trip(x: Any) -> Any:
    return x + x.redistribute(placements=[Shard(1)]).sin().redistribute(placements=[Shard(0)])


@pytest.mark.ranks(3, processes=False, timeout=600)
def test_local_shards_of_any_size_given_to_from_local_inside() -> None:
    """With a size that is marked as unbacked; Dynamo compiles sizes 0, 1 and others of plain tensors apart."""
    mesh = init_device_mesh("cpu", (3,))
    compiled, graphs = _compiled(_from_local)
    for sizes in [[3, 4, 5], [5, 0, 2], [1, 1, 7], [0, 0, 3], [1, 0, 0]]:
        full = _rows(sum(sizes), seed=len(sizes))
        local = full.split(sizes)[mesh.get_rank()].clone()
        torch._dynamo.decorators.mark_unbacked(local, 0)
        torch.testing.assert_close(compiled(local, mesh).full_tensor(), full.softmax(0))
    assert graphs() == 1


def _from_local(local: Tensor, mesh: DeviceMesh) -> Any:
    return torch.softmax(ShardTensor.from_local(local, mesh, [Shard(0)]), 0)
