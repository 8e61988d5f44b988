"""The interface that layouts require of a mesh, so that layouts, plans and rules work without process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Mesh(Protocol):
    """A grid of ranks. `torch.distributed.device_mesh.DeviceMesh` is one, and so is `MeshShape`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks along each mesh dim."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Names of the mesh dims; None if they are unnamed."""


@dataclass(frozen=True)
class MeshShape:
    """A mesh without process groups, for planning and for tests of pure functions."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None
