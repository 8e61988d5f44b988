"""Tensors of rows that belong together: which mesh dim cuts them, and others that are cut alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile import compat
from shardcompile.errors import LayoutError
from shardcompile.layout import Cut, IntLike, Layout, Spec, contiguous_stride
from shardcompile.tensor.autograd import FromLocal, Promote, redistributed
from shardcompile.tensor.core import ShardTensor


def one_or_all(results: tuple[object, ...]) -> Any:
    """The only result, or the tuple of them."""
    return results[0] if len(results) == 1 else results


def on_mesh(x: Tensor, mesh: DeviceMesh) -> ShardTensor:
    """A sharded tensor; a plain one counts as the same value on every rank of a mesh."""
    if isinstance(x, ShardTensor):
        return x
    if compat.is_fake(x):  # in a trace all ranks have the same program
        return Promote.apply(x, ShardTensor, mesh)  # type: ignore[no-any-return]
    return ShardTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)


def mesh_dim_of_rows(x: Tensor, what: str) -> int:
    """The mesh dim that cuts dim 0.

    Raises:
        LayoutError: there is none, or there are several.
    """
    if not isinstance(x, ShardTensor):
        raise LayoutError(
            f"{what} takes sharded tensors, got a plain one of shape {tuple(x.shape)}; see ShardTensor.from_local and "
            "distribute_tensor"
        )
    layout = x._spec.layout
    cut = layout.cuts[0] if x.ndim else None
    if cut is None or len(cut.mesh_dims) > 1:
        raise LayoutError(
            f"{what} sends rows along the mesh dim that cuts dim 0, and {layout.describe()} has "
            f"{'several' if cut else 'none'}; redistribute it to Shard(0) on one mesh dim first"
        )
    return cut.mesh_dims[0]


def layout_of_rows(like: Layout, mesh_dim: int, cut: Cut | None, of: Layout) -> Layout:
    """The layout of `of`, with dim 0 cut by a mesh dim as in `like`, or as a given cut."""
    cut = like.cuts[0] if cut is None else cut
    assert cut is not None, "rows are cut"
    placements = list(of.placements)
    placements[mesh_dim] = Shard(0)
    shape = (cut.extent, *of.shape[1:])
    return Layout.of(of.mesh, placements, shape, of.dtype, [cut, *of.cuts[1:]])


def beside(a: Any, layout: Layout, mesh_dim: int, what: str) -> Any:
    """A tensor of one entry for each row, cut as rows are along dim 0 and whole along all else."""
    a = on_mesh(a, layout.mesh)
    now = a._spec.layout
    if now.mesh != layout.mesh or not a.ndim or not _same(now.shape[0], layout.shape[0]):
        raise LayoutError(f"{what} {now.describe()} does not belong to the rows of {layout.describe()}")
    cuts = [layout.cuts[0], *[None] * (a.ndim - 1)]
    return redistributed(a, Layout.of_cuts(now.mesh, now.shape, now.dtype, cuts))


def _same(a: IntLike, b: IntLike) -> bool:
    return compat.same_symbol(a, b)


def wrapped(local: Tensor, layout: Layout) -> Any:
    """A block as a tensor of a layout but for its dtype, differentiably."""
    layout = layout.with_dtype(local.dtype)
    return FromLocal.apply(local, ShardTensor, Spec.of(layout, contiguous_stride(layout.shape)))


def layout_of_column(layout: Layout) -> Layout:
    """The layout of the first column of a layout."""
    return Layout.of(layout.mesh, layout.placements, layout.shape[:1], torch.int64, layout.cuts[:1])


def cut_alike(x: Any, like: Layout, mesh_dim: int, what: str) -> Any:
    """Rows in the blocks that a layout has along dim 0; all else stays as it is."""
    x = on_mesh(x, like.mesh)
    x = redistributed(x, x._spec.layout.reduced())
    now = x._spec.layout
    if now.mesh != like.mesh or not x.ndim or not _same(now.shape[0], like.shape[0]):
        raise LayoutError(f"{what}: {now.describe()} does not have the rows of the route, {like.describe()}")
    if now.cuts[0] is not None and now.cuts[0].mesh_dims != (mesh_dim,):
        raise LayoutError(
            f"{what}: dim 0 of {now.describe()} is cut by mesh dims {now.cuts[0].mesh_dims}, the route goes along "
            f"mesh dim {mesh_dim}; redistribute it first"
        )
    return redistributed(x, layout_of_rows(like, mesh_dim, None, now))
