"""Views that split a sharded dim where a row of the result lies on two ranks: rows move to the rank that has the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import mesh, once, rank
from tests.support.tiers import often

PARTITIONS = [[5, 0, 7], [4, 4, 4], [1, 22, 1], [0, 0, 12], [11, 1, 24], [3, 8, 1]]


def partition(full: torch.Tensor, sizes: list[int], dim: int = 1) -> sc.ShardTensor:
    shard = full.split(sizes, dim)[rank()].contiguous()
    return sc.ShardTensor.from_local(shard, mesh(), [Shard(dim)], {0: sizes})


def chunks(x: Any) -> Any:
    """What state spaces do: something within each chunk, and the way back."""
    parts = x.reshape(2, -1, 4, 6)
    return (parts.softmax(2) * parts.cumsum(2)).reshape(x.shape) + x


def padded_chunks(x: Any) -> Any:
    rows = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 5))
    return rows.reshape(2, -1, 5, 6).cumsum(2).sin().reshape(2, -1, 6)[:, : x.shape[1]] * x


def rows_of_another_width(x: Any) -> Any:
    """Three rows of 6 are two of 9."""
    return x.sin().reshape(2, -1, 9).cumsum(2).cos().reshape(x.shape) * x


def patches(x: Any) -> Any:
    return torch.nn.functional.pixel_unshuffle(x.reshape(1, 2, -1, 6), 2).flatten(2).sin()


def written_through(x: Any) -> Any:
    y = x * 2
    y.view(2, -1, 4, 6)[:, :, 1] = x.view(2, -1, 4, 6)[:, :, 2].cos()
    return y * x


FUNCTIONS = [chunks, padded_chunks, rows_of_another_width, patches, written_through]


def check(function: Callable[..., Any], backend: str | None, partitions: list[list[int]]) -> None:
    run = once(lambda: torch.compile(function, fullgraph=True, backend=backend) if backend else function)
    for sizes in partitions:
        full = torch.randn(2, sum(sizes), 6, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)
        plain = full.clone().requires_grad_()
        expected = function(plain)
        x = partition(full, sizes).requires_grad_()
        found = run(x)
        torch.testing.assert_close(found.full_tensor(), expected)
        (expected * expected.detach().cos()).sum().backward()
        (found * found.detach().cos()).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize(
    ("backend", "function"),
    often([(backend, f) for backend in (None, "aot_eager", "inductor") for f in FUNCTIONS], len(FUNCTIONS)),
)
def test_whole_chunks(backend: str | None, function: Callable[..., Any]) -> None:
    check(function, backend, PARTITIONS)


@pytest.mark.ranks(2)
def test_on_processes() -> None:
    check(chunks, "aot_eager", [[3, 9], [0, 8]])


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("function", [chunks, rows_of_another_width, patches])
def test_no_row_is_gathered(function: Callable[..., Any]) -> None:
    with CommDebugMode() as seen:
        function(partition(torch.randn(2, 24, 6), [5, 12, 7])).sum()
    counts = {str(op) for op in seen.get_comm_counts()}
    assert counts == {"shardcompile.fetch_ranges"}, counts


@pytest.mark.ranks(3, processes=False)
def test_only_rows_of_divided_chunks_move() -> None:
    out = partition(torch.arange(24.0).reshape(1, 24), [5, 12, 7]).view(1, 6, 4)
    assert out.sharding.describe() == "f32[1, 6, 4] 0: S(1)[2,3,1]"


@pytest.mark.ranks(4, mesh=(2, 2), processes=False)
def test_two_mesh_dims() -> None:
    full = torch.randn(24, 3, dtype=torch.float64)
    sizes = [5, 3, 9, 7]
    x = sc.ShardTensor.from_local(full.split(sizes)[rank()].clone(), mesh(), [Shard(0), Shard(0)], {0: sizes})
    found = x.requires_grad_().reshape(6, 4, 3).cumsum(1)
    plain = full.clone().requires_grad_()
    torch.testing.assert_close(found.full_tensor(), plain.reshape(6, 4, 3).cumsum(1))
    found.sin().sum().backward()
    plain.reshape(6, 4, 3).cumsum(1).sin().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]
