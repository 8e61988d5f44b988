"""What it costs that each rank watches whether it is left waiting: eager ops, and compiled steps, with it and without.

    python benchmarks/watch.py

Two sets of ranks, one that is watched and one that is not, take turns in one run; each pair of turns gives a ratio of
CPU time, of all threads of the slowest rank, and one of time on the clock. Printed are medians and quartiles of the
ratios. The row without communication runs the same code with and without: what it says beside 1 is the noise.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from step import uneven_batches
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.demo.training import make_net, sharded_step
from shardcompile.testing import LocalRanks, rank

WORLD, TURNS = 2, 40
SIZES = [700, 324]
CALLS = {
    "eager, no communication": 2000,
    "eager, all_gather_v": 200,
    "eager, all_reduce": 200,
    "compiled step of the demo": 10,
}
"""By name, how often a turn calls it."""


def _timed(step: Callable[[], object], calls: int) -> tuple[float, float]:
    """Seconds of CPU and on the clock for a call."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        step()
    return (time.process_time() - cpu) / calls, (time.perf_counter() - clock) / calls


def _steps(mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    torch.manual_seed(rank())
    torch.set_num_threads(1)
    x = sc.ShardTensor.from_local(torch.randn(SIZES[rank()], 64), mesh, [Shard(0)], {0: SIZES})
    batch = uneven_batches(1)[0]
    of_demo = sharded_step(make_net(0, torch.float32), mesh, "shardcompile")
    steps = [lambda: x * 2, x.full_tensor, lambda: x.sum(0).full_tensor(), lambda: of_demo(batch)]
    return dict(zip(CALLS, steps, strict=True))


_STEPS: dict[str, Callable[[], object]] = {}


def _turn(mesh: DeviceMesh, name: str) -> tuple[float, float]:
    if not _STEPS:
        _STEPS.update(_steps(mesh))
    _timed(_STEPS[name], 3)
    return _timed(_STEPS[name], CALLS[name])


def _described(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Print the ratios."""
    sets = {}
    for watch in (True, False):
        os.environ["SHARDCOMPILE_WATCH"] = str(int(watch))
        sets[watch] = LocalRanks(WORLD)
        for name in CALLS:
            sets[watch](_turn, name, timeout=300)
    for name in CALLS:
        seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for turn in range(TURNS):
            for watch in (True, False) if turn % 2 else (False, True):
                found = sets[watch](_turn, name, timeout=300)
                seconds[watch].append((max(c for c, _ in found), max(w for _, w in found)))
        cpu, clock = ([a[i] / b[i] for a, b in zip(seconds[True], seconds[False], strict=True)] for i in range(2))
        without = statistics.median(w for _, w in seconds[False]) * 1e6
        print(f"{name:26s} {without:9.1f} us; with: {_described(cpu)} of CPU, {_described(clock)} of time", flush=True)


if __name__ == "__main__":
    main()
