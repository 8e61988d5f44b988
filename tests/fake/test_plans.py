"""Every rank makes the same plan: which collectives meet in a bucket, and the order of everything.

Graphs are written as each rank has them, with the sizes of its local shards, for size vectors that are drawn. A sample
runs with the other tests; a thousand vectors for each program with ``-m sweep``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.fx import Graph

import shardcompile as sc
from shardcompile.inspect.offline import offline_world, trace_offline
from shardcompile.machines import A100, CPU_CORE, H100
from shardcompile.passes import Pipeline
from shardcompile.passes.cost.model import CostModel
from shardcompile.passes.graph import node_sizes
from shardcompile.passes.graph.collective import Collective, collectives
from shardcompile.passes.plan import exchanging
from tests.support import expert_models, llama, scale_models, suite
from tests.support.lockstep import world_of
from tests.support.tiers import often

Write = Callable[[suite.Place, random.Random], Graph]

SIZE = suite.Size(2, width=64, tokens=256, heads=2, sequence=64)
EXPERTS = suite.Experts(layers=2, tokens=8, width=64, hidden=64)
LLAMA = llama.Shape(layers=2, tokens=64, width=64, hidden=96, heads=4, shared_heads=2, words=128)


def own_tokens(place: suite.Place) -> suite.Size:
    """The size of a model whose input is plain, with other tokens on each rank."""
    return replace(SIZE, tokens=SIZE.sequence * (1 + 3 * place.rank))


def weights(place: suite.Place) -> llama.Groups:
    """Weights in shards, over all ranks."""
    return llama.Groups(place.group, place.ranks)


PROGRAMS: dict[str, Write] = {
    "layers sharded, forward": lambda place, _: suite.fsdp_forward(place, SIZE),
    "layers sharded, backward": lambda place, _: suite.fsdp_backward(place, SIZE),
    "experts, forward": lambda place, _: suite.experts_forward(place, EXPERTS),
    "experts, backward": lambda place, _: suite.experts_backward(place, EXPERTS),
    "u-net with halos": lambda place, _: suite.unet_forward(place, suite.Images(4, 16, 8)),
    "drawn": suite.drawn,
    "other tokens on each rank, forward": lambda place, _: suite.fsdp_forward(place, own_tokens(place)),
    "other tokens on each rank, backward": lambda place, _: suite.fsdp_backward(place, own_tokens(place)),
    "Llama, forward": lambda place, _: llama.forward(place, LLAMA, weights(place), uneven=True),
    "Llama, backward": lambda place, _: llama.backward(place, LLAMA, weights(place), uneven=True),
}


def plan(graph: Graph, ranks: int) -> list[str]:
    """All that the ranks must agree on, node by node: the order, and of collectives what they move."""
    lines = []
    for node in graph.nodes:
        c = Collective.of(node)
        line = node.name
        if c is not None:
            sizes = [(m.put and m.put.sizes, m.get and m.get.sizes, m.nbytes) for m in node_sizes.members(c, ranks)]
            line += f" {c.kind} of {[p.name for p in c.payloads]} {sizes} over {c.group_name}"
        lines.append(line)
    return lines


def partitions_of(number: int, ranks: int) -> suite.Partitions:
    """Partitions that are drawn, the same on every rank."""
    return lambda size, tensor: suite.random_partition(size, ranks, random.Random(f"{number} {size} {tensor}"))


def plans(write: Write, number: int, models: list[CostModel] | None = None) -> list[list[str]]:
    """The plan of each rank.

    Args:
        write: the program.
        number: of the draw.
        models: what each rank reckons with, and makes its own plan; one of several, drawn, if left out, and one rank
            plans for all.
    """
    numbers = random.Random(number)
    ranks = numbers.choice([2, 3, 4])
    model = CostModel(numbers.choice([H100, A100, CPU_CORE]))
    found, store = [], HashStore()
    with world_of(ranks) as world:
        world.name = lambda: "nccl"  # type: ignore[attr-defined]  # of the backend
        for rank in world.each():
            place = suite.Place(ranks, rank, "g", partitions_of(number, ranks))
            graph = write(place, random.Random(number))
            with exchanging(store, rank) if models is None else contextlib.nullcontext():
                scheduled(graph, model if models is None else models[rank % len(models)])
            found.append(plan(graph, ranks))
    return found


def scheduled(graph: Graph, model: CostModel) -> None:
    """Run our passes with the costs of a model."""
    *passes, _ = Pipeline().passes
    for p in passes:
        if hasattr(p, "model"):
            p.model = model
    Pipeline(passes)(graph)


def disagreements(write: Write, numbers: range, models: list[CostModel] | None = None) -> list[int]:
    """The draws whose ranks have different plans."""
    found = []
    for number in numbers:
        first, *others = plans(write, number, models)
        if any(other != first for other in others):
            found.append(number)
    return found


@pytest.mark.parametrize("name", often(list(PROGRAMS), 3))
def test_ranks_agree(name: str) -> None:
    assert disagreements(PROGRAMS[name], range(5)) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_agree_on_a_thousand_draws(name: str) -> None:
    assert disagreements(PROGRAMS[name], range(1000)) == []


def test_the_draws_have_empty_shards_single_owners_and_plain_ones() -> None:
    partitions = [suite.random_partition(64, 4, random.Random(i)) for i in range(200)]
    assert all(sum(c) == 64 for c in partitions)
    assert any(0 in c for c in partitions) and any(64 in c for c in partitions) and any(min(c) > 8 for c in partitions)


def test_costs_that_differ_between_ranks_are_found_out() -> None:
    slow = replace(H100, intra=replace(H100.intra, launch=1e-9, hop=0.0, bandwidth=1e9))
    assert disagreements(PROGRAMS["drawn"], range(12), [CostModel(H100), CostModel(slow)])


@pytest.mark.nightly
def test_ranks_that_plan_for_themselves_are_found_out() -> None:
    """By the sizes in the graph, which are not those of the other ranks."""
    assert disagreements(PROGRAMS["drawn"], range(12), [CostModel(H100)])


BUILDS = {
    "fsdp_module": lambda rows: suite.fsdp_module(rows, width=64),
    "demo_step": suite.demo_step,
}


def traced_plans(name: str, number: int, ranks: int = 4) -> list[list[str]]:
    """The plan of each rank for a model that it traces itself, forward and backward."""

    def rows(size: int, n: int) -> list[int]:
        return suite.random_partition(size, n, random.Random(f"{number} {size}"))

    found, store = [], HashStore()
    for rank in range(ranks):
        with offline_world(ranks, rank=rank, device="cpu") as world, exchanging(store, rank):
            lines: list[str] = []
            for graph in suite.traced(world, BUILDS[name](rows)):
                scheduled(graph, CostModel(H100))
                lines += plan(graph, ranks)
            found.append(lines)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("name", BUILDS)
def test_ranks_that_trace_agree(name: str, number: int) -> None:
    first, *others = traced_plans(name, number)
    for other in others:
        assert other == first


SUITE = scale_models.models(layers=2) | expert_models.models(layers=2)


def plans_of_the_suite(name: str, rank: int, store: HashStore, ranks: int = 64) -> list[str]:
    """The collectives of one rank, in order, for a traced model of the suite that schedules are judged by.

    Ranks of other nodes have other groups, of as many ranks; and DTensor pads where a rank has less.
    """
    lines: list[str] = []
    with scale_models.traced(SUITE[name], ranks, rank) as graphs, exchanging(store, rank):
        for graph in graphs:
            scheduled(graph, CostModel(H100))
            lines += [
                f"{c.kind} {c.global_bytes} over {node_sizes.size_of_group(c.group_name, {})}"
                for c in collectives(graph)
            ]
    return lines


@pytest.mark.nightly
@pytest.mark.parametrize("name", often(sorted(SUITE, key=lambda name: name != "Llama, 2-D"), 1))
def test_first_and_last_rank_of_the_suite_agree(name: str) -> None:
    store = HashStore()
    assert plans_of_the_suite(name, 0, store) == plans_of_the_suite(name, 63, store)


@pytest.mark.parametrize("sizes", often([[5, 0, 3], [5, 1, 3], [2, 6, 1]], 1))
def test_parameters_of_which_a_rank_has_one_row_or_none_share_buckets(sizes: list[int]) -> None:
    """Their gradients come with keys, which are allocations that every rank has."""

    def build(mesh: DeviceMesh) -> Any:
        local = sizes[mesh.get_local_rank()]
        partition = (
            sc.ShardTensor.from_local(torch.randn(local, 8), mesh, [Shard(0)], {0: [*sizes]}) for _ in range(4)
        )
        weights = [[torch.nn.Parameter(x)] for x in partition]

        def loss(layers: Any, x: Any) -> Any:
            for (weight,) in layers:
                gathered = weight.redistribute(placements=[Replicate()])
                whole = gathered.to_local(grad_placements=[Partial()])
                x = torch.relu(x @ whole.T) @ whole
            return x.sum()

        return scale_models.Model(loss, weights), (torch.randn(6, 8),)

    for rank in range(3):
        trace = trace_offline(build, world_size=3, rank=rank, device="cuda")
        kinds = [c.kind for c in trace.collectives]
        assert kinds == ["all_gather_bucket", "reduce_scatter_bucket"], f"rank {rank}"
