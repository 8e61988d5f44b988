"""Schedules of training graphs of Llama-3-8B's shape, by our passes and by Inductor's, against two bounds.

    python benchmarks/training.py [--layers 32] [--worlds 64 256 1024] [--only 1-D 2-D uneven] [--no-inductor]

Needs neither ranks nor a GPU: graphs are for CUDA, costs those of H100s, eight in a node. The graphs are written down
(`tests/llama.py`), not traced: weights in float32 over all ranks, cast and gathered one by one (1-D); the same over the
nodes, with tensor parallelism within each (2-D); weights in uneven blocks, log-normal, by our collectives (uneven).

`bound` is what no order of the graph as it came can beat. `buckets` is what no order can beat whatever shares buckets:
all bytes, one latency for each kind of collective and group, and the longest path. Ratios are bound to time: 1 is
optimal. Inductor's overlap scheduling is given the same prices, replayed in the same simulator, and counts with the
best of its settings that keeps to our limit of memory.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator

import schedules  # finds the suite
import torch
from common import duration, print_table
from torch.fx import Graph

import llama  # isort: skip
import suite  # isort: skip

from shardcompile.offline import offline_world
from shardcompile.passes.collective import collectives
from shardcompile.passes.cost import CostModel, Prices
from shardcompile.passes.simulator import bucket_bound, lower_bound, simulate

PARTS = 8


def graphs(ranks: int, kind: str, layers: int) -> Iterator[tuple[str, Graph]]:
    """The forward and the backward graph of the first rank, in the world that they are for."""
    with offline_world(ranks, mesh_shape=(ranks // PARTS, PARTS) if kind == "2-D" else (ranks,)) as world:
        names = [world.mesh.get_group(dim).group_name for dim in range(world.mesh.ndim)]
        words = -(-llama.Shape.words // ranks) * ranks  # padded, so that even gathers of all sizes fit
        if kind == "2-D":
            groups = llama.Groups(names[0], ranks // PARTS, names[1], PARTS)
            shape = llama.Shape(layers, 2 * 8192, words=words)
        else:
            groups, shape = llama.Groups(names[0], ranks), llama.Shape(layers, words=words)
        place = suite.Place(groups.ranks, 0, groups.weights, lambda e, i: suite.cut(e, ranks, "log-normal", i), "cuda")
        for side, write in (("forward", llama.forward), ("backward", llama.backward)):
            yield side, write(place, shape, groups, kind == "uneven")


COLUMNS = [
    *[
        "",
        "nodes",
        "collectives",
        "as it came",
        "bound",
        "buckets",
        "ours",
        "to bound",
        "to buckets",
        "memory",
        "CPU s",
    ],
    *["CPU s", "Inductor", "which", "ours ahead", "its memory"],
]


def row(name: str, graph: Graph, inductor: bool) -> list[str]:
    """Schedule one graph in all ways."""
    prices = Prices.of(graph, CostModel.of(graph))
    came = simulate(list(graph.nodes), prices)
    bounds = lower_bound(graph, prices), bucket_bound(graph, prices)
    ours, seconds = schedules.scheduled(graph)
    timeline = schedules.timeline(ours)
    cells = [name, str(len(graph.nodes)), f"{len(collectives(graph))} > {len(collectives(ours))}", duration(came.total)]
    cells += [*map(duration, bounds), duration(timeline.total), *(f"{b / timeline.total:.3f}" for b in bounds)]
    cells += [f"{timeline.peak_bytes / came.peak_bytes:.3f}", f"{seconds:.1f}"]
    found = schedules.inductors(graph, "", came) if inductor else {}
    fits = [v for v, t in found.items() if t.peak_bytes <= schedules.MEMORY_BAR * came.peak_bytes] or list(found)
    if not fits:
        return [*cells, "", "", "", ""]
    best = min(fits, key=lambda v: found[v].total)
    memory = found[best].peak_bytes / came.peak_bytes
    return [*cells, duration(found[best].total), best, f"{found[best].total / timeline.total:.3f}", f"{memory:.3f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--only", nargs="+", default=["1-D", "2-D", "uneven"])
    parser.add_argument("--no-inductor", action="store_true")
    options = parser.parse_args()
    logging.getLogger("torch._inductor.fx_passes.fsdp").addFilter(lambda record: False)
    torch.set_num_threads(1)
    rows = []
    for kind in options.only:
        for ranks in options.worlds:
            for side, graph in graphs(ranks, kind, options.layers):
                rows.append(row(f"{side} {ranks}, {kind}", graph, not options.no_inductor))
                print("  ".join(rows[-1]), flush=True)
    print_table(f"{options.layers} layers", COLUMNS, rows)


if __name__ == "__main__":
    main()
