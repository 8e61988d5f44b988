"""All-gather of uneven shards, against an even all-gather of the same total and against padding to the largest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Call, Times, duration, median_times, print_table, ratio, run_ranks
from shardcompile.collectives import all_gather_v

KIB, MIB = 2**10, 2**20
TOTALS = {64 * KIB: 100, 4 * MIB: 40, 64 * MIB: 10}
"""Bytes of all shards together, and rounds."""

IMBALANCES = {"1:1": 1, "1:3": 3, "1:9": 9, "one empty": None}
"""The largest shard in units of the smallest; shard sizes rise evenly from rank to rank."""

WIDTH = 16  # floats in a row
BAR = 1.0


def shard_rows(rows: int, ranks: int, largest: int | None) -> list[int]:
    """Rows of every rank's local shard."""
    steps = ranks - 1
    weights = [0.0] + [1.0] * steps if largest is None else [1 + (largest - 1) * r / steps for r in range(ranks)]
    sizes = [int(rows * w / sum(weights)) for w in weights]
    return [*sizes[:-1], rows - sum(sizes[:-1])]


def gather_even(shard: Tensor) -> Tensor:
    """Torch's all-gather of shards of one size."""
    group = dist.group.WORLD
    out = torch.ops._c10d_functional.all_gather_into_tensor(shard, group.size(), group.group_name)
    return torch.ops._c10d_functional.wait_tensor(out)


def gather_padded(shard: Tensor, sizes: Sequence[int]) -> Tensor:
    """What is written by hand: pad to the largest shard, gather, sharded the padding off."""
    size = max(sizes)
    gathered = gather_even(torch.nn.functional.pad(shard, (0, 0, 0, size - len(shard))))
    return torch.cat([gathered[r * size : r * size + n] for r, n in enumerate(sizes)])


def _calls(sizes: Sequence[int]) -> dict[str, Call]:
    group = dist.group.WORLD
    shard = torch.full([sizes[group.rank()], WIDTH], float(group.rank()))
    even = torch.zeros([sum(sizes) // group.size(), WIDTH])
    assert torch.equal(all_gather_v(shard, 0, sizes, group), gather_padded(shard, sizes))
    return {
        "all_gather_v": lambda: all_gather_v(shard, 0, sizes, group),
        "even": lambda: gather_even(even),
        "padded": lambda: gather_padded(shard, sizes),
    }


def measure(factor: float) -> dict[tuple[int, str], Times]:
    """All times, on one rank; by bytes and imbalance."""
    results = {}
    for total, rounds in TOTALS.items():
        for name, largest in IMBALANCES.items():
            sizes = shard_rows(total // (4 * WIDTH), dist.get_world_size(), largest)
            results[total, name] = median_times(_calls(sizes), max(3, int(rounds * factor)))
    return results


def _bar(total: int, imbalance: str) -> float | None:
    return BAR if imbalance == "1:9" and total >= 4 * MIB else None


def report(ranks: int, results: dict[tuple[int, str], Times]) -> None:
    """Print the table of one number of ranks."""
    rows = []
    for (total, imbalance), times in results.items():
        ours, even, padded = times["all_gather_v"], times["even"], times["padded"]
        size = f"{total // MIB} MiB" if total >= MIB else f"{total // KIB} KiB"
        against_even = ratio(ours, even, _bar(total, imbalance))
        rows.append([size, imbalance, duration(ours), duration(even), against_even, ratio(ours, padded)])
    columns = ["total", "shards", "all_gather_v", "even gather", "to even", "to padded"]
    print_table(f"all_gather_v, {ranks} ranks", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=float, default=1.0, help="times as many rounds as by default")
    options = parser.parse_args()
    for ranks in options.ranks:
        report(ranks, run_ranks(measure, ranks, options.rounds))


if __name__ == "__main__":
    main()
