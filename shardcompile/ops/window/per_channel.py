"""Kernels for images of which a rank may have no channels: all leading dims become samples of one channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.compat import OpOverload
from shardcompile.compat.own_ops import define_op
from shardcompile.ops import state
from shardcompile.ops.record import Run
from shardcompile.ops.support.local_shards import may_be_empty, view_shard
from shardcompile.ops.window.rule import per_channel
from shardcompile.sharding import IntLike

aten = torch.ops.aten


def _upsample_backward(
    grad: Tensor, op: str, fine: list[int], coarse: list[int], align_corners: list[bool], scales: list[float]
) -> Tensor:
    given: Sequence[float | None] = scales or [None] * len(fine)
    out: Tensor = getattr(aten, op).default(grad, fine, coarse, *align_corners, *given)
    return out.contiguous()


define_op(
    "upsample_backward(Tensor grad, str op, SymInt[] fine, SymInt[] coarse, bool[] align_corners, float[] scales) "
    "-> Tensor",
    _upsample_backward,
    lambda grad, op, fine, coarse, *_: grad.new_empty(coarse),
    capturable=True,
    any_strides=False,
)


def _gradient(op: OpOverload) -> Run:
    """The gradient of an interpolation; in a trace an op of this library, as torch's (2.11 - 2.15) takes no symbols."""

    def run(grad: Tensor, fine: Sequence[IntLike], coarse: Sequence[IntLike], *options: Any) -> Tensor:
        if type(grad) is Tensor:
            return op(grad, fine, coarse, *options)  # type: ignore[no-any-return]
        align, scales = options[: -len(fine)], options[-len(fine) :]
        name = op._schema.name.removeprefix("aten::")
        stated = [s for s in scales if s is not None]
        return torch.ops.shardcompile.upsample_backward(grad, name, fine, coarse, align, stated)  # type: ignore[no-any-return]

    return run


def _shape_of_gradient(grad: Tensor, fine: Sequence[IntLike], coarse: Sequence[IntLike], *options: object) -> Tensor:
    return grad.new_empty(coarse)


def _per_channel(op: Callable[..., Any], spatial: int) -> Run:
    """Wraps a kernel that refuses empty channels: if this rank may have none, leading dims become samples of one."""

    def local(x: Tensor, *args: object, **kwargs: object) -> object:
        leading = x.shape[:-spatial]
        if not may_be_empty(leading[-1]):
            return op(x, *args, **kwargs)

        def flattened(a: object) -> object:
            if isinstance(a, Tensor):
                return view_shard(a, [math.prod(a.shape[:-spatial]), 1, *a.shape[-spatial:]])
            if isinstance(a, (list, tuple)) and len(a) == spatial + len(leading) > spatial:  # a shape
                return [math.prod(a[:-spatial]), 1, *a[-spatial:]]
            return a

        out = op(flattened(x), *map(flattened, args), **kwargs)
        if isinstance(out, Tensor):
            return view_shard(out, [*leading, *out.shape[-spatial:]])
        return tuple(view_shard(o, [*leading, *o.shape[-spatial:]]) for o in out)

    return local


for _op, _spatial in per_channel():
    if "upsample" in _op._schema.name and "nearest" not in _op._schema.name and "backward" in _op._schema.name:
        state(_op, kernel=_per_channel(_gradient(_op), _spatial), shape_kernel=_shape_of_gradient)
    else:
        state(_op, kernel=_per_channel(_op, _spatial))
