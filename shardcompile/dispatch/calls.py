"""A call as rules see it: layouts in place of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardcompile.compat import OpOverload
from shardcompile.errors import LayoutError, UnsupportedOpError
from shardcompile.layout import Layout, Spec
from shardcompile.ops import OpCall, TensorArg
from shardcompile.ops.support.global_meta import tensors_of
from shardcompile.sharded import Sharded


def describe(cls: type[Sharded], op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> OpCall:
    """A call with what a rule may know of its tensors; a plain one counts as whole on every rank."""
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
    """The layout of a plain tensor, which is the same value on every rank."""
    return Layout.whole(mesh, tuple(x.shape), x.dtype)


def _common_mesh(cls: type[Sharded], op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> DeviceMesh:
    mesh = None
    for x in tensors_of([*args, *kwargs.values()]):
        if type(x) is not cls:
            _refuse_foreign(op, x)
            _refuse_unlike_shards(op, x)
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


def _refuse_unlike_shards(op: OpOverload, x: Tensor) -> None:
    kind = "quantized" if x.is_quantized else "" if x.layout is torch.strided else str(x.layout)
    if kind:
        raise UnsupportedOpError(
            f"{op} mixes a ShardTensor and a plain {kind} tensor of shape {tuple(x.shape)}; take x.full_tensor() of "
            "the sharded one, or make the other one dense"
        )


def tensors_text(cls: type[Sharded], args: Sequence[object], kwargs: dict[str, object]) -> str:
    """The layouts of the tensors of a call, for messages."""
    return "; ".join(
        f"input {i}: {x._spec.layout.describe() if type(x) is cls else f'plain {tuple(x.shape)}'}"
        for i, x in enumerate(tensors_of([*args, *kwargs.values()]))
    )


def replicated_spec(mesh: DeviceMesh, x: Tensor) -> Spec:
    """The spec of a plain tensor that is the same on every rank."""
    return Spec.of(plain_layout(mesh, x), tuple(x.stride()))
