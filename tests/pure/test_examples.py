"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import shardcompile

_ROOT = Path(shardcompile.__file__).parent
_WITH_EXAMPLES = sorted(path for path in _ROOT.rglob("*.py") if ">>> " in path.read_text())


def test_there_are_some() -> None:
    assert _ROOT / "layout" / "derived.py" in _WITH_EXAMPLES


@pytest.mark.parametrize("path", _WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path) -> None:
    name = ".".join(path.relative_to(_ROOT.parent).with_suffix("").parts)
    found = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert found.attempted and not found.failed
