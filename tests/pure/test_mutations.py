"""The faults of `tools/mutations.py`: each still has its place, and at night a test finds it."""

from __future__ import annotations

import ast

import pytest

from tools import mutations


@pytest.mark.parametrize("m", mutations.MUTATIONS, ids=lambda m: m.what)
def test_the_fault_has_its_place(m: mutations.Mutation) -> None:
    source = (mutations.ROOT / m.file).read_text()
    assert source.count(m.text) == 1
    ast.parse(source.replace(m.text, m.fault))


@pytest.mark.nightly
@pytest.mark.parametrize("m", mutations.MUTATIONS, ids=lambda m: m.what)
def test_the_fault_is_found(m: mutations.Mutation) -> None:
    found, printed = mutations.is_found(m)
    assert found, printed
