"""The rows of docs/ecosystem.md: each is what plain PyTorch gives, or refused in the words that the table has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardcompile.testing import world_size
from tests.ecosystem import CASES
from tests.ecosystem.case import NOT_IN_TORCH, NOTHING, RIGHT, attempt, plain_fails
from tools.ecosystem_table import PAGE, written

COMPILED_ON_EVERY_PUSH = {
    "Training loops: gradient accumulation",
    "`torch.func` and derivatives in a loss: `grad`, plain parameters, the input from outside",
    "Higher-order ops: `nested_compile_region`",
    "Higher-order ops: `while_loop`",
}
"""Of the compiled rows; the others run at night."""

TABLE_IS_OF = "2.13."
"""The version of torch that the page names."""

EAGER_AT_NIGHT = ("`foreach=True`", "`fused=True`")


def rows(compiled: bool, ranks: int, processes: bool) -> list[Any]:
    """Parameters of a test: the names of the cases that run so."""

    def runs_often(name: str) -> bool:
        return name in COMPILED_ON_EVERY_PUSH if compiled else not any(w in name for w in EAGER_AT_NIGHT)

    return [
        pytest.param(name, marks=() if runs_often(name) else pytest.mark.nightly)
        for name, case in CASES.items()
        if (case.ranks, case.processes) == (ranks, processes) and (case.compiled if compiled else case.eager) != NOTHING
    ]


def check(name: str, compiled: bool) -> None:
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    expected = case.compiled if compiled else case.eager
    if expected == NOT_IN_TORCH:
        failed = plain_fails(case)
        assert failed or not torch.__version__.startswith(TABLE_IS_OF)
        expected = case.eager  # another version of torch can compile it
        if failed:
            return
    if expected == RIGHT:
        attempt(case, compiled)
        return
    with pytest.raises(Exception) as raised:
        attempt(case, compiled)
    assert expected in " ".join(str(raised.value).split())  # torch breaks its lines
    assert not isinstance(raised.value, AssertionError)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", rows(False, 3, False))
def test_eager(name: str) -> None:
    check(name, False)


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("name", rows(False, 4, False))
def test_eager_on_a_grid(name: str) -> None:
    assert world_size() == 4
    check(name, False)


@pytest.mark.ranks(3, timeout=120)
@pytest.mark.parametrize("name", rows(False, 3, True))
def test_eager_on_processes(name: str) -> None:
    check(name, False)


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("name", rows(False, 4, True))
def test_eager_on_a_grid_of_processes(name: str) -> None:
    check(name, False)


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("name", rows(True, 3, False))
def test_compiled(name: str) -> None:
    check(name, True)


@pytest.mark.ranks(4, timeout=300, processes=False)
@pytest.mark.parametrize("name", rows(True, 4, False))
def test_compiled_on_a_grid(name: str) -> None:
    check(name, True)


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("name", rows(True, 3, True))
def test_compiled_on_processes(name: str) -> None:
    check(name, True)


@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("name", rows(True, 4, True))
def test_compiled_on_a_grid_of_processes(name: str) -> None:
    check(name, True)


def test_the_table_is_what_the_cases_say() -> None:
    page = PAGE.read_text()
    if torch.__version__.startswith(TABLE_IS_OF):  # other versions refuse some cases in other words
        assert page == written(page), "run python -m tools.ecosystem_table"
    assert len(CASES) > 150
    assert all(case.eager and case.compiled for case in CASES.values()), "an empty cell"
