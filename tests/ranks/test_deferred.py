"""Deferred initialization: a model is built on the device meta, sharded there, and gets memory last."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile import ShardTensor
from shardcompile.testing import mesh, once, rank, world_size

TOKENS, WIDTH, HIDDEN = 11, 5, 7


class Model(nn.Module):
    """Some kinds of parameters and buffers; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.norm(x + self.down(self.up(x).relu())) * self.scale)


def _uneven(n: int) -> list[int]:
    """Sizes of shards, one of them empty."""
    return [n - 2, 0, 2]


def _shard(_: str, module: nn.Module, of: DeviceMesh) -> None:
    for name, p in list(module.named_parameters(recurse=False)):
        if not isinstance(p, ShardTensor):
            x = sc.distribute_tensor(p, of, [Shard(0)], sharding_shapes={0: _uneven(p.shape[0])})
            setattr(module, name, nn.Parameter(x))


def _fill(model: nn.Module) -> None:
    """Values that each element knows by its place, and the initialization that torch has."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            nn.init.zeros_(p)
            p.add_(torch.linspace(-1, 1, p.numel(), dtype=torch.float64).sin().mul(i + 2).view(p.shape))
        model.get_buffer("scale").fill_(0.5)


def _made() -> nn.Module:
    with torch.device("meta"):
        model = Model().double()
        sc.distribute_module(model, mesh(), _shard)
    assert all(isinstance(p, ShardTensor) and p.is_meta for p in model.parameters())
    model.head.weight = model.embed.weight
    return model


def _reference() -> list[Tensor]:
    """Parameters of the plain model after three steps."""
    model = Model().double()
    _fill(model)
    _train(model, model)
    return [p.detach() for p in model.parameters()]


def _train(model: nn.Module, run: Callable[..., Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        tokens = (torch.arange(6) + step) * 5 % TOKENS
        loss = run(tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_built_on_meta_sharded_and_trained(backend: str | None) -> None:
    model = _made()
    shapes = {n: (p.shape, p.placements, p.sharding.sizes(0)) for n, p in model.named_parameters()}
    assert model.to_empty(device="cpu") is model
    assert model.head.weight is model.embed.weight and isinstance(model.embed.weight, nn.Parameter)
    for name, p in model.named_parameters():
        assert isinstance(p, ShardTensor) and p.requires_grad and p.is_leaf and p.device.type == "cpu"
        assert (p.shape, p.placements, p.sharding.sizes(0)) == shapes[name]
        assert p.to_local().shape[0] == _uneven(p.shape[0])[rank()]
    _fill(model)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    _train(model, run)
    for p, expected in zip(model.parameters(), once(_reference), strict=True):
        torch.testing.assert_close(p.detach().full_tensor(), expected)


@pytest.mark.ranks(3, processes=False)
def test_reset_parameters_and_init_after_to_empty() -> None:
    model = _made()
    nn.init.normal_(model.up.weight)  # on meta this does nothing
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, p in model.named_parameters():
        full = p.detach().full_tensor()
        assert full.isfinite().all(), name
        if "norm" not in name:
            assert full.std() > 0.05, name
    assert model.up.weight.detach().full_tensor().abs().max() <= 1 / WIDTH**0.5


@pytest.mark.ranks(3, processes=False)
def test_meta_tensors_by_every_constructor() -> None:
    sizes = [3, 0, 4]
    shard = torch.empty(sizes[rank()], 2, device="meta")
    whole = torch.empty(7, 2, device="meta", requires_grad=True)
    made = {
        "infer": ShardTensor.from_local(shard, mesh(), [Shard(0)]),
        "stated": ShardTensor.from_local(shard, mesh(), [Shard(0)], {0: sizes}),
        "checked": ShardTensor.from_local(shard, mesh(), [Shard(0)], run_check=True),
        "distributed": sc.distribute_tensor(whole, mesh(), [Shard(0)], sharding_shapes={0: sizes}),
        "without a source": sc.distribute_tensor(
            whole, mesh(), [Shard(0)], src_data_rank=None, sharding_shapes={0: sizes}
        ),
        "scattered": sc.scatter_tensor(
            whole if rank() == 1 else None, 1, mesh(), [Shard(0)], sharding_shapes={0: sizes}
        ),
    }
    for name, x in made.items():
        assert x.is_meta and x.shape == (7, 2) and x.sharding.sizes(0) == (3, 0, 4), name
        assert x.to_local().shape == shard.shape and x.to_local().is_meta, name
    assert made["distributed"].requires_grad and made["distributed"].is_leaf
    ragged = ShardTensor.from_local(torch.empty(2 + rank(), 2, device="meta"), mesh(), [Shard(0)], "infer")
    assert ragged.shape == (2 * world_size() + 3, 2)


@pytest.mark.ranks(3, processes=False)
def test_ops_on_meta_tell_shapes_and_layouts_and_send_nothing() -> None:
    x = sc.empty(7, 4, device="meta", device_mesh=mesh(), placements=[Shard(0)], sharding_shapes={0: [5, 0, 2]})
    real = sc.ones(7, 4, device_mesh=mesh(), placements=[Shard(0)], sharding_shapes={0: [5, 0, 2]})
    for act in (
        lambda x: x @ x.T,
        lambda x: x[1:6].sum(0),
        lambda x: x.redistribute(placements=[Shard(1)]),
        lambda x: x.redistribute(placements=[Replicate()]),
        lambda x: x.cumsum(0).roll(1, 0),
        lambda x: torch.cat([x, x * 2]),
        copy.deepcopy,
    ):
        got, expected = act(x), act(real)
        assert got.is_meta and got.sharding == expected.sharding, got
        assert got.sharding.is_partial or got.to_local().shape == expected.to_local().shape
    assert x.full_tensor().is_meta
    with pytest.raises(RuntimeError, match="meta tensor"):
        x.sum().item()
