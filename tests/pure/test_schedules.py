"""Schedules of the suite's graphs: near the bound, within memory, of the same values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph

from shardcompile.collectives.all_to_all import AllToAllV
from shardcompile.collectives.gathers import AllGatherV, ReduceScatterV
from shardcompile.collectives.range_bucket import members_of
from shardcompile.machines import CPU_CORE, H100, INFINIBAND_NDR
from shardcompile.passes import BucketReduceScatters, Pipeline
from shardcompile.passes.bucket import choice
from shardcompile.passes.cost.model import CostModel, GraphCosts, caching_costs
from shardcompile.passes.graph.collective import WAIT, Collective, collectives
from shardcompile.passes.graph.dependencies import needed_first
from shardcompile.passes.schedule.bounds import lower_bound
from shardcompile.passes.schedule.control_dependencies import AddControlDependencies
from shardcompile.passes.schedule.edges import Edges
from shardcompile.passes.schedule.outline import Outline
from shardcompile.passes.schedule.overlap import ScheduleOverlap, best_order, byte_limit
from shardcompile.passes.schedule.scheduler import Scheduler
from shardcompile.passes.schedule.search import latest, quick_policies
from shardcompile.passes.schedule.simulator import known_peak, peak_memory, simulate
from shardcompile.passes.schedule.tasks import Tasks, nodes_in_order
from tests.support import llama, lockstep, suite
from tests.support.lockstep import play, world_of
from tests.support.tiers import often
from tests.support.work import calls

RANKS = 8
MODEL = CostModel(H100)
BF16 = torch.bfloat16
ACROSS = CostModel(H100, group_links={"g": INFINIBAND_NDR})
SIZE = suite.Size(4, width=1024, tokens=4096, heads=8)
PROGRAMS: dict[str, Callable[[suite.Place], Graph]] = {
    "layers sharded, forward": lambda place: suite.fsdp_forward(place, SIZE),
    "layers sharded, backward": lambda place: suite.fsdp_backward(place, SIZE),
    "experts, forward": lambda place: suite.experts_forward(place, suite.Experts()),
    "experts, backward": lambda place: suite.experts_backward(place, suite.Experts()),
    "u-net with halos": lambda place: suite.unet_forward(place, suite.Images()),
}


def place_of(imbalance: str, ranks: int = RANKS, rank: int = 0) -> suite.Place:
    return suite.Place(ranks, rank, "g", lambda size, i: suite.partition(size, ranks, imbalance, i))


def passes(model: CostModel = MODEL) -> Pipeline:
    """All of ours but the last, which holds Inductor to the order."""
    *most, _ = Pipeline().passes
    for p in most:
        if hasattr(p, "model"):
            p.model = model
    return Pipeline(most)


@pytest.fixture(autouse=True)
def backend_of_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep.World, "name", lambda world: "gloo", raising=False)


NEAR = {
    # The fastest order holds 13 % more than the input graph: with a limit of 1.2 it is found, at 1.01.
    ("u-net with halos", "log-normal"): 1.15,
    # Compute takes longer than the exchanges, and the first of these has nothing to hide behind.
    ("experts, forward", "log-normal"): 1.21,
}
"""How near to the bound schedules are, where it is not 1.10."""


@pytest.mark.parametrize("imbalance", suite.IMBALANCES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_schedules_are_near_the_bound_and_within_memory(name: str, imbalance: str) -> None:
    with world_of(RANKS):
        graph = PROGRAMS[name](place_of(imbalance))
        prices = GraphCosts.of(graph, MODEL)
        came, bound = simulate(list(graph.nodes), prices), lower_bound(graph, prices)
        passes()(graph)
        graph.lint()
        ours = simulate(list(graph.nodes), GraphCosts.of(graph, MODEL))
    assert ours.total <= NEAR.get((name, imbalance), 1.10) * bound
    assert ours.total <= came.total
    assert ours.peak_bytes <= 1.1 * came.peak_bytes


def gathered_layers(saved: bool) -> Graph:
    """Weights that are cast and gathered, each before its product; casts may be results, for a backward pass."""
    w = suite.Writer(place_of("even"))
    x, casts = w.input(4096, 2048), []
    for _ in range(6):
        casts.append(
            w.call(torch.ops.prims.convert_element_type.default, w.input(256, 2048, dtype=torch.float32), BF16)
        )
        x = w.mm(x, w.gathered(casts[-1], [256] * RANKS, (2048, 2048)))
    return w.output(x, *(casts if saved else ()))


def test_a_cast_that_is_saved_is_ready_at_the_start_all_the_same() -> None:
    totals = []
    for saved in (False, True):
        with world_of(RANKS):
            graph = gathered_layers(saved)
            passes(ACROSS)(graph)
            totals.append(simulate(list(graph.nodes), GraphCosts.of(graph, ACROSS)).total)
    assert totals[1] <= 1.001 * totals[0]


def test_needed_first() -> None:
    """What reads a bucket early calls for it, and for all that it needs, in its order; a view does not."""
    before = {"a": [], "view": ["bucket"], "b": [], "read": ["bucket"], "c": [], "d": ["c"], "bucket": ["a", "d"]}
    before["end"] = ["view", "read", "b"]
    items = list(before)
    assert needed_first(items, before.__getitem__) == ["a", "c", "d", "bucket", "view", "b", "read", "end"]
    found = needed_first(items, before.__getitem__, on_demand=lambda item: item == "view")
    assert found == ["a", "b", "c", "d", "bucket", "read", "view", "end"]
    with pytest.raises(AssertionError, match="cycle"):
        needed_first(["a", "b"], {"a": ["b"], "b": ["a"]}.__getitem__)


def test_two_halves_of_a_batch_hide_each_others_exchanges() -> None:
    """What is exchanged for one half runs while the other half computes: hardly more than the longer of both is left."""
    with world_of(RANKS):
        graph = suite.experts_forward(place_of("even"), suite.Experts())
        prices = GraphCosts.of(graph, MODEL)
        found = best_order(graph, prices)[1]
    assert found.total <= 1.01 * max(found.compute, found.communication["g"])


def test_scheduling_moves_nodes_and_nothing_else() -> None:
    with world_of(RANKS):
        graph = suite.fsdp_backward(place_of("log-normal"), SIZE)
        before = {n: (n.target, n.args, dict(n.kwargs)) for n in graph.nodes}
        order = list(graph.nodes)
        ScheduleOverlap(MODEL)(graph)
    assert {n: (n.target, n.args, dict(n.kwargs)) for n in graph.nodes} == before
    assert list(graph.nodes) != order


def test_a_graph_that_no_order_fits_is_left_as_it_is() -> None:
    with world_of(RANKS):
        graph = suite.experts_forward(place_of("even"), suite.Experts(layers=1))
        order = list(graph.nodes)
        prices = GraphCosts.of(graph, MODEL)
        _, timeline = best_order(graph, prices, memory_limit=1.0)
    assert timeline.peak_bytes <= simulate(order, prices).peak_bytes


def test_the_memory_limit_is_of_the_graph_before_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "score", lambda outline, plan, limit: (False, 0.0))  # every legal bucket is kept
    with world_of(RANKS):
        graph = suite.fsdp_forward(place_of("even"), SIZE)
        peak = peak_memory(list(graph.nodes), GraphCosts.of(graph, MODEL))
        bucketed = passes()
        bucketed.passes = [p for p in bucketed.passes if p.name == "bucket_all_gathers"]
        bucketed(graph)
        assert any(c.kind == "all_gather_bucket" for c in collectives(graph))
        prices = GraphCosts.of(graph, MODEL)
        weightless = replace(prices, nbytes=dict.fromkeys(prices.nbytes, 0))
        assert known_peak(graph, weightless) == peak  # what the first pass found, whatever became of the graph since
        assert peak_memory(list(graph.nodes), weightless) == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 4))
def test_a_schedule_comes_to_what_its_replay_comes_to(number: int, ranks: int) -> None:
    """Time and memory, while it is made of tasks by index, and of the nodes that it stands for."""
    with world_of(ranks):
        place = suite.Place(
            ranks, 0, "g", lambda e, i: suite.random_partition(e, ranks, random.Random(f"{number} {e} {i}"))
        )
        graph = suite.drawn(place, random.Random(number))
        edges, priced = Edges.of(graph), GraphCosts.of(graph, MODEL)
        freed = frozenset([n for n in graph.nodes if n.op == "placeholder"][::2])
    for prices in (priced, replace(priced, freed=freed)):
        tasks = Tasks.of(edges, prices)
        for plan in quick_policies(Outline(tasks), 1.1 * known_peak(graph, prices)):
            schedule = Scheduler(Outline(tasks), plan).run()
            late = latest(tasks, schedule)
            held_back = replace(plan, rank=late, urgency=late, release=late)
            for other in (schedule, Scheduler(Outline(tasks), held_back).run()):
                replayed = simulate(nodes_in_order(edges, tasks, other.order), prices)
                held = other is not schedule  # a replay does not hold work back
                assert replayed.total == pytest.approx(other.total) or (held and replayed.total < other.total)
                assert other.peak_bytes == replayed.peak_bytes


def test_large_members_stay_alone_and_small_ones_meet_across_them() -> None:
    """Copying a large one takes longer than the latency that it would save."""
    with world_of(RANKS):
        graph = suite.fsdp_forward(place_of("even"), suite.Size(4, width=4096, tokens=4096))
        passes()(graph)
    kinds = [(c.kind, len(c.payloads)) for c in collectives(graph)]
    buckets = [members for kind, members in kinds if kind == "all_gather_bucket"]
    assert len(buckets) == 1 and buckets[0] >= 6  # of the eight norms
    assert kinds.count(("all_gather_v", 1)) == 4 * 6 - buckets[0]


def test_buckets_of_as_many_members_as_the_memory_holds() -> None:
    """One bucket of all would hold all payloads at once, which are made one after the other, and all results."""
    with world_of(RANKS):
        w = suite.Writer(place_of("even"))
        sizes = w.partition(4096 * RANKS)
        kept = [w.input(sizes[0], 256) for _ in range(80)]
        total = kept[0]
        for i in range(12):
            rolled = w.rolled(w.call(torch.ops.aten.mul.Tensor, kept[0], float(i)), sizes, 1)
            total = w.call(torch.ops.aten.add.Tensor, total, rolled)
        graph = w.output(total, *kept)
        limit = byte_limit(graph, GraphCosts.of(graph, MODEL))
        before = simulate(list(graph.nodes), GraphCosts.of(graph, MODEL)).total
        passes()(graph)
        after = simulate(list(graph.nodes), GraphCosts.of(graph, MODEL))
    members = [len(c.payloads) for c in collectives(graph) if c.kind == "range_bucket"]
    assert len(members) > 1 and sum(members) == 12, members
    assert after.peak_bytes <= limit and after.total < 0.6 * before


def test_buckets_that_delay_more_than_they_save_are_not_made() -> None:
    """The halves' exchanges in one bucket would leave nothing to hide them behind."""
    place = suite.Place(4, 0, "g", lambda size, i: suite.partition(size, 4, "1:9", i))
    with world_of(4):
        graph = suite.experts_forward(place, suite.Experts())
        prices = GraphCosts.of(graph, MODEL)
        bound = lower_bound(graph, prices)
        passes()(graph)
        assert simulate(list(graph.nodes), GraphCosts.of(graph, MODEL)).total <= 1.10 * bound


