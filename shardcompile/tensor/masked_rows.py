"""Redistributes a tensor and its mask to one partition, and finds the rows that the mask keeps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.ops.support.sharded_rows import local_shard_in
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import Layout, trace_key
from shardcompile.tensor.aligned_rows import wrapped
from shardcompile.tensor.autograd import Promote, ToLocal, redistributed, with_contiguous_shards
from shardcompile.tensor.core import ShardTensor
from shardcompile.tensor.kept_rows import KeptRows, can_be_ordered, kept_rows


class Masked(NamedTuple):
    """A tensor that has the partition of its mask along the masked dims, and the rows that the mask keeps.

    Attributes:
        x: the tensor, possibly with masked dims flattened.
        dim: its first masked dim.
        ndim: number of dims of the mask.
        kept: the kept rows.
        flattened: whether masked dims were flattened.
    """

    x: Sharded
    dim: int
    ndim: int
    kept: KeptRows
    flattened: bool

    @property
    def layout(self) -> Layout:
        """The layout of the tensor."""
        return self.x._spec.layout

    def rows(self) -> Tensor:
        """Returns this rank's local shard with the masked dims flattened."""
        return ToLocal.apply(self.x, None).flatten(self.dim, self.dim + self.ndim - 1)

    def layout_of_kept(self) -> Layout:
        """Returns the layout of ``x[mask]``."""
        layout, first, end = self.layout, self.dim, self.dim + self.ndim
        shape = [*layout.shape[:first], self.kept.size, *layout.shape[end:]]
        return Layout.of_partitions(
            layout.mesh,
            shape,
            layout.dtype,
            [*layout.partitions[:first], self.kept.partition, *layout.partitions[end:]],
        )


def on_mesh(x: Tensor, mesh: DeviceMesh) -> Sharded:
    """Returns a sharded tensor whose shards are one segment of rows each; a plain tensor becomes a replicated one."""
    return with_contiguous_shards(x) if isinstance(x, Sharded) else Promote.apply(x, ShardTensor, mesh)


def masked_rows(x: Tensor, mask: Tensor, dim: int, keep: bool = True) -> Masked:
    """Redistributes a tensor and a mask to one partition, and finds the rows that the mask keeps.

    Masked dims are flattened first where the row-major order of the kept rows requires it.

    Args:
        x: the tensor.
        mask: the mask.
        dim: the first masked dim.
        keep: whether the count of kept rows is a size of what the caller returns.
    """
    mesh, count = first_sharded((x, mask))._spec.layout.mesh, mask.ndim
    rows, sharded_mask = on_mesh(x, mesh), on_mesh(mask, mesh)
    rows = redistributed(rows, _common_layout(rows._spec.layout, sharded_mask, dim))
    flattened = False
    while True:
        layout = rows._spec.layout
        mask_layout = Layout.of_partitions(
            mesh, layout.shape[dim : dim + count], torch.bool, layout.partitions[dim : dim + count]
        )
        if can_be_ordered(mask_layout):
            return Masked(rows, dim, count, _cached_kept_rows(sharded_mask, mask_layout, mask, keep), flattened)
        first = next(d for d, partition in enumerate(mask_layout.partitions) if partition is not None)
        last = first or count - 1
        rows = on_mesh(rows.flatten(dim, dim + last), mesh)
        sharded_mask = on_mesh(wrapped(local_shard_in(sharded_mask, mask_layout), mask_layout).flatten(0, last), mesh)
        count, flattened = count - last, True


def _cached_kept_rows(mask: Sharded, layout: Layout, given: Tensor, keep: bool) -> KeptRows:
    """Finds the rows that a mask keeps; while tracing once per mask, so that ``x[mask] + y[mask]`` has one partition.

    Args:
        mask: the mask.
        layout: the layout to redistribute it to.
        given: the mask as the caller passed it, the key of the cache.
        keep: whether the count of kept rows is a size of what the caller returns.
    """
    if not compat.is_fake(mask._local_tensor):
        return kept_rows(local_shard_in(mask, layout), layout)
    partitions = [c and trace_key(c) for c in layout.partitions]
    key = ("kept rows", layout.placements, *partitions, 0 if given.is_inference() else given._version)
    return compat.once_for_tensor(given, key, lambda: kept_rows(local_shard_in(mask, layout), layout), keep)


def _common_layout(layout: Layout, mask: Sharded, dim: int) -> Layout:
    """Returns a layout without pending reductions, with the partitions of the mask if no masked dim is sharded."""
    layout, partitions = layout.reduced(), list(layout.partitions)
    used = {m for partition in partitions if partition is not None for m in partition.mesh_dims}
    if all(partition is None for partition in partitions[dim : dim + mask.ndim]):
        for d, partition in enumerate(mask._spec.layout.partitions):
            if partition is not None and not used & set(partition.mesh_dims):
                partitions[dim + d] = partition
    return Layout.of_partitions(layout.mesh, layout.shape, layout.dtype, partitions)
