"""Products of groups of rows with a matrix for each group, as experts are: ``aten._grouped_mm``, and the op that
`transformers` calls in its place in compiled functions, for all dtypes but bfloat16.

Rows that are cut are multiplied where they lie: of every group a rank has the rows that its block and the group share.
Where the matrices are cut, rows first go to the ranks that have the matrices of their groups, along whichever mesh dim.
In eager mode they stay there, so that the next product moves none; in a trace they come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate

from shardcompile import compat
from shardcompile.collectives import block_size, block_starts, cut_of_sizes, derive
from shardcompile.compat import OpOverload
from shardcompile.layout import Cut, IntLike, Layout, contiguous_stride, is_cut_once
from shardcompile.ops import Form, family, state
from shardcompile.ops.record import Facts
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.view.rows import layout_of, moved, reduced, wrap
from shardcompile.sharded import Sharded, first_sharded

aten = torch.ops.aten


@dataclass(frozen=True)
class _Products:
    """Rows [s, k] and the matrices of their groups [e, k, n], where they are multiplied.

    Attributes:
        like: one of the arguments.
        of_x: the layout of the rows as they were given.
        of_mats: the layout of the matrices.
        rows: how rows are cut where they are multiplied.
        experts: how the matrices are cut.
        ends: where groups end: [e], the same on every rank.
        block: this rank's rows.
        own: this rank's matrices.
        own_ends: where the groups of these end in the block.
    """

    like: Sharded
    of_x: Layout
    of_mats: Layout
    rows: Cut
    experts: Cut | None
    ends: Tensor
    block: Tensor
    own: Tensor
    own_ends: Tensor

    @classmethod
    def of(cls, x: Tensor, mats: Tensor, offs: Tensor) -> _Products | None:
        """Bring rows and matrices together; None if that cannot be done where they are."""
        like = first_sharded([t for t in (x, mats, offs) if isinstance(t, Sharded)])
        mesh = like._spec.layout.mesh
        ends = moved(offs, Layout.whole(mesh, offs.shape, offs.dtype))
        x, mats = reduced(x), reduced(mats)
        of_x, of_mats = layout_of(x, mesh), layout_of(mats, mesh)
        experts, rows = of_mats.cuts[0], of_x.cuts[0]
        if experts is not None:
            if not is_cut_once(experts) or (rows is None and compat.is_fake(ends)):
                return None
            rows = rows_of_experts(ends, experts, of_x)
        if not is_cut_once(rows):
            return None
        block = moved(x, Layout.of_cuts(mesh, of_x.shape, of_x.dtype, [rows, None]))
        own = moved(mats, Layout.of_cuts(mesh, of_mats.shape, of_mats.dtype, [experts, None, None]))
        own_ends = _ends_in_block(ends, rows, experts, mesh)
        return cls(like, of_x, of_mats, rows, experts, ends, block, own, own_ends)

    def beside(self, x: Tensor) -> Tensor:
        """This rank's block of another tensor of as many rows, [s, m]."""
        mesh = self.of_x.mesh
        return moved(reduced(x), Layout.of_cuts(mesh, x.shape, x.dtype, [self.rows, None]))

    def at_home(self, block: Tensor, columns: IntLike) -> Tensor:
        """What a block of rows has become: [s, columns]. In eager mode it stays where it is.

        In a trace a result of an op has no block whose size only that op knows: the rows go back to where they were.
        """
        mesh, home, shape = self.of_x.mesh, self.of_x.cuts[0], (self.of_x.shape[0], columns)
        layout = Layout.of_cuts(mesh, shape, block.dtype, [self.rows, None])
        result = wrap(self.like, block, layout, contiguous_stride(shape))
        if home is self.rows or home is None or not compat.is_fake(self.ends):
            return result
        layout = Layout.of_cuts(mesh, shape, block.dtype, [home, None])
        return wrap(self.like, moved(result, layout), layout, contiguous_stride(shape))


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
    out = aten._grouped_mm.default(_in_rows(found.block, 0), found.own, found.own_ends, None, dtype)
    return found.at_home(out, found.of_mats.shape[2])


def grouped_mm_fallback(x: Tensor, mats: Tensor, offs: Tensor) -> Tensor:
    """``transformers::grouped_mm_fallback``: [s, k] times the matrix of each row's group, of [e, k, n]: [s, n]."""
    found = _Products.of(x, mats, offs)
    if found is None:
        return NotImplemented
    op: Any = torch.ops.transformers.grouped_mm_fallback.default
    return found.at_home(op(found.block, found.own, found.own_ends), found.of_mats.shape[2])


