"""Habits that tests hold: files that repeat what stands elsewhere say the same, and sentences are short."""

from __future__ import annotations

import io
import os
import pkgutil
import re
import subprocess
import tokenize
import tomllib
from pathlib import Path

import pytest

from shardcompile.compat.caches import source_files
from tests.support.sources import PACKAGE, ROOT, SOURCES


def test_the_workflow_runs_the_scripts_and_the_range_of_versions() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert {"bash .ci/run", "bash scripts/nightly.sh"} <= set(re.findall(r"^\s*-? ?run: (.+)$", workflow, re.M))
    (listed,) = re.findall(r"^TORCH = \[(.+)\]$", (ROOT / "noxfile.py").read_text(), re.M)
    (pinned,) = re.findall(r"torch==([\d.]+)", (ROOT / ".ci" / "constraints.txt").read_text())
    oldest, *_, newest = re.findall(r'"([\d.]+)"', listed)
    in_matrix = re.findall(r'python: "([\d.]+)", torch: "([\d.]+)"', workflow)
    assert {torch for _, torch in in_matrix} == {oldest, pinned, newest}
    assert len({python for python, _ in in_matrix}) == 2


def test_nox_has_the_oldest_and_the_newest_torch_and_that_of_ci() -> None:
    (versions,) = re.findall(r"^TORCH = \[(.+)\]$", (ROOT / "noxfile.py").read_text(), re.M)
    listed = [tuple(map(int, version.split("."))) for version in re.findall(r'"([\d.]+)"', versions)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = (re.findall(r"(\d+)\.(\d+)", d) for d in project["dependencies"] if d.startswith("torch"))
    (low, high) = (tuple(map(int, bound)) for bound in bounds)
    assert listed[0][:2] == low and listed[-1][:2] == (high[0], high[1] - 1)
    (of_ci,) = re.findall(r"torch==([\d.]+)", (ROOT / ".ci" / "constraints.txt").read_text())
    assert tuple(map(int, of_ci.split("."))) in listed


def test_every_hook_runs_a_tool_of_the_tests() -> None:
    hooks = re.findall(r"^\s+entry: (\w+)", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert hooks and set(hooks) <= set(extras["test"])


@pytest.mark.parametrize("installed, counts", [("pinned", True), ("pinned+cpu", True), ("99.0", False)])
def test_types_are_checked_with_the_torch_of_ci(tmp_path: Path, installed: str, counts: bool) -> None:
    """With another torch `scripts/test.sh` shows what mypy finds, and does not fail for it."""
    (pinned,) = re.findall(r"torch==([\d.]+)", (ROOT / ".ci" / "constraints.txt").read_text())
    tools = {"mypy": "echo an error; exit 1", "ruff": "exit 0", "lint-imports": "echo contracts"}
    for name, script in (tools | {"python": f"echo {installed.replace('pinned', pinned)}"}).items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    run = subprocess.run(
        ["bash", "-c", "set -euo pipefail; source scripts/checks.sh; checks"],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert "an error" in run.stdout and run.returncode == int(counts)
    assert ("contracts" in run.stdout) is not counts and ("99.0" in run.stdout) is not counts


REPLACED = {
    "cut": "partition, or sharded",
    "cuts": "partitions",
    "recut": "repartition",
    "extent": "size",
    "extents": "sizes",
    "nursery": "fork server",
    "verdict": "diagnosis",
    "stretch": "segment",
    "stretches": "segments",
    "mirrors": "reflection",
    "told": "stated",
    "linked": "planned",
    "superseded": "dead",
    "beside": "on the same device, or after",
    "behind": "overlapped",
    "apart": "unflattened, or separate",
    "alike": "rank-invariant",
    "way": "strategy, algorithm or path",
    "ways": "strategies, algorithms or paths",
}
"""Words that the field does not use for what they stood for, and what it says."""


def _words(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", text)}


def _names(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return {t.string for t in tokens if t.type == tokenize.NAME}


def test_names_are_the_words_of_the_field() -> None:
    """See docs/glossary.md. ``min_cut_rematerialization_partition`` and ``executable`` are names of others."""
    assert _words("_CutOf") & REPLACED.keys() and not _words("executable") & REPLACED.keys()
    found = [
        f"{path.relative_to(ROOT)}: {name}, say {REPLACED[word]}"
        for path in SOURCES
        for name in sorted(_names(path) - {"min_cut_rematerialization_partition"})
        for word in sorted(_words(name) & REPLACED.keys())
    ]
    assert found == []


def test_the_list_of_sources_is_complete() -> None:
    """With the passes: `rglob` skips the link `shardcompile/passes`, and a test that walks by it sees none of them."""
    named = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in SOURCES}
    found = pkgutil.walk_packages([str(PACKAGE)], "shardcompile.")
    assert {"shardcompile.__init__", *(m.name + ".__init__" * m.ispkg for m in found)} == named
    assert "shardcompile.passes.graph.collective" in named


def developer_code() -> list[Path]:
    """Every module of tests, tools, benchmarks and examples."""
    return [
        path
        for folder in ("tests", "tools", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_developer_code_is_imported_by_name() -> None:
    """The repository root is on the path, and helpers are modules of packages: `tests.support`, `tools`."""
    by_path = re.compile(r"sys\.path\.(insert|append|extend)|sys\.path\[|spec_from_file_location|run_path")
    assert by_path.search("sys.path.insert(0, folder)") and by_path.search("sys.path[:0] = [folder]")
    generated = {"test_packaging.py"}  # a program that imports from a wheel, in a folder that is empty
    found = [p.name for p in developer_code() if by_path.search(p.read_text()) and p != Path(__file__)]
    assert set(found) <= generated, found
    assert {p.name for p in (ROOT / "tests").iterdir() if p.suffix == ".py"} == {"__init__.py", "conftest.py"}


def test_nothing_depends_on_code_above_it() -> None:
    """The library imports neither tests nor tools, and what tests share imports no tool."""
    above = re.compile(r"^\s*(from|import) (tests|tools|benchmarks|examples)\b", re.M)
    tool = re.compile(r"^\s*(from|import) (tools|benchmarks)\b", re.M)
    assert above.search("x = 1\n    from tests.support import op_db\n") and not tool.search("from tests import zoo")
    assert [p for p in SOURCES if above.search(p.read_text())] == []
    assert [p for p in developer_code() if p.parent.name == "support" and tool.search(p.read_text())] == []
    passes = re.compile(r"^\s*(from|import) shardcompile\.passes\b", re.M)
    examples = [p for p in developer_code() if "examples" in p.parts]
    assert examples and [p for p in examples if passes.search(p.read_text())] == [], "examples need no pass"


def test_tests_read_the_list_of_sources() -> None:
    walks = re.compile(r"""glob\(["'][*/]*\.py["']\)""")
    lines = [(p, line) for p in developer_code() for line in p.read_text().splitlines()]
    assert walks.search('(ROOT / "passes").rglob("*.py")') and walks.search('folder.glob("**/*.py")')
    assert [f"{p.name}: {line}" for p, line in lines if walks.search(line) and p != Path(__file__)] == []


def test_passes_ask_no_size_of_a_tensor_for_a_number() -> None:
    """What Python asks of a symbol becomes a guard, which may hold on some ranks only."""
    asked = re.compile(r"shape\[[^\]]+\] (?:==|!=|<|>|<=|>=) \d")
    found = [
        f"{path.name}: {line.strip()}"
        for path in source_files(PACKAGE / "passes")
        for line in path.read_text().splitlines()
        if asked.search(line)
    ]
    assert not found, found
