"""The partitioner of joint graphs: programs that go right with it, and wrong with torch's or without a part of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from shardcompile.compat import partitioner
from shardcompile.testing import LocalRanks
from tests.support.tiers import often
from tools.fuzz import RIGHT, Input, Program, judge

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])

PROGRAMS = {
    "equal parts": Program(  # on a rank whose n is 0, rows 0 to n and rows n to 2n are the same
        (2,),
        [Input("a0", (5, 1), "R", grad=True)],
        ['v0 = to(a0, "S(1)")', "v1 = torch.cat([v0, v0], 1)", "v2 = v0.expand([-1, 4])"],
    ),
    "merge_equal_nodes": Program(
        (2,),
        [Input("a0", (4,), "S(0)", {0: [3, 1]}, grad=True)],
        ['v0 = to(a0, "R")', "v1 = a0.index_fill(0, torch.tensor([2, 0, 0, 3], dtype=torch.int64), 0.5)"],
    ),
    "_save_symbols": Program(
        (2,),
        [Input("a0", (1, 2), grad=True), Input("a1", (2, 3), "S(0)", {0: [2, 0]}, "int64")],
        ["v0 = a0[:, a1.reshape(-1).remainder(2)]"],
    ),
    "_save_copies": Program(
        (2,),
        [Input("a0", (4, 2), "S(1)", {0: [1, 1]}, grad=True), Input("a1", (2, 4), "S(0)", {0: [2, 0]})],
        ["a1.sin_()", "v0 = a0[2:3, 0:1, None] / (a1.abs() + 0.5)", "v1, v2 = tuple(v0.topk(1, 0))"],
    ),
    "_drop_repeated_collectives": Program(
        (3,),
        [
            Input("a0", (1, 7), "P(sum)"),
            Input("a1", (1, 7), "S(0)", {0: [1, 0, 0]}, grad=True),
            Input("a3", (7,), "S(0)", {0: [0, 2, 5]}, grad=True),
        ],
        [
            *("v0 = a0.transpose(1, 1)", "a0[torch.tensor([0, 0], dtype=torch.int64)] = 0.5"),
            *("v1 = v0.expand([2, 7])", "v0.copy_(a3)", "v5 = a1 @ a3"),
        ],
    ),
}
"""By what of the partitioner it needs, if anything, a program of the fuzzer's."""


def _torch_merges(graph: Graph) -> None:
    """Merge equal nodes as torch does."""
    merged = fx_graph_cse(graph)
    for node in list(graph.nodes)[::-1]:
        graph.erase_node(node)
    graph.output(graph.graph_copy(merged, {}))


WITHOUT = {
    "merge_equal_nodes": _torch_merges,
    "_save_symbols": lambda *graphs: None,
    "_save_copies": lambda *graphs: None,
}
BACKENDS = {"merge_equal_nodes": "inductor", "_save_symbols": "inductor"}
RIGHT_SINCE = {"_save_copies": (2, 14), "_save_symbols": (2, 14), "merge_equal_nodes": (2, 15)}


@contextlib.contextmanager
def _compiled_anew() -> Iterator[None]:
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def _told(name: str, backend: str) -> str:
    program = PROGRAMS[name]
    with LocalRanks(program.ranks, processes=False) as ranks:
        return judge(ranks, program, backend).kind


CASES = [(name, backend) for name in PROGRAMS for backend in ("aot_eager", "inductor", "shardcompile")]


@pytest.mark.parametrize("name, backend", often(CASES, 3))
def test_right_with_it(name: str, backend: str) -> None:
    assert _told(name, backend) == RIGHT


@pytest.mark.parametrize("name", often(list(WITHOUT), 1))
def test_wrong_without_it(name: str) -> None:
    if RIGHT_SINCE.get(name, (99,)) <= TORCH:
        pytest.skip(f"the program that is known goes right with torch {torch.__version__}")
    with _compiled_anew(), mock.patch.object(partitioner, name, WITHOUT[name]):
        assert _told(name, BACKENDS.get(name, "aot_eager")) != RIGHT


def _nodes(f: object) -> list[str]:
    graph = make_fx(f)(torch.ones(4)).graph  # type: ignore[arg-type]
    partitioner.merge_equal_nodes(graph)
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_equal_nodes_are_merged() -> None:
    assert _nodes(lambda x: (x.sin() + 1) * (x.sin() + 1)) == ["aten.sin.default", "aten.add.Tensor", "aten.mul.Tensor"]


def test_equal_numbers_of_other_types_are_not_merged() -> None:
    assert _nodes(lambda x: torch.cat([x.long() + 1, x.long() + 1.0])).count("aten.add.Tensor") == 2


def test_results_are_not_merged() -> None:
    assert _nodes(lambda x: (x.sin(), x.sin())) == ["aten.sin.default"] * 2


def test_random_numbers_are_not_merged() -> None:
    assert _nodes(lambda x: torch.bernoulli(x * 0.5) + torch.bernoulli(x * 0.5)).count("aten.bernoulli.default") == 2


def test_inputs_of_ops_with_bodies_stay() -> None:
    """Such an op may write to them."""

    def body(x: Tensor) -> Tensor:
        return x + 1

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cond(x.sum() > 0, body, body, [x.sin()]), torch.cond(x.sum() > 0, body, body, [x.sin()])

    assert _nodes(f).count("aten.sin.default") == 2


def test_merging_keeps_values() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.sin() + x.cos()) * (x.sin() + x.cos()) + x.sin()

    traced = make_fx(f)(torch.ones(4))
    partitioner.merge_equal_nodes(traced.graph)
    traced.recompile()
    x = torch.randn(4)
    torch.testing.assert_close(symbolic_trace(traced)(x), f(x))