def grouped_mm_fallback_backward(x: Tensor, mats: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """``transformers::grouped_mm_fallback_backward``: gradients of rows and matrices, where these were multiplied."""
    found = _Products.of(x, mats, offs)
    if found is None:
        return NotImplemented
    op: Any = torch.ops.transformers.grouped_mm_fallback_backward.default
    of_rows, sums = op(found.block, found.own, found.own_ends, found.beside(grad))
    layout = _of_matrices(found.rows, found.experts, found.of_mats)
    return found.at_home(of_rows, found.of_x.shape[1]), wrap(found.like, sums, layout, contiguous_stride(layout.shape))


def _of_sums(x: Tensor, mats: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """[k, s] times [s, n], summed within each group: [e, k, n]. The gradient of the matrices."""
    like = first_sharded([t for t in (x, mats, offs) if isinstance(t, Sharded)])
    mesh = like._spec.layout.mesh
    ends = moved(offs, Layout.whole(mesh, offs.shape, offs.dtype))
    x, mats = reduced(x), reduced(mats)
    of_x, of_mats = layout_of(x, mesh), layout_of(mats, mesh)
    rows = of_x.cuts[1] or of_mats.cuts[0]
    if not is_cut_once(rows):
        return NotImplemented
    left = moved(x, Layout.of_cuts(mesh, of_x.shape, of_x.dtype, [None, rows]))
    right = moved(mats, Layout.of_cuts(mesh, of_mats.shape, of_mats.dtype, [rows, None]))
    experts = rows.named_rows(ends.shape[0])
    out = aten._grouped_mm.default(
        _in_rows(left, 1), _in_rows(right, 0), _ends_in_block(ends, rows, experts, mesh), None, dtype
    )
    shape = (ends.shape[0], of_x.shape[0], of_mats.shape[1])
    layout = _of_matrices(rows, experts, Layout.whole(mesh, shape, dtype))
    return wrap(like, out, layout, contiguous_stride(shape))


def _of_matrices(rows: Cut, experts: Cut | None, like: Layout) -> Layout:
    """The layout of matrices that are sums over the rows of their groups."""
    if experts is not None:
        return Layout.of_cuts(like.mesh, like.shape, like.dtype, [experts, None, None])
    terms = [Partial("sum") if m in rows.mesh_dims else Replicate() for m in range(like.mesh.ndim)]
    return Layout.of(like.mesh, terms, like.shape, like.dtype, [None, None, None])


def _in_rows(block: Tensor, dim: int) -> Tensor:
    """A block with strides that kernels take: they look at those of a single row as well, which may be anything.

    Args:
        block: the block.
        dim: of the rows.
    """
    if type(block) is not Tensor or block.shape[dim] > 1:
        return block
    return block.movedim(dim, 0).clone(memory_format=torch.contiguous_format).movedim(0, dim)


def rows_of_experts(ends: Tensor, experts: Cut, of_x: Layout) -> Cut:
    """The cut of rows in order of their groups by which each is where the matrix of its group is.

    Rows behind the last group, which belong to none, are with those of the last one.

    Args:
        ends: where each group ends: [e], the same on every rank.
        experts: how the matrices are cut.
        of_x: the layout of the rows.
    """
    mesh, extent = of_x.mesh, of_x.shape[0]
    (mesh_dim,) = experts.mesh_dims
    group_name = compat.group_name_of(mesh, mesh_dim)

    def make() -> Cut:
        with compat.unrecorded_symbols(ends):
            return _rows_of_experts(ends, experts, extent, mesh)

    what = ("rows of experts", group_name, experts.blocks, compat.expression_of(experts.key))
    return compat.once_for_value(ends, what, make).naming(experts)


def _rows_of_experts(ends: Tensor, experts: Cut, extent: IntLike, mesh: DeviceMesh) -> Cut:
    starts = block_starts(experts, mesh)[1:]
    total: Any = extent
    cuts = torch.cat([ends.new_zeros([1]), ends]).cpu().long()
    inner = cuts.index_select(0, starts)
    edges = torch.cat([inner.new_zeros([1]), inner, inner.new_full([1], total)])
    return cut_of_sizes(edges[1:] - edges[:-1], mesh, experts.mesh_dims, extent=extent)


def _ends_in_block(ends: Tensor, rows: Cut, experts: Cut | None, mesh: DeviceMesh) -> Tensor:
    """Where each group ends in this rank's block of the rows; of its own groups if the matrices are cut."""
    first: Any = derive("located", [rows], [], rows.extent, mesh)[1]
    own = ends
    if experts is not None:
        begin: Any = derive("located", [experts], [], experts.extent, mesh)[1]
        own = ends.narrow(0, begin, block_size(experts, mesh))
    size: Any = block_size(rows, mesh)
    return (own - first).clamp(0, size).to(ends.dtype)


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
