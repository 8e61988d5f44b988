"""Convolutions over an image whose rows are in uneven shards: halos, against gathering the image and one rank."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from benchmarks.common import Call, Times, compare_over_rows, median_times, rising_shards

CHANNELS, COLUMNS, LAYERS = 32, 128, 3


def measure(ranks: int, rows: int, rounds: int) -> Times:
    """Median seconds of a forward and backward pass, compiled; shards rise evenly from rank to rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(LAYERS)])
    image = torch.randn(1, CHANNELS, rows, COLUMNS)
    sizes = rising_shards(rows, ranks)
    partition = sc.distribute_tensor(image, mesh, [Shard(2)], sharding_shapes={0: sizes}).requires_grad_()
    whole = image.requires_grad_()

    def step(compiled: Call, x: Tensor) -> None:
        x.grad = None
        compiled(x).square().sum().backward()  # type: ignore[call-arg, attr-defined]

    def gathered(x: sc.ShardTensor) -> Tensor:
        return model(x.redistribute(placements=[Replicate()]))  # type: ignore[no-any-return]

    def compiled(function: Call) -> Call:
        return torch.compile(function, fullgraph=True, backend="shardcompile")

    calls = {
        "halos": partial(step, compiled(model), partition),
        "gathered": partial(step, compiled(gathered), partition),
        "one rank": partial(step, compiled(model), whole),
    }
    return median_times(calls, rounds)


def main() -> None:
    title = (
        f"{LAYERS} convolutions of {CHANNELS} channels, {COLUMNS} columns, forward and backward: time with halos, "
        "and other ways with the ratio to them"
    )
    compare_over_rows(__doc__, measure, (128, 512), title, ("with halos", "gathered", "whole on one rank"))


if __name__ == "__main__":
    main()
