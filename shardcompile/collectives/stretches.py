"""Moves the rows of a dim between blocks of neighbouring rows and blocks that have a part of each of several stretches.

``x.view(-1, channels)`` of a cut sequence and a batch of n has n stretches: each block has some rows of every sequence.
Which rows go where follows from the two cuts, so that every rank works out the table of the exchange by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives.derived_cuts import block_size, derive
from shardcompile.collectives.routes import block_starts, exchange_rows
from shardcompile.layout import Cut, neighbouring


@dataclass(frozen=True)
class _Stretches:
    """Where the rows of a cut are.

    Attributes:
        runs: how many stretches there are.
        length: of each, in rows.
        edges: where each rank's part of a stretch begins, and where the last one ends: [ranks + 1], int64, on the CPU.
    """

    runs: int
    length: Any
    edges: Tensor

    @classmethod
    def of(cls, cut: Cut, mesh: DeviceMesh) -> _Stretches:
        """Those of a cut over one mesh dim."""
        extent: Any = cut.extent
        starts = block_starts(neighbouring(cut), mesh)
        ends = torch.cat([starts, starts.new_full([1], extent)])
        return cls(cut.runs, extent // cut.runs, ends.div(cut.runs, rounding_mode="floor"))

    def parts(self) -> tuple[Tensor, Tensor]:
        """The first row of every part, and the one behind its last: each [runs, ranks]."""
        first = (torch.arange(self.runs, device=self.edges.device) * self.length).unsqueeze(1)
        return first + self.edges[:-1], first + self.edges[1:]

    def owners(self, numbers: Tensor) -> Tensor:
        """The rank that has each row."""
        within = numbers.remainder(numbers.new_full([], self.length).clamp(min=1))
        return torch.searchsorted(self.edges[:-1].to(numbers.device), within, right=True) - 1


def numbers_of_block(cut: Cut, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """The numbers in the whole dim of the rows of this rank's block, rising: [n], int64.

    Args:
        cut: over one mesh dim.
        mesh: the mesh.
        device: of the result.
    """
    extent: Any = cut.extent
    size: Any = block_size(cut, mesh)
    first: Any = derive("located", [neighbouring(cut)], [], extent, mesh)[1]
    if cut.runs == 1:
        return torch.arange(size, device=device) + first
    stretches = torch.arange(cut.runs, device=device).unsqueeze(1) * (extent // cut.runs)
    numbers = stretches + (torch.arange(size // cut.runs, device=device) + first // cut.runs)
    return torch.ops.aten.view.default(numbers, [size])


def regroup_rows(block: Tensor, dim: int, src: Cut, dst: Cut, mesh: DeviceMesh) -> Tensor:
    """This rank's block of a dim after it is cut otherwise. One exchange; rows travel once, and those at home do not.

    Args:
        block: of the dim as `src` cuts it.
        dim: of the block.
        src: over one mesh dim.
        dst: over the same mesh dim; of another number of stretches.
        mesh: the mesh.
    """
    (mesh_dim,) = src.mesh_dims
    before, after = _Stretches.of(src, mesh), _Stretches.of(dst, mesh)
    first, last = ([x[:, None, :, None] for x in before.parts()], [x[None, :, None, :] for x in after.parts()])
    shared = torch.minimum(first[1], last[1]) - torch.maximum(first[0], last[0])
    counts = shared.clamp(min=0).sum([0, 1])
    leaving, size = block.movedim(dim, 0), block_size(dst, mesh)
    if dst.runs > 1:  # otherwise rising numbers go to rising ranks
        own = numbers_of_block(src, mesh, block.device)
        leaving = leaving.index_select(0, after.owners(own).argsort(stable=True))
    (came,) = exchange_rows([leaving], counts, size, compat.group_name_of(mesh, mesh_dim))
    if src.runs > 1:
        wanted = numbers_of_block(dst, mesh, block.device)
        came = came.index_select(0, before.owners(wanted).argsort(stable=True).argsort())
    return came.movedim(0, dim)
