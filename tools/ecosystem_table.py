"""Writes the table of docs/ecosystem.md: ``python -m tools.ecosystem_table`` after a change of tests/ecosystem."""

from __future__ import annotations

from collections.abc import Iterator

from tests.ecosystem import CASES
from tests.ecosystem.case import NOT_IN_TORCH, NOTHING, RIGHT
from tests.support.sources import ROOT

PAGE = ROOT / "docs" / "ecosystem.md"
ABOUT_COMPILING = "about compiling alone"
NO_REFUSAL = (RIGHT, NOT_IN_TORCH, NOTHING)
START, END = "<!-- table -->\n", "<!-- end of table -->\n"


def table() -> str:
    """All sections."""
    lines: list[str] = []
    for section in dict.fromkeys(case.section for case in CASES.values()):
        rows = [
            f"| {case.feature} | {ABOUT_COMPILING if case.eager == NOTHING else _told(case.eager)} | {_told(case.compiled)} |"
            for case in CASES.values()
            if case.section == section
        ]
        refused = sum("refused" in row for row in rows)
        summary = f"{len(rows)} features" if not refused else f"{len(rows)} features, {refused} refused"
        lines += ["", f"### {section}", "", f'<details markdown="1"><summary>{summary}</summary>', ""]
        lines += ["| | eager | compiled |", "|---|---|---|", *rows, "", "</details>"]
    return "\n".join([*lines[1:], "", *_notes(), ""])


def _told(expected: str) -> str:
    if expected in NO_REFUSAL:
        return expected
    return f"refused ({_refusals().index(expected) + 1})"


def _refusals() -> list[str]:
    told = [t for case in CASES.values() for t in (case.eager, case.compiled) if t not in NO_REFUSAL]
    return list(dict.fromkeys(told))


def _notes() -> Iterator[str]:
    yield "### What the refusals say"
    yield ""
    for number, text in enumerate(_refusals(), 1):
        yield f"{number}. {text}."


def written(page: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + START + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