# ------------------------------------------------------------------------------------------------- values


def _members(calls: list[Any], arguments: Callable[[Any, int], Any], run: Callable[..., Any]) -> Any:
    """Buckets as so many collectives: what each rank gets of all members, one after the other."""
    parts = [run([arguments(call, i) for call in calls]) for i in range(len(calls[0].inputs))]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(calls))]


def _gather_bucket(calls: list[Any]) -> Any:
    def arguments(c: Any, i: int) -> AllGatherV:
        return AllGatherV(c.inputs[i], c.dims[i], c.totals[i], c.partitions[i], c.group_name)

    return _members(calls, arguments, lockstep._all_gather_v)


def _scatter_bucket(calls: list[Any]) -> Any:
    def arguments(c: Any, i: int) -> ReduceScatterV:
        return ReduceScatterV(c.inputs[i], c.dims[i], c.shards[i], c.reduce_op, c.partitions[i], c.group_name)

    return _members(calls, arguments, lockstep._reduce_scatter_v)


def _exchange_bucket(calls: list[Any]) -> Any:
    def arguments(c: Any, i: int) -> AllToAllV:
        pair = slice(2 * i, 2 * i + 2)
        return AllToAllV(c.inputs[i], *c.dims[pair], *c.sizes[pair], *c.partitions[pair], c.group_name)

    return _members(calls, arguments, lockstep._all_to_all_v)


