"""Lookups and additions along a sharded dim by index that are sharded: each distinct row travels once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.collectives import transport
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import mesh, once
from tests.support.tiers import often

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
WIDTH = 4


class Graph(NamedTuple):
    """Nodes and edges sharded."""

    nodes: list[int]
    edges: list[int]
    source: Tensor
    target: Tensor

    @property
    def features(self) -> Tensor:
        draw = torch.Generator().manual_seed(sum(self.edges))
        return torch.randn(sum(self.nodes), WIDTH, dtype=torch.float64, generator=draw)

    def border(self, index: Tensor) -> int:
        """How many rows travel: the distinct ones that a rank names of others."""
        owner = torch.repeat_interleave(torch.arange(len(self.nodes)), torch.tensor(self.nodes))
        named = [set(shard.tolist()) for shard in index.split(self.edges)]
        return sum(int(owner[n]) != r for r, numbers in enumerate(named) for n in numbers)


def drawn(nodes: list[int], edges: list[int], seed: int) -> Graph:
    ends = torch.randint(0, sum(nodes), (2, sum(edges)), generator=torch.Generator().manual_seed(seed))
    return Graph(nodes, edges, *ends)


GRAPHS = [
    drawn([5, 0, 4], [9, 15, 0], 0),
    drawn([2, 1, 3], [0, 1, 6], 1),
    drawn([0, 0, 7], [3, 4, 5], 2),
    Graph([3, 3, 3], [2, 2, 2], torch.tensor([0, 1, 3, 4, 6, 8]), torch.tensor([2, 0, 5, 3, 7, 7])),  # all is local
]


def partition(full: Tensor, sizes: list[int]) -> Any:
    return sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: sizes})


class MessagePassing(nn.Module):
    """A step of MeshGraphNet (Pfaff et al., "Learning Mesh-Based Simulation with Graph Networks", 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.of_edge = nn.Sequential(nn.Linear(3 * WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH))
        self.of_node = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, x: Any, e: Any, source: Any, target: Any) -> tuple[Any, Any]:
        e = e + self.of_edge(torch.cat([e, x.index_select(0, source), x.index_select(0, target)], 1))
        sums = torch.zeros_like(x).index_add(0, target, e)
        return x + self.of_node(torch.cat([x, sums], 1)), e


