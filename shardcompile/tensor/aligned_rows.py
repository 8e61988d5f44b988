"""Tensors of rows that belong together: which mesh dim shards them, and others that are identically sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile import compat
from shardcompile.errors import LayoutError
from shardcompile.sharding import IntLike, Layout, Partition, Spec, contiguous_stride
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


def mesh_dims_of_rows(x: Tensor, what: str, at_most: int = 1) -> tuple[int, ...]:
    """The mesh dims that sharded dim 0, outermost first.

    Raises:
        LayoutError: there are none, or more than allowed.
    """
    if not isinstance(x, ShardTensor):
        raise LayoutError(
            f"{what} takes sharded tensors, got a plain one of shape {tuple(x.shape)}; see ShardTensor.from_local and "
            "distribute_tensor"
        )
    layout = x._spec.layout
    partition = layout.partitions[0] if x.ndim else None
    if partition is None or len(partition.mesh_dims) > at_most:
        how_many = ("one mesh dim", "one or two mesh dims")[at_most - 1]
        raise LayoutError(
            f"{what} sends rows along the mesh dim that shards dim 0, and {layout.describe()} has "
            f"{len(partition.mesh_dims) if partition else 'none'}; redistribute it to Shard(0) on {how_many} first"
        )
    return partition.mesh_dims


def mesh_dim_of_rows(x: Tensor, what: str) -> int:
    """The only mesh dim that shards dim 0; see `mesh_dims_of_rows`."""
    return mesh_dims_of_rows(x, what)[0]


def layout_of_rows(partition: Partition, of: Layout) -> Layout:
    """The layout of `of`, with dim 0 sharded like rows."""
    placements = list(of.placements)
    for mesh_dim in partition.mesh_dims:
        placements[mesh_dim] = Shard(0)
    shape = (partition.size, *of.shape[1:])
    return Layout.of(of.mesh, placements, shape, of.dtype, [partition, *of.partitions[1:]])


def beside(a: Tensor, layout: Layout, what: str) -> ShardTensor:
    """A tensor of one entry for each row, sharded as rows are along dim 0 and whole along all else."""
    a = on_mesh(a, layout.mesh)
    now = a._spec.layout
    if now.mesh != layout.mesh or not a.ndim or not _same(now.shape[0], layout.shape[0]):
        raise LayoutError(f"{what} {now.describe()} does not belong to the rows of {layout.describe()}")
    partitions = [layout.partitions[0], *[None] * (a.ndim - 1)]
    return redistributed(a, Layout.of_partitions(now.mesh, now.shape, now.dtype, partitions))


def _same(a: IntLike, b: IntLike) -> bool:
    return compat.same_symbol(a, b)


def wrapped(local: Tensor, layout: Layout, stride: Sequence[IntLike] | None = None) -> ShardTensor:
    """A shard as a tensor of a layout but for its dtype, differentiably; contiguous if no strides are given."""
    layout = layout.with_dtype(local.dtype)
    stride = contiguous_stride(layout.shape) if stride is None else tuple(stride)
    return FromLocal.apply(local, ShardTensor, Spec.of(layout, stride))


def layout_of_column(layout: Layout) -> Layout:
    """The layout of the first column of a layout."""
    return Layout.of(layout.mesh, layout.placements, layout.shape[:1], torch.int64, layout.partitions[:1])


def identically_sharded(x: Tensor, like: Layout, what: str) -> ShardTensor:
    """Rows in the shards that a layout has along dim 0; what other mesh dims sharded stays as it is."""
    x = on_mesh(x, like.mesh)
    x = redistributed(x, x._spec.layout.reduced())
    now = x._spec.layout
    if now.mesh != like.mesh or not x.ndim or not _same(now.shape[0], like.shape[0]):
        raise LayoutError(f"{what}: {now.describe()} does not have the rows of the route, {like.describe()}")
    partition = like.partition_of(0)
    if now.partitions[0] is not None and now.partitions[0].mesh_dims != partition.mesh_dims:
        raise LayoutError(
            f"{what}: dim 0 of {now.describe()} is sharded over mesh dims {now.partitions[0].mesh_dims}, the route "
            f"goes along "
            f"mesh dims {partition.mesh_dims}; redistribute it first"
        )
    others = [c if c is None or not {*c.mesh_dims} & {*partition.mesh_dims} else None for c in now.partitions[1:]]
    return redistributed(
        x, Layout.of_partitions(now.mesh, (partition.size, *now.shape[1:]), now.dtype, [partition, *others])
    )
