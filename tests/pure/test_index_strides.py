"""Strides of an index's variables, term by term, against torch's own answer for the whole index."""

from __future__ import annotations

import contextlib
import random

import pytest
import sympy
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from shardcompile.compat.index_strides import strides_by_terms

X, Y = sympy.symbols("x0 x1", integer=True, nonnegative=True)
S, T = sympy.symbols("s0 s1", integer=True, positive=True)
TORCH = cpp.stride_at_vec_range

INDICES = (
    S * X + Y,
    (S + 1) * X - S * X + T * Y,
    T * (S * X + Y) + 3,
    S * (T + 1) * X - S * T * X,
    Y * S,
    sympy.Integer(7),
    S * FloorDiv(X, 16) + ModularIndexing(X, 1, 16),
    8 * S * FloorDiv(X, 8) + ModularIndexing(X, 1, 8) + T * Y,
    2 * ModularIndexing(X, 1, 4) + X * S,
    FloorDiv(X + S * Y, 16),
    ModularIndexing(X + Y, 4, T),
    X**2 + X,
)


def _by_terms(index: sympy.Expr, length: int | None) -> sympy.Expr:
    with contextlib.ExitStack() as stack:
        strides_by_terms(stack)
        assert cpp.stride_at_vec_range is not TORCH
        return cpp.stride_at_vec_range(index, X, length)


@pytest.mark.parametrize("length", (None, 8, 16))
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_as_torch_has_it(index: sympy.Expr, length: int | None) -> None:
    got, expected = _by_terms(index, length), TORCH(index, X, length)
    draw = random.Random(0)
    for _ in range(20):
        at = {v: draw.randrange(1, 40) for v in (X, Y, S, T)}
        assert got.subs(at) == expected.subs(at)
    for number in (0, 1):
        assert (got == number) == (expected == number)
    assert got.is_number == expected.is_number
    assert cpp.stride_at_vec_range is TORCH


def test_a_condition_is_left_to_torch() -> None:
    assert _by_terms(sympy.Ge(S, 1024), 16) == TORCH(sympy.Ge(S, 1024), X, 16) == 0
