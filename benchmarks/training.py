"""Schedules of training graphs by our passes and by Inductor's, against two bounds.

    python -m benchmarks.training [--traced | --written] [--layers N] [--worlds 64 256 1024] [--only NAME ...]
                                  [--held-out] [--no-inductor] [--json FILE]

Needs neither ranks nor a GPU: graphs are for CUDA, costs those of H100s, eight in a node. Traced graphs are those of
the models in `tests/support/scale_models.py` and `expert_models.py`, as `shardcompile.inspect.offline` gives them.
Written ones have Llama-3-8B's shape and 32 layers (`tests/support/llama.py`): weights in float32 over all ranks, cast
and gathered one by one (1-D); the same over the nodes, with tensor parallelism within each (2-D); weights in uneven
shards, log-normal, by our collectives (uneven).

Where data choose the experts of a token, times are those of a run in which all experts are chosen equally often. Our
passes assume that by themselves (`passes/cost/routes.py`); Inductor is told the sizes.

`bound` is what no order of the graph as it came can beat. `buckets` is what no order can beat whatever shares buckets:
all bytes, of uneven shards those of one rank, one latency for each kind of collective and group, and the longest path;
it is of the graph without what is sent twice or not needed. Ratios are bound to time: 1 is optimal. Inductor's overlap
scheduling is given the same prices and replayed in the same simulator, with its defaults and with the best of several
settings that keeps to our limit of memory.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph

from benchmarks import schedules
from benchmarks.common import duration, print_table
from shardcompile.inspect.offline import offline_world
from shardcompile.passes import Pipeline
from shardcompile.passes.cost.model import CostModel, GraphCosts
from shardcompile.passes.graph.collective import collectives
from shardcompile.passes.schedule.bounds import bucket_bound, lower_bound
from shardcompile.passes.schedule.simulator import simulate
from tests.support import expert_models, llama, scale_models, suite

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
        place = suite.Place(
            groups.ranks, 0, groups.weights, lambda e, i: suite.partition(e, ranks, "log-normal", i), "cuda"
        )
        for side, write in (("forward", llama.forward), ("backward", llama.backward)):
            yield side, write(place, shape, groups, kind == "uneven")


COLUMNS = [
    *["", "nodes", "collectives", "as it came", "bound", "buckets", "ours", "to bound", "to buckets", "memory"],
    *["CPU s", "Inductor", "ahead", "its memory", "at best", "which", "ahead", "its memory"],
]


def row(name: str, graph: Graph, inductor: bool, data_size: int | None = None) -> dict[str, Any]:
    """Schedules one graph in all ways.

    Args:
        name: of the graph.
        graph: any; it is not changed.
        inductor: whether Inductor schedules it, too.
        data_size: see `scale_models.with_data_sizes`.
    """
    ours = schedules.scheduled(graph)
    with scale_models.with_data_sizes(graph, data_size):
        return _row(name, graph, inductor, *ours)


def _row(name: str, graph: Graph, inductor: bool, ours: Graph, seconds: float) -> dict[str, Any]:
    prices = GraphCosts.of(graph, CostModel.of(graph))
    came = simulate(list(graph.nodes), prices)
    timeline = schedules.timeline(ours)
    found: dict[str, Any] = {
        "name": name,
        "nodes": len(graph.nodes),
        "collectives": (len(collectives(graph)), len(collectives(ours))),
        "came": came.total,
        "bound": lower_bound(graph, prices),
        "buckets": perfect(graph),
        "ours": timeline.total,
        "memory": timeline.peak_bytes / came.peak_bytes,
        "seconds": seconds,
    }
    if not inductor:
        return found
    default = schedules.inductor(graph)
    others = {"default": default, **schedules.inductors(graph, "", came)}
    times = {v: t for v, t in others.items() if t is not None}
    fits = [v for v, t in times.items() if t.peak_bytes <= schedules.MEMORY_BAR * came.peak_bytes] or list(times)
    if fits:
        best = min(fits, key=lambda v: times[v].total)
        found |= {"best": times[best].total, "which": best, "best memory": times[best].peak_bytes / came.peak_bytes}
    if default is not None:
        found |= {"default": default.total, "default memory": default.peak_bytes / came.peak_bytes}
    return found


def perfect(graph: Graph) -> float:
    """The bound with perfect buckets, of a graph without what is sent twice or not needed."""
    copy = suite.copied(graph)
    names = [p.name for p in Pipeline().passes]
    Pipeline(Pipeline().passes[: names.index("bucket_all_gathers")])(copy)
    bounds = [bucket_bound(g, GraphCosts.of(g, CostModel.of(g)), CostModel.of(g)) for g in (graph, copy)]
    return min(bounds)


def cells(found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    ours = found["ours"]
    shown = [found["name"], str(found["nodes"]), "{} > {}".format(*found["collectives"])]
    shown += [duration(found[k]) for k in ("came", "bound", "buckets", "ours")]
    shown += [f"{found[k] / ours:.3f}" for k in ("bound", "buckets")] + [f"{found['memory']:.3f}"]
    shown += [f"{found['seconds']:.1f}"]
    for key in ("default", "best"):
        if key not in found:
            shown += [""] * (3 if key == "default" else 4)
            continue
        shown += [duration(found[key])] + ([found["which"]] if key == "best" else [])
        shown += [f"{found[key] / ours:.3f}", f"{found[key + ' memory']:.3f}"]
    return shown


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows."""
    if not (options.traced or options.held_out):
        for kind in [k for k in ("1-D", "2-D", "uneven") if k in (options.only or [k])]:
            for ranks in options.worlds:
                for side, graph in graphs(ranks, kind, options.layers or 32):
                    yield row(f"{side} {ranks}, written {kind}", graph, not options.no_inductor)
    if options.written:
        return
    models = expert_models.models(options.layers, options.held_out)
    for name, model in (models if options.held_out else scale_models.models(options.layers) | models).items():
        if name not in (options.only or [name]):
            continue
        for ranks in options.worlds:
            with scale_models.traced(model, ranks) as both:
                for side, graph in zip(("forward", "backward"), both, strict=True):
                    if collectives(graph):
                        yield row(f"{side} {ranks}, {name}", graph, not options.no_inductor, model.data_size)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traced", action="store_true", help="traced graphs only")
    parser.add_argument("--written", action="store_true", help="written graphs only")
    parser.add_argument("--layers", type=int, help="at most so many; 32 of written graphs")
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--only", nargs="+", help="names of models, or 1-D, 2-D, uneven of written ones")
    parser.add_argument("--held-out", action="store_true", help="only the traced graphs that no pass may be tuned on")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--json", type=Path, help="a file to which each row is added as a line")
    options = parser.parse_args()
    logging.getLogger("torch._inductor.fx_passes.fsdp").addFilter(lambda record: False)
    torch.set_num_threads(1)
    rows = []
    for found in measured(options):
        rows.append(cells(found))
        print("  ".join(rows[-1]), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(found) + "\n")
    print_table("training graphs", COLUMNS, rows)


if __name__ == "__main__":
    main()
