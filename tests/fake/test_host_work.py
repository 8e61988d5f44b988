"""Python that a rank runs for a step: with partitions that it has met, it must not grow with the number of ranks.

On the fake process group, which sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import shardcompile as sc
from examples.poisson.model import PointTransformer
from shardcompile import compat
from shardcompile.collectives.pending import wait
from shardcompile.inspect.offline import offline_world
from shardcompile.sharding import Partition
from tests.support.work import lines

ops = torch.ops.shardcompile


def _work(world_size: int) -> dict[str, int]:
    """The lines of Python of each op when it is called with the same partition again."""
    rank = world_size // 2
    sizes = [5 + r % 3 for r in range(world_size)]
    total, own = sum(sizes), sizes[rank]
    with offline_world(world_size, rank=rank, device="cpu") as world, torch.no_grad():
        group = compat.group_name_of(world.mesh, 0)
        key = Partition.of_sizes([0], [world_size], sizes).trace.key
        partition, window = ([], key, []), [total, 1, 1, 1, 1]
        rows, with_halo = torch.ones(own, 2), torch.ones(own + 2, 2)
        counts = torch.ones(world_size, world_size, dtype=torch.int64)
        numbers = [total, 1, 1, 1, 1, 0]
        calls: dict[str, Callable[[], Tensor]] = {
            "derive_partition": lambda: ops.derive_partition("window", numbers, [1, key, 1, 1], [world_size], group),
            "fetch_ranges": lambda: ops.fetch_ranges(
                rows, 0, total, own + 2, *partition, *partition, window, 0.0, group
            ),
            "return_ranges": lambda: ops.return_ranges(
                with_halo, 0, total, own, *partition, *partition, window, 0.0, group
            ),
            "fetch_around": lambda: ops.fetch_around(rows, 0, 1, 1, total, own + 2, *partition, group),
            "return_around": lambda: ops.return_around(with_halo, 0, 1, 1, total, own, *partition, group),
            "take_shard": lambda: ops.take_shard(torch.ones(total, 2), 0, own, *partition, group),
            "gather_counts": lambda: ops.gather_counts(counts[rank], "counts are not negative", group),
        }
        found = {}
        for name, call in calls.items():
            results: list[Tensor] = [call()]
            found[name] = lines(lambda: results.append(call()))  # noqa: B023
            for result in results:
                wait(result)
        return found


def test_ops_that_repeat_do_no_more_work_among_more_ranks() -> None:
    few, many = _work(8), _work(256)
    assert all(few.values()), few  # each runs Python
    assert many == few


def _step(model: nn.Module, shape: Sequence[int], dim: int, world_size: int) -> int:
    """The lines of Python of an eager training step that repeats."""
    rank, sizes = world_size // 2, [4 + 2 * (r % 3) for r in range(world_size)]
    with offline_world(world_size, rank=rank, device="cpu") as world:
        local = torch.randn(*shape[:dim], sizes[rank], *shape[dim + 1 :])
        x = sc.ShardTensor.from_local(local, world.mesh, [Shard(dim)], {0: sizes})

        def step() -> None:
            model(x).square().mean().backward()

        step()
        step()
        return lines(step)


@pytest.mark.parametrize("work", ["points", "images"])
def test_eager_steps_do_no_more_work_among_more_ranks(work: str) -> None:
    torch.manual_seed(0)
    if work == "points":
        model: nn.Module = PointTransformer(channels=16, heads=2, slices=4, layers=1)
        shape, dim = (0, 5), 0
    else:
        convolutions = [nn.Conv2d(2, 2, 3, padding=1), nn.ConvTranspose2d(2, 2, 2, stride=2)]
        model, shape, dim = nn.Sequential(convolutions[0], nn.ReLU(), nn.MaxPool2d(2), convolutions[1]), (1, 2, 0, 6), 2
    few, many = (_step(model, shape, dim, ranks) for ranks in (8, 256))
    assert few > 1000  # the step was seen
    assert many < 1.02 * few
