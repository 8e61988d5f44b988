"""The rank, the world size and the mesh of a running test."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcompile.collectives.transport import device_type

_mesh_shape: tuple[int, ...] | None = None


def rank() -> int:
    """Returns this rank's index in the default process group."""
    return dist.get_rank()


def world_size() -> int:
    """Returns the number of ranks in the default process group."""
    return dist.get_world_size()


def mesh(names: Sequence[str] | None = None) -> DeviceMesh:
    """Makes a mesh over all ranks. The mark of the test may state its shape: ``@pytest.mark.ranks(4, mesh=(2, 2))``.

    By default the mesh has one dim. With NCCL it is a mesh of GPUs. The process groups of a mesh end with the test.

    Args:
        names: the names of the mesh dims.
    """
    device = device_type(str(dist.get_backend()))
    shape = _mesh_shape or (world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=None if names is None else tuple(names))


def default_mesh() -> DeviceMesh:
    """Makes a mesh of one dim over all ranks. With NCCL it is a mesh of GPUs."""
    return init_device_mesh(device_type(), (dist.get_world_size(),))


def set_mesh_shape(shape: tuple[int, ...] | None) -> None:
    """Sets the shape that `mesh` uses for the next test."""
    global _mesh_shape
    _mesh_shape = shape
