"""Values that `build(mesh)` may ask for in a world that is not there: those that follow from numbers, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.compat.known_values import LIMIT
from shardcompile.inspect.offline import OfflineError, offline_world, trace_step
from tests.support.tiers import needs_compiler


def rates(mesh: DeviceMesh) -> Any:
    """What timm does for the layers of a model."""
    return [[r.item() for r in torch.linspace(0, 0.2, 3)], torch.linspace(0, 1, 5).split([2, 3])[1].tolist()]


def computed(mesh: DeviceMesh) -> Any:
    grid = torch.arange(6).view(2, 3)
    return [(1 - grid[1:]).sum().item(), int(torch.tensor([1, 2, 3]).max()), grid.flip(0).T.tolist()]


def of_a_shard(mesh: DeviceMesh) -> Any:
    x = sc.distribute_tensor(torch.ones(7), mesh, [Shard(0)], sharding_shapes={0: [3, 0, 4]})
    return x.to_local().tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_compiler)])
@pytest.mark.parametrize(
    ("ask", "wanted"),
    [
        (rates, [[0.0, pytest.approx(0.1), pytest.approx(0.2)], [0.5, 0.75, 1.0]]),
        (computed, [-9, 3, [[3, 0], [4, 1], [5, 2]]]),
        (of_a_shard, [1.0, 1.0, 1.0]),
    ],
)
def test_values_that_follow_from_numbers_are_known(ask: Callable[[DeviceMesh], Any], wanted: Any, device: str) -> None:
    assert _answer(ask, device) == wanted


def reduced(mesh: DeviceMesh) -> Any:
    n = torch.tensor(3)
    dist.all_reduce(n)
    return n.item()


def gathered(mesh: DeviceMesh) -> Any:
    """Into a tensor whose values were known, and of which there is a view."""
    out = torch.zeros(9)
    part = out[3:]
    dist.all_gather_into_tensor(out, torch.zeros(3))
    return part.tolist()


def broadcast(mesh: DeviceMesh) -> Any:
    n = torch.zeros(3)
    dist.broadcast(n, 0)
    return n.tolist()


def summed(mesh: DeviceMesh) -> Any:
    return sc.distribute_tensor(torch.ones(7), mesh, [Shard(0)]).sum().item()


def written(mesh: DeviceMesh) -> Any:
    x = torch.ones(4)
    part = x[1:]
    x.add_(torch.randn(4))
    return part.tolist()


def drawn(mesh: DeviceMesh) -> Any:
    return nn.Dropout()(torch.ones(3)).tolist()


def many(mesh: DeviceMesh) -> Any:
    return torch.ones(LIMIT + 1).tolist()


@pytest.mark.parametrize("ask", [reduced, gathered, broadcast, summed, written, drawn, many])
def test_other_values_are_refused(ask: Callable[[DeviceMesh], Any]) -> None:
    with pytest.raises(OfflineError, match="asks for the value of a tensor"):
        _answer(ask, "cpu")


def _answer(ask: Callable[[DeviceMesh], Any], device: str) -> Any:
    """What a rank of three is told while it builds a model."""
    told = []

    def double(x: Tensor) -> Tensor:
        return x * 2

    def build(mesh: DeviceMesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        told.append(ask(mesh))
        return double, (sc.distribute_tensor(torch.ones(7), mesh, [Shard(0)], sharding_shapes={0: [3, 0, 4]}),)

    with offline_world(3, device=device) as world:
        trace_step(world, build, backward=False)
    return told[0]
