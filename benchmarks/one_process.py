"""What a test on ranks costs besides its ops: ranks as threads of one process, and as processes of a standing pool."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from benchmarks.common import print_table
from shardcompile.testing import LocalRanks, rank


def nothing(mesh: DeviceMesh) -> float:
    """A test without ops."""
    return 0.0


def small(mesh: DeviceMesh) -> float:
    """A small eager test: build, compute, reduce, compare. Returns its own seconds on this rank."""
    start = time.perf_counter()
    x = sc.ShardTensor.from_local(torch.ones(rank() + 1, 2), mesh, [Shard(0)], {0: [1, 2, 3, 4]})
    assert ((x * 2).sum().full_tensor()) == 40
    dist.barrier()
    return time.perf_counter() - start


def milliseconds(ranks: Any, function: Any, rounds: int) -> list[float]:
    """Of each call, the first ones left out."""
    found = []
    for _ in range(rounds + 5):
        start = time.perf_counter()
        ranks(function)
        found.append((time.perf_counter() - start) * 1e3)
    return found[5:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    rows = []
    with LocalRanks(4) as processes, LocalRanks(4, processes=False) as threads:
        for name, ranks in (("threads of one process", threads), ("processes of a pool", processes)):
            empty, full = (statistics.median(milliseconds(ranks, f, rounds)) for f in (nothing, small))
            rows.append([name, f"{empty:.2f} ms", f"{full:.2f} ms"])
    print_table("median time of a call", ["4 ranks", "a test of nothing", "a small eager test"], rows)


if __name__ == "__main__":
    main()
