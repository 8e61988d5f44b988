"""Schedules of the suite's graphs in the simulator: as they came, by our passes, by Inductor's, and the lower bound.

    python -m benchmarks.schedules [--quick] [--worlds 4 8 64 256] [--only fsdp experts traced times]

Needs neither ranks nor a GPU: graphs are for CUDA, costs those of an H100. Inductor's overlap scheduling is given the
very same costs, on the same graph, and on one that has torch's padded collectives in place of uneven ones, which are
the only ones that it can put into buckets. Of its schedules the fastest counts that keeps to our memory limit.

The bound is that of the graph as it came. Where latency decides, buckets may beat it, but not the bare bound, in which
collectives have none.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import Graph, Node

from benchmarks.common import duration, print_table
from shardcompile.inspect.offline import offline_world
from shardcompile.passes import Pipeline
from shardcompile.passes.cost.model import CostModel, GraphCosts
from shardcompile.passes.graph.collective import Collective, collectives
from shardcompile.passes.schedule.bounds import lower_bound
from shardcompile.passes.schedule.simulator import Timeline, simulate
from tests.support import suite

BOUND_BAR = 1.10
INDUCTOR_BAR = 1.00
MEMORY_BAR = 1.10
SECONDS_BAR = 5.0  # for 5,000 nodes

# ------------------------------------------------------------------------------------------ schedules


@dataclass(frozen=True)
class Result:
    """What became of a graph.

    Attributes:
        name: of the graph.
        came: as it was.
        bound: seconds that no order of it can beat.
        bare_bound: the same if collectives had no latency, which no buckets can beat either.
        ours: after our passes.
        inductor: by variant, after Inductor's.
        seconds: that our passes took.
        nodes: before our passes.
        started: number of collectives before and after our passes.
    """

    name: str
    came: Timeline
    bound: float
    bare_bound: float
    ours: Timeline
    inductor: dict[str, Timeline]
    seconds: float
    nodes: int
    started: tuple[int, int]

    @property
    def best(self) -> str:
        """The fastest of Inductor's variants, of those that keep to our memory limit; of all if none does."""
        fits = [v for v, t in self.inductor.items() if t.peak_bytes <= MEMORY_BAR * self.came.peak_bytes]
        return min(fits or self.inductor, key=lambda v: self.inductor[v].total)


def measure(name: str, graph: Graph, padded: Graph | None = None) -> Result:
    """Schedule a graph in all ways.

    Args:
        name: of the graph.
        graph: is left as it is.
        padded: the same program with torch's even collectives.
    """
    prices = GraphCosts.of(graph, CostModel.of(graph))
    came = simulate(list(graph.nodes), prices)
    ours, seconds = scheduled(graph)
    variants = inductors(graph, "", came)
    if padded is not None:
        variants |= inductors(padded, "padded ", came)
    return Result(
        name,
        came,
        lower_bound(graph, prices),
        lower_bound(graph, _without_latency(graph, prices)),
        timeline(ours),
        variants,
        seconds,
        len(graph.nodes),
        (len(collectives(graph)), len(collectives(ours))),
    )


def _without_latency(graph: Graph, prices: GraphCosts) -> GraphCosts:
    model, seconds = CostModel.of(graph), dict(prices.seconds)
    for node, group in prices.group.items():
        seconds[node] = max(seconds[node] - model.link(group).latency(model.group_size(group) or 1), 0.0)
    return dataclasses.replace(prices, seconds=seconds)


def timeline(graph: Graph) -> Timeline:
    """A graph in its own order."""
    return simulate(list(graph.nodes), GraphCosts.of(graph, CostModel.of(graph)))


def scheduled(graph: Graph) -> tuple[Graph, float]:
    """A copy of a graph after our passes, and the CPU seconds that they took."""
    copy = suite.copied(graph)
    *passes, hold = Pipeline().passes
    assert hold.name == "add_control_dependencies", "the last one holds Inductor to the order, and hides costs"
    start = time.process_time()
    Pipeline(passes)(copy)
    seconds = time.process_time() - start
    held = suite.copied(copy)
    start = time.process_time()
    hold(held)
    return copy, seconds + time.process_time() - start


