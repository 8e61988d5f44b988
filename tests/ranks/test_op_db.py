"""A sample of the ops of PyTorch's operator database. `tests/sweeps` runs all of them."""

from __future__ import annotations

import pytest

from tests.support.tiers import often, spread


@pytest.mark.ranks(3, timeout=45, processes=False)
@pytest.mark.parametrize("number", often(spread(range(1, 640, 20), 2), 16))
def test_a_sample_of_the_ops(number: int) -> None:
    from tests.support import op_db  # PyTorch's database takes seconds to import
    from tests.support.op_sweep import sweep

    names = sorted(op_db.OPS)
    sweep(names[number % len(names)], (3,), count=2, limit=4)
