"""The files that repeat what stands elsewhere say the same: the workflow, the versions of torch, the hooks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"^\s*-? ?run: (.+)$", workflow, re.M) == ["bash .ci/run"]


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
