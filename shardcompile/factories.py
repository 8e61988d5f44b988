"""Factory functions for sharded tensors (`empty`, `zeros`, `randn`, ...) and the layouts that their arguments state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from shardcompile import compat
from shardcompile.errors import LayoutError, UnsupportedOpError
from shardcompile.planning import target_layout
from shardcompile.sharding import Layout, Spec, contiguous_stride, normalize_placements
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.autograd import redistributed
from shardcompile.tensor.construct import refuse_quantized, stated_partitions

SizesByMeshDim = Mapping[int, Sequence[Any]]
"""From a mesh dim to the sizes of all shards along the tensor dim that it shards."""


def requested_layout(
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    sharding_shapes: SizesByMeshDim | None,
) -> Layout:
    """Returns the layout that the arguments of a factory state. Without sizes the partition is torch.chunk's."""
    wanted = normalize_placements(or_replicate(placements, mesh), mesh, len(shape))
    refuse_quantized(dtype)
    if any(isinstance(p, Partial) for p in wanted):
        raise LayoutError(f"Partial cannot be a target: {list(wanted)}; use Replicate or Shard")
    replicated = Layout.chunked(mesh, [Replicate()] * mesh.ndim, tuple(shape), dtype)
    return target_layout(replicated, wanted, stated_partitions(replicated, wanted, sharding_shapes, fixed=False))


def or_replicate(placements: Sequence[Placement] | None, mesh: DeviceMesh) -> Sequence[Placement]:
    """Returns the placements, or Replicate on every mesh dim if they are None."""
    return [Replicate()] * mesh.ndim if placements is None else placements


def mesh_coordinate(mesh: DeviceMesh) -> Sequence[int]:
    """Returns this rank's mesh coordinate.

    Raises:
        LayoutError: this rank is not in the mesh.
    """
    coordinate = compat.coordinate(mesh)
    if coordinate is None:
        raise LayoutError(f"this rank is not in the mesh {mesh}, and holds no tensors of it")
    return coordinate


_FILLS: dict[str, Callable[[ShardTensor], object]] = {
    "empty": lambda t: None,
    "zeros": lambda t: t.zero_(),
    "ones": lambda t: t.fill_(1),
    "rand": lambda t: t.uniform_(),
    "randn": lambda t: t.normal_(),
}


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _make(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    sharding_shapes: SizesByMeshDim | None,
    device: torch.device | str | int | None,
) -> ShardTensor:
    mesh = compat.mesh_itself(mesh)
    device_type = _device_type(device, mesh)
    layout = requested_layout(mesh, placements, shape, dtype, sharding_shapes)
    with torch.no_grad():
        if layout.has_symbols:
            tensor = _allocate_in_graph(layout, device_type)
        else:
            local = allocate(layout, device_type)
            tensor = ShardTensor(local, Spec.of(layout, contiguous_stride(layout.shape)))
        _FILLS[name](tensor)
    return tensor


def _device_type(device: torch.device | str | int | None, mesh: DeviceMesh) -> str:
    """Returns the type of the device of a factory's result: that of the mesh, or meta.

    Meta is requested by the argument or by ``with torch.device("meta")``.

    Raises:
        LayoutError: another device is requested.
        UnsupportedOpError: meta is requested inside a compiled function.
    """
    if device is None:
        device = "meta" if torch.get_default_device().type == "meta" else mesh.device_type
    wanted = torch.device(device)
    if wanted.type == "meta" and compat.is_compiling():
        raise UnsupportedOpError(
            "a factory of sharded tensors was called with device='meta' inside a compiled function, whose tensors have "
            "values; call it outside"
        )
    if wanted.type not in ("meta", mesh.device_type):
        raise LayoutError(
            f"a factory of sharded tensors was called with device={str(wanted)!r} on a mesh of {mesh.device_type!r}; "
            f"leave it out, or pass {mesh.device_type!r}, or 'meta' to allocate later by to_empty"
        )
    current_index = torch.empty(0, device=wanted.type).device.index
    if wanted.index is not None and current_index is not None and wanted.index != current_index:
        raise LayoutError(
            f"a factory of sharded tensors was called with device={str(wanted)!r}, and this rank's local shards are on "
            f"device {current_index}; leave the index out"
        )
    return wanted.type


def allocate(layout: Layout, device: str | None = None) -> Tensor:
    """Allocates this rank's local shard without initializing it; on the device of the mesh by default."""
    device = device or layout.mesh.device_type
    return torch.empty(layout.local_shape(mesh_coordinate(layout.mesh)), dtype=layout.dtype, device=device)


def _allocate_in_graph(layout: Layout, device: str) -> ShardTensor:
    """Allocates a tensor in a graph that serves every partition, where the shard size is a symbol.

    The local shard is taken from an expanded replicated tensor, since that step of a redistribution makes the symbol.
    """
    expanded = torch.empty((), dtype=layout.dtype, device=device).expand(layout.shape)
    replicated = ShardTensor(expanded, Spec.of(layout.replicated(), contiguous_stride(layout.shape)))
    sharded: ShardTensor = redistributed(replicated, layout)
    return sharded


def _factory(name: str) -> Callable[..., ShardTensor]:
    def make(
        *size: object,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | int | None = None,
        requires_grad: bool = False,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: SizesByMeshDim | None = None,
    ) -> ShardTensor:
        if layout is not torch.strided:
            raise UnsupportedOpError(
                f"a factory of sharded tensors was called with layout={layout}; shards are dense: leave it out, or "
                "pass torch.strided"
            )
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        tensor = _make(name, shape, dtype, device_mesh, placements, sharding_shapes, device)
        if requires_grad:
            tensor.requires_grad_()
        return tensor

    make.__doc__ = f"Like `torch.{name}`, with device_mesh, placements and sharding_shapes; `device` may be meta."
    return make


empty = _factory("empty")
zeros = _factory("zeros")
ones = _factory("ones")
rand = _factory("rand")
randn = _factory("randn")


def full(size: Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> ShardTensor:
    """Like `torch.full`, with device_mesh, placements and sharding_shapes; `device` may be meta."""
    dtype = dtype or torch.tensor(fill_value).dtype
    requires_grad = kwargs.pop("requires_grad", False)
    with torch.no_grad():
        tensor = empty(size, dtype=dtype, **kwargs)
        tensor.fill_(fill_value)
    if requires_grad:
        tensor.requires_grad_()
    return tensor
