"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.support.sources import PACKAGE, ROOT, SOURCES

_WITH_EXAMPLES = [path for path in SOURCES if ">>> " in path.read_text()]


def test_there_are_some() -> None:
    assert PACKAGE / "sharding" / "derivations.py" in _WITH_EXAMPLES


@pytest.mark.parametrize("path", _WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    found = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert found.attempted and not found.failed
