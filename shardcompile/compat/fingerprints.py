"""Fingerprints of what patches replace in torch: they tell whether a version that is not known has changed it.

`fingerprints.json` has those of the known versions, as `python -m tools.fingerprints` writes them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any, cast

import torch

KNOWN_VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch that are known, the oldest first."""

FILE = Path(__file__).with_suffix(".json")

Version = tuple[int, int]


def version_of(text: str) -> Version:
    """A version as numbers: (2, 13) for ``2.13.0+cpu``."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def running_version() -> Version:
    """The version of torch that runs."""
    return version_of(torch.__version__)


def is_known() -> bool:
    """Whether the version of torch that runs is one of `KNOWN_VERSIONS`."""
    return running_version() <= version_of(KNOWN_VERSIONS[-1])


@functools.cache
def _of_all_versions() -> dict[str, dict[str, str]]:
    return cast(dict[str, dict[str, str]], json.loads(FILE.read_text()))


def recorded(version: str) -> dict[str, str]:
    """The fingerprints of a known version by name; empty if none are recorded."""
    return _of_all_versions().get(version, {})


def fingerprint(found: Any) -> str:
    """A hash of what a function does, or of how it is called if its source cannot be read.

    Docstrings, comments and layout do not count.
    """
    function = inspect.unwrap(getattr(found, "__func__", found)) if callable(found) else found
    try:
        text = _code_of(function)
    except (OSError, TypeError, SyntaxError):
        text = getattr(function, "__doc__", None) or type(function).__name__
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _code_of(function: Any) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        body: object = getattr(node, "body", None)
        # A docstring, or another constant that does nothing.
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(body, list) and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del body[0]
    return ast.dump(tree)
