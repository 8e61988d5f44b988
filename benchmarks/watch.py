"""What it costs that each rank watches whether it is left waiting: eager ops, and compiled steps, with it and without.

    python benchmarks/watch.py

Two sets of ranks, one that is watched and one that is not, take turns in one run. What is printed are ratios of CPU
time, of all threads of the slowest rank, and of time on the clock, each of the median turn.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.testing import LocalRanks, rank

WORLD, TURNS = 2, 15
SIZES = [700, 324]


def _timed(step: Callable[[], object], calls: int) -> tuple[float, float]:
    """Seconds of CPU and on the clock for a call."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        step()
    return (time.process_time() - cpu) / calls, (time.perf_counter() - clock) / calls


def _steps(mesh: DeviceMesh) -> dict[str, tuple[Callable[[], object], int]]:
    torch.manual_seed(rank())
    torch.set_num_threads(1)
    x = sc.ShardTensor.from_local(torch.randn(SIZES[rank()], 64), mesh, [Shard(0)], {0: SIZES})
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return x.redistribute(placements=[Replicate()]).to_local() * 2  # type: ignore[attr-defined]

    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y.softmax(0) * y).sum() + gathered(y).mean()

    compiled = torch.compile(step, fullgraph=True, backend="shardcompile")
    return {
        "eager, no communication": (lambda: x * 2, 2000),
        "eager, all_gather_v": (lambda: x.full_tensor(), 200),
        "eager, all_reduce": (lambda: x.sum(0).full_tensor(), 200),
        "compiled step": (lambda: compiled(x).backward(), 20),
    }


_STEPS: dict[str, tuple[Callable[[], object], int]] = {}


def _turn(mesh: DeviceMesh, name: str) -> tuple[float, float]:
    if not _STEPS:
        _STEPS.update(_steps(mesh))
    step, calls = _STEPS[name]
    _timed(step, 3)
    return _timed(step, calls)


def main() -> None:
    """Print the ratios."""
    sets = {}
    for watch in (True, False):
        os.environ["SHARDCOMPILE_WATCH"] = str(int(watch))
        sets[watch] = LocalRanks(WORLD)
        sets[watch](_turn, "eager, no communication", timeout=300)
    for name in ("eager, no communication", "eager, all_gather_v", "eager, all_reduce", "compiled step"):
        seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for turn in range(TURNS):
            for watch in (True, False) if turn % 2 else (False, True):
                found = sets[watch](_turn, name, timeout=300)
                seconds[watch].append((max(c for c, _ in found), max(w for _, w in found)))
        cpu, clock = (
            statistics.median(s[i] for s in seconds[True]) / statistics.median(s[i] for s in seconds[False])
            for i in range(2)
        )
        microseconds = statistics.median(s[1] for s in seconds[False]) * 1e6
        print(f"{name:26s} {microseconds:9.1f} us without; with: {cpu:.3f} of CPU, {clock:.3f} of time", flush=True)


if __name__ == "__main__":
    main()
