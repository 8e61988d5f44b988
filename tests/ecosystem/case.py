"""What a row of the table in docs/ecosystem.md is: a few lines as people write them, run on plain and on sharded tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import world_size

RIGHT = "right"
"""What single-device PyTorch gives on the full tensors."""

NOT_IN_TORCH = "no, with plain tensors either"
"""torch cannot compile these lines on plain tensors."""

NOTHING = "nothing to compile"
"""The lines are a way to get a graph of their own, or nothing of them runs in a graph."""


class Setting:
    """Where the lines of a case run.

    Attributes:
        mesh: of all ranks; None where the lines run on plain tensors, as on a single device.
        over: the mesh whose ranks hold the shards, one dim of `mesh`.
        compiled: whether `compile` compiles.
        compilations: how often it has.
    """

    def __init__(self, mesh: DeviceMesh | None, compiled: bool) -> None:
        self.mesh, self.compiled, self.compilations = mesh, compiled, 0
        self.over = mesh["data"] if mesh is not None and mesh.ndim > 1 else mesh

    @property
    def sharded(self) -> bool:
        """Whether this is the run on sharded tensors."""
        return self.mesh is not None

    def sizes(self, size: int) -> list[int]:
        """Uneven shard sizes, one of them empty where there are more than two."""
        ranks = self.over.size() if self.over is not None else 1
        return [size] if ranks == 1 else [size - 2, 2] if ranks == 2 else [size - 2, *[0] * (ranks - 2), 2]

    def partition(self, full: Tensor, dim: int = 0) -> Any:
        """A tensor in uneven shards."""
        if self.over is None:
            return full.clone()
        return sc.distribute_tensor(full, self.over, [Shard(dim)], sharding_shapes={0: self.sizes(full.shape[dim])})

    def shard_parameters(self, module: nn.Module) -> nn.Module:
        """Put the parameters of a module into uneven shards of rows."""
        if self.over is not None:
            for owner in module.modules():
                for name, p in list(owner.named_parameters(recurse=False)):
                    setattr(owner, name, nn.Parameter(self.partition(p.detach())))
        return module

    def compile(self, function: Any, **options: Any) -> Any:
        """The function or module, compiled in the compiled run."""
        if not self.compiled:
            return function
        self.compilations += 1
        return torch.compile(function, **({"fullgraph": True, "backend": "aot_eager"} | options))


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        section: the heading that it stands under.
        feature: what is tried, as the table says it.
        run: the lines; what they return is compared.
        eager: `RIGHT`, or the words with which it is refused; `NOTHING` if it is about compiling.
        compiled: likewise, or `NOT_IN_TORCH`, or `NOTHING`.
        ranks: how many; of four there is a mesh of 2 x 2.
        processes: whether ranks have to be processes: where torch keeps one state for all threads.
        needs: a package that must be there.
        rtol: relative tolerance, where the feature itself computes in a narrow dtype.
    """

    section: str
    feature: str
    run: Callable[[Setting], Any]
    eager: str = RIGHT
    compiled: str = RIGHT
    ranks: int = 3
    processes: bool = False
    needs: str = ""
    rtol: float = 1e-8


def values(*shape: int, seed: int = 0) -> Tensor:
    """Numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net(seed: int = 0, width: int = 6) -> nn.Module:
    """A small model, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)).double()


def whole(x: Any) -> Any:
    """Results as plain tensors."""

    def plain(t: Any) -> Any:
        while isinstance(t, (sc.ShardTensor, DTensor)):
            t = t.full_tensor()
        return (
            t.detach().clone()
            if isinstance(t, Tensor)
            else torch.tensor(bytearray(t, "utf8"))
            if isinstance(t, str)
            else t
        )

    return torch.utils._pytree.tree_map(plain, x)


def gradients(module: nn.Module) -> list[Any]:
    """Of all parameters."""
    return [p.grad for p in module.parameters()]


def attempt(case: Case, compiled: bool) -> None:
    """Run a case on every rank.

    Raises:
        AssertionError: the results differ from those on plain tensors, or nothing was compiled.
    """
    from torch.distributed.device_mesh import init_device_mesh

    grid = world_size() == 4
    mesh = init_device_mesh(
        "cpu", (2, 2) if grid else (world_size(),), mesh_dim_names=("data", "model") if grid else ("data",)
    )
    expected = whole(case.run(Setting(None, False)))
    here = Setting(mesh, compiled)
    found = whole(case.run(here))
    torch.testing.assert_close(found, expected, rtol=case.rtol, atol=1e-10 + case.rtol / 100)
    assert here.compilations > 0 or not compiled, "nothing was compiled"


def plain_fails(case: Case) -> bool:
    """Whether torch fails to compile the lines on plain tensors."""
    try:
        case.run(Setting(None, True))
    except Exception:
        return True
    return False
