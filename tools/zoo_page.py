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

Look up here what public models send when their inputs are sharded unevenly: along the sequence, the height, points, or
nodes and edges. The models have random weights and tiny sizes, and are unmodified.

The tests compare values and gradients of each model with one process, on three ranks over five partitions, with an empty
shard, a shard of one row and another size: eager, and, but for those listed below, compiled by `aot_eager` to one graph.
That runs at night (`pytest -m zoo`); the first five run on every push.

By `backend="shardcompile"`, our passes and Inductor, {tried} of {all} models are compared over two of the partitions, and
are right, each compiled to one graph (`pytest -m zoo -k by_our_backend`). In {double} of them steps that the model takes in
single precision, whatever its dtype is, are taken in double precision there: Inductor rounds single precision otherwise
than eager kernels do, of plain tensors too.

## What a step sends

A row is what one rank of three sends in a forward and a backward pass.

- *collectives*: as traced > after the passes
- *bytes*: all that is sent, the gradients of parameters included, which any data-parallel step sends
- *parameters*: their size
- *gathers*: of full tensors that remain; in brackets those that are not needed. `tests/zoo` says of each why it is there

A model without numbers has no golden file yet.
"""

_HEADER = """| model | collectives | bytes | parameters | gathers |
|---|---|---|---|---|
"""

_EAGER_ONLY = """
## Compared in eager mode only

"""

_NOT_BY_OUR_BACKEND = """
## Compared by `aot_eager`, not by our backend

"""


def page() -> str:
    """The page."""
    tried = len(ENTRIES) - len(EAGER_ONLY) - len(NOT_BY_OUR_BACKEND)
    introduction = _INTRODUCTION.format(tried=tried, all=len(ENTRIES), double=len(IN_DOUBLE))
    left_out = [_EAGER_ONLY, *_reasons(EAGER_ONLY), _NOT_BY_OUR_BACKEND, *_reasons(NOT_BY_OUR_BACKEND)]
    packages: dict[str, list[Entry]] = {}
    for entry in ENTRIES:
        packages.setdefault(entry.package or "written down in the tests", []).append(entry)
    return "".join([introduction, *(_section(name, found) for name, found in packages.items()), *left_out])


def _section(package: str, found: list[Entry]) -> str:
    rows = "".join(map(_row, found))
    summary = f"{len(found)} model{'s' * (len(found) > 1)}"
    heading = package if " " in package else f"`{package}`"
    folded = f'<details markdown="1"><summary>{summary}</summary>\n\n{_HEADER}{rows}\n</details>\n'
    return f"\n### {heading[0].upper()}{heading[1:]}\n\n{folded}"


def _reasons(left_out: Mapping[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [f"- {', '.join(those)}: {reason}.\n" for reason, those in names.items()]


def _row(entry: Entry) -> str:
    path = GOLDEN / f"{entry.name}.txt"
    if not path.exists():
        return f"| {entry.name} | not counted | | | |\n"
    text = path.read_text()
    found = _HEAD.match(text)
    assert found is not None, path
    traced, sent, issued, parameters = map(int, found.groups())
    gathers = [line for line in text.splitlines() if line.startswith("    ")]
    idle = sum(_times(line) for line in gathers if _word(entry, line).startswith("not needed"))
    whole = sum(map(_times, gathers))
    gathered = f"{whole} ({idle})" if idle else str(whole)
    numbers = (f"{traced} > {issued}", f"{sent / 1000:.1f} kB", f"{parameters / 1000:.1f} kB", gathered)
    return f"| {entry.name} | {' | '.join(numbers)} |\n"


def _times(line: str) -> int:
    times = re.search(r"\((\d+) times\)$", line)
    return int(times.group(1)) if times else 1


def _word(entry: Entry, line: str) -> str:
    return next((word for part, word in entry.gathers if part in line), "")


if __name__ == "__main__":
    PAGE.write_text(page())
