"""The environment of the checks: the ranks, rank-invariant random values, and timing."""

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
class Environment:
    """The environment of the checks on this rank.

    Attributes:
        mesh: a mesh of one dim over all ranks.
        traced: the collectives that offline tracing finds, see `traced_collectives`.
    """

    mesh: DeviceMesh
    traced: list[tuple[str, int]]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The rank of this process or thread."""
        return self.mesh.get_local_rank()

    @property
    def device(self) -> str:
        """The device type."""
        return self.mesh.device_type

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors are on GPUs."""
        return self.device == "cuda"

    @property
    def one_process(self) -> bool:
        """Whether all ranks are threads of one process, which take turns and share compiled code."""
        return self.group.name() in BACKENDS.values()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks."""
        return self.mesh.get_group()

    def partitions(self, rows: int) -> list[list[int]]:
        """Returns the shard sizes of partitions that cover the edge cases, see `uneven_sizes`."""
        return [uneven_sizes(rows, self.ranks, style) for style in range(4)]

    def drawn(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        """Returns random values, which are the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * 3
        return (values > 0 if dtype is torch.bool else values.abs() if dtype is torch.uint8 else values).to(
            self.device, dtype
        )

    def partition(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> sc.ShardTensor:
        """Shards a full tensor."""
        return sc.distribute_tensor(x, self.mesh, [Shard(dim)], sharding_shapes={0: list(sizes)})

    def seconds(self, call: Callable[[], object], rounds: int = 5) -> float:
        """Returns the median over rounds of the time of a call on the slowest rank."""
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
        """Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()


def same(found: Tensor, wanted: Tensor, rtol: float | None = None, atol: float | None = None) -> None:
    """Raises unless two plain tensors are close, as `torch.testing.assert_close` does."""
    torch.testing.assert_close(found, wanted.to(found.device), rtol=rtol, atol=atol)
