"""Timelines worked out by hand, a bound that no order beats, memory, and how the work grows with the graph."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from shardcompile.machines import H100
from shardcompile.passes.cost.model import CostModel, GraphCosts
from shardcompile.passes.graph.collective import WAIT, add_node
from shardcompile.passes.schedule.bounds import bucket_bound, lower_bound
from shardcompile.passes.schedule.edges import Edges
from shardcompile.passes.schedule.outline import Outline, SchedulingPolicy
from shardcompile.passes.schedule.overlap import best_order
from shardcompile.passes.schedule.scheduler import Scheduler
from shardcompile.passes.schedule.search import due_times, latest, quick_policies
from shardcompile.passes.schedule.simulator import COMPUTE, Timeline, simulate
from shardcompile.passes.schedule.tasks import Tasks, nodes_in_order
from tests.support.work import calls

aten = torch.ops.aten
REDUCE = torch.ops._c10d_functional.all_reduce.default
GATHER = torch.ops.shardcompile.all_gather_v.default
MODEL = CostModel(H100, group_sizes={"g": 3, "h": 2})


class Program:
    """A graph whose nodes have stated costs: nothing of the cost model is asked."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.seconds: dict[Node, float] = {}
        self.nbytes: dict[Node, int] = {}
        self.storage: dict[Node, Node] = {}
        self.group: dict[Node, str] = {}
        self.awaits: dict[Node, Node] = {}

    def _add(self, node: Node, seconds: float, nbytes: int, base: Node | None = None) -> Node:
        self.seconds[node], self.nbytes[node] = seconds, nbytes
        self.storage[node] = node if base is None else self.storage[base]
        return node

    def input(self, nbytes: int = 0) -> Node:
        return self._add(self.graph.placeholder(f"x{len(self.seconds)}"), 0.0, nbytes)

    def op(self, seconds: float, *inputs: Node, nbytes: int = 0) -> Node:
        return self._add(self.graph.call_function(aten.cat.default, (inputs,)), seconds, nbytes)

    def view(self, x: Node) -> Node:
        return self._add(self.graph.call_function(aten.alias.default, (x,)), 0.0, 0, x)

    def start(self, seconds: float, x: Node, group: str = "g", nbytes: int = 0) -> Node:
        node = self._add(self.graph.call_function(REDUCE, (x, "sum", group)), seconds, nbytes)
        self.group[node] = group
        return node

    def wait(self, start: Node) -> Node:
        node = self._add(self.graph.call_function(WAIT, (start,)), 0.0, 0, start)
        self.awaits[node] = start
        return node

    def prices(self, *results: Node) -> GraphCosts:
        self._add(self.graph.output(results), 0.0, 0)
        inputs = {n: tuple(n.all_input_nodes) for n in self.graph.nodes}
        return GraphCosts(self.seconds, self.nbytes, self.storage, self.group, self.awaits, inputs)


def two_products_and_a_gather() -> tuple[Program, GraphCosts, list[Node]]:
    """a: 3 s; gather: 5 s; b, which needs no gather: 4 s; c, which does: 2 s."""
    p = Program()
    x = p.input()
    a = p.op(3.0, x)
    g = p.start(5.0, a)
    w = p.wait(g)
    c = p.op(2.0, w)
    b = p.op(4.0, x)
    prices = p.prices(c, b)
    (out,) = (n for n in p.graph.nodes if n.op == "output")
    return p, prices, [x, a, g, w, c, b, out]


def test_a_wait_at_once_hides_nothing() -> None:
    _, prices, order = two_products_and_a_gather()
    timeline = simulate(order, prices)
    assert timeline.total == 3 + 5 + 2 + 4
    assert (timeline.compute, timeline.communication, timeline.exposed) == (9, {"g": 5}, 5)
    assert [(e.stream, e.start, e.end) for e in timeline.events] == [
        (COMPUTE, 0, 3),
        ("g", 3, 8),
        (COMPUTE, 8, 10),
        (COMPUTE, 10, 14),
    ]


def test_a_product_between_start_and_wait_hides_the_gather() -> None:
    p, prices, (x, a, g, w, c, b, out) = two_products_and_a_gather()
    timeline = simulate([x, a, g, b, w, c, out], prices)
    assert timeline.total == 3 + 5 + 2  # b runs from 3 to 7, the gather from 3 to 8
    assert timeline.exposed == 1
    assert lower_bound(p.graph, prices) == 10


