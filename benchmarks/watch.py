"""What it costs that each rank watches whether it is left waiting: eager ops and a compiled step, with it and without.

    python -m benchmarks.watch

Ranks state their collectives in one call and not in the next, by turns, hundreds of times in one process each; each
pair of turns gives a ratio of CPU time and one of time on the clock. Printed are medians and quartiles of the slowest
rank. The row without communication runs the same code with and without: what it says beside 1 is the noise. The thread
that watches is there in both: its own CPU time is printed by itself.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from benchmarks.step import uneven_batches
from examples.poisson.training import make_net, sharded_step
from shardcompile.diagnosis import recorded_calls
from shardcompile.testing import LocalRanks, rank

WORLD, PAIRS = 2, 300
SIZES = [700, 324]
CALLS = {
    "eager, no communication": 100,
    "eager, all_gather_v": 10,
    "eager, all_reduce": 10,
    "compiled step of the demo": 1,
}
"""By name, how often a turn calls it."""


def _step(mesh: DeviceMesh, name: str) -> Callable[[], object]:
    torch.manual_seed(rank())
    torch.set_num_threads(1)
    x = sc.ShardTensor.from_local(torch.randn(SIZES[rank()], 64), mesh, [Shard(0)], {0: SIZES})
    if name == "compiled step of the demo":
        batch, of_demo = uneven_batches(1)[0], sharded_step(make_net(0, torch.float32), mesh, "shardcompile")
        return lambda: of_demo(batch)
    return {
        "eager, no communication": lambda: x * 2,
        "eager, all_gather_v": x.full_tensor,
        "eager, all_reduce": lambda: x.sum(0).full_tensor(),
    }[name]


def _cpu_of_watch() -> float:
    """Seconds of CPU that the thread has taken so far."""
    (thread,) = (t for t in threading.enumerate() if t.name == "shardcompile watch")
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def _turns(mesh: DeviceMesh, name: str) -> tuple[list[float], list[float], float, float]:
    """Ratios of CPU and of time on the clock, seconds of a call without, share of the thread."""
    step = _step(mesh, name)
    for _ in range(5):
        step()
    watched = dict(recorded_calls._MEMBERS)
    began, thread = time.perf_counter(), _cpu_of_watch()
    found: dict[bool, list[Any]] = {True: [], False: []}
    for pair in range(PAIRS):
        for watch in (True, False) if pair % 2 else (False, True):
            for group, members in watched.items():
                recorded_calls._MEMBERS[group] = members if watch else None
            clock, cpu = time.perf_counter(), time.thread_time()
            for _ in range(CALLS[name]):
                step()
            found[watch].append((time.thread_time() - cpu, time.perf_counter() - clock))
    share = (_cpu_of_watch() - thread) / (time.perf_counter() - began)
    recorded_calls._MEMBERS.update(watched)
    cpu, clock = ([a[i] / b[i] for a, b in zip(found[True], found[False], strict=True)] for i in range(2))
    return cpu, clock, statistics.median(w for _, w in found[False]) / CALLS[name], share


def _described(ratios: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Print the ratios."""
    with LocalRanks(WORLD) as ranks:
        for name in CALLS:
            ends = ranks(_turns, name, timeout=600)
            cpu, clock, seconds, share = max(ends, key=lambda end: statistics.median(end[1]))
            said = f"with: {_described(cpu)} of CPU, {_described(clock)} of time"
            print(f"{name:26s} {seconds * 1e6:9.1f} us; {said}; the thread takes {share:.2%} of a core", flush=True)


if __name__ == "__main__":
    main()
