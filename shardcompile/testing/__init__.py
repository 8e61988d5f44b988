"""Tests on real ranks: a pytest plugin with a standing pool of processes.

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
`shardcompile.testing.plugin` says what the mark accepts, which fixtures reach the ranks, and what is reset
between tests.
"""

__all__ = ["rank", "world_size"]


def rank() -> int:
    """This process's rank in the default process group."""
    import torch.distributed as dist  # here, so that loading the pytest plugin does not load torch

    return dist.get_rank()


def world_size() -> int:
    """The number of ranks in the default process group."""
    import torch.distributed as dist

    return dist.get_world_size()
