"""One rank decides about a graph, and the others apply its plan."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.distributed import HashStore
from torch.fx import Graph

from shardcompile.errors import PassError
from shardcompile.machines import H100
from shardcompile.passes import BucketAllGathers, Pipeline, ScheduleOverlap
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.graph.collective import WAIT, collectives
from shardcompile.passes.plan import Plan, compare, exchanging, key_of, planning
from tests.support.lockstep import Builder, world_of

aten, ours = torch.ops.aten, torch.ops.shardcompile
MODEL = CostModel(H100)


def program(rows: Sequence[int], rank: int, layers: int = 4, batch: int = 64) -> Graph:
    """Layers with weights of known uneven shards, each gathered right before its product.

    Args:
        rows: of the weights, by rank.
        rank: whose graph it is. One without rows copies none, as torch has it.
        layers: how many.
        batch: rows of the input of this rank.
    """
    b = Builder()
    x = b.input(batch, sum(rows), dtype=torch.float32)
    for _ in range(layers):
        shard = b.input(rows[rank], sum(rows), dtype=torch.float32)
        if rows[rank]:
            shard = b.call(aten.clone.default, shard)
        start = b.call(ours.all_gather_v.default, shard, 0, sum(rows), list(rows), 0, [], "g")
        whole = b.call(aten.view.default, b.call(WAIT, start), [sum(rows)] * 2)
        x = b.call(aten.mm.default, x, whole)
    return b.output(x)


def pipeline(plan: Plan | None = None) -> Pipeline:
    return Pipeline([BucketAllGathers(model=MODEL), ScheduleOverlap(model=MODEL)], plan=plan)


def started(graph: Graph) -> list[str]:
    return [f"{c.kind} of {len(c.payloads)}: {c.sizes}" for c in collectives(graph)]


def planned(rows: Sequence[int], batches: Sequence[int]) -> list[Graph]:
    """The graph of each rank after the passes, one of which plans for all."""
    store, graphs = HashStore(), []
    with world_of(len(rows)) as world:
        for rank in world.each():
            graph = program(rows, rank, batch=batches[rank])
            with exchanging(store, rank):
                pipeline()(graph)
            graph.lint()
            graphs.append(graph)
    return graphs


@pytest.mark.parametrize("rows", [[512, 4608, 512], [512, 0, 1024], [1, 512, 3]], ids=str)
def test_ranks_whose_costs_differ_start_the_same_collectives(rows: list[int]) -> None:
    batches = [64, 4096, 1 << 17]
    graphs = planned(rows, batches)
    with world_of(3):
        assert started(graphs[0]) == started(graphs[1]) == started(graphs[2])


def test_ranks_that_decide_for_themselves_decide_differently() -> None:
    """So that the test above can fail."""
    alone = []
    with world_of(3) as world:
        for rank in world.each():
            graph = program([1, 512, 3], rank, batch=[64, 4096, 1 << 17][rank])
            pipeline()(graph)
            alone.append(started(graph))
    assert alone[0] != alone[2]


def test_a_rank_with_other_nodes_keeps_the_order_of_collectives() -> None:
    graphs = planned([512, 0, 1024], [64, 64, 64])
    counts = [len(g.find_nodes(op="call_function", target=aten.clone.default)) for g in graphs]
    assert counts == [4, 0, 4]
    with world_of(3):
        assert started(graphs[0]) == started(graphs[1])


def test_graphs_of_the_same_collectives_and_other_products_have_plans_of_their_own() -> None:
    with world_of(3):
        once, twice = program([5, 1, 3], 0), program([5, 1, 3], 0)
        product = once.find_nodes(op="call_function", target=aten.mm.default)[0]
        assert key_of(once) == key_of(twice)
        with twice.inserting_before(twice.output_node()):
            _, second = twice.find_nodes(op="placeholder")[:2]
            twice.call_function(aten.mm.default, (second, second)).meta["val"] = product.meta["val"]
        assert key_of(once) != key_of(twice)


def test_a_plan_is_kept_and_applied() -> None:
    with world_of(3):
        first, again, other = program([5, 1, 3], 0), program([5, 1, 3], 0), program([5, 1, 4], 0)
        with planning("two passes") as so_far:
            assert so_far() is None
            for p in pipeline().passes:
                p(first)
            made = so_far()
        assert made is not None
        plan = Plan.loads(made.dumps())
        assert plan == Plan.loads(plan.dumps()) and [name for name, _ in plan.decisions] == [
            "bucket_all_gathers",
            "schedule_overlap",
        ]
        assert "bucket_all_gathers: buckets" in str(plan) and "schedule_overlap: collectives" in str(plan)
        pipeline(plan)(again)
        assert [n.name for n in again.nodes] == [n.name for n in first.nodes]
        with pytest.raises(PassError, match="the plan is for graph"):
            pipeline(plan)(other)


def test_a_plan_of_other_passes_is_refused() -> None:
    with world_of(3):
        plan = Plan(key_of(program([5, 1, 3], 0)), (("another_pass", []),))
        with pytest.raises(PassError, match="no decision of bucket_all_gathers"):
            pipeline(plan)(program([5, 1, 3], 0))


def test_keys_tell_dependencies_and_partitions_but_no_sizes_of_this_rank() -> None:
    with world_of(3):
        key = key_of(program([5, 1, 3], 0))
        assert key == key_of(program([5, 1, 3], 2, batch=7))
        assert key not in (key_of(program([5, 2, 2], 0)), key_of(program([5, 1, 3], 0, layers=3)))


def test_code_of_another_plan_is_refused_before_it_runs() -> None:
    store, plan = HashStore(), Plan("key", (("bucket_all_gathers", [[0, 1]]),))
    for rank in (0, 1):
        with exchanging(store, rank):
            compare("passes", plan)
    with exchanging(store, 2), pytest.raises(PassError, match="another plan"):
        compare("passes", Plan("key", (("bucket_all_gathers", []),)))


def test_a_rank_that_fails_to_plan_says_so() -> None:
    store = HashStore()

    class Fail:
        name = "fail"

        def __call__(self, graph: Graph) -> None:
            raise ValueError("no way")

    with world_of(3):
        with exchanging(store, 0), pytest.raises(PassError, match="no way"):
            Pipeline([*pipeline().passes, Fail()])(program([5, 1, 3], 0))
        graph = program([5, 1, 3], 1)
        with exchanging(store, 1):
            pipeline()(graph)  # for itself
        graph.lint()
