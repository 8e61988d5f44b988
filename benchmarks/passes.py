"""Time of the passes, by pass and by size of the graph.

    python -m benchmarks.passes [--layers 12 25 50 100] [--only even uneven none softmax] [--rounds 1]

Needs neither ranks nor a GPU. Graphs are backward passes of Llama-3-8B's shape with so many layers
(`tests/support/llama.py`), weights over eight nodes and tensor parallelism within each: with torch's even collectives,
with weights in uneven shards, on one GPU without any collective; and softmaxes along a sharded dim that wait for one
another, twelve for each layer, which the passes merge. Seconds are of this process's CPU. `loop` is what ten million
additions in Python take at that time: machines, and the same one at other times, differ by factors. The bar is for a
loop of 0.5 s, to which the last column is scaled.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator

import torch
from torch.fx import Graph

from benchmarks.common import print_table
from shardcompile.inspect.offline import offline_world
from shardcompile.passes import Pipeline
from shardcompile.passes.pipeline import watching
from tests.support import llama, suite

aten = torch.ops.aten
NODES, PARTS = 8, 8
BARS = ((10_000, 5.0), (20_000, 11.0))
"""Seconds for so many nodes."""

_LOOP = compile("s = 0\nfor i in range(10_000_000):\n    s += i", "loop", "exec")


def loop() -> float:
    """Seconds of ten million additions."""
    start = time.perf_counter()
    exec(_LOOP, {})
    return time.perf_counter() - start


class Clock:
    """Tells how long each pass takes, the check of what it left included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def begun(self, graph: Graph) -> None:
        """A graph as it comes to the first pass."""
        self._start = time.process_time()

    def passed(self, graph: Graph, name: str) -> None:
        """The graph after a pass."""
        now = time.process_time()
        self.seconds[name], self._start = now - self._start, now

    def planned(self, plan: object) -> None:
        """What the passes decided."""

    def ended(self, graph: Graph) -> None:
        """The graph after the last pass."""


def transformer(layers: int, ranks: int, parts: int, uneven: bool, groups: list[str]) -> Graph:
    """The backward pass of the first rank."""
    place = suite.Place(ranks, 0, groups[0], lambda e, i: suite.partition(e, ranks, "log-normal", i), "cuda")
    partition = llama.Groups(groups[0], ranks, groups[1] if parts > 1 else "", parts)
    return llama.backward(place, llama.Shape(layers, 2 * 8192), partition, uneven)


def softmaxes(number: int, group: str) -> Graph:
    """Softmaxes along sharded rows, what each weights added to its rows."""
    w = suite.Writer(suite.Place(NODES * PARTS, 0, group, lambda e, i: [e], "cuda"))

    def reduced(x: torch.fx.Node, op: str) -> torch.fx.Node:
        flat = w.call(aten.view.default, x, [-1])
        done = w.done(torch.ops._c10d_functional.all_reduce.default, flat, op, group)
        return w.call(aten.view.default, done, list(x.meta["val"].shape))

    x = w.input(512, 8, dtype=torch.float32)
    for _ in range(number):
        terms = w.call(
            aten.exp.default, w.call(aten.sub.Tensor, x, reduced(w.call(aten.amax.default, x, [0], True), "max"))
        )
        total = reduced(w.call(aten.sum.dim_IntList, terms, [0], True), "sum")
        context = reduced(w.mm(w.t(w.call(aten.div.Tensor, terms, total)), x), "sum")
        x = w.call(aten.add.Tensor, x, w.mm(x, context))
    return w.output(x)


def graphs(layers: int, only: list[str]) -> Iterator[tuple[str, Graph]]:
    """Graphs by name, in the world that they are for."""
    with offline_world(NODES * PARTS, mesh_shape=(NODES, PARTS)) as world:
        groups = [world.mesh.get_group(dim).group_name for dim in range(2)]
        kinds: dict[str, Callable[[], Graph]] = {
            "even": lambda: transformer(layers, NODES, PARTS, False, groups),
            "uneven": lambda: transformer(layers, NODES, PARTS, True, groups),
            "none": lambda: transformer(layers, 1, 1, False, groups),
            "softmax": lambda: softmaxes(12 * layers, groups[0]),
        }
        for name in only:
            yield name, kinds[name]()


def timed(graph: Graph) -> dict[str, float]:
    """Seconds of each pass with a copy of a graph."""
    clock = Clock()
    copy = suite.copied(graph)
    with watching(clock):
        Pipeline()(copy)
    return clock.seconds


def row(name: str, graph: Graph, rounds: int) -> list[str]:
    """One line of the table."""
    nodes = len(graph.nodes)
    best, took, speed = {}, float("inf"), 1.0
    for _ in range(rounds):
        before = loop()
        seconds = timed(graph)
        pace = (before + loop()) / 2
        if sum(seconds.values()) / pace < took / speed:
            best, took, speed = seconds, sum(seconds.values()), pace
    largest = sorted(best.items(), key=lambda item: -item[1])[:4]
    scaled = 0.5 * took / speed
    bar = next((seconds for limit, seconds in BARS if 0.9 * limit <= nodes <= 1.1 * limit), None)
    met = "" if bar is None else f" {'ok' if scaled <= bar else 'OVER'} (bar {bar:g})"
    slowest = ", ".join(f"{pass_name} {seconds:.2f}" for pass_name, seconds in largest)
    return [name, str(nodes), slowest, f"{took:.2f}", f"{speed:.2f}", f"{1e6 * took / nodes:.0f}", f"{scaled:.2f}{met}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 25, 50, 100])
    parser.add_argument("--only", nargs="+", default=["even", "uneven", "none", "softmax"])
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    for layers in options.layers:
        for name, graph in graphs(layers, options.only):
            rows.append(row(f"{name}, {layers} layers", graph, options.rounds))
            print("  ".join(rows[-1]), flush=True)
    columns = ["", "nodes", "slowest passes", "CPU s", "loop s", "us per node", "CPU s at loop 0.5"]
    print_table("time of all passes", columns, rows)


if __name__ == "__main__":
    main()