class MeshGraphNet(nn.Module):
    """Two steps, edges made of differences of nodes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleList([MessagePassing(), MessagePassing()]).double()

    def forward(self, x: Any, source: Any, target: Any) -> Any:
        e = x.index_select(0, source) - x.index_select(0, target)
        for step in self.steps:
            x, e = step(x, e, source, target)
        return x


def by_items(x: Any, source: Any, target: Any) -> Any:
    """Lookups ``x[i]``, sums, means and maxima as torch_geometric has them."""
    messages = x[source] * 2 - x[target]
    rows = target.unsqueeze(1).expand_as(messages)
    sums = messages.new_zeros(x.shape).scatter_add_(0, rows, messages.sin())
    most = messages.new_zeros(x.shape).scatter_reduce_(0, rows, messages, "amax", include_self=False)
    counts = messages.new_zeros(x.shape[0]).scatter_add_(0, target, torch.ones_like(messages[:, 0]))
    return sums / counts.clamp(min=1).unsqueeze(1) + most


def step(run: Any, of: Graph, parameters: list[Tensor]) -> None:
    """Values and gradients against one device."""

    def expected() -> list[Tensor]:
        x = of.features.requires_grad_()
        plain = MeshGraphNet() if parameters else by_items
        out = plain(x, of.source, of.target)
        out.sin().sum().backward()
        gradients = [p.grad for p in plain.parameters()] if parameters else []
        return [out.detach(), x.grad, *gradients]

    for p in parameters:
        p.grad = None
    x = partition(of.features, of.nodes).requires_grad_()
    out = run(x, partition(of.source, of.edges), partition(of.target, of.edges))
    assert out.sharding.partitions[0].sizes == tuple(of.nodes)
    out.sin().sum().backward()
    found = [out.detach().full_tensor(), x.grad.full_tensor(), *(p.grad for p in parameters)]
    for ours, theirs in zip(found, once(expected), strict=True):
        torch.testing.assert_close(ours, theirs, **TIGHT)


CASES = [(c, k) for c in ("", "aot_eager", "inductor") for k in ("net", "items")]


@pytest.mark.ranks(3, timeout=900, processes=False)
@pytest.mark.parametrize(("backend", "kind"), often(CASES, 1))
def test_one_graph_serves_every_partition_and_every_index(backend: str, kind: str) -> None:
    model = MeshGraphNet() if kind == "net" else None
    run: Any = model or by_items
    parameters = list(model.parameters()) if model else []
    if backend:
        run = torch.compile(run, fullgraph=True, backend=backend)
    step(run, GRAPHS[0], parameters)
    step(run, GRAPHS[1], parameters)  # a size that changes compiles once more, as everywhere
    before = once(graphs_compiled)
    for of in GRAPHS[2:]:
        step(run, of, parameters)
    assert graphs_compiled() == before


def messages_from_here_on(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Kind and bytes of each message to another rank, of all ranks together."""
    messages: list[tuple[str, int]] = once(list)
    real = transport.exchange

    def counted(call: Any, sends: Any, receives: Any) -> Any:
        messages.extend((call.entry.kind, t.numel() * t.itemsize) for _, t in sends)
        return real(call, sends, receives)

    once(lambda: monkeypatch.setattr(transport, "exchange", counted))
    return messages


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("number", often([0, 3], 1), ids=["border", "local"])
def test_each_distinct_row_travels_once_for_each_layer_and_direction(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = GRAPHS[number]
    sent = messages_from_here_on(monkeypatch)
    x, source, target = partition(of.features, of.nodes), partition(of.source, of.edges), partition(of.target, of.edges)
    x.requires_grad_()
    layers = 3

    def run(x: Any, source: Any, target: Any) -> Any:
        for _ in range(layers):
            rows = x.index_select(0, source)
            x = x + torch.zeros_like(x).index_add(0, target, rows.sin())
        return x

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    compiled(x, source, target).sum().backward()
    once(sent.clear)
    compiled(x, source, target).sum().backward()
    rows = of.border(of.source) + of.border(of.target)
    assert {kind for kind, _ in sent} <= {"exchange_rows"}
    # Of the first layer's lookup and the last one's sum the gradients travel as well; numbers once.
    assert sum(n for _, n in sent) == rows * (WIDTH * 8 * layers * 2 + 8)


def layers_of(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    layer = getattr(pytest.importorskip("torch_geometric.nn"), name)
    torch.manual_seed(0)
    return layer(WIDTH, WIDTH, **options).double()  # type: ignore[no-any-return]


LAYERS: list[Any] = [
    ("SAGEConv", {}, 0),
    ("GATConv", {"heads": 2, "concat": False, "add_self_loops": False}, 0),
    # It counts edges into plain zeros, by index that it has to have whole for that.
    ("PNAConv", {"aggregators": ["mean", "max", "std"], "scalers": ["identity"], "deg": torch.tensor([0, 3, 6])}, 8),
]


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(("name", "options", "of_edge"), often(LAYERS, 1))
def test_layers_of_torch_geometric_gather_no_nodes(
    name: str, options: Any, of_edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = messages_from_here_on(monkeypatch)
    of = drawn([20, 1, 19], [60, 40, 20], 3)
    model = torch.compile(layers_of(name, options), fullgraph=True, backend="aot_eager")
    x, edges = partition(of.features, of.nodes).requires_grad_(), torch.stack([of.source, of.target])
    spread = sc.distribute_tensor(edges, mesh(), [Shard(1)], sharding_shapes={0: of.edges})
    for _ in range(2):
        once(sent.clear)
        model(x, spread).sin().sum().backward()
    others = [n for kind, n in sent if kind != "exchange_rows"]
    assert sum(others) == of_edge * sum(of.edges) * (len(of.edges) - 1), others


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_number_out_of_range_is_an_error_on_every_rank(compiled: bool) -> None:
    of = GRAPHS[0]
    x, target = partition(of.features, of.nodes), partition(of.target, of.edges)

    def look_up(x: Any, index: Any, target: Any) -> Any:
        return x.index_select(0, index)

    def add(x: Any, index: Any, target: Any) -> Any:
        return torch.zeros_like(x).index_add(0, index, x.index_select(0, target))

    for run in (look_up, add):
        call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        for bad in (9, -1):
            wrong = of.source.clone()
            wrong[3] = bad
            with pytest.raises(
                IndexError, match=rf"aten\.index[\w.]*: index out of range.*; rank 0 of the group has {bad}\."
            ):
                call(x, partition(wrong, of.edges), target)


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("compiled", often([False, True], 1))
def test_rows_and_numbers_on_a_mesh_of_two_dims(compiled: bool) -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full, index = (
        torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        torch.arange(12) % 7,
    )

    def run(x: Any, i: Any) -> Any:
        return torch.zeros_like(x).index_add(0, i, x.index_select(0, i).sin())

    plain = full.clone().requires_grad_()
    expected = run(plain, index)
    expected.cos().sum().backward()
    for placements, of_index in (
        ([Shard(0), Shard(1)], [Shard(0), Replicate()]),
        ([Shard(1), Shard(0)], [Replicate(), Shard(0)]),
        ([Replicate(), Shard(0)], [Replicate(), Shard(0)]),
    ):
        x = sc.distribute_tensor(full, on, placements).requires_grad_()
        spread = sc.distribute_tensor(index, on, of_index)
        out = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, spread)
        assert out.placements == tuple(placements)
        out.cos().sum().backward()
        torch.testing.assert_close(out.detach().full_tensor(), expected.detach(), **TIGHT)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **TIGHT)


@pytest.mark.ranks(3, processes=False)
def test_a_table_that_is_partition_as_its_numbers_are() -> None:
    full, index = torch.randn(11, 3, dtype=torch.float64), torch.tensor([[0, 10], [3, 3], [10, 9], [2, 0], [7, 7]])
    plain = full.clone().requires_grad_()
    expected = nn.functional.embedding(index, plain, padding_idx=3)
    expected.sin().sum().backward()
    x = partition(full, [4, 0, 7]).requires_grad_()
    out = nn.functional.embedding(partition(index, [1, 3, 1]), x, padding_idx=3)
    assert out.sharding.partitions[0].sizes == (1, 3, 1)
    out.sin().sum().backward()
    torch.testing.assert_close(out.detach().full_tensor(), expected.detach(), **TIGHT)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, **TIGHT)
    assert x.grad.sharding.partitions[0].sizes == (4, 0, 7)