def test_a_group_does_one_thing_at_a_time_and_groups_run_side_by_side() -> None:
    p = Program()
    x = p.input()
    one, two, other = p.start(5.0, x), p.start(3.0, x), p.start(6.0, x, "h")
    prices = p.prices(p.wait(one), p.wait(two), p.wait(other))
    timeline = simulate(list(p.graph.nodes), prices)
    assert timeline.total == 8
    assert {e.node: e.start for e in timeline.events} == {one: 0, two: 5, other: 0}
    assert lower_bound(p.graph, prices) == 8


def test_a_collective_that_nobody_awaits_has_to_end_all_the_same() -> None:
    p = Program()
    start = p.start(5.0, p.op(1.0, p.input()))
    prices = p.prices(start)
    assert simulate(list(p.graph.nodes), prices).total == lower_bound(p.graph, prices) == 6


def test_the_bound_counts_what_must_come_before_and_after_a_full_stream() -> None:
    p = Program()
    first = p.op(2.0, p.input())
    gathers = [p.wait(p.start(3.0, first)) for _ in range(4)]
    prices = p.prices(*[p.op(1.0, g) for g in gathers])
    # 2 s, then 4 gathers, then the product of the last one; neither stream nor path alone is longer than 12 s.
    assert simulate(list(p.graph.nodes), prices).total >= lower_bound(p.graph, prices) == 2 + 12 + 1


def test_peak_memory() -> None:
    p = Program()
    x = p.input(nbytes=100)
    a = p.op(1.0, x, nbytes=10)
    v = p.view(a)
    b = p.op(1.0, v, nbytes=1000)  # reads a through its view
    c = p.op(1.0, b, nbytes=5)
    prices = p.prices(c)
    assert simulate(list(p.graph.nodes), prices).peak_bytes == 100 + 10 + 1000  # then a is freed: 100 + 1000 + 5


def test_what_was_saved_for_the_backward_pass_is_freed() -> None:
    p = Program()
    kept, saved = p.input(nbytes=100), p.input(nbytes=50)
    a = p.op(1.0, kept, p.view(saved), nbytes=10)
    b = p.op(1.0, a, nbytes=60)
    prices = replace(p.prices(b), freed=frozenset([saved]))
    assert simulate(list(p.graph.nodes), prices).peak_bytes == 100 + 10 + 60
    assert simulate(list(p.graph.nodes), replace(prices, freed=frozenset())).peak_bytes == 100 + 50 + 10 + 60


def test_a_full_link_gets_its_next_transfer_in_time() -> None:
    """What a later transfer waits for comes before work whose own path is longer, so that the link is never idle."""
    p = Program()
    x, results = p.input(), []
    for _ in range(4):
        routed = p.op(0.2, x)
        worked = p.op(1.0, p.wait(p.start(1.0, routed)), routed)
        results.append(p.wait(p.start(1.0, p.op(0.2, worked))))
    prices = p.prices(*results)
    assert lower_bound(p.graph, prices) == pytest.approx(0.2 + 8)
    tasks = Tasks.of(Edges.of(p.graph), prices)
    outline = Outline(tasks)
    urgent = [-tail for tail in outline.tails]
    longest_first = SchedulingPolicy(urgent, urgent, due_times(outline, math.inf), len(urgent), math.inf)
    found = Scheduler(outline, longest_first).run()
    late = latest(tasks, found)
    justified = Scheduler(outline, replace(longest_first, rank=late, urgency=late)).run()
    assert justified.total == pytest.approx(0.2 + 8)
    assert found.total > 0.2 + 8.5


def test_constants_are_made_when_they_are_read() -> None:
    p = Program()
    x = p.input(nbytes=1)
    constants = [p.op(0.1, nbytes=1000) for _ in range(8)]
    arrived = p.wait(p.start(5.0, x))
    for constant in constants:
        arrived = p.op(1.0, arrived, constant, nbytes=1)
    timeline = best_order(p.graph, p.prices(arrived))[1]
    assert timeline.peak_bytes < 2000


