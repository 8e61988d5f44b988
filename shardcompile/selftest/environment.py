"""Where the checks run: the ranks, the values that they share, and the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing.arrange import uneven_sizes
from shardcompile.testing.thread_group import BACKENDS


@dataclass(frozen=True)
class Here:
    """Where the checks run.

    Attributes:
        mesh: over all ranks, one dim.
        traced: see `traced_collectives`.
    """

    mesh: DeviceMesh
    traced: list[tuple[str, int]]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This one."""
        return self.mesh.get_local_rank()

    @property
    def device(self) -> str:
        """Type of the device."""
        return self.mesh.device_type

    @property
    def on_gpu(self) -> bool:
        """Whether there are GPUs."""
        return self.device == "cuda"

    @property
    def one_process(self) -> bool:
        """Whether all ranks are threads of one process: they take turns, and share what is compiled."""
        return self.group.name() in BACKENDS.values()

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""
        return self.mesh.get_group()

    def partitions(self, rows: int) -> list[list[int]]:
        """Shard sizes that are worth a check."""
        return [uneven_sizes(rows, self.ranks, style) for style in range(4)]

    def drawn(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        """The same numbers on every rank."""
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(*shape, generator=generator, dtype=torch.float64) * 3
        return (numbers > 0 if dtype is torch.bool else numbers.abs() if dtype is torch.uint8 else numbers).to(
            self.device, dtype
        )

    def partition(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> sc.ShardTensor:
        """A full value as a sharded tensor."""
        return sc.distribute_tensor(x, self.mesh, [Shard(dim)], sharding_shapes={0: list(sizes)})

    def seconds(self, call: Callable[[], object], rounds: int = 5) -> float:
        """Median time of a call on the slowest rank."""
        call()
        times = []
        for _ in range(rounds):
            self.finish()
            dist.barrier()
            start = time.perf_counter()
            call()
            self.finish()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def finish(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


def same(found: Tensor, wanted: Tensor, rtol: float | None = None, atol: float | None = None) -> None:
    """Raise unless two plain tensors are equal, or near each other by `torch.testing.assert_close`."""
    torch.testing.assert_close(found, wanted.to(found.device), rtol=rtol, atol=atol)
