"""The page of the zoo, made of its registry and its golden files: ``python tests/zoo/page.py``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zoo.entry import Entry
from zoo.registry import ENTRIES

ROOT = Path(__file__).resolve().parents[2]
PAGE, GOLDEN = ROOT / "docs" / "zoo.md", ROOT / "tests" / "zoo" / "golden"

_HEAD = re.compile(r"(\d+) collectives, (\d+) B; (\d+) after the passes; parameters: (\d+) B")

_INTRODUCTION = """# Models that were tried

Public models with random weights and tiny sizes, unmodified, with inputs that are cut unevenly over three ranks: along the
sequence, the height, points, or nodes and edges. For each of them the tests compare values and gradients with one process
over five cuts, with an empty block, a block of one row and another extent: eager, and compiled to one graph. That runs at
night (`pytest -m zoo`); the first five run on every push.

A row says what one rank of three sends in a forward and a backward pass, as traced and after the passes. The gradients of
parameters, which any data-parallel step sends, are a part of the bytes; sizes of parameters stand beside. Gathers of whole
tensors are those that remain, each with a word beside its golden file in `tests/zoo` on whether it is needed.

| model | package | collectives | after the passes | bytes | parameters | whole gathers | not needed |
|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page."""
    return _INTRODUCTION + "".join(_row(entry) for entry in ENTRIES)


def _row(entry: Entry) -> str:
    path = GOLDEN / f"{entry.name}.txt"
    package = entry.package or "written down in the tests"
    if not path.exists():
        return f"| {entry.name} | {package} | not counted | | | | | |\n"
    text = path.read_text()
    found = _HEAD.match(text)
    assert found is not None, path
    traced, sent, issued, parameters = map(int, found.groups())
    gathers = [line for line in text.splitlines() if line.startswith("    ")]
    idle = sum(_times(line) for line in gathers if _word(entry, line).startswith("not needed"))
    whole = sum(map(_times, gathers))
    numbers = (traced, issued, f"{sent / 1000:.1f} kB", f"{parameters / 1000:.1f} kB", whole, idle)
    return f"| {entry.name} | {package} | {' | '.join(map(str, numbers))} |\n"


def _times(line: str) -> int:
    times = re.search(r"\((\d+) times\)$", line)
    return int(times.group(1)) if times else 1


def _word(entry: Entry, line: str) -> str:
    return next((word for part, word in entry.gathers if part in line), "")


if __name__ == "__main__":
    PAGE.write_text(page())
