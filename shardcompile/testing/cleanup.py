"""What a rank forgets between two tests."""

from __future__ import annotations

import gc
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def seed() -> None:
    """Give every test the same random numbers, on every rank."""
    random.seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # `manual_seed` notes for each kind of device that is not there, with a traceback, what to seed one day
        torch.default_generator.manual_seed(0)


class Cleaner:
    """Frees what a test left in this process."""

    def __init__(self) -> None:
        # To compile is to make millions of objects that stay: looking through them every 700 takes a tenth of the time.
        gc.set_threshold(50_000, 50, 100)
        self._modules = 0
        self._collect()

    def after_test(self) -> None:
        """Forget compiled code and process groups. Call it on all ranks, with no collective in flight."""
        forget_compiled()
        _destroy_groups_of_test()
        if "shardcompile.compat" in sys.modules:  # layouts of this test's meshes must not stand in for the next test's
            sys.modules["shardcompile.compat"].start_epoch()
        self._collect()

    def _collect(self) -> None:
        # A full collection walks every object of torch, 0.1 s. Frozen objects are not walked, so freeze again
        # whenever the test imported something. Price: a reference cycle that lives through that freeze stays.
        gc.collect()
        if len(sys.modules) != self._modules:
            gc.freeze()
            self._modules = len(sys.modules)


def forget_compiled() -> None:
    """Forget compiled code."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _destroy_groups_of_test() -> None:
    # A gloo group holds threads and sockets: each 2-D mesh of four ranks costs 10 descriptors and 6 threads.
    # torch 2.13 keeps every group in `_world.pg_map` until it is destroyed.
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
