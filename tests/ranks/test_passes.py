"""Compiled steps with the passes against those without: fewer collectives, the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from examples.poisson.model import PointTransformer, relative_l2
from examples.poisson.traffic import traffic_of
from shardcompile.passes import inductor_options
from shardcompile.testing import rank, world_size
from tests.support.after_passes import graph_after_passes

SIZES = {2: [9, 2], 3: [6, 0, 5]}


def gradients(net: nn.Module, how: dict[str, Any]) -> tuple[list[Tensor], int]:
    """The gradients of a compiled step, and how many collectives it took.

    Args:
        net: the model.
        how: arguments of `torch.compile`.
    """
    mesh, sizes = init_device_mesh("cpu", (world_size(),)), SIZES[world_size()]
    torch.manual_seed(0)
    points, values = torch.randn(11, 5, dtype=torch.float64), torch.randn(11, dtype=torch.float64)
    x, y = (
        sc.ShardTensor.from_local(full.split(sizes)[rank()].clone(), mesh, [Shard(0)], {0: sizes})
        for full in (points, values)
    )
    loss = torch.compile(lambda x, y: relative_l2(net(x), y), fullgraph=True, **how)
    loss(x, y).backward()  # compiles
    net.zero_grad()
    traffic = traffic_of(lambda: loss(x, y).backward(), world_size())
    return [p.grad for p in net.parameters()], traffic.collectives


@pytest.mark.ranks(3, timeout=300, processes=False)
def test_bucketed_reductions_give_the_same_gradients() -> None:
    same_gradients(lambda off: {"backend": graph_after_passes(off)}, 4)


@pytest.mark.nightly
@pytest.mark.ranks(2, 3, timeout=300)
def test_bucketed_reductions_through_inductor() -> None:
    same_gradients(lambda off: {"options": inductor_options(off=off)}, 4)


def same_gradients(how: Callable[[list[str]], dict[str, Any]], left: int) -> None:
    """Compare gradients with and without buckets.

    Args:
        how: arguments of `torch.compile` by the passes that are off.
        left: how many collectives there are with buckets: the slices, forward and backward; the loss; the gradients
            that are left.
    """
    torch.manual_seed(1)
    net = PointTransformer(channels=16, heads=2, slices=4, layers=1).double()
    one_by_one, many = gradients(copy.deepcopy(net), how(["bucket_all_reduces"]))
    bucketed, few = gradients(net, how([]))
    assert many > 20
    assert few == left
    tolerance = 0 if world_size() == 2 else 1e-12  # two terms have one sum, three may be added up in another order
    torch.testing.assert_close(bucketed, one_by_one, rtol=tolerance, atol=tolerance)
