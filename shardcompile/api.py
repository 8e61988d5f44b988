"""Public functions that create and distribute sharded tensors, map functions over shards, and register shardings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import broadcast, receive_shard, send_shards
from shardcompile.dispatch import clear_cache
from shardcompile.errors import LayoutError, RuleError
from shardcompile.factories import (
    SizesByMeshDim,
    allocate,
    empty,
    full,
    mesh_coordinate,
    ones,
    or_replicate,
    rand,
    randn,
    requested_layout,
    zeros,
)
from shardcompile.ops import OpCall, Rule, Strategy, TensorArg, replace_rule
from shardcompile.sharding import Layout, Partition, Spec, contiguous_stride, normalize_placements, transfer_dtype_of
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.autograd import FromLocal
from shardcompile.tensor.inputs import agreed_copies, agreed_metadata, as_tuple, check_kind, kind_of


def scatter_tensor(
    tensor: Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    *,
    sharding_shapes: SizesByMeshDim | None = None,
) -> ShardTensor:
    """Scatters a tensor that one rank holds. Every other rank receives its local shard only.

    Args:
        tensor: the full tensor on the source rank; ignored on other ranks. A tensor on the meta device gives local
            shards on the meta device.
        global_src: global rank of the source; it must be in the mesh.
        mesh: the mesh.
        placements: one for each mesh dim, no Partial.
        global_shape: shape of the tensor; announced by the source if not given.
        dtype: element type; announced by the source if not given.
        requires_grad: whether the result is a leaf that requires a gradient.
        sharding_shapes: from a mesh dim to the sizes of all shards along it; torch.chunk's by default.

    Raises:
        LayoutError: on every rank: the source is not in the mesh, its tensor is not of the stated shape and dtype, or
            the placements or sizes do not fit.
    """
    source = _coordinate_of(mesh, global_src)
    request = repr((list(placements), global_src, as_tuple(global_shape), dtype, sharding_shapes))
    shape, found, is_meta = agreed_metadata(tensor, source, mesh, request)
    assert source is not None, "it has been looked up in the mesh"
    if global_shape is not None and tuple(global_shape) != tuple(shape):
        raise LayoutError(f"rank {global_src} holds shape {tuple(shape)}, not the stated {tuple(global_shape)}")
    if dtype is not None and dtype != found:
        raise LayoutError(f"rank {global_src} holds {found}, not the stated {dtype}")
    layout = requested_layout(mesh, placements, shape, found, sharding_shapes)
    local = allocate(layout, "meta") if is_meta else _scatter(tensor, source, layout)
    return ShardTensor(local, Spec.of(layout, contiguous_stride(layout.shape)), requires_grad)


def _coordinate_of(mesh: DeviceMesh, global_rank: int) -> tuple[int, ...] | None:
    coordinates = (mesh.mesh == global_rank).nonzero().tolist()
    return tuple(coordinates[0]) if coordinates else None


def _scatter(tensor: Tensor | None, source: tuple[int, ...], layout: Layout) -> Tensor:
    """Sends each shard to one rank, broadcasts it along the mesh dims that replicate, and returns the local shard."""
    mesh = layout.mesh
    me = tuple(mesh_coordinate(mesh))
    transfer_dtype = transfer_dtype_of(layout.dtype)
    replicating = [m for m, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    local = allocate(layout.with_dtype(transfer_dtype))
    if me == source:
        assert tensor is not None, "the source holds the tensor"
        held = tensor.detach()
        if transfer_dtype is not held.dtype:
            held = held.view(transfer_dtype)
        others = [c for c in _coordinates(mesh) if c != me and all(c[m] == source[m] for m in replicating)]
        send_shards({int(mesh.mesh[c]): held[layout.shard_slices(c)] for c in others})
        local.copy_(held[layout.shard_slices(me)])
    elif all(me[m] == source[m] for m in replicating):
        receive_shard(local, int(mesh.mesh[source]))
    for i, mesh_dim in enumerate(replicating):
        if all(me[m] == source[m] for m in replicating[i + 1 :]):
            local = broadcast(local, source[mesh_dim], mesh.get_group(mesh_dim))
    return local if transfer_dtype is layout.dtype else local.view(layout.dtype)


def _coordinates(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    return list(itertools.product(*[range(n) for n in mesh.shape]))


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
    sharding_shapes: SizesByMeshDim | None = None,
) -> ShardTensor:
    """Distributes a tensor of which every rank holds a copy, as in `torch.distributed.tensor`.

    Args:
        tensor: a leaf of the same shape and dtype on every rank. A tensor on the meta device stays there: it has no
            values to send.
        device_mesh: the mesh; the current one by default.
        placements: one for each mesh dim; Replicate by default.
        src_data_rank: rank in each mesh dim that is the source of the data; None: every rank takes its shard of its own
            copy, without communication.
        sharding_shapes: from a mesh dim to the sizes of all shards along it; torch.chunk's by default.

    Raises:
        LayoutError: the placements or sizes do not fit, the ranks pass different shapes, or `tensor` is not a leaf.
    """
    mesh = device_mesh or compat.current_mesh()
    placements = or_replicate(placements, mesh)
    sharded = tensor if isinstance(tensor, ShardTensor) else None
    if sharded is not None and (src_data_rank is None or torch.compiler.is_compiling()):
        return sharded.redistribute(mesh, placements, sharding_shapes=sharding_shapes)
    if src_data_rank is None or compat.is_fake_outside_traces(tensor):  # fake tensors have no values to send
        check_kind("distribute_tensor", kind_of(tensor, leaf=True))
        layout = requested_layout(mesh, placements, tuple(tensor.shape), tensor.dtype, sharding_shapes)
        local = tensor.detach()[layout.shard_slices(mesh_coordinate(mesh))].clone(memory_format=torch.contiguous_format)
        return ShardTensor(local, Spec.of(layout, contiguous_stride(layout.shape)), tensor.requires_grad)
    source = tuple(src_data_rank if n > src_data_rank else 0 for n in mesh.shape)
    current = None if sharded is None else sharded.sharding.describe()
    request = repr((list(placements), sharding_shapes, source, getattr(tensor, "requires_grad", None), current))
    agreed = agreed_copies(tensor, source, mesh, request)
    if agreed is None:
        assert sharded is not None, "all ranks have passed a ShardTensor"
        return sharded.redistribute(mesh, placements, sharding_shapes=sharding_shapes)
    layout = requested_layout(mesh, placements, agreed.shape, agreed.dtype, sharding_shapes)
    local = allocate(layout, "meta") if agreed.is_meta else _scatter(tensor, source, layout)
    return ShardTensor(local, Spec.of(layout, contiguous_stride(layout.shape)), tensor.requires_grad)


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, object, DeviceMesh], object] | None = None,
    output_fn: Callable[[nn.Module, object, DeviceMesh], object] | None = None,
) -> nn.Module:
    """Distributes the parameters of a module, as in `torch.distributed.tensor`.

    Args:
        module: modified in place and returned.
        device_mesh: the mesh; the current one by default.
        partition_fn: ``(name, submodule, mesh)``, replaces parameters of each submodule. Parameters that it leaves
            plain stay plain: a plain parameter is the same on every rank and gets a complete gradient.
        input_fn: ``(module, inputs, mesh)``, called before `forward`.
        output_fn: ``(module, outputs, mesh)``, called after it.
    """
    mesh = device_mesh or compat.current_mesh()
    if partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: input_fn(mod, inputs, mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda mod, _, outputs: output_fn(mod, outputs, mesh))
    return module


# Extension points


def register_sharding(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the acceptable shardings of an op, as in `torch.distributed.tensor.experimental`.

    The decorated function takes the op's arguments, where each tensor is an object that has ``shape``, ``ndim``,
    ``dtype`` and ``layout``. It returns a list of pairs ``(output placements, input placements)`` that are acceptable
    along one mesh dim. None stands for an argument that is not a tensor. Sharded inputs are brought to one partition,
    and sharded outputs have it too. A built-in rule for the op is replaced.

    Args:
        op: an overload, or a list of them.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def strategies(call: OpCall) -> list[Strategy]:
            return [_strategy(call, outs, ins) for outs, ins in function(*call.args, **call.kwargs)]

        for overload in op if isinstance(op, (list, tuple)) else [op]:
            replace_rule(overload, Rule(strategies, None, function.__qualname__))
        clear_cache()
        return function

    return decorate


def _strategy(call: OpCall, outputs: Sequence[Any], inputs: Sequence[Any]) -> Strategy:
    kept = tuple(p for p in inputs if p is not None)
    returns = len(call.op._schema.returns)
    if len(kept) != len(call.tensors) or len(outputs) != returns:
        raise RuleError(
            f"register_sharding of {call.op}: {len(kept)} input and {len(outputs)} output placements for "
            f"{len(call.tensors)} tensors and {returns} results"
        )
    for placement in outputs:
        if isinstance(placement, Shard) and placement.dim < 0:
            raise RuleError(
                f"register_sharding of {call.op}: {placement} of a result has a negative dim, and the number of dims "
                "is unknown before the op has run; use a non-negative dim"
            )
    normalized = tuple(_normalize_dim(call, p, t) for p, t in zip(kept, call.tensors, strict=True))
    return Strategy(normalized, tuple(outputs))


def _normalize_dim(call: OpCall, placement: object, tensor: TensorArg) -> Any:
    if not isinstance(placement, Shard):
        return placement
    if not -tensor.ndim <= placement.dim < tensor.ndim:
        raise RuleError(f"register_sharding of {call.op}: {placement} is out of range for {tensor.layout.describe()}")
    return Shard(placement.dim % tensor.ndim)


def local_map(
    func: Callable[..., Any],
    out_placements: Any,
    in_placements: Sequence[Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Wraps a function of plain tensors so that it runs on the local shards of sharded tensors.

    Args:
        func: takes this rank's local shards, and keyword arguments unchanged; returns local shards.
        out_placements: placements of the result, or a tuple of them for several results. A sharded result takes its
            partition from the inputs that the same mesh dims shard. All of these must be identically sharded.
        in_placements: required placements of each argument, None for an argument that is not a sharded tensor.
        device_mesh: the mesh of the result; that of the inputs by default.
        redistribute_inputs: redistribute inputs to `in_placements` instead of raising an error if they differ.

    Raises:
        LayoutError: an input has other placements, or the partition of a result does not follow from any input.
    """

    def mapped(*args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if isinstance(value, ShardTensor):
                raise LayoutError(
                    f"local_map: {name} is a sharded tensor ({value.sharding.describe()}) and a keyword argument; "
                    "placements are those of positional arguments, so pass it as one"
                )
        wanted = [None] * len(args) if in_placements is None else in_placements
        placed = [
            _place(a, w, redistribute_inputs) if isinstance(a, ShardTensor) and w is not None else a
            for a, w in zip(args, wanted, strict=True)
        ]
        results = func(*[a.to_local() if isinstance(a, ShardTensor) else a for a in placed], **kwargs)
        several = isinstance(results, tuple)
        sources = [a for a in placed if isinstance(a, ShardTensor)]
        outs = results if several else (results,)
        targets = out_placements if several else (out_placements,)
        wrapped = tuple(
            o if p is None else _from_shard(o, device_mesh, p, *sources) for o, p in zip(outs, targets, strict=True)
        )
        return wrapped if several else wrapped[0]

    return mapped


# Each of these is one node for Dynamo. It traces the user's function, which is called between them, on plain tensors.


@torch.compiler.allow_in_graph
def _place(a: ShardTensor, wanted: Sequence[Placement], may_redistribute: bool) -> ShardTensor:
    target = normalize_placements(wanted, a.device_mesh, a.ndim)
    if a.placements == target:
        return a.view_as(a)  # type: ignore[return-value]
    if not may_redistribute:
        raise LayoutError(
            f"local_map: an input has the layout {a.sharding.describe()}, not the placements {list(target)}; "
            "redistribute it, or pass redistribute_inputs=True"
        )
    return a.redistribute(placements=target)


def _partition_of_inputs(sources: Sequence[ShardTensor], mesh_dims: tuple[int, ...]) -> Partition | None:
    """Returns the partition of the inputs that these mesh dims shard, or None if they do not have the same one.

    If they had several, the shard of a result might fit one of them on this rank and another one on another rank.
    """
    found = [c for s in sources for c in s.sharding.partitions if c is not None and c.mesh_dims == mesh_dims]
    return found[0] if found and all(found[0].guard_same_shards(c) for c in found) else None


@torch.compiler.allow_in_graph
def _from_shard(
    local: Tensor, device_mesh: DeviceMesh | None, placements: Sequence[Placement], *sources: ShardTensor
) -> ShardTensor:
    mesh = compat.mesh_itself(device_mesh or (sources[0].device_mesh if sources else None))
    wanted = normalize_placements(placements, mesh, local.ndim)
    shape: list[Any] = list(local.shape)
    partitions: list[Any] = [None] * local.ndim
    coordinate = mesh_coordinate(mesh)
    for dim in range(local.ndim):
        mesh_dims = tuple(m for m, p in enumerate(wanted) if isinstance(p, Shard) and p.dim == dim)
        if not mesh_dims:
            continue
        partition = _partition_of_inputs(sources, mesh_dims)
        if partition is None or partition.local_size(coordinate) != local.shape[dim]:
            raise LayoutError(
                f"local_map: a result of shard shape {tuple(local.shape)} is to be sharded along dim {dim} by mesh "
                f"dims {mesh_dims}, but the inputs do not have one such partition; return to_local() results and use "
                "ShardTensor.from_local"
            )
        partitions[dim], shape[dim] = partition, partition.size
    layout = Layout.of(mesh, wanted, shape, local.dtype, partitions)
    return FromLocal.apply(local, ShardTensor, Spec.of(layout, contiguous_stride(layout.shape)))


__all__ = [
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "local_map",
    "ones",
    "rand",
    "randn",
    "register_sharding",
    "scatter_tensor",
    "zeros",
]
