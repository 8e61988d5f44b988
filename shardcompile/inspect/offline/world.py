"""`offline_world`: makes this process one rank of a fake process group."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcompile import compat
from shardcompile.compat import offline as _torch
from shardcompile.inspect.offline.absent_cuda import OfflineError, pretend_cuda


@dataclass(frozen=True)
class OfflineWorld:
    """A fake process group, as one of its ranks sees it.

    Attributes:
        mesh: the mesh over all ranks.
        rank: the rank that this process is.
    """

    mesh: DeviceMesh
    rank: int

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def device(self) -> str:
        """The device type of the trace."""
        return self.mesh.device_type


@contextlib.contextmanager
def offline_world(
    world_size: int = 64,
    *,
    mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    rank: int = 0,
    device: str = "cuda",
) -> Iterator[OfflineWorld]:
    """Makes this process one rank of a fake process group inside the context. Collectives do nothing.

    `trace_step` traces in such a world. Passes can run on its graphs there, since they need process groups and make
    fake tensors on the device. After the context the process groups are gone, and all compiled code is dropped, also
    older code. With ``device="cuda"`` and without a GPU, the process gets a fake one; see
    `shardcompile.inspect.offline.absent_cuda.pretend_cuda`. If there is a GPU, torch initialises it, but nothing runs
    on it.

    Args:
        world_size: the number of ranks.
        mesh_shape: the shape of the mesh over all ranks; one dim by default.
        mesh_dim_names: the names of the mesh dims.
        rank: the rank that this process is.
        device: "cuda" or "cpu".

    Raises:
        OfflineError: a process group exists; there is no C++ compiler; or rank, mesh and world size do not fit.
    """
    shape = (world_size,) if mesh_shape is None else tuple(mesh_shape)
    _check(world_size, shape, rank, device)
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(pretend_cuda())
        stack.enter_context(_current_device())
        stack.callback(compat.start_epoch)
        dist.init_process_group("fake", store=_torch.fake_store(), rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        if torch.cuda.is_initialized():
            torch.cuda.set_device(0)  # `init_device_mesh` has set it by rank
        torch.compiler.reset()
        stack.callback(torch.compiler.reset)
        yield OfflineWorld(mesh, rank)


def _current_device() -> contextlib.AbstractContextManager[object]:
    """Restores the current GPU after the context, if there is a GPU."""
    return torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_available() else contextlib.nullcontext()


def _check(world_size: int, shape: tuple[int, ...], rank: int, device: str) -> None:
    if device not in ("cuda", "cpu"):
        raise OfflineError(f'offline tracing takes device="cuda" or "cpu", not {device!r}')
    if not 0 <= rank < world_size:
        raise OfflineError(f"there is no rank {rank} in a world of {world_size}")
    if math.prod(shape) != world_size:
        raise OfflineError(f"a mesh of shape {shape} has {math.prod(shape)} ranks, but world_size is {world_size}")
    if not dist.is_available():
        raise OfflineError("this build of torch has no torch.distributed")
    if dist.is_initialized():
        raise OfflineError(
            "offline tracing makes a fake process group, but this process has one already "
            f"({dist.get_backend()}, {dist.get_world_size()} ranks). Call it before init_process_group, after "
            "destroy_process_group, or in a process of its own"
        )
