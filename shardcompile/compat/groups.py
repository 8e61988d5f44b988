"""Process groups, meshes, and the mode that counts their collectives. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import (
    _register_process_group,  # 2.11 - 2.15
    _register_work,  # 2.11 - 2.15
    _unregister_process_group,  # 2.11 - 2.15
)
from torch._guards import TracingContext  # 2.11 - 2.15
from torch._ops import OpOverloadPacket  # 2.11 - 2.15
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import (
    DeviceMesh,  # 2.11 - 2.15
    _mesh_resources,  # 2.11 - 2.15
)
from torch.distributed.distributed_c10d import (
    _get_default_store,  # 2.11 - 2.15
    _resolve_process_group,  # 2.11 - 2.15
)
from torch.distributed.tensor.debug import _comm_mode  # 2.11 - 2.15

from shardcompile.compat.patch import Patch, put_in_once, replace
from shardcompile.compat.threads import rank_of_thread
from shardcompile.compat.worlds import add_guard, forget_with_world


def process_group(name: str) -> ProcessGroup:
    """The process group with this name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def store() -> torch.distributed.Store:
    """The key-value store of the default process group."""
    return _get_default_store()


def has_other_ranks() -> bool:
    """Whether there is a default process group of several ranks, which is not a fake one: a store to meet them at."""
    dist = torch.distributed
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def abort(groups: Sequence[ProcessGroup]) -> None:
    """End what waits in some process groups of NCCL, all together: one by one they can wait for one another.

    As `torch.distributed.distributed_c10d._abort_process_group` does, which also forgets the groups.

    Args:
        groups: at least one.
    """
    first = groups[0]._get_backend(torch.device("cuda"))  # 2.11 - 2.15
    first._group_start()  # type: ignore[attr-defined]  # 2.11 - 2.15
    for group in groups:
        group.abort()
    first._group_end()  # type: ignore[attr-defined]  # 2.11 - 2.15


_COMMON_NAMES: dict[str, str] = {}
"""The names of `group_name_of`, by torch's names."""


def _forget_common_names() -> None:
    for name in _COMMON_NAMES.values():
        _unregister_process_group(name)  # type: ignore[arg-type]
    _COMMON_NAMES.clear()


forget_with_world(_forget_common_names)


def group_name_of(mesh: DeviceMesh, mesh_dim: int) -> str:
    """The name of this rank's process group along a mesh dim, which is the same on all ranks of the mesh.

    A mesh of several dims has several groups along each, and torch numbers them all. These numbers would stand in
    graphs, and code that one rank compiles would not serve the others. So each group is registered under a second name,
    by the dim's place in the mesh. A name is local to the process: a graph has those of the meshes in its program.
    """
    group = mesh.get_group(mesh_dim)
    name = group.group_name
    common = _COMMON_NAMES.get(name)
    if common is not None:
        return common
    if rank_of_thread() is not None or (mesh.ndim == 1 and root_of(mesh) is mesh):
        return name  # ranks that are threads share the registry; all ranks of a mesh of one dim are in one group
    label = f"mesh:{_dim_of_root(mesh, mesh_dim)}"
    taken = set(_COMMON_NAMES.values())
    common = next(n for n in itertools.chain([label], (f"{label}#{i}" for i in itertools.count(1))) if n not in taken)
    _register_process_group(common, group)  # type: ignore[arg-type]
    _COMMON_NAMES[name] = common
    return common


def _dim_of_root(mesh: DeviceMesh, mesh_dim: int) -> int | str:
    """Where a dim is in the mesh of which this one is a part; its name if that one lacks it, since it was flattened."""
    names, of_root = mesh.mesh_dim_names, root_of(mesh).mesh_dim_names
    if names is None or of_root is None:
        return mesh_dim
    return of_root.index(names[mesh_dim]) if names[mesh_dim] in of_root else names[mesh_dim]


