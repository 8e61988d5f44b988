"""The partition of torch.chunk, which `distribute_tensor` gives, stays where it is in compiled functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once
from tests.support.sent import Sent
from tests.support.tiers import often


def layer(x: Any, weight: Tensor) -> Any:
    """A linear layer as GPT-2 and others write it, and the sum with what came in."""
    flat = x.view(-1, x.shape[-1])
    return x + torch.addmm(weight[0], flat, weight).view(x.shape).relu()


def flat(x: Any, weight: Tensor) -> Any:
    return (x.flatten().sin() * 2).view(x.shape) @ weight


def joined_columns(x: Any, weight: Tensor) -> Any:
    return (x.flatten(1) * 3).cos().view(x.shape) + nnf.linear(x, weight)


FUNCTIONS = [layer, flat, joined_columns]
SIZES = {0: [(5, 7), (4, 7), (7, 7), (2, 7), (10, 7)], 1: [(5, 7), (5, 6), (5, 4), (5, 9), (5, 2)]}


@pytest.mark.ranks(3, processes=False, timeout=600)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", often(["aot_eager", None, "inductor"], 1))
def test_flattened_dims_stay_partition(function: Callable[..., Any], dim: int, backend: str | None) -> None:
    run = torch.compile(function, fullgraph=True, backend=backend) if backend else function
    once(torch.compiler.reset)
    before = 0
    for step, (rows, columns) in enumerate(SIZES[dim]):
        draw = torch.Generator().manual_seed(step)
        full, matrix = (torch.randn(*n, dtype=torch.float64, generator=draw) for n in ((rows, columns, 4), (4, 4)))
        plain, weight = full.clone().requires_grad_(), matrix.clone().requires_grad_()
        expected = function(plain, weight)
        expected.square().sum().backward()
        x = sc.distribute_tensor(full, mesh(), [Shard(dim)]).requires_grad_()
        own = matrix.clone().requires_grad_()
        before = once(graphs_compiled) if step == 2 else before
        with Sent() as seen:
            found = run(x, own)
        assert not seen.names
        assert found.placements == (Shard(dim),)
        found.square().sum().backward()
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        torch.testing.assert_close(own.grad, weight.grad)
    assert backend is None or graphs_compiled() == before


@pytest.mark.ranks(4, processes=False, timeout=300)
@pytest.mark.parametrize("compiled", [False, True])
def test_on_two_mesh_dims(compiled: bool) -> None:
    on = init_device_mesh("cpu", (2, 2))
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    weight = torch.randn(4, 4, dtype=torch.float64)
    for rows in (7, 3, 9):
        full = torch.randn(rows, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        found = run(sc.distribute_tensor(full, on, [Shard(0), Shard(0)]), weight)
        assert found.placements == (Shard(0), Shard(0))
        torch.testing.assert_close(found.full_tensor(), layer(full, weight))


@pytest.mark.ranks(2, timeout=300)
def test_on_processes_a_result_feeds_the_next_function() -> None:
    first = torch.compile(lambda x: x.flatten() * 2, fullgraph=True, backend="aot_eager")
    second = torch.compile(lambda x: x.view(-1, 4).cumsum(0), fullgraph=True, backend="aot_eager")
    before = 0
    for step, rows in enumerate((5, 7, 3, 6)):
        full = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        x = sc.distribute_tensor(full, mesh(), [Shard(0)]).requires_grad_()
        found = second(first(x))
        found.sin().sum().backward()
        before = graphs_compiled() if step == 1 else before
        plain = full.clone().requires_grad_()
        expected = (plain * 2).cumsum(0)
        expected.sin().sum().backward()
        torch.testing.assert_close(found.full_tensor(), expected)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    assert graphs_compiled() == before
