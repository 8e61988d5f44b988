"""What a report advises about a line is true: a program that follows it no longer moves these rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.inspect.advice import advice
from tests.support.tiers import often


class Places(nn.Module):
    """Rows, and rows of a table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.mix = nn.Embedding(64, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        return self.mix(x + self.places(numbers))


class Sum(nn.Module):
    """Of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.mix(x) + y


class Steps(nn.Module):
    """Rows of one step after the other, written into a tensor that the module makes."""

    def __init__(self, like_rows: bool = True, learned: bool = True) -> None:
        super().__init__()
        self.like_rows, self.mix = like_rows, nn.Linear(4, 4).requires_grad_(learned)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape) if self.like_rows else torch.zeros(x.shape)
        for step in range(2):
            out[step] = self.mix(x[step])
        return out * x


def _partition(x: Tensor, sizes: Sequence[int], mesh: DeviceMesh) -> Tensor:
    shard = x.split(list(sizes), 1)[mesh.get_rank()].clone()
    return sc.ShardTensor.from_local(shard, mesh, [Shard(1)], {0: list(sizes)})


def _advice(module: nn.Module, second: Tensor, sizes: Sequence[int] | None) -> list[str]:
    """Of a module on 12 rows sharded of 5, 4 and 3, and a second tensor sharded of `sizes`, or whole."""

    def build(mesh: DeviceMesh) -> Any:
        other = second + 0  # made anew, among fake tensors
        x = _partition(torch.randn(2, 12, 4), [5, 4, 3], mesh)
        return type(module)(), (x, other if sizes is None else _partition(other, sizes, mesh))

    return advice(sc.explain(build, world_size=3, device="cpu", stages=[]))


def test_a_plain_lookup() -> None:
    numbers = torch.arange(12).expand(2, -1)
    (found,) = [text for text in _advice(Places(), numbers, None) if "a tensor is replicated there" in text]
    assert "self.mix(x + self.places(numbers))" in found and "384 B" in found
    assert not [text for text in _advice(Places(), numbers, [5, 4, 3]) if "a tensor is replicated there" in text]


def test_two_partitions() -> None:
    other = torch.zeros(2, 12, 4)
    (found,) = [text for text in _advice(Sum(), other, [3, 4, 5]) if "partitions differ" in text]
    assert "return self.mix(x) + y" in found
    assert not [text for text in _advice(Sum(), other, [5, 4, 3]) if "partitions differ" in text]


@pytest.mark.parametrize("learned", often([True, False], 1))
def test_rows_written_into_a_plain_tensor(learned: bool) -> None:
    def explained(like_rows: bool) -> list[str]:
        def build(mesh: DeviceMesh) -> Any:
            return Steps(like_rows, learned), (_partition(torch.randn(2, 12, 4), [5, 4, 3], mesh),)

        return advice(sc.explain(build, world_size=3, device="cpu", stages=[]))

    (found,) = [text for text in explained(False) if "written into a plain tensor" in text]
    assert "out[step] = self.mix(x[step])" in found and "384 B" in found
    assert not [text for text in explained(False) if "runs on full tensors" in text]
    assert not [text for text in explained(True) if "plain tensor" in text or "is replicated there" in text]
