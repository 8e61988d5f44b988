"""Describes a call to sharding rules: an `OpCall` with layouts in place of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.errors import LayoutError, UnsupportedOpError
from shardcompile.ops import OpCall, TensorArg
from shardcompile.ops.support.global_meta import tensors_of
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout, Spec


def describe(cls: type[Sharded], op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> OpCall:
    """Returns the call with a `TensorArg` in place of every tensor; a plain tensor counts as replicated."""
    mesh = _common_mesh(cls, op, args, kwargs)
    tensors: list[TensorArg] = []

    def describe(a: object) -> object:
        if isinstance(a, Tensor):
            layout = a._spec.layout if type(a) is cls else plain_layout(mesh, a)
            tensors.append(TensorArg(layout))
            return tensors[-1]
        if isinstance(a, (list, tuple)):
            return [describe(b) for b in a]
        return a

    described = tuple(describe(a) for a in args)
    named = {k: describe(a) for k, a in kwargs.items()}
    return OpCall(op, described, named, tuple(tensors))


def plain_layout(mesh: DeviceMesh, x: Tensor) -> Layout:
    """Returns the layout of a plain tensor, which is replicated."""
    return Layout.whole(mesh, tuple(x.shape), x.dtype)


def _common_mesh(cls: type[Sharded], op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> DeviceMesh:
    mesh = None
    for x in tensors_of([*args, *kwargs.values()]):
        if type(x) is not cls:
            _refuse_foreign(op, x)
        elif mesh is None:
            mesh = x._spec.layout.mesh
        elif x._spec.layout.mesh is not mesh and x._spec.layout.mesh != mesh:
            raise LayoutError(
                f"{op}: tensors on two meshes, {mesh} and {x._spec.layout.mesh}; bring them to one mesh first "
                "(full_tensor() and distribute_tensor())"
            )
    if mesh is None:
        raise UnsupportedOpError(f"{op} was called without a sharded tensor")
    return mesh


def _refuse_foreign(op: OpOverload, x: Tensor) -> None:
    if isinstance(x, DTensor):
        raise UnsupportedOpError(
            f"{op} mixes a ShardTensor and a DTensor ({x.placements}); convert one: ShardTensor.from_dtensor(x) or "
            "y.to_dtensor()"
        )


def refuse_unlike_shards(cls: type[Sharded], op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Raises if a plain tensor of the call is not dense, e.g. sparse or nested.

    Raises:
        UnsupportedOpError: there is such a tensor; raised on all ranks.
    """
    for x in tensors_of([*args, *kwargs.values()]):
        if type(x) is not cls and _is_unlike_shards(x):
            raise UnsupportedOpError(
                f"{op} mixes a ShardTensor and a {plain_text(x)} ({tensors_text(cls, args, kwargs)}); take "
                "x.full_tensor() of the sharded one, or make the other one dense"
            )


def _is_unlike_shards(x: Tensor) -> bool:
    return x.is_quantized or x.is_nested or x.layout is not torch.strided


def plain_text(x: Tensor) -> str:
    """Describes a plain tensor in messages. A nested tensor of strided layout has no shape to print."""
    if x.is_nested and x.layout is torch.strided:
        return f"plain nested tensor of {x.size(0)} tensors"
    return f"plain {kind_of(x)} tensor of shape {tuple(x.shape)}"


def kind_of(x: Tensor) -> str:
    """Returns the kind of a tensor that is not dense, for messages: nested, quantized, or its torch layout."""
    return "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)


def tensors_text(cls: type[Sharded], args: Sequence[object], kwargs: dict[str, object]) -> str:
    """Describes the tensors of a call in messages, each by its layout."""

    def text(x: Any) -> str:
        if type(x) is cls:
            return str(x._spec.layout.describe())
        return plain_text(x) if _is_unlike_shards(x) else f"plain {tuple(x.shape)}"

    return "; ".join(f"input {i}: {text(x)}" for i, x in enumerate(tensors_of([*args, *kwargs.values()])))


_REPLICATED: dict[Any, Spec] = {}
"""Specs of plain tensors, by the id of the mesh, which they keep alive: eager mode promotes every parameter anew."""
_REPLICATED_LIMIT = 4096
compat.forget_with_world(_REPLICATED.clear)


def replicated_spec(mesh: DeviceMesh, x: Tensor) -> Spec:
    """Returns the spec of a plain tensor, which is replicated."""
    key = id(mesh), x.shape, x.stride(), x.dtype
    try:
        spec = _REPLICATED.get(key)
    except TypeError:  # a symbolic size cannot be hashed
        return Spec.of(plain_layout(mesh, x), tuple(x.stride()))
    if spec is None:
        if len(_REPLICATED) >= _REPLICATED_LIMIT:
            _REPLICATED.clear()
        spec = _REPLICATED[key] = Spec.of(plain_layout(mesh, x), tuple(x.stride()))
    return spec
