"""Tests on real ranks: a pytest plugin with a pool of rank processes that outlive a test.

    import pytest
    import torch
    import torch.distributed as dist

    from shardcompile.testing import rank, world_size

    @pytest.mark.ranks(2, 3)
    def test_sum_of_ranks():
        x = torch.tensor([rank()])
        dist.all_reduce(x)
        assert x.item() == sum(range(world_size()))

The function above runs on two ranks, then on three: `test_sum_of_ranks[ranks=2]` and `[ranks=3]`.
`shardcompile.testing.plugin` documents the arguments of the mark, the fixtures that reach the ranks, and the
reset between tests.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardcompile.testing.current import mesh as mesh
    from shardcompile.testing.current import rank as rank
    from shardcompile.testing.current import world_size as world_size
    from shardcompile.testing.local_ranks import LocalRanks as LocalRanks
    from shardcompile.testing.one_process import once as once
    from shardcompile.testing.rule_check import RuleReport as RuleReport
    from shardcompile.testing.rule_check import check_rule as check_rule
    from shardcompile.testing.same_collectives import same_collectives_on_every_rank as same_collectives_on_every_rank
    from shardcompile.testing.single_device import assert_matches_single_device as assert_matches_single_device
    from shardcompile.testing.snapshot import assert_graph as assert_graph

_MODULES = {
    "LocalRanks": "local_ranks",
    "RuleReport": "rule_check",
    "assert_graph": "snapshot",
    "assert_matches_single_device": "single_device",
    "check_rule": "rule_check",
    "mesh": "current",
    "once": "one_process",
    "rank": "current",
    "same_collectives_on_every_rank": "same_collectives",
    "world_size": "current",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a module at the first use of its names. pytest loads this package for its plugin, without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
