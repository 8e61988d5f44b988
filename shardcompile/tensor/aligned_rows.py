"""Layouts of tensors that are sharded along dim 0 with one partition: queries, checks and redistribution to it."""

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
    """Returns the only result, or the tuple of several."""
    return results[0] if len(results) == 1 else results


def on_mesh(x: Tensor, mesh: DeviceMesh) -> ShardTensor:
    """Returns a sharded tensor as it is, and a plain one as a replicated tensor on a mesh."""
    if isinstance(x, ShardTensor):
        return x
    if compat.is_fake(x):  # while tracing all ranks run the same program: there is nothing to compare
        return Promote.apply(x, ShardTensor, mesh)  # type: ignore[no-any-return]
    return ShardTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)


def mesh_dims_of_rows(x: Tensor, what: str, at_most: int = 1) -> tuple[int, ...]:
    """Returns the mesh dims that shard dim 0, outermost first.

    Raises:
        LayoutError: there are none, or more than `at_most`.
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
    """Returns the only mesh dim that shards dim 0; see `mesh_dims_of_rows`."""
    return mesh_dims_of_rows(x, what)[0]


def layout_of_rows(partition: Partition, of: Layout) -> Layout:
    """Returns the layout `of` with another partition of dim 0."""
    placements = list(of.placements)
    for mesh_dim in partition.mesh_dims:
        placements[mesh_dim] = Shard(0)
    shape = (partition.size, *of.shape[1:])
    return Layout.of(of.mesh, placements, shape, of.dtype, [partition, *of.partitions[1:]])


def sharded_like_rows(x: Tensor, layout: Layout, what: str) -> ShardTensor:
    """Redistributes a tensor that has one entry for each row of a layout: dim 0 as there, no other dim sharded."""
    x = on_mesh(x, layout.mesh)
    current = x._spec.layout
    if current.mesh != layout.mesh or not x.ndim or not _same(current.shape[0], layout.shape[0]):
        raise LayoutError(f"{what} {current.describe()} does not belong to the rows of {layout.describe()}")
    partitions = [layout.partitions[0], *[None] * (x.ndim - 1)]
    return redistributed(x, Layout.of_partitions(current.mesh, current.shape, current.dtype, partitions))


def _same(a: IntLike, b: IntLike) -> bool:
    return compat.guard_equal(a, b)


def wrapped(local: Tensor, layout: Layout, stride: Sequence[IntLike] | None = None) -> ShardTensor:
    """Wraps a local shard as a sharded tensor, differentiably.

    Args:
        local: this rank's local shard.
        layout: the layout of the tensor; its dtype is replaced by that of `local`.
        stride: the global strides; those of a contiguous tensor by default.
    """
    layout = layout.with_dtype(local.dtype)
    stride = contiguous_stride(layout.shape) if stride is None else tuple(stride)
    return FromLocal.apply(local, ShardTensor, Spec.of(layout, stride))


def layout_of_column(layout: Layout) -> Layout:
    """Returns the layout of a tensor of int64 with one element for each row of a layout."""
    return Layout.of(layout.mesh, layout.placements, layout.shape[:1], torch.int64, layout.partitions[:1])


def identically_sharded(x: Tensor, like: Layout, what: str) -> ShardTensor:
    """Redistributes a tensor so that dim 0 has the partition of a layout; what other mesh dims shard stays as it is."""
    x = on_mesh(x, like.mesh)
    x = redistributed(x, x._spec.layout.reduced())
    current = x._spec.layout
    if current.mesh != like.mesh or not x.ndim or not _same(current.shape[0], like.shape[0]):
        raise LayoutError(f"{what}: {current.describe()} does not have the rows of the route, {like.describe()}")
    partition = like.partition_of(0)
    if current.partitions[0] is not None and current.partitions[0].mesh_dims != partition.mesh_dims:
        raise LayoutError(
            f"{what}: dim 0 of {current.describe()} is sharded over mesh dims {current.partitions[0].mesh_dims}, the "
            f"route goes along mesh dims {partition.mesh_dims}; redistribute it first"
        )
    others = [c if c is None or not {*c.mesh_dims} & {*partition.mesh_dims} else None for c in current.partitions[1:]]
    shape = (partition.size, *current.shape[1:])
    return redistributed(x, Layout.of_partitions(current.mesh, shape, current.dtype, [partition, *others]))
