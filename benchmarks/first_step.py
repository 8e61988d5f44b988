"""The first compiled step of the demo, on several ranks and on one: wall time, and CPU seconds of all ranks.

Each case starts with empty compiler caches, and is run a second time with the caches that the first run left.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common import print_table, ratio
from examples.poisson.ranks import Settings
from examples.poisson.training import sharded_step
from shardcompile.launch import launch

RANKS = 4
BAR_WALL, BAR_CPU = 1.2, 1.5


@dataclass(frozen=True)
class Measured:
    """The first step of one rank.

    Attributes:
        wall: seconds from a barrier to the end of the step.
        cpu: CPU seconds of the rank and of the compilers that it started, from its start on.
        step_cpu: the part of them that the step took.
        lowered: graphs that Inductor compiled on this rank.
        loaded: graphs that it took from its cache.
    """

    wall: float
    cpu: float
    step_cpu: float
    lowered: int
    loaded: int


def first_step(settings: Settings) -> Measured:
    """Takes the step on this rank."""
    mesh = init_device_mesh(settings.device, (settings.ranks,))
    step = sharded_step(settings.net(), mesh, settings.compiler)
    batch = settings.batch(0)
    dist.barrier()
    start, cpu = time.perf_counter(), _cpu()
    step(batch)
    wall, used = time.perf_counter() - start, _cpu()
    counters = torch._dynamo.utils.counters["inductor"]
    return Measured(wall, used, used - cpu, counters["fxgraph_cache_miss"], counters["fxgraph_cache_hit"])


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(ranks: int, compiler: str, backend: str) -> dict[str, list[Measured]]:
    """Measures a cold and a warm first step on every rank."""
    settings = Settings(ranks=ranks, compiler=compiler, backend=backend)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        return {state: launch(first_step, settings, ranks, backend) for state in ("cold", "warm")}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--compiler", default="shardcompile", choices=["shardcompile", "inductor"])
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    options = parser.parse_args()
    results = {n: measure(n, options.compiler, options.backend) for n in (1, options.ranks)}
    rows = []
    for state in ("cold", "warm"):
        one, many = results[1][state], results[options.ranks][state]
        for n, found in ((1, one), (options.ranks, many)):
            cells = [f"{max(m.wall for m in found):.1f}", f"{sum(m.cpu for m in found):.1f}"]
            cells += [f"{sum(m.step_cpu for m in found):.1f}", ", ".join(f"{m.lowered}/{m.loaded}" for m in found)]
            rows.append([f"{state}, {n} ranks", *cells])
        walls, cpus = (
            [max(m.wall for m in found) for found in (many, one)],
            [sum(m.step_cpu for m in found) for found in (many, one)],
        )
        bars = (BAR_WALL, BAR_CPU) if state == "cold" else (None, None)
        rows.append([f"{state}, ratio", ratio(*walls, bars[0]), "", ratio(*cpus, bars[1]), ""])
    print_table(
        "The first step of the demo", ["case", "wall s", "CPU s", "CPU s of the step", "compiled/loaded by rank"], rows
    )


if __name__ == "__main__":
    main()