def test_a_payload_is_held_until_the_wait() -> None:
    p = Program()
    x = p.input(nbytes=1)
    payload = p.op(1.0, x, nbytes=10)
    start = p.start(1.0, payload, nbytes=100)
    between = p.op(1.0, x, nbytes=1000)
    end = p.op(1.0, between, nbytes=2000)
    late = p.wait(start)
    prices = p.prices(late, end)
    assert simulate(list(p.graph.nodes), prices).peak_bytes == 1 + 10 + 100 + 1000 + 2000
    x, payload, start, between, end, late, out = p.graph.nodes
    early = [x, payload, start, late, between, end, out]
    assert simulate(early, prices).peak_bytes == 1 + 100 + 1000 + 2000


def test_an_order_that_is_none_is_refused() -> None:
    _, prices, (x, a, g, w, c, b, out) = two_products_and_a_gather()
    with pytest.raises(AssertionError, match="before one of its inputs"):
        simulate([x, g, a, w, c, b, out], prices)
    with pytest.raises(AssertionError, match="each node of the graph once"):
        simulate([x, a, g, w, c], prices)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, GraphCosts]:
    p = Program()
    nodes = [p.input()]
    seconds = st.integers(0, 9).map(float)
    for _ in range(draw(st.integers(1, 25))):
        x = draw(st.sampled_from(nodes))
        kind = draw(st.sampled_from(["op", "op", "start", "wait", "view"]))
        if kind == "op":
            nodes.append(p.op(draw(seconds), x, draw(st.sampled_from(nodes)), nbytes=draw(st.integers(0, 9))))
        elif kind == "view":
            nodes.append(p.view(x))
        elif kind == "start" or not p.group:
            nodes.append(p.start(draw(seconds), x, draw(st.sampled_from(["g", "h"])), nbytes=1))
        else:
            nodes.append(p.wait(draw(st.sampled_from(list(p.group)))))  # some twice, some never
    return p, p.prices(*draw(st.lists(st.sampled_from(nodes), max_size=4)))


def random_order(graph: Graph, seed: int) -> list[Node]:
    rng, order, done = random.Random(seed), [], set()
    left = list(graph.nodes)
    while left:
        ready = [n for n in left if done.issuperset(n.all_input_nodes) and (n.op != "output" or len(left) == 1)]
        node = rng.choice(ready)
        left.remove(node)
        order.append(node)
        done.add(node)
    return order


@settings(max_examples=300, deadline=None)
@given(programs(), st.integers(0, 1 << 30))
def test_no_order_beats_the_bound(drawn: tuple[Program, GraphCosts], seed: int) -> None:
    p, prices = drawn
    bound = lower_bound(p.graph, prices)
    for order in (list(p.graph.nodes), random_order(p.graph, seed), random_order(p.graph, seed + 1)):
        timeline = simulate(order, prices)
        assert bound <= timeline.total + 1e-9
        assert bound >= max([timeline.compute, *timeline.communication.values()]) - 1e-9
        assert timeline.exposed >= 0
        assert timeline.peak_bytes <= sum(prices.nbytes.values())
        _check_streams(timeline)


def _check_streams(timeline: Timeline) -> None:
    """Nothing overlaps on a stream, and the streams' work adds up."""
    for stream in (COMPUTE, *timeline.communication):
        events = [e for e in timeline.events if e.stream == stream]
        assert all(a.end <= b.start for a, b in itertools.pairwise(events))
        work = timeline.compute if stream == COMPUTE else timeline.communication[stream]
        assert sum(e.end - e.start for e in events) == pytest.approx(work)


