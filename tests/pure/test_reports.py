"""The reports of faults of PyTorch: each belongs to a patch, and has what its maintainers ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardcompile import compat
from shardcompile.compat.patches import all_patches

REPORTS = sorted((Path(compat.__file__).parent / "reports").iterdir())
SECTIONS = ["Program", "Output", "Versions", "Cause", "Proposed change"]


def test_there_are_reports() -> None:
    assert REPORTS


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.name)
def test_a_report_is_about_a_patch(report: Path) -> None:
    assert report.suffix == ".md" and report.stem in {patch.name for patch in all_patches()}


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.name)
def test_a_report_is_short_and_complete(report: Path) -> None:
    lines = report.read_text().splitlines()
    assert len(lines) <= 70
    assert lines[0].startswith("# ")
    assert [line.strip("*") for line in lines if line.startswith("**")] == SECTIONS


def test_every_fault_of_torch_is_reported_or_needs_a_gpu_to_be_shown() -> None:
    reported = {report.stem for report in REPORTS}
    left = {
        p.name for p in all_patches() if not re.search(r"https://github.com/pytorch|^None: ", p.upstream)
    } - reported
    assert left == {"mixed_reductions_by_hint"}