def _range_bucket(calls: list[Any]) -> Any:
    members = [members_of(call) for call in calls]
    parts = [
        lockstep._PLAYED[of_one[0][0].of.kind]([record for _, record in of_one])
        for of_one in zip(*members, strict=True)
    ]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(calls))]


@pytest.fixture
def buckets_play(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every legal bucket kept, and played."""
    played = {
        "all_gather_bucket": _gather_bucket,
        "reduce_scatter_bucket": _scatter_bucket,
        "all_to_all_bucket": _exchange_bucket,
        "range_bucket": _range_bucket,
    }
    monkeypatch.setattr(lockstep, "_PLAYED", lockstep._PLAYED | played)
    monkeypatch.setattr(lockstep, "signature", lambda node: f"{node.target} {node.args[-1]} {Collective.of(node).kind}")
    monkeypatch.setattr(choice, "score", lambda outline, plan, limit: (False, 0.0))


def inputs_of(graph: Graph, rank: int) -> list[Tensor]:
    """Small whole numbers, in which sums are exact in any order."""
    numbers = torch.Generator().manual_seed(rank)
    shapes = [n.meta["val"].shape for n in graph.nodes if n.op == "placeholder"]
    return [torch.randint(-3, 4, tuple(s), generator=numbers).to(torch.bfloat16) for s in shapes]


@pytest.mark.usefixtures("buckets_play")
@pytest.mark.parametrize("number", often(range(25), 4))
def test_any_program_keeps_its_values(number: int) -> None:
    ranks = 2 + number % 3

    def written(rank: int) -> Graph:
        def partitions(size: int, i: int) -> list[int]:
            return suite.random_partition(size, ranks, random.Random(f"{number} {size} {i}"))

        return suite.drawn(suite.Place(ranks, rank, "g", partitions), random.Random(number), ops=16)

    with world_of(ranks) as world:
        plain, changed = ([written(rank) for rank in world.each()] for _ in range(2))
        inputs = [inputs_of(graph, rank) for rank, graph in enumerate(plain)]
        lockstep.apply(world, passes(MODEL if number % 2 else CostModel(CPU_CORE)), changed)
        before, after = (play(world, graphs, inputs) for graphs in (plain, changed))
    for a, b in zip(before, after, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))


# -------------------------------------------------------------------------------------------------- growth


@pytest.mark.nightly
def test_work_of_the_scheduler_grows_no_faster_than_n_log_n() -> None:
    per_node = []
    for layers in (8, 32):
        with world_of(RANKS):
            size = suite.Size(layers, width=1024, tokens=4096, heads=8)
            graph = suite.fsdp_backward(place_of("log-normal"), size)
            prices = GraphCosts.of(graph, MODEL)
        work = calls(lambda graph=graph, prices=prices: best_order(graph, prices))  # type: ignore[misc]
        n = len(graph.nodes)
        per_node.append(work / (n * math.log2(n)))
    assert per_node[1] < 1.2 * per_node[0], per_node


def counted(graph: Graph) -> dict[str, int]:
    """How much work each pass has with a graph."""
    found = {}
    with caching_costs():
        for each in [*passes(ACROSS).passes, AddControlDependencies()]:
            found[each.name] = calls(lambda each=each: each(graph))  # type: ignore[misc]
    return found


def test_work_of_every_pass_grows_with_the_graph() -> None:
    """Twice the layers, hardly more than twice the work: of a graph for which as many buckets are tried in both sizes."""
    by_size = []
    for layers in (12, 24):
        with world_of(RANKS):
            graph = foreign(0, "forward", 8, uneven=True, layers=layers)
            nodes = len(graph.nodes)
            by_size.append((nodes, counted(graph)))
    (few, before), (many, after) = by_size
    growth = {name: after[name] / before[name] / (many / few) for name in before}
    assert max(growth.values()) <= 1.15, growth


def test_graphs_without_collectives_cost_next_to_nothing() -> None:
    w = suite.Writer(place_of("even"))
    x = w.input(64, 64)
    for _ in range(300):
        x = w.call(torch.ops.aten.add.Tensor, w.mm(x, w.t(x)), 1.0)
    graph = w.output(x)
    pipeline = Pipeline()
    with world_of(RANKS), mock.patch.object(graph, "lint", side_effect=graph.lint) as lint:
        work = calls(lambda: pipeline(graph))
    assert lint.call_count == 1  # what no pass has changed is as valid as it was
    assert work <= 120 * len(graph.nodes), work / len(graph.nodes)


def test_waits_follow_their_starts() -> None:
    with world_of(RANKS):
        graph = suite.experts_backward(place_of("1:9"), suite.Experts())
        passes()(graph)
    seen = set()
    for node in graph.nodes:
        assert node.target is not WAIT or node.args[0] in seen
        seen.add(node)


# ------------------------------------------------------------------------------------- graphs of other programs


def foreign(rank: int, side: str, parts: int = 1, uneven: bool = False, layers: int = 3) -> Graph:
    """Of a small transformer that others trained: weights over eight ranks, products over so many."""
    groups = llama.Groups("g", RANKS, "p" if parts > 1 else "", parts)
    shape = llama.Shape(layers, 4096, 1024, 4096, 8, 8, words=8192)
    return getattr(llama, side)(place_of("log-normal", rank=rank), shape, groups, uneven)


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("side", ["forward", "backward"])
def test_graphs_of_others_are_bucketed_and_scheduled_as_ours_are(side: str, parts: int) -> None:
    with world_of(RANKS):
        graph = foreign(0, side, parts)
        prices = GraphCosts.of(graph, ACROSS)
        came, started = simulate(list(graph.nodes), prices), len(collectives(graph))
        passes(ACROSS)(graph)
        graph.lint()
        ours = simulate(list(graph.nodes), GraphCosts.of(graph, ACROSS))
    assert ours.total < 0.9 * came.total
    assert ours.peak_bytes <= 1.1 * came.peak_bytes
    assert len(collectives(graph)) < started
    if side == "backward":
        # Torch's even reductions stay torch's.
        scatters = [c for c in collectives(graph) if c.kind == "reduce_scatter"]
        assert any(c.node.args[0].target is torch.ops.aten.view.default for c in scatters)


@pytest.mark.parametrize("uneven", often([True, False], 1))
def test_the_first_and_the_last_rank_make_the_same_plan_of_graphs_of_others(uneven: bool) -> None:
    plans = []
    for rank in (0, RANKS - 1):
        with world_of(RANKS) as world:
            world.here = rank
            graph = foreign(rank, "backward", 8, uneven, layers=1)
            passes(ACROSS)(graph)
            plans.append([n.name for n in graph.nodes])
    assert plans[0] == plans[1]


@pytest.mark.usefixtures("buckets_play")
@pytest.mark.parametrize("kinds", ["even even", "even uneven", "uneven even even"])
def test_even_and_uneven_reductions_share_a_bucket_and_keep_their_values(kinds: str) -> None:
    def written(rank: int) -> Graph:
        b = lockstep.Builder()
        results = []
        for i, kind in enumerate(kinds.split()):
            x = b.input(6, 2 + i)
            if kind == "even":
                results.append(b.done(lockstep.REDUCE_SCATTER, x, "sum", 2, "g"))
            else:
                partition = ([5, 1], 0, [], "g")
                results.append(
                    b.done(torch.ops.shardcompile.reduce_scatter_v.default, x, 0, [5, 1][rank], "sum", *partition)
                )
        return b.output(*results)

    with world_of(2) as world:
        plain, changed = ([written(rank) for rank in world.each()] for _ in range(2))
        inputs = [inputs_of(graph, rank) for rank, graph in enumerate(plain)]
        inputs = [[x.double() for x in rank] for rank in inputs]
        lockstep.apply(world, BucketReduceScatters(model=MODEL), changed)
        assert [len(collectives(graph)) for graph in changed] == [1, 1]
        before, after = (play(world, graphs, inputs) for graphs in (plain, changed))
    for a, b in zip(before, after, strict=True):
        assert all(torch.equal(x, y) and x.shape == y.shape for x, y in zip(a, b, strict=True))
