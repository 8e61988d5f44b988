"""The page of the zoo, made of its registry and its golden files: ``python -m tools.zoo_page``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tests.support.sources import ROOT
from tests.zoo.double_steps import IN_DOUBLE
from tests.zoo.eager_only import EAGER_ONLY, NOT_BY_OUR_BACKEND
from tests.zoo.entry import Entry
from tests.zoo.registry import ENTRIES

PAGE, GOLDEN = ROOT / "docs" / "zoo.md", ROOT / "tests" / "zoo" / "golden"

_HEAD = re.compile(r"(\d+) collectives, (\d+) B; (\d+) after the passes; parameters: (\d+) B")

_INTRODUCTION = """# Models that were tried

Public models with random weights and tiny sizes, unmodified, with inputs that are sharded unevenly over three ranks: along the
sequence, the height, points, or nodes and edges. For each of them the tests compare values and gradients with one process
over five partitions, with an empty shard, a shard of one row and another size: eager, and, but for those listed below,
compiled by `aot_eager` to one graph. That runs at night (`pytest -m zoo`); the first five run on every push.

By `backend="shardcompile"`, our passes and Inductor, {tried} of {all} models are compared over two of the partitions, and are right,
each compiled to one graph (`pytest -m zoo -k by_our_backend`). In {double} of them steps that the model takes in single
precision, whatever its dtype is, are taken in double precision there: Inductor rounds single precision otherwise than
eager kernels do, of plain tensors too.

A row says what one rank of three sends in a forward and a backward pass, as traced and after the passes. The gradients of
parameters, which any data-parallel step sends, are a part of the bytes; sizes of parameters stand beside. Gathers of whole
tensors are those that remain, each with a word beside its golden file in `tests/zoo` on whether it is needed. Models
without numbers have no golden file yet.

| model | package | collectives | after the passes | bytes | parameters | whole gathers | not needed |
|---|---|---|---|---|---|---|---|
"""

_EAGER_ONLY = """
## Compared in eager mode alone

"""

_NOT_BY_OUR_BACKEND = """
## Compared by `aot_eager`, not by our backend

"""


def page() -> str:
    """The page."""
    tried = len(ENTRIES) - len(EAGER_ONLY) - len(NOT_BY_OUR_BACKEND)
    introduction = _INTRODUCTION.format(tried=tried, all=len(ENTRIES), double=len(IN_DOUBLE))
    left_out = [_EAGER_ONLY, *_reasons(EAGER_ONLY), _NOT_BY_OUR_BACKEND, *_reasons(NOT_BY_OUR_BACKEND)]
    return "".join([introduction, *map(_row, ENTRIES), *left_out])


def _reasons(left_out: Mapping[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [f"- {', '.join(those)}: {reason}.\n" for reason, those in names.items()]


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
