"""Strategies of rules, tried by force: a sample of the ops. `tests/sweeps` tries every op."""

from __future__ import annotations


def test_strategies_of_a_sample_of_the_ops() -> None:
    # PyTorch's database takes seconds to import.
    from tests.support import op_db, rules_by_force

    problems, tried = [], 0
    for name in sorted(op_db.OPS)[::80]:
        found, count = rules_by_force.wrong(name)
        problems += [f"{name}: {p}" for p in found]
        tried += count
    assert not problems, "\n".join(problems)
    assert tried > 75
