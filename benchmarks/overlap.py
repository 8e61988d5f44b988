"""A compiled training step with weights in uneven shards, with the passes and without, on real ranks.

The width is chosen so that a layer's products take about as long as the gather of its weight; then there is most to
gain. Also without the buckets, and without the order held, to see what each does.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from benchmarks.common import Call, Times, duration, median_times, print_table, ratio, run_ranks
from shardcompile.passes import default_passes, inductor_options

BAR = 1.0
_BUCKETS = ["bucket_all_gathers", "bucket_reduce_scatters", "bucket_all_reduces", "bucket_all_to_alls", "bucket_ranges"]
_ORDER = ["schedule_overlap", "add_control_dependencies"]


def weights_of(layers: int, width: int, imbalance: int) -> list[nn.Parameter]:
    """One square weight for each layer; one rank holds `imbalance` times what the others do."""
    ranks = dist.get_world_size()
    small = width // (imbalance + ranks - 1)
    sizes = [width - small * (ranks - 1), *[small] * (ranks - 1)]
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    full = [torch.randn(width, width) / width**0.5 for _ in range(layers)]
    return [nn.Parameter(sc.distribute_tensor(w, mesh, [Shard(0)], sharding_shapes={0: sizes})) for w in full]


def loss_of(x: Any, *weights: Any) -> Tensor:
    """Layers one after the other, each weight gathered where it is used."""
    for w in weights:
        x = torch.tanh(x @ w.full_tensor().mT)
    return x.square().mean()


def _step(options: dict[str, Any], x: Any, weights: list[nn.Parameter]) -> Call:
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, options=options)

    def step() -> None:
        for w in weights:
            w.grad = None
        compiled(x, *weights).backward()

    step()
    return step


def measure(layers: int, width: int, rows: int, imbalance: int, rounds: int) -> Times:
    """All times, on one rank."""
    weights, ranks = weights_of(layers, width, imbalance), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    sizes = [rows] * ranks
    x = sc.distribute_tensor(torch.randn(rows * ranks, width), mesh, [Shard(0)], sharding_shapes={0: sizes})
    names = [p.name for p in default_passes()]
    calls = {
        "off": _step(inductor_options(off=names), x, weights),
        "on": _step(inductor_options(), x, weights),
        "no buckets": _step(inductor_options(off=_BUCKETS), x, weights),
        "no order": _step(inductor_options(off=_ORDER), x, weights),
    }
    return median_times(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rows = []
    for width, batch in ((128, 64), (512, 512), (1024, 256)):
        for imbalance in (1, 9):
            arguments = (options.layers, width, batch, imbalance, options.rounds)
            times = run_ranks(measure, options.ranks, *arguments)
            off = times["off"]
            ratios = [ratio(times["on"], off, BAR), ratio(times["no buckets"], off), ratio(times["no order"], off)]
            rows.append([f"{width} wide, {batch} rows", f"1:{imbalance}", duration(off), *ratios])
    columns = ["layers", "shards", "passes off", "on to off", "no buckets", "no order"]
    print_table(f"a step of {options.layers} layers, {options.ranks} ranks", columns, rows)


if __name__ == "__main__":
    main()