def inductors(graph: Graph, name: str, came: Timeline) -> dict[str, Timeline]:
    """Inductor's schedules of a graph: of its order alone, and with its buckets.

    It may take a gigabyte more than the graph did, by default. Where that is beyond our limit, it is given this one;
    where it kept below, too.
    """
    found: dict[str, Timeline] = {}
    limit = {"max_memory_increase_gb": None, "max_memory_increase_ratio": MEMORY_BAR - 1}
    for variant, buckets in (("order", False), ("buckets", True)):
        for limited in ({}, limit):
            result = inductor(graph, collective_bucketing=buckets, **limited)
            if result is not None:
                found[name + variant + (", limited" if limited else "")] = result
    return found


def inductor(graph: Graph, **options: Any) -> Timeline | None:
    """One schedule of Inductor's; None where it fails, as it does when its buckets close a circle.

    Args:
        graph: is left as it is.
        options: in place of its defaults.
    """
    copy = suite.copied(graph)
    assert copy.owning_module is not None
    given: dict[str, Any] = {
        "compute_estimator": "analytical",
        "custom_runtime_estimation": _Estimate(copy),
        **options,
    }
    # It asks for the GPU's rates although it is given all costs.
    with mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0):
        try:
            overlap_scheduling.schedule_overlap_bucketing(copy.owning_module, **given)
        except (RuntimeError, AssertionError) as error:
            print(f"Inductor's overlap scheduling fails: {str(error)[:90]}", flush=True)
            return None
    return timeline(copy)


class _Estimate:
    """Our costs as Inductor asks for them: in milliseconds, with a size of 0 for the latency alone."""

    def __init__(self, graph: Graph) -> None:
        self.model = CostModel.of(graph)
        self.seconds = dict(GraphCosts.of(graph, self.model).seconds)

    def __call__(self, node: Node, size: int | None) -> float:
        c = Collective.of(node)
        if c is not None and size == 0:
            n = self.model.group_size(c.group_name)
            assert n is not None
            return 1e3 * self.model.link(c.group_name).latency(n)
        if node not in self.seconds:  # made by a bucket
            price = self.model.compute_seconds if c is None else self.model.collective_seconds
            self.seconds[node] = price(node if c is None else c)  # type: ignore[operator]
        return 1e3 * self.seconds[node]


# ---------------------------------------------------------------------------------------------- graphs


def written(ranks: int, group: str, imbalance: str, layers: Sequence[int]) -> Iterator[Result]:
    """Graphs that are written down."""

    def partitions(dim_size: int, number: int) -> list[int]:
        return suite.partition(dim_size, ranks, imbalance, number)

    place = suite.Place(ranks, 0, group, partitions, "cuda")
    padded = suite.Place(ranks, 0, group, partitions, "cuda", padded=True)
    for n in layers:
        size = suite.Size(n, tokens=suite.balanced_tokens(ranks, partitions))
        for name, write in (("forward", suite.fsdp_forward), ("backward", suite.fsdp_backward)):
            # Torch's padding takes slices by the number of ranks; with many the graphs get too large to wait for.
            other = write(padded, size) if n * ranks <= 64 else None
            yield measure(f"{n} layers sharded, {name}", write(place, size), other)


def exchanged(ranks: int, group: str, imbalance: str) -> Iterator[Result]:
    """Experts, and images whose convolutions fetch rows."""
    place = suite.Place(ranks, 0, group, lambda e, i: suite.partition(e, ranks, imbalance, i), "cuda")
    yield measure("experts, forward", suite.experts_forward(place, suite.Experts()))
    yield measure("experts, backward", suite.experts_backward(place, suite.Experts()))
    yield measure("u-net with halos", suite.unet_forward(place, suite.Images()))


def captured(ranks: int, imbalance: str, world: Any) -> Iterator[Result]:
    """Graphs that are traced."""
    for build in (suite.point_transformer, suite.demo_step, suite.unet, suite.fsdp_module):
        graphs = suite.traced(world, build(lambda rows, n: suite.partition(rows, n, imbalance)))
        for side, graph in zip(("forward", "backward"), graphs, strict=False):
            if collectives(graph):  # with a few ranks some have gathered all in the forward pass
                yield measure(f"{build.__name__}, {side}", graph)


