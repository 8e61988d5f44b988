"""The sweep over PyTorch's operator database, see `op_sweep`: every op."""

from __future__ import annotations

import pytest

from tests.support import op_db
from tests.support.op_sweep import sweep


@pytest.mark.sweep
@pytest.mark.ranks(3, timeout=45, processes=False)
@pytest.mark.parametrize("name", sorted(op_db.OPS))
def test_every_op_on_three_ranks(name: str) -> None:
    sweep(name, (3,), count=4, limit=8)


@pytest.mark.sweep
@pytest.mark.ranks(4, timeout=45, processes=False)
@pytest.mark.parametrize("name", sorted(op_db.OPS))
def test_every_op_on_two_by_two_ranks(name: str) -> None:
    sweep(name, (2, 2), count=3, limit=4)


@pytest.mark.sweep
@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("name", sorted(op_db.OPS))
def test_every_op_compiled_with_aot_eager(name: str) -> None:
    sweep(name, (3,), count=1, limit=2, backend="aot_eager")


@pytest.mark.sweep
@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("name", sorted(op_db.OPS)[::4])
def test_a_sample_of_the_ops_compiled_with_inductor(name: str) -> None:
    sweep(name, (3,), count=1, limit=1, backend="inductor")
