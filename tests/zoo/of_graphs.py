"""Layers of torch_geometric: nodes and edges are sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo import packages
from tests.zoo.entry import Entry
from tests.zoo.words import NODES


def _layer(name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: packages.of("torch_geometric.nn", name)(*args, **kwargs)


def _isomorphism() -> nn.Module:
    return packages.of("torch_geometric.nn", "GINConv")(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))


def _nodes_and_edges(n: int) -> list[Tensor]:
    return [torch.randn(n, 6), torch.randint(0, n, (2, 3 * n))]


def _entry(name: str, make: Callable[[], nn.Module]) -> Entry:
    return Entry(name, make, _nodes_and_edges, (0, 1), rows=(1, 3), package="torch_geometric", gathers=NODES)


OF_GRAPHS = [
    _entry("pyg-gcn", _layer("GCNConv", 6, 4, add_self_loops=False)),
    _entry("pyg-sage", _layer("SAGEConv", 6, 4)),
    _entry("pyg-gat", _layer("GATConv", 6, 4, heads=2, add_self_loops=False)),
    _entry("pyg-graph", _layer("GraphConv", 6, 4)),
    _entry("pyg-gin", _isomorphism),
    _entry("pyg-transformer", _layer("TransformerConv", 6, 4, heads=2)),
]
