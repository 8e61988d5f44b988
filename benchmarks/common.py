"""What all benchmarks share: starting ranks, timing calls in turn, printing tables of ratios."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

Call = Callable[[], object]
Times = dict[str, float]
"""Seconds by name."""

# ------------------------------------------------------------------------------------------------ ranks


def run_ranks(work: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Run `work(*args)` on every rank of a gloo group and return what rank 0 returned.

    Args:
        work: a function of a module, so that it can be named to other processes.
        ranks: how many processes.
        args: the same for all ranks; must pickle.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        mp.spawn(_rank_main, (ranks, Path(folder) / "store", result, work, args), nprocs=ranks)
        return torch.load(result)


def _rank_main(
    rank: int, ranks: int, store: Path, result: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> NoReturn:
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=ranks)
    value = work(*args)
    if rank == 0:
        torch.save(value, result)
    leave()


def join_fake_group(ranks: int) -> None:
    """Be rank 0 of a group whose collectives return at once and move nothing."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def leave() -> NoReturn:
    """End this process once all ranks have come here."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a gloo group that is torn down by the interpreter's exit sometimes aborts


# ----------------------------------------------------------------------------------------------- timing


def median_times(
    calls: Mapping[str, Call], rounds: int, repeats: int = 1, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Median time of each call, of the slowest rank in each round.

    The calls take turns, so that what else the machine does hits all alike; each round starts with another one. All
    ranks start each measurement together. Every call runs twice before.

    Args:
        calls: by name.
        rounds: measurements of each call.
        repeats: calls in one measurement.
        clock: in seconds; where nothing is waited for, the CPU time of this process is less noisy.
    """
    for call in list(calls.values()) * 2:
        call()
    names = list(calls)
    times = torch.zeros(rounds, len(names), dtype=torch.float64)
    gc.collect()
    gc.disable()
    for r in range(rounds):
        for i in range(len(names)):
            at = (r + i) % len(names)
            times[r, at] = _time(calls[names[at]], repeats, clock)
    gc.enable()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return {name: statistics.median(column.tolist()) for name, column in zip(names, times.T, strict=True)}


def _time(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    dist.barrier()
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


# ---------------------------------------------------------------------------------------------- printing


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(f"\n{title}")
    for row in (columns, *rows):
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    sys.stdout.flush()


def ratio(value: float, reference: float, bar: float | None = None) -> str:
    """A ratio as text, and whether it meets the bar, if there is one."""
    quotient = value / reference
    if bar is None:
        return f"{quotient:.2f}"
    return f"{quotient:.2f} {'ok' if quotient <= bar else 'OVER'} (bar {bar:g})"


def duration(seconds: float) -> str:
    """A duration as text, in a unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


# ------------------------------------------------------------------------------------------------ rows sharded


def rising_shards(rows: int, ranks: int) -> list[int]:
    """Shard sizes that rise evenly from rank to rank."""
    ends = [rows * (r + 1) * (r + 2) // (ranks * (ranks + 1)) for r in range(ranks)]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def compare_over_rows(
    doc: str | None, measure: Callable[[int, int, int], Times], rows: Sequence[int], title: str, columns: Sequence[str]
) -> None:
    """Command of a benchmark that holds one way to compute on local shards of rows against others.

    Args:
        doc: what `--help` says.
        measure: from ranks, rows and rounds to seconds by name, first the way in question.
        rows: to take if not told.
        title: of the table.
        columns: names of the ways in the table.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=list(rows))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = []
    for ranks in options.ranks:
        for many in options.rows:
            ours, *others = run_ranks(measure, ranks, ranks, many, options.rounds).values()
            lines.append([str(ranks), str(many), duration(ours), *(f"{duration(t)}  {ratio(ours, t)}" for t in others)])
    print_table(title, ["ranks", "rows", *columns], lines)
