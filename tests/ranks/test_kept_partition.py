"""What compiled models of the zoo gathered, or could not be compiled for, in a few lines each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import assert_matches_single_device
from tests.support.tiers import often


class Tokens(nn.Module):
    """Words with a kind each, of which plain numbers look up two, behind a first row that the batch shares.

    The first row is also in a sum of plain tensors, as the bias of an attention with a mask is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.first = nn.Embedding(2, 4), nn.Parameter(torch.randn(1, 1, 4))
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        x = self.mix(x) + self.kinds(kinds) + (self.first + kinds.unsqueeze(-1))
        return torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1).sin()


class Halved(nn.Module):
    """A norm of every second row, whose shards only a run knows; in the gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x[::2].sin()))


def finer(x: Tensor) -> Tensor:
    return nnf.interpolate(nnf.avg_pool2d(x, 2), scale_factor=2.0, mode="nearest").sin()


def mirrored(x: Tensor) -> Tensor:
    return nnf.conv2d(nnf.pad(x, (1, 1, 2, 1), mode="reflect"), torch.ones(2, 2, 3, 3, dtype=x.dtype)).sin()


def windows(x: Tensor) -> Tensor:
    return x.unfold(1, 3, 2).sin()


def own_places(x: Tensor) -> Tensor:
    """A plain row in which numbers look up that are sharded along the dim that is looked up in."""
    row = torch.arange(20, dtype=x.dtype).square().expand(x.shape[0], -1)
    return x * row.gather(1, x.detach().abs().round().long())


CASES: dict[str, tuple[Any, list[tuple[int, ...]], list[Any]]] = {
    "tokens": (Tokens, [(12, 3, 4)], [Shard(0)]),
    "halved": (Halved, [(9, 2, 4)], [Shard(0)]),
    "finer": (lambda: finer, [(1, 2, 8, 4)], [Shard(2)]),
    "mirrored": (lambda: mirrored, [(1, 2, 9, 5)], [Shard(2)]),
    "windows": (lambda: windows, [(7, 8, 2)], [Shard(0)]),
    "own places": (lambda: own_places, [(2, 7)], [Shard(1)]),
}


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("name", often([n for n in CASES if n != "mirrored"] + ["mirrored"], 3))
def test_equals_one_process(name: str) -> None:
    make, shapes, placements = CASES[name]
    torch.manual_seed(0)
    module = make().double() if isinstance(make, type) else make()
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    if name == "tokens":
        inputs, placements = [*inputs, torch.randint(0, 2, (12, 3))], [*placements, None]
    assert_matches_single_device(module, inputs, placements, steps=3, backend="aot_eager", max_graphs=1)


@pytest.mark.parametrize(
    ("name", "most"),
    often([("tokens", 0), ("halved", 0), ("finer", 0), ("windows", 0), ("own places", 0), ("mirrored", 32 * 9)], 3),
)
def test_gathers_no_more_than_a_few_rows(name: str, most: int) -> None:
    make, (shape,), (placement,) = CASES[name]

    def build(mesh: DeviceMesh) -> Any:
        sizes = [shape[placement.dim] - 3, 1, 2]
        shard = [sizes[mesh.get_rank()] if d == placement.dim else n for d, n in enumerate(shape)]
        x = sc.ShardTensor.from_local(torch.randn(shard), mesh, [placement], {0: sizes}).requires_grad_()
        return make(), (x, torch.zeros(12, 3, dtype=torch.int64)) if name == "tokens" else (x,)

    report = sc.explain(build, world_size=3, device="cpu", stages=[])
    gathered = [c for c in report.traced if c.kind == "all_gather_v"]
    assert all(c.global_bytes <= most for c in gathered), gathered
