"""Products of groups of rows with a matrix for each group, as experts are: ``aten._grouped_mm``, and the op that
`transformers` calls in its place in compiled functions, for all dtypes but bfloat16.

Rows that are sharded are multiplied where they lie: of every group a rank has the rows that its shard and the group
share. Where the matrices are sharded, `shardcompile.tensor.grouped` moves the rows, above autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from shardcompile.collectives import shard_size
from shardcompile.compat import OpOverload
from shardcompile.ops import Form, family, state
from shardcompile.ops.record import Facts
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.view.rows import first_row, layout_of, moved, reduced, wrap
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import IntLike, Layout, Partition, contiguous_stride, is_sharded_once

aten = torch.ops.aten


@dataclass(frozen=True)
class _Products:
    """Rows [s, k] and the matrices of their groups [e, k, n], where they are multiplied.

    Attributes:
        like: one of the arguments.
        of_x: the layout of the rows, with the sharded over which they are multiplied.
        of_mats: the layout of the matrices, which are whole.
        shard: this rank's rows.
        mats: the matrices.
        ends: where the groups end in the shard: [e].
    """

    like: Sharded
    of_x: Layout
    of_mats: Layout
    shard: Tensor
    mats: Tensor
    ends: Tensor

    @classmethod
    def of(cls, x: Tensor, mats: Tensor, offs: Tensor) -> _Products | None:
        """Bring rows and matrices together; None if that cannot be done where they are."""
        like = first_sharded([t for t in (x, mats, offs) if isinstance(t, Sharded)])
        mesh = like._spec.layout.mesh
        ends = moved(offs, Layout.whole(mesh, offs.shape, offs.dtype))
        x, mats = reduced(x), reduced(mats)
        of_x, of_mats = layout_of(x, mesh), layout_of(mats, mesh)
        rows = of_x.partitions[0]
        if of_mats.partitions[0] is not None or not is_sharded_once(rows):
            return None
        of_x = Layout.of_partitions(mesh, of_x.shape, of_x.dtype, [rows, None])
        of_mats = Layout.whole(mesh, of_mats.shape, of_mats.dtype)
        return cls(like, of_x, of_mats, moved(x, of_x), moved(mats, of_mats), ends_in_shard(ends, rows, of_x))

    def result(self, shard: Tensor, columns: IntLike) -> Tensor:
        """What a shard of rows has become: [s, columns]."""
        shape = (self.of_x.shape[0], columns)
        layout = Layout.of_partitions(self.of_x.mesh, shape, shard.dtype, [self.of_x.partitions[0], None])
        return wrap(self.like, shard, layout, contiguous_stride(shape))


def grouped_mm(
    x: Tensor,
    mats: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten._grouped_mm`` of rows in groups: with a matrix for each, or of two tensors along their rows."""
    if offs is None or bias is not None or x.ndim != 2:
        return NotImplemented
    dtype = global_meta(aten._grouped_mm.default, (x, mats, offs, None, out_dtype), {}).dtype
    if mats.ndim == 2:
        return _of_sums(x, mats, offs, dtype)
    found = _Products.of(x, mats, offs)
    if found is None:
        return NotImplemented
    out = aten._grouped_mm.default(in_rows(found.shard), found.mats, found.ends, None, dtype)
    return found.result(out, found.of_mats.shape[2])


def grouped_mm_fallback(x: Tensor, mats: Tensor, offs: Tensor) -> Tensor:
    """``transformers::grouped_mm_fallback``: [s, k] times the matrix of each row's group, of [e, k, n]: [s, n]."""
    found = _Products.of(x, mats, offs)
    if found is None:
        return NotImplemented
    op: Any = torch.ops.transformers.grouped_mm_fallback.default
    return found.result(op(found.shard, found.mats, found.ends), found.of_mats.shape[2])


