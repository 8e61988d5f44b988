"""What watching costs: compiling the demo's training step inside of `capture` and outside, and running it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from benchmarks.common import duration, join_fake_group, leave, print_table, ratio
from examples.poisson.model import PointTransformer, mean_squared_error

RANKS = 4
SIZES = [700, 0, 1, 323]
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "off": nullcontext,
    "on": sc.capture,
    "on, no texts": lambda: sc.capture(stages=[]),
}


def measure(rounds: int, backend: str) -> dict[str, tuple[float, float]]:
    """Median seconds to compile a step, forward and backward, and to run it compiled; by way of watching."""
    mesh = init_device_mesh("cpu", (RANKS,))
    net = PointTransformer()
    x, y = (
        sc.ShardTensor.from_local(torch.randn(SIZES[0], *rest), mesh, [Shard(0)], {0: SIZES}) for rest in ((5,), ())
    )
    compiling: dict[str, list[float]] = {name: [] for name in WAYS}
    running: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, watch in WAYS.items():
            torch.compiler.reset()
            step = torch.compile(lambda x, y: mean_squared_error(net(x), y), fullgraph=True, backend=backend)
            with torch._inductor.config.patch(force_disable_caches=True), watch():
                compiling[name].append(_seconds(lambda step=step: step(x, y).backward()))
                running[name].append(min(_seconds(lambda step=step: step(x, y).backward()) for _ in range(20)))
    return {name: (statistics.median(compiling[name]), statistics.median(running[name])) for name in WAYS}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="shardcompile")
    options = parser.parse_args()
    join_fake_group(RANKS)
    measure(1, options.backend)
    times = measure(options.rounds, options.backend)
    rows = [
        [name, duration(c), ratio(c, times["off"][0]), duration(r), ratio(r, times["off"][1])]
        for name, (c, r) in times.items()
    ]
    print_table("capture", ["", "compile", "to off", "run", "to off"], rows)
    leave()


if __name__ == "__main__":
    main()
