"""The table of a sweep over the operator database: ``python tests/op_table.py RESULTS [--totals]``.

RESULTS is what OP_DB_RESULTS named, see tests/ranks/test_op_db.py.
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
    options = parser.parse_args()
    results = [json.loads(line) for line in options.results.read_text().splitlines()]
    if not results:
        sys.exit(f"{options.results} holds no results")
    if not options.totals:
        for result in sorted(results, key=lambda r: r["op"]):
            print(_line(result))
    for mesh in sorted({tuple(r["mesh"]) for r in results}):
        _print_totals(mesh, [r for r in results if tuple(r["mesh"]) == mesh])


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