def run(worlds: Sequence[int], only: Sequence[str], quick: bool) -> list[Result]:
    """Measure the suite, a table for each world size and partition."""
    found: list[Result] = []
    imbalances = suite.IMBALANCES[:3:2] if quick else suite.IMBALANCES
    for ranks in worlds:
        with offline_world(ranks) as world:
            group = world.mesh.get_group().group_name
            for imbalance in imbalances:
                results: list[Result] = []
                if "fsdp" in only:
                    results += written(ranks, group, imbalance, [8] if quick else [8, 32])
                if "experts" in only:
                    results += exchanged(ranks, group, imbalance)
                # Their shards are symbols, so that partitions count by their hints only.
                if "traced" in only and imbalance in ("even", "1:9"):
                    results += captured(ranks, imbalance, world)
                report(f"{ranks} ranks, {imbalance}", results)
                found += results
    return found


# ---------------------------------------------------------------------------------------------- tables

COLUMNS = [
    *["", "nodes", "collectives", "as it came", "bound", "ours", "to bound", "to bare", "exposed", "memory"],
    *["Inductor", "which", "ours to it", "its memory"],
]


def report(title: str, results: Sequence[Result]) -> None:
    """Print a table."""
    if results:
        print_table(title, COLUMNS, [_row(r) for r in results])


def _row(r: Result) -> list[str]:
    best = r.best
    return [
        r.name,
        str(r.nodes),
        "{} > {}".format(*r.started),
        duration(r.came.total),
        duration(r.bound),
        duration(r.ours.total),
        _mark(r.ours.total / r.bound, BOUND_BAR),
        f"{r.ours.total / r.bare_bound:.3f}",
        duration(r.ours.exposed),
        _mark(r.ours.peak_bytes / r.came.peak_bytes, MEMORY_BAR),
        duration(r.inductor[best].total),
        best,
        _mark(r.ours.total / r.inductor[best].total, INDUCTOR_BAR),
        f"{r.inductor[best].peak_bytes / r.came.peak_bytes:.3f}",
    ]


def _mark(ratio: float, bar: float) -> str:
    return f"{ratio:.3f}{' ' if ratio <= bar + 5e-4 else '!'}"


def summary(results: Sequence[Result]) -> None:
    """Print what misses its bar, and the worst of all."""
    bars: list[tuple[str, float, Callable[[Result], float]]] = [
        ("total to bound", BOUND_BAR, lambda r: r.ours.total / r.bound),
        ("total to Inductor's best", INDUCTOR_BAR, lambda r: r.ours.total / r.inductor[r.best].total),
        ("peak memory", MEMORY_BAR, lambda r: r.ours.peak_bytes / r.came.peak_bytes),
    ]
    rows = []
    for name, bar, ratio in bars:
        ratios = sorted(map(ratio, results))
        over = sum(x > bar + 5e-4 for x in ratios)
        rows.append([name, f"{bar:.2f}", f"{ratios[len(ratios) // 2]:.3f}", f"{ratios[-1]:.3f}", f"{over}"])
    print_table(f"{len(results)} graphs; ! misses the bar", ["", "bar", "median", "worst", "over"], rows)


# ------------------------------------------------------------------------------------- time of the passes


def times(targets: Sequence[int]) -> None:
    """CPU seconds of the whole pipeline by the number of nodes."""
    rows = []
    with offline_world(8) as world:
        group = world.mesh.get_group().group_name
        place = suite.Place(8, 0, group, lambda e, i: suite.partition(e, 8, "log-normal", i), "cuda")
        for target in targets:
            graph = suite.fsdp_backward(place, suite.Size(max(round(target / 96), 1), tokens=6144))
            n = len(graph.nodes)
            seconds = min(scheduled(graph)[1] for _ in range(3))
            bar = f" (bar {SECONDS_BAR:g} s)" if target == 5000 else ""
            rows.append([f"{n}", f"{seconds:.2f} s{bar}", f"{1e6 * seconds / (n * math.log2(n)):.2f} us"])
    print_table("time of all passes", ["nodes", "CPU seconds", "by n log2 n"], rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer partitions and layers")
    parser.add_argument("--worlds", type=int, nargs="+", default=[4, 8, 64, 256])
    parser.add_argument("--only", nargs="+", default=["fsdp", "experts", "traced", "times"])
    options = parser.parse_args()
    logging.getLogger("torch._inductor.fx_passes.fsdp").addFilter(lambda record: False)
    torch.set_num_threads(1)
    if results := run(options.worlds, options.only, options.quick):
        summary(results)
    if "times" in options.only:
        times([1000, 2000, 5000, 10000])


if __name__ == "__main__":
    main()
