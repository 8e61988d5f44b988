"""CPU time of the first forward and backward of a compiled model, by index of ranks."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from benchmarks.common import join_fake_group, print_table, ratio
from examples.poisson.model import PointTransformer, mean_squared_error
from shardcompile import ShardTensor

RANKS = (4, 64, 1024)
PLAIN = 0  # stands for the plain model
BACKENDS = ("aot_eager", "inductor")
BAR = 1.2  # for the most ranks against the fewest

# ---------------------------------------------------------------------------------- in a process of its own


def compile_once(ranks: int, backend: str) -> float:
    """CPU seconds of this process; the C++ compiler that Inductor starts is not in them."""
    torch.manual_seed(0)
    _warm_up(backend)
    model = PointTransformer(channels=16, heads=2, slices=4)
    step = torch.compile(
        lambda x, y: mean_squared_error(model(x), y), fullgraph=True, backend=backend, dynamic=not ranks or None
    )
    x, y = _data(ranks)
    start = time.process_time()
    step(x, y).backward()
    return time.process_time() - start


def _warm_up(backend: str) -> None:
    """Have the compiler import its modules."""
    x = torch.randn(7, requires_grad=True)
    torch.compile(lambda a: (a.sin() * 2).sum(), fullgraph=True, backend=backend)(x).backward()


def _data(ranks: int) -> tuple[Tensor, Tensor]:
    if ranks == PLAIN:
        return torch.randn(9, 5), torch.randn(9)
    join_fake_group(ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    numbers = random.Random(0)
    sizes = [numbers.randrange(1, 10) for _ in range(ranks)]
    shards = torch.randn(sizes[0], 5), torch.randn(sizes[0])
    x, y = (ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes}) for shard in shards)
    return x, y


# ----------------------------------------------------------------------------------------------- in the parent


def _measured(ranks: int, backend: str) -> float:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", str(ranks), backend]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(backends: Sequence[str], repeats: int) -> dict[tuple[int, str], float]:
    """Median CPU seconds, by ranks and backend; the cases take turns."""
    cases = [(ranks, backend) for backend in backends for ranks in (PLAIN, *RANKS)]
    seconds: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
    for _ in range(repeats):
        for case in cases:
            seconds[case].append(_measured(*case))
            print(f"{case[1]}, {case[0] or 'no'} ranks: {seconds[case][-1]:.2f} CPU s", flush=True)
    return {case: statistics.median(values) for case, values in seconds.items()}


def report(seconds: dict[tuple[int, str], float]) -> None:
    """Print the table."""
    rows = []
    for (ranks, backend), value in seconds.items():
        fewest, plain = seconds[RANKS[0], backend], seconds[PLAIN, backend]
        bar = BAR if ranks == RANKS[-1] else None
        against_fewest = ratio(value, fewest, bar) if ranks != PLAIN else "-"
        rows.append([backend, str(ranks or "plain"), f"{value:.2f}", against_fewest, ratio(value, plain)])
    columns = ["backend", "ranks", "CPU s", f"to {RANKS[0]} ranks", "to plain"]
    print_table("first forward and backward of a compiled model", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("RANKS", "BACKEND"), help="measure one case in this process")
    options = parser.parse_args()
    if options.one:
        print(compile_once(int(options.one[0]), options.one[1]), flush=True)
        os._exit(0)
    report(measure(options.backends, options.repeats))


if __name__ == "__main__":
    main()