def common_name(name: str) -> str:
    """The name by which `group_name_of` knows a group that has been named by torch, if it does."""
    return _COMMON_NAMES.get(name, name)


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which a mesh is a part; itself if it is none."""
    root: DeviceMesh = mesh._get_root_mesh()  # 2.11 - 2.15
    return root


def describe_mesh(mesh: DeviceMesh) -> tuple[object, ...]:
    """What a mesh is, the same on all ranks of its root: a part of a mesh has other ranks on each."""
    root = root_of(mesh)
    return mesh.device_type, root.mesh.tolist(), root.mesh_dim_names, mesh.mesh_dim_names, tuple(mesh.shape)


def mesh_itself(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh behind the stand-in that a trace has for a mesh input. Without an argument, the current mesh.

    Raises:
        RuntimeError: `mesh` is None, and there is no current mesh.
    """
    found: DeviceMesh = current_mesh() if mesh is None else getattr(mesh, "real_obj", mesh)  # 2.12 - 2.15
    return found


def coordinate(mesh: DeviceMesh) -> Any:
    """This rank's coordinate in a mesh, one number for each mesh dim; None if the rank is not in the mesh."""
    return mesh.get_coordinate()


def register_work(tensor: torch.Tensor, work: torch.distributed.Work) -> None:
    """Have `wait_tensor(tensor)` wait for `work`, beside the works that were registered for this tensor before."""
    _register_work(tensor, work)


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:``. A compilation gets a guard that this is the current mesh.

    Raises:
        RuntimeError: there is no current mesh.
    """
    mesh = _innermost_mesh()
    if TracingContext.try_get() is not None:
        kept = weakref.ref(mesh)  # a reference to a mesh keeps its process groups alive
        add_guard(lambda _: _is_innermost(kept()), "the current mesh is that of the trace")
    return mesh


def _innermost_mesh() -> DeviceMesh:
    current = getattr(DeviceMesh, "_get_current_mesh", None)  # where it lives moved between 2.11 and 2.15
    return _mesh_resources.get_current_mesh() if current is None else current()


def _is_innermost(mesh: DeviceMesh | None) -> bool:
    try:
        return mesh is not None and _innermost_mesh() is mesh
    except RuntimeError:
        return False


_SEEN_THROUGH: list[type[torch.Tensor]] = []


def let_comm_debug_mode_see_through(cls: type[torch.Tensor], collectives: Sequence[OpOverloadPacket]) -> None:
    """Have CommDebugMode count the collectives inside an op on this class, as it does for DTensor.

    Args:
        cls: the class.
        collectives: ops that it counts as collectives.
    """
    _SEEN_THROUGH[:] = [cls]
    for packet in collectives:
        _comm_mode.NATIVE_TO_PY_MAPPING[packet] = packet
    put_in_once(COLLECTIVES_IN_COMM_DEBUG_MODE)


def _stepping_back(handler: Callable[..., object]) -> Callable[..., object]:
    def step_back(
        self: object, func: object, types: Sequence[type], args: object = (), kwargs: object = None
    ) -> object:
        if any(issubclass(t, _SEEN_THROUGH[0]) for t in types):
            return NotImplemented
        return handler(self, func, types, args, kwargs)

    return torch.compiler.disable(step_back)


COLLECTIVES_IN_COMM_DEBUG_MODE = Patch(
    "collectives_in_comm_debug_mode",
    "torch.distributed.tensor.debug.CommDebugMode.__torch_dispatch__",
    "A mode runs before a subclass, so it sees the op alone and counts none of the collectives inside.",
    "https://github.com/pytorch/pytorch/pull/118769: "
    "CommDebugMode steps back for DTensor by name, and offers no way to do so for another class.",
    "2.11 - 2.15",
    lambda stack: replace(stack, _comm_mode.CommDebugMode, "__torch_dispatch__", _stepping_back),
)
"""Put in with the first sharded tensor."""
