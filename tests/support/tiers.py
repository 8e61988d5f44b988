"""Which cases of a test run on every push, which at night, and which only where there is a compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

needs_compiler = pytest.mark.skipif(
    not torch.cuda.is_available() and not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="no GPU, and no C++ compiler (c++, g++, clang++) to build what stands in for it",
)


def spread(cases: Iterable[Any], step: int) -> list[Any]:
    """Every `step`-th case first, then those behind them, and so on, so that the first ones are of all kinds."""
    found = list(cases)
    return [case for first in range(step) for case in found[first::step]]


def often(cases: Sequence[Any], count: int) -> list[Any]:
    """Cases for `pytest.mark.parametrize`: the first ones run always, the others have the mark ``nightly``.

    Args:
        cases: a tuple is a case of several arguments.
        count: how many run always.
    """
    rest = [case if isinstance(case, tuple) else (case,) for case in cases[count:]]
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.nightly) for case in rest)]
