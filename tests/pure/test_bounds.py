"""No schedule beats the bound, whichever collectives share buckets: all buckets and all orders of small graphs."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.fx import Graph, Node

from shardcompile.machines import H100, INFINIBAND_NDR
from shardcompile.passes import BucketAllGathers, BucketAllToAlls, BucketReduceScatters
from shardcompile.passes.bucket.buckets import Bucketing
from shardcompile.passes.cost.model import CostModel, GraphCosts
from shardcompile.passes.graph.collective import collectives
from shardcompile.passes.graph.dependencies import Closure
from shardcompile.passes.schedule.bounds import bucket_bound, lower_bound
from shardcompile.passes.schedule.edges import Edges
from shardcompile.passes.schedule.simulator import Streams
from shardcompile.passes.schedule.tasks import START, WAIT, Tasks
from tests.support import lockstep, suite
from tests.support.lockstep import world_of

MODEL = CostModel(H100, group_links={"g": INFINIBAND_NDR})
_c10d = torch.ops._c10d_functional
KINDS: dict[str, type[Bucketing]] = {
    "all_gather": BucketAllGathers,
    "all_gather_v": BucketAllGathers,
    "reduce_scatter": BucketReduceScatters,
    "reduce_scatter_v": BucketReduceScatters,
    "all_to_all_v": BucketAllToAlls,
}


@pytest.fixture(autouse=True)
def backend_of_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep.World, "name", lambda world: "gloo", raising=False)


def written(numbers: random.Random, ranks: int) -> Graph:
    """Weights that are gathered, even and uneven ones, products with them, and gradients that are reduced."""
    place = suite.Place(ranks, 0, "g", lambda e, i: suite.random_partition(e, ranks, numbers))
    w = suite.Writer(place)
    x = w.input(numbers.choice([64, 4096]), 2048)
    weights = []
    for _ in range(numbers.randint(1, 3)):
        shard, sizes, shape = w.parameter(2048, 2048)
        if numbers.random() < 0.3:
            shard = w.input(-(-2048 // ranks), 2048)
            weights.append(w.done(_c10d.all_gather_into_tensor.default, shard, ranks, "g"))
        else:
            weights.append(w.gathered(shard, sizes, shape))
    results = []
    for weight in weights:
        wide = w.call(torch.ops.aten.slice.Tensor, weight, 0, 0, 2048)
        gradient = w.mm(w.t(x), x)
        x = w.mm(x, wide)
        if len(weights) + len(results) < 5 and numbers.random() < 0.7:
            results.append(w.scattered(gradient, w.partition(2048)))
    if len(weights) < 2:
        partitions = w.partition(64), w.partition(64)
        results += [w.turned(w.input(partitions[0][0], 64, 512), (0, 1), partitions) for _ in range(2)]
    return w.output(x, *results)


def divisions(nodes: Sequence[Node]) -> Iterator[list[list[Node]]]:
    """All ways to divide nodes into sets."""
    if not nodes:
        yield []
        return
    first, *rest = nodes
    for division in divisions(rest):
        yield [[first], *division]
        for i, part in enumerate(division):
            yield [*division[:i], [first, *part], *division[i + 1 :]]


def bucketed(write: Callable[[], Graph]) -> Iterator[Graph]:
    """A graph in all buckets that are legal; `write` gives the same graph each time."""
    by_pass: dict[type[Bucketing], list[str]] = {}
    for c in collectives(write()):
        by_pass.setdefault(KINDS[c.kind], []).append(c.node.name)
    choices = [list(divisions(names)) for names in by_pass.values()]  # type: ignore[type-var]
    for choice in itertools.product(*choices):
        graph = write()
        node = {n.name: n for n in graph.nodes}
        if legal(graph, [[node[name] for name in part] for division in choice for part in division]):  # type: ignore[index]
            for bucketing, division in zip(by_pass, choice, strict=True):
                bucketing()._replace(graph, [[node[name] for name in p] for p in division if len(p) > 1])  # type: ignore[index]
            graph.lint()
            yield graph


def legal(graph: Graph, buckets: Sequence[Sequence[Node]]) -> bool:
    closure = Closure(graph, [node for bucket in buckets for node in bucket])
    for bucket in buckets:
        if any(not closure.independent(node, [b for b in bucket if b is not node]) for node in bucket):
            return False
        closure.tie(list(bucket))
    return True


def fastest(tasks: Tasks) -> float:
    """The least time of all orders, replayed as `simulate` does. All collectives have one group.

    Of two orders of the same tasks that one is followed no further which is behind in everything.
    """
    best = math.inf
    seen: dict[frozenset[int], list[tuple[float, ...]]] = {}
    pending = [(frozenset[int](), 0.0, dict[int, float](), Streams(tasks.link))]
    while pending:
        taken, now, ends, streams = pending.pop()
        state = (now, streams.free_at("g"), *(end for _, end in sorted(ends.items())))
        if max(state) >= best or any(all(a <= b for a, b in zip(o, state, strict=True)) for o in seen.get(taken, [])):
            continue
        seen.setdefault(taken, []).append(state)
        if len(taken) == len(tasks.nodes):
            best = max(state)
        for n in range(len(tasks.nodes)):
            if n in taken or not taken.issuperset(tasks.before[n]):
                continue
            after, others, running = now, dict(ends), copy.deepcopy(streams)
            if tasks.kind[n] == WAIT:
                after = max(after, others[tasks.start_of[n]])
            after += tasks.seconds[n]
            if tasks.kind[n] == START:
                price = tasks.price[n]
                others[n] = running.run("g", after, price.latency, price.seconds)[1]
            pending.append((taken | {n}, after, others, running))
    return best


def the_best_of_all(seed: int) -> tuple[float, float, float]:
    """Of a drawn graph: its bound with buckets, the least time with buckets, the bound of the graph as it came."""
    ranks = random.Random(seed).choice([2, 3, 5])

    def write() -> Graph:
        return written(random.Random(seed), ranks)

    with world_of(ranks):
        graph = write()
        prices = GraphCosts.of(graph, MODEL)
        bounds = bucket_bound(graph, prices, MODEL), lower_bound(graph, prices)
        times = [fastest(Tasks.of(Edges.of(g), GraphCosts.of(g, MODEL))) for g in bucketed(write)]
    return bounds[0], min(times), bounds[1]


def test_no_buckets_and_no_order_beat_the_bound() -> None:
    found = [the_best_of_all(seed) for seed in range(12)]
    assert all(bound <= best * (1 + 1e-9) for bound, best, _ in found)
    assert any(best < came for _, best, came in found)  # or buckets were never worth it
