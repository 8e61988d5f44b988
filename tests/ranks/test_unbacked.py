"""Unbacked sizes of plain tensors beside sharded ones: what plain PyTorch compiles is one graph for every partition.

Plain edges of a graph, of which a mask keeps some, are such tensors.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once
from tests.support.tiers import often

NODES = 7
Run = Callable[[Tensor, Tensor], Any]


def without_loops(edges: Tensor) -> Tensor:
    return edges[:, edges[0] != edges[1]]


def with_loops(x: Tensor, edges: Tensor) -> Tensor:
    nodes = torch.arange(x.shape[0])
    return torch.cat([without_loops(edges), torch.stack([nodes, nodes])], 1)


def gathered(x: Tensor, edges: Tensor) -> Tensor:
    return x.index_select(0, without_loops(edges)[0])


def added(x: Tensor, edges: Tensor) -> Tensor:
    source, target = with_loops(x, edges)
    return torch.zeros_like(x).index_add(0, target, x.index_select(0, source))


def scattered(x: Tensor, edges: Tensor) -> Tensor:
    source, target = without_loops(edges)
    rows = x[source]
    return x.new_zeros(x.shape[0], x.shape[1]).scatter_add(0, target.unsqueeze(1).expand_as(rows), rows)


def none_left(x: Tensor, edges: Tensor) -> Tensor:
    edges = with_loops(x, edges)
    return x if edges.numel() == 0 else x[edges[0]]


def counted(x: Tensor, edges: Tensor) -> Tensor:
    kept = (edges[0] != edges[1]).nonzero().view(-1)
    ones = torch.ones(kept.shape[0], dtype=x.dtype)
    return x * torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, edges[0][kept], ones).unsqueeze(1)


def numbered(x: Tensor, edges: Tensor) -> Tensor:
    kept = (edges[0] != edges[1]).nonzero().view(-1)
    return x[torch.arange(kept.shape[0]) % 3].sum(0) + x


def unique(x: Tensor, edges: Tensor) -> Tensor:
    found, inverse = torch.unique(edges[0], return_inverse=True)
    return x[found].sin()[inverse]


def attention(x: Tensor, edges: Tensor) -> Tensor:
    source, target = without_loops(edges)
    score = (x[source] * x[target]).sum(-1)
    largest = torch.full((x.shape[0],), -torch.inf, dtype=x.dtype)
    largest = largest.scatter_reduce(0, target, score.detach(), "amax", include_self=False)
    weight = (score - largest[target]).exp()
    total = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, target, weight)
    weight = weight / total[target]
    return torch.zeros_like(x).index_add(0, target, weight.unsqueeze(1) * x[source])


def joined(x: Tensor, edges: Tensor) -> Tensor:
    kept = (edges[0] != edges[1]).nonzero().view(-1)
    return torch.cat([x, x[edges[0][kept]]])


def scaled(x: Tensor, edges: Tensor) -> tuple[Tensor, ...]:
    """Results whose unbacked sizes come from a plain tensor alone: their gradients have these sizes as well."""
    weight = edges[0].to(x.dtype)
    weight = weight[weight > 2]
    return x.sum(0) + weight.sum(), torch.cat([weight, weight]) * x.sum(), weight * x.mean()


def written(x: Tensor, edges: Tensor) -> Tensor:
    kept = torch.where(edges[0] < edges[1])[0]
    y = x.clone()
    y[edges[0][kept]] = 0.5
    return y


def item(x: Tensor, edges: Tensor) -> Tensor:
    return x.sum() + torch.ones(int(edges.max()) + 1, dtype=x.dtype).sum()


def sliced(x: Tensor, edges: Tensor) -> tuple[Tensor, ...]:
    """Slices along a sharded dim and another one, whose bound the program has checked."""
    count = int(edges[0, 0]) + 1
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    torch._check(count <= x.shape[1])
    return x[:count] * 2, x[:, :count].sum()


PROGRAMS: list[Run] = [
    *(gathered, none_left, scaled, sliced, added, attention, scattered),
    *(counted, numbered, unique, joined, written, item),
]


def inputs() -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Shard sizes, nodes, and edges: with loops, with loops alone, and of other counts."""
    edges = [
        torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, 2, 2, 3], [1, 2, 2, 4, 5, 6, 0, 6, 1, 0, 3]]),
        torch.tensor([[3, 1, 2, 3, 6, 6, 2], [1, 2, 2, 4, 0, 6, 2]]),
        torch.tensor([[1, 2, 3], [1, 2, 3]]),
        torch.tensor([[0, 1, 2, 4], [1, 2, 4, 6]]),
    ]
    for n, (sizes, e) in enumerate(zip(([3, 0, 4], [1, 5, 1], [0, 7, 0], [2, 2, 3]), edges, strict=True)):
        yield sizes, torch.randn(NODES, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64), e


