"""Our own compiled models under regression test, by the kit that users have: numbers, collectives, budgets.

The graphs are those of eight GPUs, traced without any; `pytest --update-snapshots` accepts new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Shard

import shardcompile as sc
from examples.poisson.model import PointTransformer, mean_squared_error
from shardcompile.inspect import explain
from shardcompile.testing import assert_graph, assert_matches_single_device, same_collectives_on_every_rank
from tests.support.tiers import often

SIZES = [40, 0, 1, 25, 64, 3, 17, 10]


class Points(nn.Module):
    """The network of the demo and its loss."""

    placements = (Shard(0), Shard(0))

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.net = PointTransformer(channels=16, heads=2, slices=4, layers=layers)

    def forward(self, points: Tensor, target: Tensor) -> Tensor:
        return mean_squared_error(self.net(points), target)

    @staticmethod
    def shapes(n: int) -> list[tuple[int, ...]]:
        return [(n, 5), (n,)]


class Transformer(nn.Module):
    """Layers over a sequence sharded: queries stay where they are, keys and values are gathered."""

    placements = (Shard(1), Shard(1))

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) - target).square().mean()

    @staticmethod
    def shapes(n: int) -> list[tuple[int, ...]]:
        return [(2, n, 16), (2, n, 3)]


class Images(nn.Module):
    """A convolutional network on a batch sharded, whose batch norms need every shard."""

    placements = (Shard(0), Shard(0))

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            *[
                part
                for _ in range(layers - 1)
                for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            ],
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.net(x) - target).square().mean()

    @staticmethod
    def shapes(n: int) -> list[tuple[int, ...]]:
        return [(n, 3, 8, 8), (n, 4)]


class Graphs(nn.Module):
    """Rounds of messages along edges: edges and nodes are sharded of their own."""

    placements = (Shard(0), Shard(0), Shard(0))

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.rounds = layers
        self.encode, self.message, self.update = nn.Linear(4, 8), nn.Linear(16, 8), nn.Linear(16, 8)
        self.decode = nn.Linear(8, 1)

    def forward(self, nodes: Tensor, edges: Tensor, target: Tensor) -> Tensor:
        h = torch.tanh(self.encode(nodes))
        n = nodes.shape[0]
        start, end = (edges[:, i].remainder(n) for i in (0, 1))
        for _ in range(self.rounds):
            messages = torch.tanh(self.message(torch.cat([h[start], h[end]], 1)))
            received = torch.zeros_like(h).index_add(0, end, messages)
            h = h + torch.tanh(self.update(torch.cat([h, received], 1)))
        return (self.decode(h) - target).square().mean()

    @staticmethod
    def shapes(n: int) -> list[tuple[int, ...]]:
        return [(n, 4), (2 * n, 2), (n, 1)]


MODELS = [Points, Transformer, Images, Graphs]


def data(model: Any, n: int, dtype: torch.dtype) -> list[Tensor]:
    tensors = [torch.randn(shape, dtype=dtype) for shape in model.shapes(n)]
    if model is Graphs:
        tensors[1] = torch.randint(0, 1000, (2 * n, 2))
    return tensors


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize("model", often([Transformer, *(m for m in MODELS if m is not Transformer)], 1))
@pytest.mark.parametrize(("backend", "layers"), often([("aot_eager", 1), ("shardcompile", 2)], 1))
def test_training_equals_one_device(model: Any, backend: str, layers: int) -> None:
    torch.manual_seed(0)
    net = model(layers).double()
    assert_matches_single_device(
        net,
        data(model, 7, torch.float64),
        list(model.placements),
        backend=backend,
        steps=2,
        max_graphs=2,
        input_grads=False,
    )


@pytest.mark.ranks(3, timeout=600, processes=False)
@pytest.mark.parametrize("model", often(MODELS, 1))
def test_one_row_in_all(model: Any) -> None:
    torch.manual_seed(0)
    net = model().double()
    inputs = data(model, 1, torch.float64)
    partitions = [
        {0: [0, 2, 0] if x.shape[p.dim] == 2 else [0, 1, 0]} for x, p in zip(inputs, model.placements, strict=True)
    ]
    assert_matches_single_device(
        net, inputs, list(model.placements), sharding_shapes=partitions, backend="aot_eager", input_grads=False
    )


@pytest.mark.parametrize("sizes", often([[0, 1, 0], [1, 0, 0], [2, 0, 0]], 1), ids=str)
@pytest.mark.parametrize("model", often([*MODELS[1:], MODELS[0]], 0))
def test_one_row_gives_every_rank_the_same_collectives(model: Any, sizes: list[int]) -> None:
    assert same_collectives_on_every_rank(build_of(model, sizes), 3)


def build_of(model: Any, rows: list[int], layers: int = 1) -> Callable[[DeviceMesh], tuple[Any, tuple[Any, ...]]]:
    def build(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
        here = mesh.get_rank()

        def shard(shape: tuple[int, ...], placement: Placement) -> sc.ShardTensor:
            dim = placement.dim  # type: ignore[attr-defined]
            sizes = [s * (shape[dim] // sum(rows)) for s in rows]
            local = list(shape)
            local[dim] = sizes[here]
            dtype = torch.int64 if model is Graphs and shape[-1] == 2 else torch.float32
            return sc.ShardTensor.from_local(torch.zeros(local, dtype=dtype), mesh, [placement], {0: sizes})

        shards = [shard(s, p) for s, p in zip(model.shapes(sum(rows)), model.placements, strict=True)]
        return model(layers), tuple(shards)

    return build


@pytest.mark.parametrize("model", often(MODELS, 0))
def test_communication_of_eight_gpus(model: Any) -> None:
    report = explain(build_of(model, SIZES, layers=2), world_size=8, device="cuda", stages=[])
    assert not [c for c in report.traced if c.gathered_for]
    # Many orders of the collectives of a graph network cost the same, and versions of torch come to different ones.
    if model is Graphs:  # an exchange of rows whose number only a run gives counts as one of 64 rows
        assert_graph(report, max_graphs=2, max_collectives=19, max_bytes=134468)
    else:
        assert_graph(report, snapshot=f"{model.__name__.lower()}-8", max_graphs=2)
