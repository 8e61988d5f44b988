"""Draws docs/timeline.svg: the predicted timeline of eight GPUs, before and after the passes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.inspect import GraphReport
from shardcompile.passes import default_passes

matplotlib.use("svg")
from matplotlib import pyplot  # after the backend is chosen

SIZES = [600, 100, 900, 50, 250, 0, 100, 48]
"""Rows of each weight on each rank."""

COLOURS = {"compute": "#4c78a8", "communication": "#f58518", "waiting": "#d9d9d9"}


def build(mesh: DeviceMesh) -> tuple[Any, tuple[Tensor, ...]]:
    """Six layers, whose weights lie in uneven shards and are gathered where they are needed."""
    width, rows = sum(SIZES), 4096

    def shard(n: int, sizes: list[int]) -> sc.ShardTensor:
        local = torch.zeros(n, width, dtype=torch.bfloat16)
        return sc.ShardTensor.from_local(local, mesh, [Shard(0)], {0: sizes})

    weights = [shard(SIZES[mesh.get_rank()], SIZES).requires_grad_() for _ in range(6)]
    x = shard(rows, [rows] * len(SIZES))

    def step(x: Tensor, *weights: sc.ShardTensor) -> Tensor:
        for weight in weights:
            x = torch.relu(x @ weight.redistribute(placements=[Replicate()]))
        return x.float().square().mean()

    return step, (x, *weights)


def draw(axes: Any, graphs: list[GraphReport], title: str, seconds: float) -> None:
    """Both graphs of a step, one after the other: a lane for compute, one for communication."""
    shift, exposed = 0.0, sum(g.exposed for g in graphs)
    for graph in graphs:
        for span in graph.spans:
            lane = 0 if span.stream == "compute" else 1
            axes.barh(
                lane,
                1e6 * (span.end - span.start),
                left=1e6 * (shift + span.start),
                height=0.7,
                color=COLOURS["compute" if lane == 0 else "communication"],
                edgecolor="white",
                linewidth=0.4,
            )
        shift += graph.total
    axes.axvline(1e6 * graphs[0].total, color="#555555", linewidth=0.8, linestyle=":")
    axes.set_title(f"{title}: {1e6 * shift:.0f} us, {1e6 * exposed:.0f} us waiting", loc="left", fontsize=9)
    axes.set_yticks([0, 1], ["compute", "communication"], fontsize=8)
    axes.set_xlim(0, 1e6 * seconds)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "timeline.svg")
    options = parser.parse_args()
    everything = [p.name for p in default_passes()]
    before, after = (
        sc.explain(build, world_size=len(SIZES), device="cuda", stages=[], off=off).graphs for off in (everything, [])
    )
    longest = sum(g.total for g in before)
    matplotlib.rcParams["svg.hashsalt"] = "shardcompile"
    figure, axes = pyplot.subplots(2, 1, figsize=(9, 2.9), sharex=True)
    draw(axes[0], before, "without passes", longest)
    draw(axes[1], after, "with passes", longest)
    axes[1].set_xlabel("predicted microseconds; forward, then backward", fontsize=8)
    figure.tight_layout()
    figure.savefig(options.out, metadata={"Date": None})
    print(f"{options.out}: {options.out.stat().st_size} B")


if __name__ == "__main__":
    main()
