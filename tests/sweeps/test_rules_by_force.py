"""Every strategy of every rule, tried by force."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import op_db
import rules_by_force


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(op_db.OPS))
def test_strategies_of_every_op(name: str) -> None:
    problems, _ = rules_by_force.wrong(name)
    assert not problems, "\n".join(problems)
