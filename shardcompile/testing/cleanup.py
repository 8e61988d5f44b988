"""The reset of a rank between two tests."""

from __future__ import annotations

import gc
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def seed() -> None:
    """Seeds the random number generators, with the same seed for every test and rank."""
    random.seed(0)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # `manual_seed` would queue a call, with a traceback, for each absent device type
        torch.default_generator.manual_seed(0)


class Cleaner:
    """Frees the objects that a test left in this process."""

    def __init__(self) -> None:
        # A compilation makes millions of long-lived objects. The default threshold of 700 costs a tenth of its time.
        gc.set_threshold(50_000, 50, 100)
        self._modules = 0
        self._collect()

    def after_test(self) -> None:
        """Drops compiled code and process groups. Call it on all ranks, with no collective in flight."""
        forget_compiled()
        _destroy_groups_of_test()
        if "shardcompile.compat" in sys.modules:  # cached layouts refer to this test's meshes
            sys.modules["shardcompile.compat"].start_epoch()
        self._collect()

    def _collect(self) -> None:
        # A full collection visits every object of torch, which takes 0.1 s. It skips frozen objects, so freeze again
        # after a test that imported modules. The price: a reference cycle that exists then is never freed.
        gc.collect()
        if len(sys.modules) != self._modules:
            gc.freeze()
            self._modules = len(sys.modules)


def forget_compiled() -> None:
    """Drops compiled code."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _destroy_groups_of_test() -> None:
    # A gloo group owns threads and sockets: a 2-D mesh of four ranks has 10 descriptors and 6 threads.
    # torch 2.13 keeps every group in `_world.pg_map` until it is destroyed.
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
