"""Plays the findings again and prints what each line gives today.

python -m tools.findings_table            # all of them, some ten minutes
python -m tools.findings_table A3 C1      # those of some findings
"""

from __future__ import annotations

import sys
import time

from tests.findings import LINES
from tests.findings.play import Ranks, scenes


def main(wanted: list[str]) -> int:
    chosen = [line for line in LINES.values() if not wanted or any(line.name.startswith(w) for w in wanted)]
    ranks, wrong = Ranks(), 0
    try:
        for line in chosen:
            if line.scene:
                continue
            start = time.perf_counter()
            verdict = ranks.play(line)
            wrong += verdict.startswith("WRONG")
            print(f"{line.name}\n    {verdict[:700]}   [{time.perf_counter() - start:.1f} s]", flush=True)
    finally:
        ranks.close()
    for line, verdict in scenes([x for x in chosen if x.scene]) if any(x.scene for x in chosen) else ():
        wrong += verdict.startswith("WRONG")
        print(f"{line.name}\n    {verdict[:700]}", flush=True)
    print(f"{len(chosen)} lines, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
