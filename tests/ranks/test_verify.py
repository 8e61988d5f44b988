"""Ranks that would communicate differently are found when they compile."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.fx import Graph

import shardcompile as sc
from shardcompile.passes import Pipeline, compile_with_passes
from shardcompile.passes.collective import WAIT, collectives
from shardcompile.testing import rank, world_size


class ReduceTwiceOnRankOne:
    """A decision that only one rank takes."""

    name = "reduce_twice_on_rank_one"

    def __call__(self, graph: Graph) -> None:
        if rank() != 1:
            return
        first = collectives(graph)[0]
        wait = first.waits[0]
        with graph.inserting_after(wait):
            again = graph.call_function(first.node.target, (wait, *first.node.args[1:]))
        again.meta = dict(first.node.meta)
        with graph.inserting_after(again):
            graph.call_function(WAIT, (again,)).meta = dict(wait.meta)


class FailOnRankOne:
    name = "fail_on_rank_one"

    def __call__(self, graph: Graph) -> None:
        if rank() == 1:
            node = next(iter(graph.nodes))
            raise ValueError(f"no way with {node.name}")


def inputs() -> Tensor:
    mesh = init_device_mesh("cpu", (world_size(),))
    sizes = [5, 0, 2][: world_size()]
    return sc.distribute_tensor(torch.arange(float(sum(sizes))), mesh, [Shard(0)], sharding_shapes={0: sizes})


def gathered(x: Tensor) -> Tensor:
    return x.full_tensor().square().sum()  # type: ignore[attr-defined]


def compiled(*passes: Any) -> Any:
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": Pipeline(list(passes))}

    def backend(model: Any, example: Any) -> Any:
        return compile_with_passes(model, example, options=options)

    return torch.compile(gathered, fullgraph=True, backend=backend)


@pytest.mark.ranks(2, 3, timeout=100)
def test_a_decision_of_one_rank_raises_on_all_and_the_next_graph_compiles() -> None:
    x = inputs()
    with pytest.raises(Exception, match="different collectives") as raised:
        compiled(ReduceTwiceOnRankOne())(x)
    text = str(raised.value)
    assert "ranks 0 and 1" in text and "number 1 on (of 1 and 2)" in text and "all_gather_v" in text, text
    whole = x.full_tensor()
    torch.testing.assert_close(compiled()(x), whole.square().sum())


@pytest.mark.ranks(3, timeout=100)
def test_a_rank_that_fails_to_compile_does_not_leave_the_others_waiting() -> None:
    x = inputs()
    start = time.monotonic()
    with pytest.raises(Exception, match="no way with") as raised:
        compiled(FailOnRankOne())(x)
    assert time.monotonic() - start < 60
    text = str(raised.value)
    assert "pass fail_on_rank_one failed at node" in text and "off=['fail_on_rank_one']" in text, text
    assert ("rank 1 failed to compile" in text) == (rank() != 1)
    torch.testing.assert_close(compiled()(x), x.full_tensor().square().sum())


@pytest.mark.ranks(2, timeout=100)
def test_a_rank_that_compiles_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sc.config, "verify_timeout", 2.0)
    x = inputs()
    if rank() == 0:
        with pytest.raises(Exception, match="rank 1 did not compile this graph within 2 s"):
            compiled()(x)
    dist.barrier()


@pytest.mark.ranks(4, timeout=100)
def test_groups_of_a_mesh_are_compared_among_their_own_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.randn(7, 5, dtype=torch.float64)
    x = sc.distribute_tensor(full, mesh, [Shard(0), Shard(1)], sharding_shapes={0: [6, 1], 1: [2, 3]})
    torch.testing.assert_close(compiled()(x), full.square().sum())
