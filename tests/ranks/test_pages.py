"""The code of the pages in docs/ runs, and prints what they say.

docs/testing.md has `test_docs.py`, docs/recipes.md `test_recipes.py`, docs/training.md `test_training_page.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.fx import Graph

import shardcompile as sc
from shardcompile.passes import Pipeline, collectives, inductor_options
from shardcompile.testing import once, rank
from tests.support.pages import DOCS, CodeBlock, code_blocks, run_blocks, without_versions_and_places
from tests.support.tiers import often


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def by_aot_eager(page: str) -> list[CodeBlock]:
    """The code blocks of a page; what they compile by our backend is compiled in a tenth of the time."""
    return [replace(b, source=b.source.replace('"shardcompile"', '"aot_eager"')) for b in code_blocks(DOCS / page)]


def code_and_text(page: str) -> list[CodeBlock]:
    return [block for block in by_aot_eager(page) if block.language in ("python", "text")]


@pytest.mark.nightly  # README's example, which is much the same, runs on every push
@pytest.mark.ranks(2, processes=False, timeout=300)
def test_first_model() -> None:
    run_blocks(code_blocks(DOCS / "first-model.md"), cleaned=without_versions_and_places)


def test_looking_inside() -> None:
    run_blocks(code_blocks(DOCS / "looking-inside.md"))["test_communication"]()


def test_a_pass_of_ones_own() -> None:
    names = run_blocks(code_blocks(DOCS / "passes.md"))
    assert names["trace"].collectives[0].global_bytes == 512 * 512 * 2


@pytest.mark.ranks(3, processes=False)
def test_that_pass_keeps_every_bit() -> None:
    names = _pass_and_layer()
    weight = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    shard = weight.split([4, 0, 3])[rank()].clone()
    sharded = sc.ShardTensor.from_local(shard, init_device_mesh("cpu", (3,)), [Shard(0)], {0: [4, 0, 3]})
    step = torch.compile(names["layer"], fullgraph=True, options=once(_options))
    with torch.no_grad():
        assert torch.equal(step(x, sharded), names["layer"](x, sharded))
    assert _SENT == [7 * 4 * 2]


_SENT: list[int] = []


@cache
def _pass_and_layer() -> dict[str, Any]:
    """The names of the page of passes, the same objects on every rank."""
    written, step, *_ = [block for block in code_blocks(DOCS / "passes.md") if block.language == "python"]
    return run_blocks([written, replace(step, source=step.source.partition("\n\nfor passes")[0])])


class _Sent:
    """A pass that changes nothing, and keeps the bytes of collectives."""

    name = "sent"

    def __repr__(self) -> str:
        return "Sent()"

    def __call__(self, graph: Graph) -> None:
        _SENT[:] = [c.global_bytes for c in collectives(graph)]


def _options() -> dict[str, Any]:
    """Recorded, so that nothing comes from a cache."""
    passes = [_pass_and_layer()["CastBeforeGather"](), _Sent()]
    return inductor_options() | {"post_grad_custom_post_pass": Pipeline(passes, record=True)}


def test_install() -> None:
    run_blocks(code_blocks(DOCS / "install.md"))


PHYSICS = code_and_text("physics.md")


@pytest.mark.nightly
def test_what_a_physics_informed_loss_costs() -> None:
    laplacian, model, _, costs, printed = PHYSICS
    run_blocks([laplacian, model, costs, printed])


@pytest.mark.nightly
@pytest.mark.ranks(2, processes=False)
def test_training_of_a_physics_informed_loss_prints_what_the_page_says() -> None:
    laplacian, model, printed, *_ = PHYSICS
    run = replace(model, source=model.source + "\ntrain(init_device_mesh('cpu', (2,)), 101)\n")
    start = replace(laplacian, source=laplacian.source + "from torch.distributed.device_mesh import init_device_mesh\n")
    run_blocks([start, run, printed])


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", often([False, True], 1))
def test_physics_informed_loss(compiled: bool, float64: None) -> None:
    names = run_blocks(PHYSICS[:2])
    solved = names["laplacian"](lambda p: (math.pi * p).sin().prod(1), points := torch.rand(7, 2))
    torch.testing.assert_close(solved, -names["source"](points))  # the solution, in closed form

    full, models = [torch.rand(7, 2), torch.rand(4, 2)], []
    for sharded in (False, True):
        torch.manual_seed(0)
        names["field"] = names["Field"]()
        given: list[Any] = full
        loss_of = eval("lambda *points: poisson_loss(field, *points)", names)
        if sharded:
            mesh = init_device_mesh("cpu", (3,))
            sizes = [[5, 0, 2], [0, 1, 3]]
            shards_here = [x.split(n)[rank()] for x, n in zip(full, sizes, strict=True)]
            given = [
                sc.ShardTensor.from_local(b, mesh, [Shard(0)], {0: n}) for b, n in zip(shards_here, sizes, strict=True)
            ]
            loss_of = torch.compile(loss_of, fullgraph=True, backend="aot_eager") if compiled else loss_of
        loss = loss_of(*given)
        loss.backward()
        models.append([loss.item(), *(p.grad for p in names["field"].parameters())])
    torch.testing.assert_close(models[1], models[0])


@pytest.mark.ranks(3, processes=False)
def test_troubleshooting() -> None:
    run_blocks(code_blocks(DOCS / "troubleshooting.md"), cleaned=str.split)  # the page breaks lines


@pytest.mark.ranks(3, processes=False)
def test_concepts() -> None:
    run_blocks(by_aot_eager("concepts.md"))


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("page", ["from-dtensor.md", "from-physicsnemo.md"])
def test_coming_from(page: str) -> None:
    run_blocks(code_blocks(DOCS / page))


@pytest.mark.nightly
@pytest.mark.ranks(4, processes=False)
def test_routing(float64: None) -> None:
    names = run_blocks(code_blocks(DOCS / "routing.md"))
    tokens, gate, weights, sizes = torch.rand(7, 3), torch.rand(3, 16), torch.rand(16, 3, 3), [4, 0, 1, 2]
    mesh = init_device_mesh("cpu", (4,))
    own = weights[4 * rank() : 4 * rank() + 4]
    shard = tokens.split(sizes)[rank()].clone().requires_grad_()
    x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes})
    out = names["layer"](x, gate, own)
    compiled = torch.compile(names["layer"], fullgraph=True, backend="aot_eager")(x, gate, own)
    torch.testing.assert_close(compiled.full_tensor(), out.full_tensor())
    out.square().sum().backward()

    plain = tokens.clone().requires_grad_()
    shares, numbers = (plain @ gate).softmax(-1).topk(2)
    each = (plain[:, None, None] @ weights[numbers]).squeeze(2).relu()
    expected = (shares[..., None] * each).sum(1)
    expected.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), expected)
    torch.testing.assert_close(shard.grad, plain.grad.split(sizes)[rank()])  # type: ignore[union-attr]

    moved = names["balance"](sc.distribute_tensor(tokens, mesh, [Shard(0)]), torch.tensor(sizes))
    torch.testing.assert_close(moved.to_local(), tokens.split(sizes)[rank()])


@pytest.mark.ranks(4, mesh=(2, 2), processes=False)
def test_nodes_of_the_routing_page() -> None:
    names = run_blocks(code_blocks(DOCS / "routing.md"))
    mesh = init_device_mesh("cpu", (2, 2))
    rows, _ = names["by_nodes"](torch.full((2, 1), rank()), torch.tensor([3, rank()]), mesh)
    assert rows.sharding.partitions[0].sizes == (1, 1, 1, 5)
    assert rows.full_tensor().flatten().tolist() == [0, 1, 2, 0, 1, 2, 3, 3]


@pytest.mark.ranks(3, processes=False)
def test_graph_layers_of_the_routing_page() -> None:
    names = run_blocks(code_blocks(DOCS / "routing.md"))
    draw = torch.Generator().manual_seed(0)
    nodes = torch.randn(7, 3, dtype=torch.float64, generator=draw)
    weights = [torch.randn(6, 3, dtype=torch.float64, generator=draw) for _ in range(2)]
    source, target = torch.randint(0, 7, (2, 11), generator=draw)
    expected = nodes
    for weight in weights:
        sums = torch.zeros_like(expected).index_add(0, target, expected[source])
        mean = sums / torch.bincount(target, minlength=7).clamp(min=1).unsqueeze(1)
        expected = torch.cat([expected, mean], 1) @ weight
    mesh = init_device_mesh("cpu", (3,))
    x, *edges = (
        sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: sizes})
        for full, sizes in ((nodes, [5, 0, 2]), (source, [4, 4, 3]), (target, [4, 4, 3]))
    )
    out = names["graph_layers"](x, *edges, weights)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    expected = names["graph_network"](nodes, source, target, weights)
    out = names["graph_network"](x, *edges, weights)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
