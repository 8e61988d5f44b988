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
from torch.distributed.tensor.placement_types import Shard

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
    shard = full.split(sizes)[mesh.get_local_rank()].clone()
    return sc.ShardTensor.from_local(shard, mesh, [Shard(0)], sharding_shapes={0: sizes})


def build(mesh: DeviceMesh) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
    """What ``python -m shardcompile precompile tests.support.precompiled:build`` calls."""
    sizes = [5 + r for r in range(mesh.size())]
    x = torch.empty(sizes[mesh.get_local_rank()], COLUMNS, dtype=torch.float64)
    return step_of(net()), (sc.ShardTensor.from_local(x, mesh, [Shard(0)], sharding_shapes={0: sizes}),)


def build_softmax(mesh: DeviceMesh) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
    """A step in which a pass gathers maxima and sums of all ranks at once: the graph has the number of ranks."""
    _, inputs = build(mesh)
    return lambda x: x.softmax(0), inputs


@dataclass(frozen=True)
class Job:
    """What a rank runs: `folder` gets a cache for each rank, `without` names a patch that is left out."""

    artifacts: Path
    folder: Path
    sizes: list[int]
    without: str = ""


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
    mesh = init_device_mesh("cpu", (len(job.sizes),))
    model = net()
    step = torch.compile(step_of(model), fullgraph=True, backend="shardcompile")
    loss = step(sharded(points(job.sizes), job.sizes, mesh))
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.detach().full_tensor(), gradients  # type: ignore[attr-defined]
