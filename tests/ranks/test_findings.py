"""What fell short when the library was first tried from outside is right, refused in words, or stated as a limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.findings import LINES
from tests.findings.play import SKIPPED, Ranks

pytestmark = [pytest.mark.nightly, pytest.mark.rank_processes]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", [name for name, line in LINES.items() if not line.scene])  # scenes: test_divergence.py
def test_a_line_of_the_findings(name: str, ranks: Ranks) -> None:
    verdict = ranks.play(LINES[name])
    if verdict == SKIPPED.format(LINES[name].needs):
        pytest.skip(verdict)
    assert not verdict.startswith("WRONG"), verdict
