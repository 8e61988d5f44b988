"""What a test on ranks knows of where it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcompile.collectives.transport import device_type

_mesh_shape: tuple[int, ...] | None = None


def rank() -> int:
    """This process's rank in the default process group."""
    return dist.get_rank()


def world_size() -> int:
    """The number of ranks in the default process group."""
    return dist.get_world_size()


def mesh(names: Sequence[str] | None = None) -> DeviceMesh:
    """A mesh over all ranks, of the shape that the mark of the test states: ``@pytest.mark.ranks(4, mesh=(2, 2))``.

    It has one dim if the mark states none, and is of GPUs where the process group is NCCL's. The process groups of a
    mesh end with the test.

    Args:
        names: of its dims.
    """
    device = device_type(str(dist.get_backend()))
    shape = _mesh_shape or (world_size(),)
    return init_device_mesh(device, shape, mesh_dim_names=None if names is None else tuple(names))


def default_mesh() -> DeviceMesh:
    """A mesh of one dim over all ranks, of GPUs if the process group has NCCL."""
    return init_device_mesh(device_type(), (dist.get_world_size(),))


def set_mesh_shape(shape: tuple[int, ...] | None) -> None:
    """Tell `mesh` what the mark of the test that is about to run says."""
    global _mesh_shape
    _mesh_shape = shape
