"""The pictures of graphs on the site are of the graphs that the passes make today."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pictures are made with torch 2.13")
@pytest.mark.parametrize("program", ["pass_graphs", pytest.param("timeline", marks=pytest.mark.nightly)])
def test_pictures_are_what_the_passes_do(program: str) -> None:
    panels = importlib.import_module(f"tools.pictures.{program}").panels()
    differing = [name for name, panel in panels.items() if str(panel) != (ROOT / f"docs/{name}.svg").read_text()]
    assert panels and not differing, f"python -m tools.pictures.{program} draws them anew; look at them"