def backward(results: Any) -> list[Tensor]:
    """Run a backward pass through all results, and return them as full plain tensors."""
    found = results if isinstance(results, tuple) else (results,)
    torch.stack([y.sin().sum() for y in found]).sum().backward()
    return [full_of(y) for y in found]


def full_of(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, sc.ShardTensor) else x).detach()


def check(run: Run, plain: Run, sizes: list[int], full: Tensor, edges: Tensor) -> None:
    def expected() -> tuple[list[Tensor], Tensor]:
        leaf = full.clone().requires_grad_()
        found = backward(plain(leaf, edges))
        assert leaf.grad is not None
        return found, leaf.grad

    x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes}).requires_grad_()
    found = backward(run(x, edges))
    results, gradient = once(expected)
    torch.testing.assert_close(found, results)
    torch.testing.assert_close(full_of(x.grad), gradient)


def check_compiled(plain: Run, backend: str) -> None:
    """Values and gradients of a compiled program over all inputs, by as many graphs as serve the first ones."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        run = torch.compile(plain, fullgraph=True, backend=backend, dynamic=True)
        (first, *others) = inputs()
        check(run, plain, *first)
        before = once(graphs_compiled)
        for worked in others:
            check(run, plain, *worked)
        assert graphs_compiled() == before


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_eager(program: Run) -> None:
    for worked in inputs():
        check(program, program, *worked)


_CASES = [(program, backend) for backend in ("aot_eager", "inductor") for program in PROGRAMS]


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("program", "backend"),
    often(_CASES, 6),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_one_graph(program: Run, backend: str) -> None:
    check_compiled(program, backend)


# Slices whose bounds are unbacked, of any sign and beyond the rows, and rows by unbacked indices


def _row(bounds: Tensor, which: int = 0) -> int:
    return int(bounds[which].item())


def first_rows(x: Tensor, bounds: Tensor) -> Tensor:
    return x[: _row(bounds)].exp()


def last_rows(x: Tensor, bounds: Tensor) -> Tensor:
    return x[_row(bounds) :] * 2


def rows_between(x: Tensor, bounds: Tensor) -> Tensor:
    return x[_row(bounds) : _row(bounds, 1)].sum(0)


def rows_apart(x: Tensor, bounds: Tensor) -> Tensor:
    n = _row(bounds)
    return torch.cat([x[:n].sin(), x[n:]])


def columns(x: Tensor, bounds: Tensor) -> Tensor:
    return x[:, : _row(bounds)].sum(1)


def of_a_slice(x: Tensor, bounds: Tensor) -> Tensor:
    return x[1:][: _row(bounds)].mm(torch.ones(4, 2, dtype=x.dtype))


def added_slices(x: Tensor, bounds: Tensor) -> Tensor:
    n = _row(bounds)
    return x[:n] + x.sin()[:n]


def zeroed(x: Tensor, bounds: Tensor) -> Tensor:
    y = x.sin()
    y[: _row(bounds)] = 0
    return y


def zeroed_columns(x: Tensor, bounds: Tensor) -> Tensor:
    y = x.sin()
    y[:, _row(bounds) : _row(bounds, 1)] = 0
    return y


def one_row(x: Tensor, bounds: Tensor) -> Tensor:
    return x[_row(bounds, 2)] + x.exp().select(1, _row(bounds, 3)).sum()


def one_row_written(x: Tensor, bounds: Tensor) -> Tensor:
    return x.sin().select_scatter(x[0], 0, _row(bounds, 2))


SLICES = [
    first_rows,
    last_rows,
    rows_between,
    rows_apart,
    columns,
    of_a_slice,
    added_slices,
    zeroed,
    zeroed_columns,
    one_row,
    one_row_written,
]
BOUNDS = [
    *((4, 6, 3, 1), (0, 3, 0, 0), (7, 2, -1, 3), (20, 30, 6, -1)),
    *((-2, -1, -7, -4), (-30, 5, 5, 2), (1, 7, 1, 1), (6, -1, -2, -2)),
]
"""First and last bound, the index of a row, and that of a column."""


def bounded() -> Iterator[tuple[list[int], Tensor, Tensor]]:
    sizes = [[5, 0, 2], [1, 4, 2], [0, 7, 0], [3, 3, 1]]
    for n, bounds in enumerate(BOUNDS):
        full = torch.randn(NODES, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        yield sizes[n % len(sizes)], full, torch.tensor(bounds)


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(
    ("program", "backend"),
    often(
        [(program, "aot_eager") for program in SLICES]
        # Inductor allocates a gradient of `of_a_slice` before it reads the size, also where the program checks the bound.
        + [(program, "shardcompile") for program in SLICES if program is not of_a_slice],
        len(SLICES),
    ),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_slices_by_bounds_that_a_run_gives(program: Run, backend: str) -> None:
    for worked in bounded():
        check(program, program, *worked)
    once(torch.compiler.reset)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(program, fullgraph=True, backend=backend)
        before = once(graphs_compiled)
        for worked in bounded():
            check(run, program, *worked)
        assert graphs_compiled() == before + 1


def _isomorphism(layers: Any) -> nn.Module:
    return layers.GINConv(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))


LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "GCNConv": lambda layers: layers.GCNConv(4, 3),
    "GATConv": lambda layers: layers.GATConv(4, 3, heads=2),
    "SAGEConv": lambda layers: layers.SAGEConv(4, 3),
    "GINConv": _isomorphism,
    "TransformerConv": lambda layers: layers.TransformerConv(4, 3, heads=2),
    "GATv2Conv": lambda layers: layers.GATv2Conv(4, 3, heads=2),
    "ChebConv": lambda layers: layers.ChebConv(4, 3, K=3),
    "ClusterGCNConv": lambda layers: layers.ClusterGCNConv(4, 3),
}
_LAYERS = [(name, "aot_eager") for name in LAYERS] + [("GCNConv", "shardcompile"), ("GATConv", "inductor")]


@pytest.mark.zoo
@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(("name", "backend"), _LAYERS)
def test_layers_of_torch_geometric(name: str, backend: str) -> None:
    layers = pytest.importorskip("torch_geometric.nn")

    def made() -> nn.Module:
        torch.manual_seed(0)
        return LAYERS[name](layers).double()

    layer = once(made)
    check_compiled(lambda x, edges: layer(x, edges), backend)


_WITH_EINOPS = """
import torch
from einops import rearrange, repeat
from torch.distributed.tensor.placement_types import Shard
import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import LocalRanks

