"""Ranks that are processes make one plan: the first one that asks makes it, and the others get it over the store."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from shardcompile.machines import A100, CPU_CORE, H100
from shardcompile.passes.cost.model import CostModel
from shardcompile.testing import rank, world_size
from tests.fake.test_plans import PROGRAMS, partitions_of, plan, scheduled
from tests.support import suite
from tests.support.tiers import often


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", often(list(PROGRAMS), 2))
def test_ranks_agree(name: str) -> None:
    """Five partitions of each program; each rank has the sizes of its shards."""
    for number in range(2000, 2005):
        place = suite.Place(world_size(), rank(), dist.group.WORLD.group_name, partitions_of(number, world_size()))
        graph = PROGRAMS[name](place, random.Random(number))
        scheduled(graph, CostModel([H100, A100, CPU_CORE][number % 3]))
        plans: list[list[str]] = [[]] * world_size()
        dist.all_gather_object(plans, plan(graph, world_size()))
        assert plans == [plans[0]] * world_size()
