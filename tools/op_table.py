"""The table of a sweep over the operator database: ``python -m tools.op_table RESULTS [--totals | --families]``.

RESULTS is what OP_DB_RESULTS named, see tests/support/op_sweep.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

WAYS = ("local", "reduced", "exchanged", "gathered")


def main() -> None:
    """Print a line for every op, and totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--totals", action="store_true", help="only the totals")
    parser.add_argument("--families", action="store_true", help="a line of Markdown for every family of ops")
    options = parser.parse_args()
    results = [json.loads(line) for line in options.results.read_text().splitlines()]
    if not results:
        sys.exit(f"{options.results} holds no results")
    if options.families:
        _print_families(results)
        return
    if not options.totals:
        for result in sorted(results, key=lambda r: r["op"]):
            print(_line(result))
    for mesh in sorted({tuple(r["mesh"]) for r in results}):
        _print_totals(mesh, [r for r in results if tuple(r["mesh"]) == mesh])


def _print_families(results: list[dict[str, Any]]) -> None:
    """Of the runs that gathered, those with one sharded input are told from those where several inputs were sharded.

    Where two inputs are sharded along different dims, one of them has to move, and it is gathered where that is cheapest.
    """
    from tools.op_families import SHOULD_NOT_GATHER, family_of  # with all of torch's tests

    families: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        families.setdefault(family_of(result["op"]), []).append(result)
    order = [*SHOULD_NOT_GATHER, *sorted(families.keys() - set(SHOULD_NOT_GATHER))]
    print("| | ops | runs | local | sums only | rows exchanged | gathered: one input partition | several partition |")
    print("|---|---|---|---|---|---|---|---|")
    alone: dict[str, set[str]] = {}
    for family in order:
        members = families.get(family, [])
        served = [(r["op"], *s) for r in members for s in r["served"]]
        how = Counter(s[3] for s in served)
        gathered = [s for s in served if s[3] == "gathered"]
        one = [s for s in gathered if s[2].count("S(") == 1]
        alone[family] = {s[0] for s in one}
        counts = " | ".join(str(how[way]) for way in WAYS[:-1])
        print(f"| {family} | {len(members)} | {len(served)} | {counts} | {len(one)} | {len(gathered) - len(one)} |")
    print()
    for family in SHOULD_NOT_GATHER:
        if alone[family]:
            print(f"- {family}, gathered with one input partition: {', '.join(sorted(alone[family]))}")


def _line(result: dict[str, Any]) -> str:
    how = Counter(served[2] for served in result["served"])
    counts = "  ".join(f"{way} {how[way]:>3}" for way in WAYS)
    most = max((served[3] for served in result["served"]), default=0)
    outcome = "ok" if not result["failures"] else f"{len(result['failures'])} failures"
    return f"{result['op']:<50} {counts}  at most {most:>7} B  {outcome}"


def _print_totals(mesh: tuple[int, ...], results: list[dict[str, Any]]) -> None:
    passed = sum(not r["failures"] for r in results)
    how = Counter(served[2] for r in results for served in r["served"])
    runs = sum(how.values())
    without = sum(all(s[2] != "gathered" for s in r["served"]) for r in results)
    shares = ", ".join(f"{way} {how[way]}" for way in WAYS)
    print(
        f"mesh {'x'.join(map(str, mesh))}: {passed} of {len(results)} ops pass in all {runs} runs; {shares}; "
        f"{without} ops never gather"
    )


if __name__ == "__main__":
    main()
