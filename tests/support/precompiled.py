"""A step that tests compile before a job, and what its ranks do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.compat.patch import leave_out

COLUMNS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(COLUMNS, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)
    return nn.Sequential(*layers).double()


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        y = model(x)
        return (y * y).sum() / (x * x).sum()

    return step


def points(sizes: list[int]) -> Tensor:
    return torch.randn(sum(sizes), COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sharded(full: Tensor, sizes: list[int], mesh: DeviceMesh) -> Tensor:
    shard = full.split(sizes)[mesh.get_local_rank(0)].clone()
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    return sc.ShardTensor.from_local(shard, mesh, placements, sharding_shapes={0: sizes})


def build(mesh: DeviceMesh) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
    """What ``python -m shardcompile precompile tests.support.precompiled:build`` calls."""
    sizes = [5 + r for r in range(mesh.size())]
    x = torch.empty(sizes[mesh.get_local_rank()], COLUMNS, dtype=torch.float64)
    return step_of(net()), (sc.ShardTensor.from_local(x, mesh, [Shard(0)], sharding_shapes={0: sizes}),)


def build_grid(mesh: DeviceMesh) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
    """Points in shards along the first dim of a mesh of two, the columns of a weight along the second."""
    sizes = [5 + r for r in range(mesh.size(0))]
    x = torch.empty(sizes[mesh.get_local_rank(0)], COLUMNS, dtype=torch.float64)
    at = [Shard(0), Replicate()]
    return step_of(grid_net(mesh)), (sc.ShardTensor.from_local(x, mesh, at, sharding_shapes={0: sizes}),)


def grid_net(mesh: DeviceMesh) -> nn.Module:
    model = net()
    weight, count = model[0].weight, mesh.size(1)  # type: ignore[index]
    rows = [len(weight) - count + 1] + [1] * (count - 1)
    shard = weight.detach().split(rows)[mesh.get_local_rank(1)].clone()
    weight = sc.ShardTensor.from_local(shard, mesh, [Replicate(), Shard(0)], sharding_shapes={1: rows})
    model[0].weight = nn.Parameter(weight)  # type: ignore[index]
    return model


def build_softmax(mesh: DeviceMesh) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
    """A step in which a pass gathers maxima and sums of all ranks at once: the graph has the number of ranks."""
    _, inputs = build(mesh)
    return lambda x: x.softmax(0), inputs


@dataclass(frozen=True)
class Job:
    """What a rank runs: `folder` gets a cache for each rank, `without` names a patch that is left out.

    With `columns`, the mesh has a second dim of so many ranks, and the step is that of `build_grid`.
    """

    artifacts: Path
    folder: Path
    sizes: list[int]
    without: str = ""
    columns: int = 0


@dataclass(frozen=True)
class Outcome:
    is_used: bool
    loss: Tensor
    gradients: list[Tensor]
    misses: int
    hits: int


def run(job: Job) -> Outcome:
    """Loads artifacts and takes a step on a rank whose caches are empty."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.folder / f"cache_{dist.get_rank()}")
    with leave_out(job.without):
        is_used = sc.load_artifacts(job.artifacts)
        loss, gradients = _step(job)
    counts = counters["inductor"]
    return Outcome(is_used, loss, gradients, counts["fxgraph_cache_miss"], counts["fxgraph_cache_hit"])


def record(job: Job) -> None:
    """Takes a step on a rank, and records it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.folder / f"cache_{dist.get_rank()}")
    with sc.record_artifacts(job.artifacts):
        _step(job)


def _step(job: Job) -> tuple[Tensor, list[Tensor]]:
    if job.columns:
        mesh = init_device_mesh("cpu", (len(job.sizes), job.columns), mesh_dim_names=("points", "weights"))
        model = grid_net(mesh)
    else:
        mesh, model = init_device_mesh("cpu", (len(job.sizes),)), net()
    step = torch.compile(step_of(model), fullgraph=True, backend="shardcompile")
    loss = step(sharded(points(job.sizes), job.sizes, mesh))
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return full(loss.detach()), [full(g) for g in gradients]


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, sc.ShardTensor) else x
