"""Thousands of compiled steps, with another partition and another number of points each: graphs, memory and time per
step.

    python -m benchmarks.long_run [--steps 3000]

Prints for every tenth of the run the resident memory of rank 0 and the time of a step, relative to the second tenth.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import LocalRanks, rank

WORLD = 2


def _resident() -> float:
    """MiB of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _run(mesh: DeviceMesh, steps: int) -> tuple[int, list[float], list[float]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    counter = CompileCounterWithBackend("inductor")

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return ((y - y.softmax(0)) ** 2).mean()

    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    memory, seconds, part = [], [], []
    for step in range(steps):
        draw = random.Random(step)
        sizes = [draw.choice([0, 1, draw.randint(2, 400)]), draw.randint(1, 400)]
        x = sc.ShardTensor.from_local(torch.randn(sizes[rank()], 16), mesh, [Shard(0)], {0: sizes})
        start = time.perf_counter()
        compiled(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        part.append(time.perf_counter() - start)
        if (step + 1) % (steps // 10) == 0:
            gc.collect()
            memory.append(_resident())
            seconds.append(statistics.median(part))
            part = []
    return counter.frame_count, memory, seconds


def main() -> None:
    """Run, and print a line for every tenth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    with LocalRanks(WORLD) as ranks:
        found = ranks(_run, steps, timeout=3000)
    graphs = [g for g, _, _ in found]
    print(f"{steps} steps, each with another partition: {graphs} graphs on ranks 0 and 1")
    _, memory, seconds = found[0]
    for i, (mib, s) in enumerate(zip(memory, seconds, strict=True)):
        print(
            f"to step {steps // 10 * (i + 1):5d}: {mib:7.1f} MiB ({mib - memory[0]:+.1f}), a step {s / seconds[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
