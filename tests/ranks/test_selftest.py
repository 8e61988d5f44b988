"""``python -m shardcompile selftest`` tells what is right, and says so where something is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardcompile.selftest import Finding, Job, print_table, run_checks
from shardcompile.selftest.checks import CHECKS
from shardcompile.selftest.environment import Environment
from tests.support.tiers import often

WITHOUT_THE_PACKAGE = """
import importlib.metadata as metadata
import importlib.util as util
entry_points, find_spec = metadata.entry_points, util.find_spec
metadata.entry_points = lambda **named: entry_points(group="none") if named.get("group") == "torch_dynamo_backends" else entry_points(**named)
util.find_spec = lambda name, *rest: None if name == "depyf" else find_spec(name, *rest)
"""
"""What Python finds if neither this library nor depyf is installed."""


@pytest.mark.parametrize(
    "only, count",
    often(
        [
            (["collectives: gathers", "redistribution", "halos", "routing"], 4),
            (["collectives", "redistribution", "halos", "routing", "neighbours", "checkpoints", "attention: doc"], 11),
        ],
        1,
    ),
)
def test_the_command(only: list[str], count: int) -> None:
    command = [sys.executable, "-m", "shardcompile", "selftest", "--device", "cpu", "--ranks", "3", "--only", *only]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("3 ranks, cpu, gloo, torch ")
    assert [line.split()[0] for line in lines[1:-1]] == ["right"] * count
    assert lines[-1].startswith(f"{count} of {count} right")


@pytest.mark.nightly
def test_the_command_with_ranks_in_one_process_in_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    for name in ("shardcompile", "passes"):
        shutil.copytree(root / name, tmp_path / name, symlinks=True)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_THE_PACKAGE)
    command = [sys.executable, "-m", "shardcompile", "selftest", "--device", "cpu", "--one-process", "--ranks", "3"]
    ended = subprocess.run(
        [*command, "--only", "model: collectives", "halos"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("3 ranks, cpu, one process, torch ")
    assert [line.split()[0] for line in lines[1:-1]] == ["right"] * 2
    assert "3 collectives" in lines[1]


@pytest.mark.ranks(2, processes=False)
def test_what_is_wrong_on_one_rank_is_told_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(here: Environment) -> str:
        assert here.rank != 1, "rows are lost"
        return "never shown"

    monkeypatch.setitem(CHECKS, "zz", wrong)
    (found,) = run_checks(Job([], ("zz",)))
    assert found.problem.startswith("rank 1: AssertionError in wrong, lines [")
    assert "rows are lost" in found.problem


@pytest.mark.ranks(2, processes=False)
def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CHECKS["redistribution"].__globals__["fetch_ranges"]
    monkeypatch.setitem(CHECKS["redistribution"].__globals__, "fetch_ranges", lambda *a: real(*a) + 1)
    found = {f.name: f.problem for f in run_checks(Job([], ("collectives: exch", "redistribution")))}
    assert found["collectives: exchanges"].startswith("rank 0: AssertionError in exchanges, lines [")
    assert not found["redistribution"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_table([Finding("a", "", "2 MiB", 1.0)])
    assert not print_table([Finding("a", "", "", 1.0), Finding("long", "rank 0: E\nmore", "", 0.25)])
    assert capsys.readouterr().out == (
        "right  a     1.0 s  2 MiB\n1 of 1 right, 1 s\n"
        "right  a        1.0 s\nWRONG  long     0.2 s\n       rank 0: E\n       more\n1 of 2 right, 1 s\n"
    )
