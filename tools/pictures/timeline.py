"""Draws the predicted timeline of eight GPUs, docs/timeline.svg: ``python -m tools.pictures.timeline``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.inspect import GraphReport
from shardcompile.passes import default_passes
from tools.pictures.svg import Panel, write

SIZES = [600, 100, 900, 50, 250, 0, 100, 48]
"""Rows of each weight on each rank."""

WIDTH, LEFT, LANE = 480, 108, 22


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


def draw(panel: Panel, top: float, graphs: list[GraphReport], title: str, longest: float) -> None:
    """Draws both graphs of a step, one after the other: a lane for compute, one for communication."""
    total, exposed = sum(g.total for g in graphs), sum(g.exposed for g in graphs)
    scale = (WIDTH - LEFT - 2) / longest
    panel.text(0, top + 8, f"{title}: {1e6 * total:.0f} us, of which {1e6 * exposed:.0f} us waiting", size=13)
    for lane, name in enumerate(("compute", "communication")):
        panel.text(0, top + 32 + (LANE + 4) * lane, name, "quiet", size=13)
    start = 0.0
    for graph in graphs:
        for span in graph.spans:
            lane = int(span.stream != "compute")
            x, width = LEFT + scale * (start + span.start), scale * (span.end - span.start)
            colour = "comm" if lane else "busy"
            panel.rect(x, top + 21 + (LANE + 4) * lane, max(width - 0.4, 0.4), LANE, colour, rounded=0)
        start += graph.total
    x = LEFT + scale * graphs[0].total
    panel.line([(x, top + 18), (x, top + 24 + 2 * LANE)], "ink", dash="2 3")


def panels() -> dict[str, Panel]:
    """The picture by the name of its file."""
    everything = [p.name for p in default_passes()]
    before, after = (
        sc.explain(build, world_size=len(SIZES), device="cuda", stages=[], off=off).graphs for off in (everything, [])
    )
    longest = sum(g.total for g in before)
    panel = Panel(206, WIDTH)
    draw(panel, 0, before, "without passes", longest)
    draw(panel, 92, after, "with passes", longest)
    panel.text(LEFT, 188, "forward", "quiet", size=13)
    panel.text(
        LEFT + (WIDTH - LEFT) * after[0].total / longest + 6, 188, "backward (from the dotted line)", "quiet", size=13
    )
    return {"timeline": panel}


if __name__ == "__main__":
    write(panels())
