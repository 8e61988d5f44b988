"""Graph networks as people write them, on nodes and edges in uneven shards, against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import mesh
from tests.support.tiers import often

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
NODES = 9


def points() -> Tensor:
    return torch.randn(NODES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def partition(full: Tensor, dim: int, sizes: list[int]) -> Any:
    return sc.distribute_tensor(full, mesh(), [Shard(dim)], sharding_shapes={0: sizes})


def check(plain: Any, ours: Any, model: nn.Module, compiled: bool) -> None:
    """Values, and gradients of rows and parameters.

    Args:
        plain: the model's call on whole rows.
        ours: the same on sharded rows.
        model: whose parameters get gradients.
        compiled: whether ours is compiled.
    """
    full = points().requires_grad_()
    expected = plain(full)
    expected.sin().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    x = partition(points(), 0, [5, 0, 4]).requires_grad_()
    found = (torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours)(x)
    found.sin().sum().backward()
    torch.testing.assert_close(found.detach().full_tensor(), expected.detach(), **TIGHT)
    torch.testing.assert_close(x.grad.full_tensor(), full.grad, **TIGHT)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **TIGHT)


LAYERS = [
    ("SAGEConv", {}),
    ("GATConv", {"heads": 2, "add_self_loops": False}),
    ("GCNConv", {"add_self_loops": False}),
    ("PNAConv", {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}),
]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize(("name", "options", "compiled"), often([(*of, c) for c in (False, True) for of in LAYERS], 2))
def test_layers_of_torch_geometric(name: str, options: dict[str, Any], compiled: bool) -> None:
    layers = pytest.importorskip("torch_geometric.nn")
    edges = torch.randint(0, NODES, (2, 24), generator=torch.Generator().manual_seed(3))
    if name == "PNAConv":
        options = {**options, "deg": torch.bincount(torch.bincount(edges[1], minlength=NODES))}
    torch.manual_seed(0)
    model = getattr(layers, name)(6, 4, **options).double()
    spread = partition(edges, 1, [9, 15, 0])
    check(lambda x: model(x, edges), lambda x: model(x, spread), model, compiled)


class DynamicGraph(nn.Module):
    """DGCNN (Wang et al., "Dynamic Graph CNN for Learning on Point Clouds", 2019): each layer finds neighbours anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 8), nn.Linear(16, 5)]).double()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            numbers = sc.neighbors.knn(x.detach(), x.detach(), 3).indices
            near = sc.plan_gather(x, numbers).gather(x) if isinstance(x, sc.ShardTensor) else x[numbers]
            here = x.unsqueeze(1).expand_as(near)
            x = nn.functional.leaky_relu(layer(torch.cat([here, near - here], 2)), 0.2).amax(1)
        return x


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("compiled", often([False, True], 1))
def test_a_network_whose_graph_follows_its_features(compiled: bool) -> None:
    torch.manual_seed(0)
    model = DynamicGraph()
    check(model, model, model, compiled)
