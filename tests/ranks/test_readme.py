"""The code of README.md runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardcompile.testing import rank

README = Path(__file__).resolve().parents[2] / "README.md"
BLOCKS = list(re.finditer(r"^```(\w+)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL))
TEN_LINES, IN_A_TEST = (block for block in BLOCKS if block[1] == "python")
(PRINTED,) = (block[2] for block in BLOCKS if block[1] == "text")


def code(block: re.Match[str]) -> Any:
    """A block, with the line numbers of the file; what is explained has to have its source in a file."""
    source = block[2]
    return compile("\n" * README.read_text().count("\n", 0, block.start(2)) + source, str(README), "exec")


def without_versions_and_places(text: str) -> list[str]:
    """What is the same with every version of torch: numbers of nodes, and what follows from them, are not."""
    text = re.sub(r"torch \S+|[\w./-]+\.(py|md):\d+|\d+ nodes|predicted .*", "...", text)
    return [re.sub(r" {2,}", "  ", line).rstrip() for line in text.strip().splitlines()]


@pytest.mark.ranks(2, timeout=300)
def test_ten_lines() -> None:
    printed: list[str] = []
    exec(code(TEN_LINES), {"__name__": "example", "print": lambda *a: printed.append(" ".join(map(str, a)))})
    if rank() == 0:
        said = "\n".join(printed).partition("\nwhat to do")[0]
        assert without_versions_and_places(said) == without_versions_and_places(PRINTED)


def test_snapshot() -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec("\n".join(line for line in TEN_LINES[2].splitlines() if "import" in line), names)
    exec(code(IN_A_TEST), names)
    names["test_communication"]()


def test_pictures_and_pages_that_it_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert "docs/timeline.svg" in links
    assert not [link for link in links if not (README.parent / link).exists()]