def grouped_mm_fallback_backward(x: Tensor, mats: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """``transformers::grouped_mm_fallback_backward``: gradients of rows and matrices, where these were multiplied."""
    found = _Products.of(x, mats, offs)
    if found is None:
        return NotImplemented
    op: Any = torch.ops.transformers.grouped_mm_fallback_backward.default
    beside = moved(
        reduced(grad), Layout.of_partitions(found.of_x.mesh, grad.shape, grad.dtype, [found.of_x.partitions[0], None])
    )
    of_rows, sums = op(found.shard, found.mats, found.ends, beside)
    layout = _of_sums_of(found.of_x.partition_of(0), found.of_mats)
    return found.result(of_rows, found.of_x.shape[1]), wrap(found.like, sums, layout, contiguous_stride(layout.shape))


def _of_sums(x: Tensor, mats: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """[k, s] times [s, n], summed within each group: [e, k, n]. The gradient of the matrices."""
    like = first_sharded([t for t in (x, mats, offs) if isinstance(t, Sharded)])
    mesh = like._spec.layout.mesh
    ends = moved(offs, Layout.whole(mesh, offs.shape, offs.dtype))
    x, mats = reduced(x), reduced(mats)
    of_x, of_mats = layout_of(x, mesh), layout_of(mats, mesh)
    rows = of_x.partitions[1] or of_mats.partitions[0]
    if not is_sharded_once(rows):
        return NotImplemented
    left = moved(x, Layout.of_partitions(mesh, of_x.shape, of_x.dtype, [None, rows]))
    right = moved(mats, Layout.of_partitions(mesh, of_mats.shape, of_mats.dtype, [rows, None]))
    out = aten._grouped_mm.default(in_rows(left, 1), in_rows(right), ends_in_shard(ends, rows, of_x), None, dtype)
    shape = (ends.shape[0], of_x.shape[0], of_mats.shape[1])
    layout = _of_sums_of(rows, Layout.whole(mesh, shape, dtype))
    return wrap(like, out, layout, contiguous_stride(shape))


def _of_sums_of(rows: Partition, like: Layout) -> Layout:
    """The layout of matrices that are sums over the rows of their groups."""
    terms = [Partial("sum") if m in rows.mesh_dims else Replicate() for m in range(like.mesh.ndim)]
    return Layout.of(like.mesh, terms, like.shape, like.dtype, [None, None, None])


def in_rows(shard: Tensor, dim: int = 0) -> Tensor:
    """A shard of two dims with strides that kernels take: each row in one piece, also a single one.

    Args:
        shard: the shard.
        dim: of the rows.
    """
    step, rows = shard.stride(1 - dim), shard.shape[dim]
    if isinstance(step, int) and step == 1 and (not isinstance(rows, int) or rows > 1):
        return shard
    return shard.movedim(dim, 0).clone(memory_format=torch.contiguous_format).movedim(0, dim)


def ends_in_shard(ends: Tensor, rows: Partition, layout: Layout) -> Tensor:
    """Where groups end in this rank's local shard of the rows.

    Args:
        ends: where they end in all rows.
        rows: how these are sharded.
        layout: of the rows, or any other on their mesh.
    """
    first: Any = first_row(rows, layout)
    size: Any = shard_size(rows, layout.mesh)
    return (ends - first).clamp(0, size).to(ends.dtype)


def _shape_of_product(
    x: Tensor,
    mats: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A stand-in for the result. Torch's fake kernel (2.11 - 2.15) takes bfloat16 alone, its kernels more."""
    groups = [offs.shape[0]] if offs is not None and x.ndim == mats.ndim == 2 else list(mats.shape[:-2])
    kept = groups if x.ndim == mats.ndim else []
    return x.new_empty([*kept, x.shape[-2], mats.shape[-1]], dtype=out_dtype or x.dtype)


state(aten._grouped_mm.default, sharded=grouped_mm, shape_kernel=_shape_of_product)

_OF_TRANSFORMERS: dict[str, Facts] = {
    "transformers::grouped_mm_fallback": {"sharded": Form(grouped_mm_fallback)},
    "transformers::grouped_mm_fallback_backward": {"sharded": Form(grouped_mm_fallback_backward)},
}


@family
def transformers_experts(op: OpOverload) -> Facts | None:
    """Ops that exist as soon as somebody imports `transformers`."""
    return _OF_TRANSFORMERS.get(op.name())
