"""Many small uneven all-gathers: in one bucket and one by one, against one even all-gather of the same total bytes."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from benchmarks.common import Call, Times, duration, median_times, print_table, ratio, run_ranks
from shardcompile.collectives import wait
from shardcompile.sharding import GroupPartition, write_group_partitions

_ops = torch.ops.shardcompile
KIB = 2**10
WIDTH = 16  # floats in a row
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
"""Bytes of a member, over all ranks."""

IMBALANCES = {"1:1": 1, "1:9": 9}
"""The largest shard in units of the others; it is another rank's in each member."""

BAR, BAR_ALONE = 1.3, 5.0


def partition(member: int, rows: int, imbalance: int, ranks: int) -> list[int]:
    """Shard sizes of a member."""
    small = rows // (imbalance + ranks - 1)
    return [rows - small * (ranks - 1) if r == member % ranks else small for r in range(ranks)]


def _calls(members: int, nbytes: int, imbalance: int) -> dict[str, Call]:
    ranks, me, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD.group_name
    rows = nbytes // (4 * WIDTH)
    partitions = [partition(m, rows, imbalance, ranks) for m in range(members)]
    shards = [torch.full([c[me], WIDTH], float(me)) for c in partitions]
    even = torch.zeros([members * rows // ranks, WIDTH])
    flat = write_group_partitions([GroupPartition(list(c), 0, []) for c in partitions])

    def bucket() -> torch.Tensor:
        return wait(_ops.all_gather_bucket(shards, [0] * members, [rows] * members, *flat, group))

    def one_by_one() -> torch.Tensor:
        started = [_ops.all_gather_v(b, 0, rows, c, 0, [], group) for b, c in zip(shards, partitions, strict=True)]
        return torch.cat([wait(s) for s in started])

    def reference() -> torch.Tensor:
        return wait(torch.ops._c10d_functional.all_gather_into_tensor(even, ranks, group))

    assert torch.equal(bucket(), one_by_one())
    return {"bucket": bucket, "one by one": one_by_one, "even": reference}


def measure(members: int, rounds: int) -> dict[tuple[int, str], Times]:
    """All times, on one rank; by bytes of a member and imbalance."""
    return {
        (nbytes, name): median_times(_calls(members, nbytes, imbalance), rounds)
        for nbytes in SIZES
        for name, imbalance in IMBALANCES.items()
    }


def report(ranks: int, members: int, results: dict[tuple[int, str], Times]) -> None:
    """Print the table of one number of ranks."""
    rows = []
    for (nbytes, imbalance), times in results.items():
        bucket, alone, even = times["bucket"], times["one by one"], times["even"]
        small = nbytes <= 64 * KIB
        gain = alone / bucket
        wanted = f" {'ok' if gain >= BAR_ALONE else 'UNDER'} (bar {BAR_ALONE:g})" if small else ""
        to_even = ratio(bucket, even, BAR if small else None)
        rows.append(
            [f"{nbytes // KIB} KiB", imbalance, duration(bucket), duration(even), to_even, f"{gain:.1f}{wanted}"]
        )
    columns = ["a member", "shards", "bucket", "even gather", "to even", "one by one to bucket"]
    print_table(f"{members} all-gathers, {ranks} ranks", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    for ranks in options.ranks:
        report(ranks, options.members, run_ranks(measure, ranks, options.members, options.rounds))


if __name__ == "__main__":
    main()
