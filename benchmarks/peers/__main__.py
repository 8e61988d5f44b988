"""Training steps on sharded inputs against code by hand for one partition, against DTensor where it is even, and
against PhysicsNeMo where that is installed.

Gradients are compared with those of one process on the whole input before anything is timed. Collectives that send
nothing are not counted. Bytes are those that go through the loopback interface (Linux).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.common import duration, print_table, ratio, run_ranks
from benchmarks.peers.measuring import measure
from benchmarks.peers.suite import WORKS

AGAINST = {
    "eager": ("eager by hand", "eager DTensor", "eager PhysicsNeMo"),
    "compiled": ("compiled by hand", "compiled PhysicsNeMo"),
}


def report(results: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Prints the tables."""
    for ours, others in AGAINST.items():
        rows = []
        for (work, partition), result in results.items():
            times, counts = result["times"], result["collectives"]
            cells = [f"{duration(times[ours])} ({counts[ours]})"]
            for other in others:
                if other in times:
                    cells += [f"{duration(times[other])} ({counts[other]})", ratio(times[ours], times[other])]
                else:
                    cells += ["-", "-"]
            rows.append([f"{work}, {partition}", *cells])
        columns = [text for other in others for text in (other, "ratio")]
        print_table(f"{ours}: seconds of a training step (collectives)", ["work", ours, *columns], rows)
    contenders = [name for ours, others in AGAINST.items() for name in (ours, *others)]
    rows = [
        [f"{work}, {partition}", *[_kilobytes(result["bytes"].get(name, 0)) for name in contenders]]
        for (work, partition), result in results.items()
    ]
    print_table("kB that all ranks send in a training step, those of TCP included", ["work", *contenders], rows)


def _kilobytes(count: float) -> str:
    return f"{count / 1000:.0f}" if count else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2, help="an even number")
    parser.add_argument("--backend", default="shardcompile")
    options = parser.parse_args()
    results = {}
    for work in options.works:
        for label, partitions in WORKS[work].partitions(options.ranks).items():
            print(f"{work}, {label}", flush=True)
            results[work, label] = run_ranks(measure, options.ranks, work, partitions, options.rounds, options.backend)
    report(results)


if __name__ == "__main__":
    main()
