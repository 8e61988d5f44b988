"""Memory for messages: what is given back is had again, and by nobody else before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardcompile.collectives import scratch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scratch, "_free", type(scratch._free)(list))
    monkeypatch.setattr(scratch, "_kept", 0)
    monkeypatch.setattr(scratch, "_SMALLEST", 4096)
    yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 1000, 4097, 70001])
def test_it_is_a_tensor_as_any(dtype: torch.dtype, numel: int) -> None:
    x = scratch.borrow(numel, torch.empty(2, dtype=dtype))
    assert (x.shape, x.dtype, x.is_contiguous(), x.storage_offset()) == ((numel,), dtype, True, 0)
    assert torch.equal(x.fill_(1), torch.ones(numel, dtype=dtype))


def test_what_is_given_back_is_had_again() -> None:
    like = torch.empty(0)
    x = scratch.borrow(5000, like)
    address = x.data_ptr()
    other = scratch.borrow(5000, like)
    assert other.data_ptr() != address
    scratch.give_back(x)
    again = scratch.borrow(6000, like.double()[:0].to(torch.int32))  # of the same power of two
    assert again.data_ptr() == address and again.dtype == torch.int32
    assert scratch.borrow(5000, like).data_ptr() not in (address, other.data_ptr())


def test_only_what_was_borrowed_is_taken_back_and_once() -> None:
    x = scratch.borrow(8192, torch.empty(0))
    scratch.give_back(torch.empty(8192), x[:], x.view(64, 128), x.detach())
    assert scratch._kept == 0
    scratch.give_back(x, x)
    assert scratch._kept == 4 * 8192
    assert scratch.borrow(8192, x).data_ptr() == x.data_ptr() != scratch.borrow(8192, x).data_ptr()


def test_small_and_large_ones_are_not_kept() -> None:
    like = torch.empty(0, dtype=torch.uint8)
    for numel in (1, 4095, scratch.LIMIT + 1):
        scratch.give_back(scratch.borrow(numel, like))
    assert scratch._kept == 0


def test_the_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "LIMIT", 3 * 2**14)
    several = [scratch.borrow(2**14, torch.empty(0, dtype=torch.uint8)) for _ in range(5)]
    scratch.give_back(*several)
    assert scratch._kept == 3 * 2**14
    for _ in range(5):
        scratch.borrow(2**14, several[0])
    assert scratch._kept == 0
