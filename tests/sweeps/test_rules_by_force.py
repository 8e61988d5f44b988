"""Every strategy of every rule, tried by force."""

from __future__ import annotations

import pytest

from tests.support import op_db, rules_by_force


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(op_db.OPS))
def test_strategies_of_every_op(name: str) -> None:
    problems, _ = rules_by_force.wrong(name)
    assert not problems, "\n".join(problems)
