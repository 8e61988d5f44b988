"""Every notebook runs cell by cell, and what it shows is what is committed below its cells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import often
from tools import notebook_runner

pytestmark = pytest.mark.rank_processes  # cells start ranks

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KIB = 1024
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|work|Users|mnt|data)/|[A-Z]:\\\\")

# A cell with the tag `varies` shows something that depends on torch's version: its code, or its names.
VARIES = "varies"

_DIFFERS = re.compile(r"torch \d+\.\d+\.\d+\S*|\b\d+ nodes|peak(?: memory)?\s+[\d.]+ \w+(?:\s+->\s+[\d.]+ \w+)?")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def kind_of(output: dict[str, Any]) -> tuple[str, ...]:
    return (output["output_type"], *sorted(output.get("data", ())))


def text_of(outputs: list[dict[str, Any]]) -> str:
    """What is shown as text, without what differs between versions of torch: its name, numbers of nodes, memory."""
    texts = [o["text"] if "text" in o else o["data"].get("text/plain", "") for o in outputs]
    return _DIFFERS.sub("...", "".join(line for text in texts for line in text))


def test_there_are_six_in_order() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == list("123456")


@pytest.mark.parametrize("path", often(NOTEBOOKS, 0), ids=lambda p: p.stem)
def test_notebook_runs_and_shows_what_is_committed(path: Path) -> None:
    found = notebook_runner.in_own_process(path)
    for cell, outputs in zip(code_cells(path), found, strict=True):
        assert list(map(kind_of, outputs)) == list(map(kind_of, cell["outputs"])), "".join(cell["source"])
        if VARIES not in cell["metadata"].get("tags", ()):
            assert text_of(outputs) == text_of(cell["outputs"]), "".join(cell["source"])


@each_notebook
def test_notebook_can_be_read_without_running_it(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = sum(bool(cell["outputs"]) for cell in cells)
    assert shown >= len(cells) / 2
    assert path.stat().st_size < 150 * KIB


@each_notebook
def test_outputs_hold_no_paths_and_no_noise(path: Path) -> None:
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    assert {output.get("name", "stdout") for output in outputs} <= {"stdout"}
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    for output in outputs:
        data = output.get("data", {"text": output.get("text")})
        words = "".join(line for kind, lines in data.items() if kind != "image/png" for line in lines)
        assert not ABSOLUTE_PATH.search(words), words
        assert "Warning" not in words


def test_a_path_would_be_seen() -> None:
    assert ABSOLUTE_PATH.search('File "/tmp/ipykernel_1/2.py", line 3')
    assert not ABSOLUTE_PATH.search("f32[3]/tmp and https://ui.perfetto.dev/tmp/")


@each_notebook
def test_links_between_notebooks_lead_somewhere(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    prose = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_a_cell_that_raises_fails_the_run(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["print('seen')\n", "1 / 0"], "outputs": [], "metadata": {}}
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(RuntimeError, match=r"(?s)seen.*cell 1.*ZeroDivisionError"):
        notebook_runner.in_own_process(path)
