"""CPU time of the first forward and backward of the zoo's models, compiled: inputs that are sharded against plain
ones.
"""

from __future__ import annotations

import argparse
import os
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
from shardcompile import ShardTensor
from tests.zoo.entry import Entry, Reading
from tests.zoo.registry import ENTRIES

CASES = (
    "plain",
    "symbolic",
    "partition",
)  # plain tensors; plain tensors of sizes that are symbols; inputs in uneven shards
BACKENDS = {"aot_eager": "aot_eager", "shardcompile": "inductor"}  # and what plain tensors are compiled by beside it
SIZES = [5, 4, 3]
MEDIAN, WORST = 1.4, 2.0  # bars
LIMIT = 240  # seconds of a process

# ---------------------------------------------------------------------------------- in a process of its own


def compile_once(entry: Entry, case: str, backend: str) -> float:
    """CPU seconds of this process; the C++ compiler that Inductor starts is not in them."""
    torch.set_num_threads(1)
    backend = backend if case == "partition" else BACKENDS[backend]
    torch.compile(lambda a: (a.sin() * 2).sum(), backend=backend)(torch.randn(7, requires_grad=True)).backward()
    torch.manual_seed(0)
    model = Reading(entry).float()
    inputs = [x.float() if x.is_floating_point() else x for x in entry.inputs(sum(SIZES))]
    if case == "partition":
        inputs = _partition(entry, inputs)
    step = torch.compile(model, fullgraph=True, backend=backend, dynamic=True if case == "symbolic" else None)
    start = time.process_time()
    step(*inputs).sum().backward()
    return time.process_time() - start


def _partition(entry: Entry, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What rank 0 has of the inputs."""
    join_fake_group(len(SIZES))
    mesh = init_device_mesh("cpu", (len(SIZES),))
    placed: list[Tensor] = []
    for i, (x, dim) in enumerate(zip(inputs, entry.partition, strict=True)):
        shards = [size * entry.rows_of(i) for size in SIZES]
        shard = x if dim is None else x.narrow(dim, 0, shards[0]).clone()
        placed.append(x if dim is None else ShardTensor.from_local(shard, mesh, [Shard(dim)], {0: shards}))
    return placed


# ----------------------------------------------------------------------------------------------- in the parent


def _measured(name: str, case: str, backend: str) -> float | None:
    """Seconds, or None where the process fails, which it says on its way."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zoo", "--one", name, case, backend]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        print(f"{name}, {case}: not done in {LIMIT} s", flush=True)
        return None
    if done.returncode:
        print(f"{name}, {case}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
        return None
    return float(done.stdout.split()[-1])


def measure(names: Sequence[str], backend: str, repeats: int) -> dict[str, dict[str, float | None]]:
    """Median CPU seconds of each case of each model; the cases take turns."""
    found: dict[str, dict[str, float | None]] = {}
    for name in names:
        seconds: dict[str, list[float | None]] = {case: [] for case in CASES}
        for _ in range(repeats):
            for case in CASES:
                seconds[case].append(_measured(name, case, backend))
        found[name] = {case: _median(values) for case, values in seconds.items()}
        print(f"{name}: {', '.join(f'{case} {_text(value)}' for case, value in found[name].items())}", flush=True)
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _text(value: float | None) -> str:
    return "fails" if value is None else f"{value:.2f}"


def report(found: dict[str, dict[str, float | None]], backend: str) -> None:
    """Print the table, with the bars below it; models that fail in a case are in no ratio, and are counted."""
    rows: list[list[str]] = []
    ratios: dict[str, list[float]] = {case: [] for case in CASES[:2]}
    for name, seconds in found.items():
        partition = seconds["partition"]
        quotients = []
        for case, quotients_of_case in ratios.items():
            base = seconds[case]
            if partition is None or base is None:
                quotients.append("-")
                continue
            quotients_of_case.append(partition / base)
            quotients.append(ratio(partition, base))
        rows.append([name, *(_text(seconds[case]) for case in CASES), *quotients])
    columns = ["model", "plain CPU s", "symbolic CPU s", "sharded CPU s", "to plain", "to symbolic"]
    print_table(f"first forward and backward of the zoo's models by {backend}", columns, rows)
    for case, values in ratios.items():
        if values:
            middle, most = ratio(statistics.median(values), 1, MEDIAN), ratio(max(values), 1, WORST)
            print(f"against {case}, {len(values)} of {len(found)} models: median {middle}, worst {most}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[e.name for e in ENTRIES], default=[e.name for e in ENTRIES])
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="aot_eager")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "CASE", "BACKEND"), help="measure one in this process")
    options = parser.parse_args()
    if options.one:
        name, case, backend = options.one
        print(compile_once(next(e for e in ENTRIES if e.name == name), case, backend), flush=True)
        os._exit(0)
    report(measure(options.models, options.backend, options.repeats), options.backend)


if __name__ == "__main__":
    main()
