"""Differentiable crossings: between layouts, and between plain and sharded tensors.

The gradient of Replicate is Replicate, or a pending sum that is carried out before it leaves. The gradient of Partial
is Replicate, and that of Shard is the same Shard. A gradient arrives in whatever layout the backward pass left it in
and is redistributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from shardcompile.dispatch.calls import replicated_spec
from shardcompile.errors import LayoutError, RedistributeError
from shardcompile.ops.support.strides import in_order
from shardcompile.ops.view.joined import layout_in_one_piece
from shardcompile.planning import find_plan, target_layout
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout, Spec, contiguous_stride, dense_stride, has_runs, normalize_placements

S = TypeVar("S", bound=Sharded)


def brought_to(x: Sharded, layout: Layout, async_op: bool = False) -> Sharded:
    """`x` in another layout, without autograd."""
    plan = find_plan(x._spec.layout, layout)
    async_op = async_op and plan.communicates and type(x._local_tensor) is Tensor  # the passes order what is traced
    local = run_plan(plan, x._local_tensor, async_op=async_op) if plan.steps else x._local_tensor.clone()
    stride = dense_stride(layout.shape, x._spec.stride)
    # One that is on its way is put in order when it has come.
    out = type(x)._wrap(local if async_op else in_order(local, stride), Spec.of(layout, stride))
    if async_op:
        out._in_flight = out.__dict__.pop("_local_tensor")
    return out


class Redistribute(torch.autograd.Function):
    """Bring a tensor from one layout to another; cast it before."""

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout, async_op: bool, backward_dtype: torch.dtype | None) -> object:
        """Redistribute, and remember where the gradient has to go."""
        ctx.cls, ctx.source = type(x), x._spec.layout
        ctx.dtype, ctx.backward_dtype = x.dtype, backward_dtype
        return brought_to(x.to(layout.dtype), layout, async_op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Bring the gradient to the source's layout, and to its dtype after that."""
        grad = sharded_gradient(grad, ctx.cls, ctx.source)
        if ctx.backward_dtype is not None:
            grad = grad.to(ctx.backward_dtype)
        grad = redistributed(grad, ctx.source.reduced().with_dtype(grad.dtype))
        return grad.to(ctx.dtype), None, None, None


def redistributed(x: S, layout: Layout, async_op: bool = False, backward_dtype: torch.dtype | None = None) -> S:
    """`x` in another layout, of the dtype that this has, differentiably; `x` itself if it has that layout."""
    if x._spec.layout == layout:
        return x
    return Redistribute.apply(x, layout, async_op, backward_dtype)


def in_one_piece(x: S) -> S:
    """A tensor sharded of neighbouring rows, differentiably; itself if it has these."""
    layout = x._spec.layout
    return redistributed(x, layout_in_one_piece(layout)) if has_runs(layout) else x


def _resolve(x: Tensor) -> Tensor:
    """A view, or a copy if `x` is conjugated or negated lazily. Below `__torch_dispatch__` nothing reads these flags.

    It requires no gradient: the sharded tensor does. Dynamo guards on that, and an empty shard is a tensor of its own.
    """
    x = x.detach()
    if x._is_zerotensor():  # zeros without memory: of autograd's own making
        return torch.zeros_like(x)
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def sharded_gradient(grad: Tensor, cls: type[Sharded], layout: Layout) -> Sharded:
    """A gradient as a sharded tensor.

    Where it is zero whatever the input, such as that of `sgn` in a second backward pass, autograd makes it itself:
    plain, and whole on every rank.
    """
    return grad if isinstance(grad, cls) else Promote.apply(grad, cls, layout.mesh)


class FromLocal(torch.autograd.Function):
    """From this rank's local shard to the sharded tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, cls: type[Sharded], spec: Spec) -> Sharded:
        """Wrap a shard, or a copy where it is not stored as the strides say: views are decided on these."""
        ctx.cls, ctx.layout = cls, spec.layout
        return cls._wrap(in_order(_resolve(local), spec.stride), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Hand out this rank's local shard of the gradient."""
        grad = sharded_gradient(grad, ctx.cls, ctx.layout)
        grad = redistributed(grad, ctx.layout.reduced().with_dtype(grad.dtype))
        shard, terms = ToLocal.apply(grad, None), _averaged_terms(ctx.layout)
        return shard if terms == 1 else shard / terms, None, None


def _averaged_terms(layout: Layout) -> int:
    """How many terms the tensor is the average of."""
    terms = 1
    for count, placement in zip(layout.mesh.shape, layout.placements, strict=True):
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            if placement.reduce_op != "avg":
                raise RedistributeError(
                    f"the shard of {layout.describe()} is a term that has no gradient of its own; only sums and "
                    "averages of terms have. Redistribute, then take the gradient of the tensor"
                )
            terms *= count
    return terms


def gradient_layout(layout: Layout, grad_placements: Sequence[Placement]) -> Layout:
    """The layout of a gradient whose shards are the gradients of the ranks' shards.

    Raises:
        LayoutError: the shards would have other shapes.
    """
    wanted = normalize_placements(grad_placements, layout.mesh, layout.ndim)
    result = target_layout(layout, wanted)
    pairs = zip(layout.partitions, result.partitions, strict=True)
    if not all(a is b or (a is not None and a.same_shards(b)) for a, b in pairs):
        raise LayoutError(
            f"grad_placements {list(wanted)} would give the gradient of a shard of another shape than the shard of "
            f"{layout.describe()}; only Replicate and Partial can stand for one another"
        )
    return result


class ToLocal(torch.autograd.Function):
    """From the sharded tensor to this rank's local shard."""

    @staticmethod
    def forward(ctx: Any, x: Sharded, grad_layout: Layout | None) -> Tensor:
        """Unwrap the shard."""
        ctx.cls = type(x)
        ctx.layout = grad_layout if grad_layout is not None else x._spec.layout.reduced()
        return torch.ops.aten.alias.default(x._local_tensor)  # `view` would give other strides to sizes of 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Take the shard of the gradient as such."""
        layout = ctx.layout.with_dtype(grad.dtype)
        spec = Spec.of(layout, contiguous_stride(layout.shape))
        return FromLocal.apply(grad, ctx.cls, spec), None


class Promote(torch.autograd.Function):
    """From a plain tensor, the same on every rank, to a replicated one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cls: type[Sharded], mesh: DeviceMesh, completes: bool = True) -> Sharded:
        """Wrap the whole value; `completes`: whether the gradient is completed here, or by who gets it."""
        ctx.cls, ctx.completes = cls, completes
        x = _resolve(x)
        return cls._wrap(x, replicated_spec(mesh, x))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Complete the gradient before it leaves."""
        if not ctx.completes or not isinstance(grad, ctx.cls):  # as in `sharded_gradient`
            return grad, None, None, None
        grad = redistributed(grad, grad._spec.layout.replicated())
        return ToLocal.apply(grad, None), None, None, None