def layers(nodes: int) -> Graph:
    """As of a model whose weights are gathered layer by layer."""
    graph, mode = Graph(), FakeTensorMode()

    def tensor(*shape: int) -> Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        with mode:
            node.meta["val"] = torch.empty(shape)
        return node

    x, weights = tensor(16, 64), [tensor(3, 64) for _ in range(nodes // 7)]
    for weight in weights:
        start = add_node(graph, GATHER, weight, 0, 64, [3, 50, 11], 0, [], "g")
        whole = add_node(graph, aten.view.default, add_node(graph, WAIT, start), [64, 64])
        x = add_node(
            graph, aten.add.Tensor, add_node(graph, aten.relu.default, add_node(graph, aten.mm.default, x, whole)), 1.0
        )
    graph.output((x,))
    return graph


@pytest.mark.nightly
def test_work_grows_no_faster_than_n_log_n(capsys: pytest.CaptureFixture[str]) -> None:
    steps: dict[str, list[tuple[int, int]]] = {"price": [], "simulate": [], "bound": []}
    lines = ["nodes   price s  simulate s  bound s"]
    for size in (1000, 2000, 5000, 10000):
        graph = layers(size)
        order, prices = list(graph.nodes), GraphCosts.of(graph, MODEL)
        runs: Sequence[tuple[str, Callable[[], Any]]] = (
            ("price", lambda graph=graph: GraphCosts.of(graph, MODEL)),
            ("simulate", lambda order=order, prices=prices: simulate(order, prices)),
            ("bound", lambda graph=graph, prices=prices: lower_bound(graph, prices)),
        )
        times = []
        for name, run in runs:
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
            steps[name].append((len(order), calls(run)))
        lines.append(f"{len(order):6}  {times[0]:7.3f}  {times[1]:10.3f}  {times[2]:7.3f}")
    with capsys.disabled():
        print("", *lines, sep="\n")
    for name, counts in steps.items():
        per_node = [work / (n * math.log2(n)) for n, work in counts]
        assert max(per_node) < 1.2 * per_node[0], (name, counts)


def test_groups_that_share_a_link_take_turns_on_it() -> None:
    """Latencies pass side by side, transfers one after the other."""
    p = Program()
    x = p.input()
    first, second = p.start(5.0, x, "g"), p.start(5.0, x, "h")
    prices = p.prices(p.wait(first), p.wait(second))
    shared = replace(prices, latency={first: 1.0, second: 1.0}, link={"g": "wire", "h": "wire"})
    assert simulate(list(p.graph.nodes), prices).total == 5.0
    assert simulate(list(p.graph.nodes), shared).total == 1 + 4 + 4
    assert lower_bound(p.graph, shared) == 1 + 4 + 4


@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_a_collective_does_not_delay_a_more_urgent_one_of_another_group_on_its_link(latency: float) -> None:
    p = Program()
    x = p.input()
    first, second, last = p.start(2.0, x, "h"), p.start(2.0, x, "h"), p.start(10.0, x, "g")
    worked = p.op(4.0, p.wait(second), p.op(1.0, p.wait(first)))
    prices = p.prices(p.op(1.0, p.wait(last), worked))
    starts = dict.fromkeys((first, second, last), latency)
    prices = replace(prices, latency=starts, link={"g": "wire", "h": "wire"})
    edges = Edges.of(p.graph)
    outline = Outline(Tasks.of(edges, prices))
    for policy in quick_policies(outline, math.inf):
        found = Scheduler(outline, policy).run()
        replayed = simulate(nodes_in_order(edges, outline.tasks, found.order), prices)
        assert found.total == pytest.approx(2 + 2 + (10 - latency) + 1)
        assert replayed.total == pytest.approx(found.total)


def test_the_bound_with_perfect_buckets_counts_one_latency_for_a_group() -> None:
    p = Program()
    x = p.input()
    starts = [p.start(3.0, x) for _ in range(4)]
    prices = replace(p.prices(*(p.wait(s) for s in starts)), latency=dict.fromkeys(starts, 1.0))
    assert lower_bound(p.graph, prices) == 4 * 3.0
    assert bucket_bound(p.graph, prices, MODEL) == 1 + 4 * 2.0


def test_what_is_packed_and_unpacked_is_compute() -> None:
    p = Program()
    start = p.start(3.0, p.input())
    wait = p.wait(start)
    prices = p.prices(wait)
    prices = replace(prices, packing={start: 2.0}, seconds={**prices.seconds, wait: 4.0})
    timeline = simulate(list(p.graph.nodes), prices)
    assert (timeline.total, timeline.compute) == (9.0, 6.0)
    assert lower_bound(p.graph, prices) == 9.0


def test_a_collective_starts_while_the_next_piece_of_work_runs_however_short_the_last_one_was() -> None:
    p = Program()
    x = p.input()
    first, second = p.start(2.0, x), p.start(5.0, x)  # of one group: the second one runs from 2 to 7
    short = p.op(1.0, x)
    long = p.op(6.0, short)
    last = p.op(1.0, p.wait(first), p.wait(second), long)
    prices = p.prices(last)
    tasks = Tasks.of(Edges.of(p.graph), prices)
    outline = Outline(tasks)
    for plan in quick_policies(outline, math.inf):
        assert Scheduler(outline, plan).run().total == 1 + 6 + 1
