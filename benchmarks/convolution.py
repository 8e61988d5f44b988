"""Convolutions over an image whose rows are in uneven blocks: halos, against gathering the image and one rank."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from common import Call, Times, duration, median_times, print_table, ratio, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc

CHANNELS, COLUMNS, LAYERS = 32, 128, 3


def measure(ranks: int, rows: int, rounds: int) -> Times:
    """Median seconds of a forward and backward pass, compiled; blocks rise evenly from rank to rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(LAYERS)])
    image = torch.randn(1, CHANNELS, rows, COLUMNS)
    ends = [rows * (r + 1) * (r + 2) // (ranks * (ranks + 1)) for r in range(ranks)]
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    cut = sc.distribute_tensor(image, mesh, [Shard(2)], sharding_shapes={0: sizes}).requires_grad_()
    whole = image.requires_grad_()

    def step(compiled: Call, x: Tensor) -> None:
        x.grad = None
        compiled(x).square().sum().backward()  # type: ignore[call-arg, attr-defined]

    def gathered(x: sc.ShardTensor) -> Tensor:
        return model(x.redistribute(placements=[Replicate()]))  # type: ignore[no-any-return]

    def compiled(function: Call) -> Call:
        return torch.compile(function, fullgraph=True, backend="shardcompile")

    calls = {
        "halos": partial(step, compiled(model), cut),
        "gathered": partial(step, compiled(gathered), cut),
        "one rank": partial(step, compiled(model), whole),
    }
    return median_times(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = []
    for ranks in options.ranks:
        for rows in options.rows:
            times = run_ranks(measure, ranks, ranks, rows, options.rounds)
            halos, others = times.pop("halos"), times
            against = [f"{duration(t)}  {ratio(halos, t)}" for t in others.values()]
            lines.append([str(ranks), str(rows), duration(halos), *against])
    print_table(
        f"{LAYERS} convolutions of {CHANNELS} channels, {COLUMNS} columns, forward and backward: time with halos, "
        "and other ways with the ratio to them",
        ["ranks", "rows", "with halos", "gathered", "whole on one rank"],
        lines,
    )


if __name__ == "__main__":
    main()
