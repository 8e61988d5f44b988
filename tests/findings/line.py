"""A line of the findings, as a few lines that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc

Program = Callable[[DeviceMesh], Any]


@dataclass(frozen=True)
class Line:
    """A line.

    Attributes:
        number: of the finding, such as "A1".
        says: what is tried.
        run: on every rank, with a mesh of one dim over all of them; raises an AssertionError where a value is wrong.
        refused: a pattern for the words of the error that is expected on every rank; empty where it has to be right.
        ranks: how many; of four there is a mesh of 2 x 2.
        processes: whether ranks have to be processes.
        needs: a package that must be there.
        scene: the name of a scene of tests/support/divergence_scenes.py that is played in place of `run`.
        known: the page that states it as a limit, where it is neither right nor refused.
    """

    number: str
    says: str
    run: Program | None
    refused: str = ""
    ranks: int = 2
    processes: bool = False
    needs: str = ""
    scene: str = ""
    known: str = ""

    @property
    def name(self) -> str:
        return f"{self.number} {self.says}"


LINES: dict[str, Line] = {}


def line(number: str, says: str, refused: str = "", **how: Any) -> Callable[[Program], Program]:
    """Register a program as a line."""

    def register(run: Program) -> Program:
        found = Line(number, says, run, refused, **how)
        assert found.name not in LINES, found.name
        LINES[found.name] = found
        return run

    return register


def scenes(number: str, known: str = "", /, **says: str) -> None:
    """Register scenes of divergence as lines: from the name of the scene to what it shows."""
    for scene, text in says.items():
        found = Line(number, text, None, scene=scene, ranks=3, processes=True, known=known)
        LINES[found.name] = found


def partition(full: Tensor, mesh: DeviceMesh, sizes: Sequence[int], dim: int = 0) -> sc.ShardTensor:
    """A tensor sharded of these sizes."""
    shard = full.split(list(sizes), dim)[mesh.get_local_rank()].clone()
    return sc.ShardTensor.from_local(shard, mesh, [Shard(dim)], {0: list(sizes)})


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def same(found: Any, expected: Any, **how: Any) -> None:
    """Compare with plain PyTorch."""
    if isinstance(found, sc.ShardTensor):
        found = found.full_tensor()
    torch.testing.assert_close(found, expected, **how)
