"""The 16 nearest neighbours among points in uneven shards: memory, time, and whether they are those that scipy finds.

Memory is what a rank's process grows by at most during the call, as the kernel counts resident pages. It is held
against two shards, the largest there are, and the result. By gathering means that each rank gets all points and
searches them for its own queries by one tree.
"""

from __future__ import annotations

import argparse
import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.spatial import cKDTree
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from benchmarks.common import duration, median_times, print_table, ratio, rising_shards, run_ranks

NEAR, DIMS, MIB = 16, 3, 2**20


def _resident(what: str) -> int:
    """Bytes that this process holds now (VmRSS), or has held at most since the last `_forget_peak` (VmHWM)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) * 1024


def _growth(call: Any) -> int:
    """By how much this process grows at most during a call."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    kept = call()
    del kept
    return max(_resident("VmHWM") - before, 0)


def by_gathering(points: Any) -> tuple[Tensor, Tensor]:
    whole = points.redistribute(placements=[Replicate()]).to_local()
    near, numbers = cKDTree(whole.numpy()).query(points.to_local().numpy(), NEAR)
    return torch.from_numpy(near), torch.from_numpy(numbers)


def measure(count: int, rounds: int, ours: bool) -> dict[str, Any]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    sizes = rising_shards(count, ranks)
    full = torch.rand(count, DIMS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    points = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: sizes})
    few = sc.distribute_tensor(full[:64], mesh, [Shard(0)])
    sc.neighbors.knn(few, few, NEAR)  # imports and connections are made once
    by_gathering(few)
    call = partial(sc.neighbors.knn, points, points, NEAR) if ours else partial(by_gathering, points)
    grown = torch.tensor(float(_growth(call)))
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    largest = max(sizes)
    bound = 2 * largest * DIMS * 8 + largest * NEAR * 16
    found: dict[str, Any] = {"grown": float(grown), "bound": bound}
    if ours:
        near, numbers = call()
        told = cKDTree(full.numpy()).query(full.numpy(), NEAR)
        first = sum(sizes[: dist.get_rank()])
        mine = slice(first, first + sizes[dist.get_rank()])
        other = (numbers.to_local() != torch.from_numpy(told[1][mine])).sum()
        dist.all_reduce(other)
        torch.testing.assert_close(near.to_local(), torch.from_numpy(told[0][mine]), rtol=1e-12, atol=1e-12)
        found["other"] = int(other)
        found |= median_times({"knn": call, "gathered": partial(by_gathering, points)}, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--points", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = []
    for count in options.points:
        # Each way in processes of its own: what an allocator keeps of one would not count for the other.
        ours = run_ranks(measure, options.ranks, count, options.rounds, True)
        theirs = run_ranks(measure, options.ranks, count, options.rounds, False)
        lines.append(
            [
                str(count),
                str(ours["other"]),
                f"{ours['grown'] / MIB:.1f} MiB  {ratio(ours['grown'], ours['bound'], 1.0)}",
                f"{theirs['grown'] / MIB:.1f} MiB  {ratio(theirs['grown'], ours['bound'])}",
                f"{duration(ours['knn'])}  {ratio(ours['knn'], ours['gathered'])}",
            ]
        )
    print_table(
        f"{NEAR} nearest of all points in {options.ranks} rising shards: peak memory of a rank against two largest "
        "shards and the result; time against gathering",
        ["points", "other than scipy's", "memory", "gathered: memory", "time"],
        lines,
    )


if __name__ == "__main__":
    main()
