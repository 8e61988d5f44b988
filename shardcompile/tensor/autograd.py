"""Differentiable conversions: between layouts, and between plain and sharded tensors.

The gradient of Replicate is Replicate, or a pending sum that is reduced before the gradient becomes plain. The gradient
of Partial is Replicate, and that of Shard is the same Shard. A gradient may arrive in any layout and is redistributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from shardcompile.dispatch.calls import replicated_spec
from shardcompile.errors import LayoutError, RedistributeError
from shardcompile.ops.support.strides import in_order
from shardcompile.ops.view.segmented import layout_with_contiguous_shards
from shardcompile.planning import find_plan, target_layout
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout, Spec, contiguous_stride, dense_stride, has_segments, normalize_placements

S = TypeVar("S", bound=Sharded)


def brought_to(x: Sharded, layout: Layout, async_op: bool = False) -> Sharded:
    """Redistributes `x` to another layout, without autograd."""
    plan = find_plan(x._spec.layout, layout)
    async_op = async_op and plan.communicates and type(x._local_tensor) is Tensor  # in a graph the passes place waits
    local = run_plan(plan, x._local_tensor, async_op=async_op) if plan.steps else x._local_tensor.clone()
    stride = dense_stride(layout.shape, x._spec.stride)
    # A shard whose collective is in flight is put in order after the wait.
    out = type(x)._wrap(local if async_op else in_order(local, stride), Spec.of(layout, stride))
    if async_op:
        out._in_flight = out.__dict__.pop("_local_tensor")
    return out


class Redistribute(torch.autograd.Function):
    """Casts a tensor and redistributes it to another layout."""

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout, async_op: bool, backward_dtype: torch.dtype | None) -> object:
        """Redistributes, and saves the layout and the dtype of the gradient."""
        ctx.cls, ctx.source = type(x), x._spec.layout
        ctx.dtype, ctx.backward_dtype = x.dtype, backward_dtype
        return brought_to(x.to(layout.dtype), layout, async_op)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Redistributes the gradient to the layout of the input, then casts it to the dtype of the input."""
        grad = sharded_gradient(grad, ctx.cls, ctx.source)
        if ctx.backward_dtype is not None:
            grad = grad.to(ctx.backward_dtype)
        grad = redistributed(grad, ctx.source.reduced().with_dtype(grad.dtype))
        return grad.to(ctx.dtype), None, None, None


def redistributed(x: S, layout: Layout, async_op: bool = False, backward_dtype: torch.dtype | None = None) -> S:
    """Redistributes `x` to another layout and its dtype, differentiably; returns `x` itself if it has that layout."""
    if x._spec.layout is layout:  # equal layouts may have another kind or provenance
        return x
    return Redistribute.apply(x, layout, async_op, backward_dtype)


def with_contiguous_shards(x: S) -> S:
    """Redistributes `x` so that each shard is one segment of rows, differentiably; returns `x` itself if it is so."""
    layout = x._spec.layout
    return redistributed(x, layout_with_contiguous_shards(layout)) if has_segments(layout) else x


def _resolve(x: Tensor) -> Tensor:
    """Returns a view, or a copy if `x` has the conjugate or negative bit, which nothing below dispatch reads.

    The result requires no gradient: the sharded tensor does. Dynamo guards on it, and an empty shard, which is a new
    tensor, does not require one.
    """
    x = x.detach()
    if x._is_zerotensor():  # zeros without memory, which autograd makes
        return torch.zeros_like(x)
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def sharded_gradient(grad: Tensor, cls: type[Sharded], layout: Layout) -> Sharded:
    """Returns a gradient as a sharded tensor.

    Where a gradient is identically zero, such as that of `sgn` in a second backward pass, autograd makes a plain
    tensor of the global shape on every rank.
    """
    return grad if isinstance(grad, cls) else Promote.apply(grad, cls, layout.mesh)


class FromLocal(torch.autograd.Function):
    """Wraps this rank's local shard as a sharded tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, cls: type[Sharded], spec: Spec) -> Sharded:
        """Wraps the shard, or a copy if its strides differ from those of the spec, by which views are decided."""
        ctx.cls, ctx.layout = cls, spec.layout
        out = cls._wrap(in_order(_resolve(local), spec.stride), spec)
        out._borrows = True
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns this rank's local shard of the gradient."""
        grad = sharded_gradient(grad, ctx.cls, ctx.layout)
        grad = redistributed(grad, ctx.layout.reduced().with_dtype(grad.dtype))
        shard, terms = ToLocal.apply(grad, None), _averaged_terms(ctx.layout)
        return shard if terms == 1 else shard / terms, None, None


def _averaged_terms(layout: Layout) -> int:
    """Returns the number of terms that the tensor is the average of; 1 if it is not an average."""
    terms = 1
    for count, placement in zip(layout.mesh.shape, layout.placements, strict=True):
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            if placement.reduce_op != "avg":
                raise RedistributeError(
                    f"the shard of {layout.describe()} is a term of a reduction without a gradient of the terms; only "
                    "sums and averages have one. Redistribute, then take the gradient of the tensor"
                )
            terms *= count
    return terms


def gradient_layout(layout: Layout, grad_placements: Sequence[Placement]) -> Layout:
    """Returns the layout of a gradient whose local shards are the gradients of the local shards.

    Raises:
        LayoutError: the shards would have other shapes.
    """
    wanted = normalize_placements(grad_placements, layout.mesh, layout.ndim)
    result = target_layout(layout, wanted)
    pairs = zip(layout.partitions, result.partitions, strict=True)
    if not all(a is b or (a is not None and a.guard_same_shards(b)) for a, b in pairs):
        raise LayoutError(
            f"grad_placements {list(wanted)} would give the gradient another local shape than the shard of "
            f"{layout.describe()}; only Replicate and Partial can replace one another"
        )
    return result


class ToLocal(torch.autograd.Function):
    """Unwraps this rank's local shard of a sharded tensor."""

    @staticmethod
    def forward(ctx: Any, x: Sharded, grad_layout: Layout | None) -> Tensor:
        """Returns the local shard."""
        ctx.cls = type(x)
        ctx.layout = grad_layout if grad_layout is not None else x._spec.layout.reduced()
        return torch.ops.aten.alias.default(x._local_tensor)  # `view` would give other strides to sizes of 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Wraps the gradient of the local shard as a sharded tensor."""
        layout = ctx.layout.with_dtype(grad.dtype)
        spec = Spec.of(layout, contiguous_stride(layout.shape))
        return FromLocal.apply(grad, ctx.cls, spec), None


def complete_gradient(grad: Sharded) -> Tensor:
    """Reduces and gathers a gradient, and returns it as a plain tensor. Differentiable."""
    return ToLocal.apply(redistributed(grad, grad._spec.layout.replicated()), None)  # type: ignore[no-any-return]


class Promote(torch.autograd.Function):
    """Wraps a plain tensor, the same on every rank, as a replicated tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cls: type[Sharded],
        mesh: DeviceMesh,
        to_plain: Callable[[Sharded], Tensor] = complete_gradient,
    ) -> Sharded:
        """Wraps the tensor.

        Args:
            ctx: the context of the autograd node.
            x: the plain tensor.
            cls: the class of the result.
            mesh: its mesh.
            to_plain: returns the gradient of `x`, given that of the result.
        """
        ctx.cls, ctx.to_plain = cls, to_plain
        x = _resolve(x)
        return cls._wrap(x, replicated_spec(mesh, x))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Returns the gradient as `to_plain` makes it."""
        return ctx.to_plain(grad) if isinstance(grad, ctx.cls) else grad, None, None, None  # as in `sharded_gradient`