weight = torch.nn.Parameter(torch.randn(4, 4))

def function(plain, x):
    turned = rearrange(plain, "a b -> b a")
    return rearrange(x, "(n k) c -> n (k c)", k=1).sin() @ turned + repeat(weight, "a b -> (a b) c", c=4).sum(0)

def main(mesh):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for sizes in [3, 0, 4], [1, 5, 1], [0, 7, 0]:
        x = sc.distribute_tensor(torch.randn(7, 4), mesh, [Shard(0)], sharding_shapes={0: sizes})
        compiled(torch.randn(4, 4), x)
    return graphs_compiled()

print(LocalRanks(3, processes=False)(main))
"""
_AFTER_DYNAMO = """
import einops, torch
torch.compile(lambda x: einops.rearrange(x, "a b -> b a"), backend="eager")(torch.ones(2, 2))
torch._dynamo.utils.counters.clear()
"""


@pytest.mark.parametrize("before", often([_AFTER_DYNAMO, ""], 1), ids=["after Dynamo has traced a call", "first"])
def test_a_call_of_einops_compiles_once(before: str) -> None:
    pytest.importorskip("einops")
    program = [sys.executable, "-c", before + _WITH_EINOPS]
    shown = subprocess.run(program, capture_output=True, text=True, timeout=200, check=True)
    assert shown.stdout.split() == ["[1,", "1,", "1]"]
