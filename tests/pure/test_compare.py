"""The text of a difference: where, by how much, and within which tolerance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shardcompile.testing.arrange import uneven_sizes
from shardcompile.testing.compare import difference, tolerances
from shardcompile.testing.rule_check import _count, _input_layouts, _placements_of

USUAL = tolerances()


def test_the_largest_differences_are_located() -> None:
    want = torch.tensor([[1.0, 2.0, 100.0], [4.0, 0.5, 6.0]], dtype=torch.float64)
    got = want.clone()
    got[0, 2] += 1.0
    got[1, 1] += 0.25
    assert difference(got, want, tolerances(rtol=1e-6, atol=0.01)) == (
        "2 of 6 elements differ by more than atol=0.01 plus rtol=1e-06 times the expected value\n"
        "largest absolute difference 1 at index (0, 2): expected 100.0, got 101.0\n"
        "largest relative difference 0.5 at index (1, 1): expected 0.5, got 0.75"
    )
    assert difference(got, want, tolerances(atol=1.0)) is None


@pytest.mark.parametrize(
    "got, want",
    [
        (torch.tensor(math.nan), torch.tensor(1.0)),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([2**62 + 1]), torch.tensor([2**62])),
        (torch.tensor([1j]), torch.tensor([2j])),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (None, torch.zeros(2)),
        (1, 1.0),
        (1.0, 1.1),
        ("a", "b"),
    ],
)
def test_what_differs_is_told_both_ways(got: object, want: object) -> None:
    assert difference(got, want, USUAL) and difference(want, got, USUAL)
    for same in (got, want):
        assert difference(same, same.clone() if isinstance(same, Tensor) else same, USUAL) is None


def test_tolerances_are_those_of_torch() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        rtol, atol = USUAL(dtype)
        for factor, right in ((0.5, True), (4.0, False)):
            want = torch.ones(1, dtype=torch.float64)
            got = (want + factor * (rtol + atol)).to(dtype)
            assert (difference(got, want.to(dtype), USUAL) is None) == right, (dtype, factor)


def test_partitions_are_uneven_and_add_up() -> None:
    for size in range(12):
        for parts in range(1, 9):
            for style in range(8):
                sizes = uneven_sizes(size, parts, style)
                assert len(sizes) == parts and sum(sizes) == size and min(sizes) >= 0
    for style in (1, 2):
        for parts in range(3, 9):
            assert {0, 1} <= set(uneven_sizes(20, parts, style))
    assert uneven_sizes(7, 2, 2) == [0, 7]


@pytest.mark.parametrize("shapes", [[(3,)], [(3, 4)], [(3, 4), (4,)], [(2,), (), (3, 3)]])
def test_all_layouts_are_counted(shapes: list[tuple[int, ...]]) -> None:
    tensors = [torch.zeros(s) for s in shapes]
    ways, left_out = _input_layouts(tensors, limit=10_000, seed=0)
    assert left_out == 0 and len(set(map(str, ways))) == len(ways) == _count([_placements_of(x) for x in tensors])
    some, others = _input_layouts(tensors, limit=5, seed=0)
    assert len(some) == min(5, len(ways)) and others == len(ways) - len(some)
    assert some == _input_layouts(tensors, limit=5, seed=0)[0]
