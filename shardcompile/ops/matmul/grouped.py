"""Grouped matrix products, as of the experts of a mixture: ``aten._grouped_mm``, and the op that `transformers` calls
in its place in compiled functions for all dtypes but bfloat16.

Sharded rows are multiplied on their ranks: the groups of a local shard are the intersections of the global groups with
its range of rows. If the matrices are sharded, `shardcompile.tensor.grouped` sends the rows to them, above autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from shardcompile.collectives import shard_size
from shardcompile.compat import OpOverload
from shardcompile.ops import NotServed, ShardedDecomposition, family, state
from shardcompile.ops.record import Facts
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.sharded_rows import first_row, layout_of, local_shard_in, reduced, wrap
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import IntLike, Layout, Partition, contiguous_stride, is_sharded_once

aten = torch.ops.aten


@dataclass(frozen=True)
class _LocalOperands:
    """Local rows [s, k], the matrices of their groups [e, k, n] and the local ends of the groups.

    Attributes:
        like: one of the sharded arguments.
        x_layout: the layout in which the rows are multiplied.
        mats_layout: the layout of the matrices, which is replicated.
        shard: the local shard of the rows.
        mats: the matrices.
        ends: the ends of the groups in the local shard: [e].
    """

    like: Sharded
    x_layout: Layout
    mats_layout: Layout
    shard: Tensor
    mats: Tensor
    ends: Tensor

    @classmethod
    def of(cls, x: Tensor, mats: Tensor, offs: Tensor) -> _LocalOperands | NotServed:
        """Redistributes the operands, unless matrices are sharded by group or rows are not sharded."""
        like = first_sharded([t for t in (x, mats, offs) if isinstance(t, Sharded)])
        mesh = like._spec.layout.mesh
        ends = local_shard_in(offs, Layout.whole(mesh, offs.shape, offs.dtype))
        x, mats = reduced(x), reduced(mats)
        x_layout, mats_layout = layout_of(x, mesh), layout_of(mats, mesh)
        rows = x_layout.partitions[0]
        if mats_layout.partitions[0] is not None:
            return NotServed("the matrices are sharded by group")
        if not is_sharded_once(rows):
            return NotServed("the rows are not sharded into ranges over one mesh dim")
        x_layout = Layout.of_partitions(mesh, x_layout.shape, x_layout.dtype, [rows, None])
        mats_layout = Layout.whole(mesh, mats_layout.shape, mats_layout.dtype)
        return cls(
            like,
            x_layout,
            mats_layout,
            local_shard_in(x, x_layout),
            local_shard_in(mats, mats_layout),
            ends_in_shard(ends, rows, x_layout),
        )

    def result(self, shard: Tensor, columns: IntLike) -> Tensor:
        """Wraps a local result [s, columns], whose rows are sharded like the rows of the operands."""
        shape = (self.x_layout.shape[0], columns)
        layout = Layout.of_partitions(self.x_layout.mesh, shape, shard.dtype, [self.x_layout.partitions[0], None])
        return wrap(self.like, shard, layout, contiguous_stride(shape))


def grouped_mm(
    x: Tensor,
    mats: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | NotServed:
    """``aten._grouped_mm`` of groups of rows: rows times one matrix per group, or products summed within each group."""
    if offs is None:
        return NotServed("there are no group offsets")
    if bias is not None:
        return NotServed("there is a bias")
    if x.ndim != 2:
        return NotServed("the left operand is not 2-d")
    dtype = global_meta(aten._grouped_mm.default, (x, mats, offs, None, out_dtype), {}).dtype
    if mats.ndim == 2:
        return _sums_by_group(x, mats, offs, dtype)
    operands = _LocalOperands.of(x, mats, offs)
    if isinstance(operands, NotServed):
        return operands
    out = aten._grouped_mm.default(in_rows(operands.shard), operands.mats, operands.ends, None, dtype)
    return operands.result(out, operands.mats_layout.shape[2])


def grouped_mm_fallback(x: Tensor, mats: Tensor, offs: Tensor) -> Tensor | NotServed:
    """``transformers::grouped_mm_fallback``: rows [s, k] times the matrices of their groups [e, k, n], to [s, n]."""
    operands = _LocalOperands.of(x, mats, offs)
    if isinstance(operands, NotServed):
        return operands
    op: Any = torch.ops.transformers.grouped_mm_fallback.default
    return operands.result(op(operands.shard, operands.mats, operands.ends), operands.mats_layout.shape[2])


def grouped_mm_fallback_backward(
    x: Tensor, mats: Tensor, offs: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor] | NotServed:
    """``transformers::grouped_mm_fallback_backward``: the gradients of rows and matrices."""
    operands = _LocalOperands.of(x, mats, offs)
    if isinstance(operands, NotServed):
        return operands
    op: Any = torch.ops.transformers.grouped_mm_fallback_backward.default
    grad_shard = local_shard_in(
        reduced(grad),
        Layout.of_partitions(operands.x_layout.mesh, grad.shape, grad.dtype, [operands.x_layout.partitions[0], None]),
    )
    grad_x, sums = op(operands.shard, operands.mats, operands.ends, grad_shard)
    layout = _partial_layout(operands.x_layout.partition_of(0), operands.mats_layout)
    grad_rows = operands.result(grad_x, operands.x_layout.shape[1])
    return grad_rows, wrap(operands.like, sums, layout, contiguous_stride(layout.shape))


def _sums_by_group(x: Tensor, mats: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor | NotServed:
    """Returns [k, s] times [s, n], summed within each group, to [e, k, n]: the gradient of the matrices."""
    like = first_sharded([t for t in (x, mats, offs) if isinstance(t, Sharded)])
    mesh = like._spec.layout.mesh
    ends = local_shard_in(offs, Layout.whole(mesh, offs.shape, offs.dtype))
    x, mats = reduced(x), reduced(mats)
    x_layout, mats_layout = layout_of(x, mesh), layout_of(mats, mesh)
    rows = x_layout.partitions[1] or mats_layout.partitions[0]
    if not is_sharded_once(rows):
        return NotServed("the rows are not sharded into ranges over one mesh dim")
    left = local_shard_in(x, Layout.of_partitions(mesh, x_layout.shape, x_layout.dtype, [None, rows]))
    right = local_shard_in(mats, Layout.of_partitions(mesh, mats_layout.shape, mats_layout.dtype, [rows, None]))
    out = aten._grouped_mm.default(in_rows(left, 1), in_rows(right), ends_in_shard(ends, rows, x_layout), None, dtype)
    shape = (ends.shape[0], x_layout.shape[0], mats_layout.shape[1])
    layout = _partial_layout(rows, Layout.whole(mesh, shape, dtype))
    return wrap(like, out, layout, contiguous_stride(shape))


def _partial_layout(rows: Partition, like: Layout) -> Layout:
    """Returns the layout of matrices that each rank has summed over its local rows: Partial over their mesh dims."""
    placements = [Partial("sum") if m in rows.mesh_dims else Replicate() for m in range(like.mesh.ndim)]
    return Layout.of(like.mesh, placements, like.shape, like.dtype, [None, None, None])


def in_rows(shard: Tensor, dim: int = 0) -> Tensor:
    """Returns a 2-d shard with strides that kernels accept: rows are contiguous, even if there is only one.

    Args:
        shard: the shard.
        dim: the dim of the rows.
    """
    step, rows = shard.stride(1 - dim), shard.shape[dim]
    if isinstance(step, int) and step == 1 and (not isinstance(rows, int) or rows > 1):
        return shard
    return shard.movedim(dim, 0).clone(memory_format=torch.contiguous_format).movedim(0, dim)


def ends_in_shard(ends: Tensor, rows: Partition, layout: Layout) -> Tensor:
    """Returns the ends of the groups within the local shard of the rows.

    Args:
        ends: the ends of the groups in the full tensor.
        rows: the partition of the rows.
        layout: the layout of the rows, or any other one on their mesh.
    """
    first: Any = first_row(rows, layout)
    size: Any = shard_size(rows, layout.mesh)
    return (ends - first).clamp(0, size).to(ends.dtype)


def _grouped_mm_shape(
    x: Tensor,
    mats: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The shape kernel. Torch's fake kernel (2.11 - 2.15) accepts bfloat16 only, its kernels accept other dtypes."""
    groups = [offs.shape[0]] if offs is not None and x.ndim == mats.ndim == 2 else list(mats.shape[:-2])
    kept = groups if x.ndim == mats.ndim else []
    return x.new_empty([*kept, x.shape[-2], mats.shape[-1]], dtype=out_dtype or x.dtype)


state(aten._grouped_mm.default, sharded=grouped_mm, shape_kernel=_grouped_mm_shape)

_TRANSFORMERS_FACTS: dict[str, Facts] = {
    "transformers::grouped_mm_fallback": {"sharded": ShardedDecomposition(grouped_mm_fallback)},
    "transformers::grouped_mm_fallback_backward": {"sharded": ShardedDecomposition(grouped_mm_fallback_backward)},
}


@family
def transformers_experts(op: OpOverload) -> Facts | None:
    """Facts of ops that exist only once `transformers` is imported."""
    return _TRANSFORMERS_FACTS.get(op.name())
