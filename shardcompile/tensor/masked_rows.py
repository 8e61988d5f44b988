"""One partition for a tensor and its mask, and the rows that the mask keeps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.ops.view.rows import moved
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import Layout
from shardcompile.tensor.aligned_rows import wrapped
from shardcompile.tensor.autograd import Promote, ToLocal, in_one_piece, redistributed
from shardcompile.tensor.core import ShardTensor
from shardcompile.tensor.kept_rows import KeptRows, can_be_ordered, kept_rows


class Masked(NamedTuple):
    """A tensor in the partition of its mask, and the rows that this keeps.

    Attributes:
        x: the tensor; perhaps with masked dims flattened.
        dim: its first masked dim.
        ndim: of the mask.
        kept: the rows.
        flattened: whether masked dims were flattened.
    """

    x: Sharded
    dim: int
    ndim: int
    kept: KeptRows
    flattened: bool

    @property
    def layout(self) -> Layout:
        """That of the tensor."""
        return self.x._spec.layout

    def rows(self) -> Tensor:
        """This rank's shard, with the masked dims flattened."""
        return ToLocal.apply(self.x, None).flatten(self.dim, self.dim + self.ndim - 1)

    def layout_of_kept(self) -> Layout:
        """That of what is kept."""
        layout, first, end = self.layout, self.dim, self.dim + self.ndim
        shape = [*layout.shape[:first], self.kept.size, *layout.shape[end:]]
        return Layout.of_partitions(
            layout.mesh,
            shape,
            layout.dtype,
            [*layout.partitions[:first], self.kept.partition, *layout.partitions[end:]],
        )


def on_mesh(x: Tensor, mesh: DeviceMesh) -> Sharded:
    """A sharded tensor in shards of neighbouring rows; a plain one counts as the same value on every rank."""
    return in_one_piece(x) if isinstance(x, Sharded) else Promote.apply(x, ShardTensor, mesh)


def masked_rows(x: Tensor, mask: Tensor, dim: int, keep: bool = True) -> Masked:
    """A tensor and the rows that a mask keeps of it. Where their order needs it, masked dims are flattened first.

    Args:
        x: the tensor.
        mask: the mask.
        dim: the first masked dim.
        keep: whether what the caller returns has as many rows.
    """
    mesh, count = first_sharded((x, mask))._spec.layout.mesh, mask.ndim
    rows, keeps = on_mesh(x, mesh), on_mesh(mask, mesh)
    rows = redistributed(rows, _common_layout(rows._spec.layout, keeps, dim))
    flattened = False
    while True:
        layout = rows._spec.layout
        of_mask = Layout.of_partitions(
            mesh, layout.shape[dim : dim + count], torch.bool, layout.partitions[dim : dim + count]
        )
        if can_be_ordered(of_mask):
            return Masked(rows, dim, count, _kept_by(keeps, of_mask, mask, keep), flattened)
        first = next(d for d, partition in enumerate(of_mask.partitions) if partition is not None)
        last = first or count - 1
        rows = on_mesh(rows.flatten(dim, dim + last), mesh)
        keeps = on_mesh(wrapped(moved(keeps, of_mask), of_mask).flatten(0, last), mesh)
        count, flattened = count - last, True


def _kept_by(mask: Sharded, layout: Layout, given: Tensor, keep: bool) -> KeptRows:
    """The rows that a mask keeps, in a trace worked out once for it: ``x[mask] + y[mask]`` has one partition.

    Args:
        mask: the mask.
        layout: in which it is needed.
        given: the mask as it was given.
        keep: whether what the caller returns has as many rows.
    """
    if not compat.is_fake(mask._local_tensor):
        return kept_rows(moved(mask, layout), layout)
    partitions = [
        None if c is None else (c.kind, c.shards, *map(compat.expression_of, (c.key, c.size, c.inner, c.scale)))
        for c in layout.partitions
    ]
    what = ("kept rows", layout.placements, *partitions, 0 if given.is_inference() else given._version)
    return compat.once_for_tensor(given, what, lambda: kept_rows(moved(mask, layout), layout), keep)


def _common_layout(layout: Layout, mask: Sharded, dim: int) -> Layout:
    """A layout of a tensor without pending reductions; sharded like its mask where it is not sharded there."""
    layout, partitions = layout.reduced(), list(layout.partitions)
    used = {m for partition in partitions if partition is not None for m in partition.mesh_dims}
    if all(partition is None for partition in partitions[dim : dim + mask.ndim]):
        for d, partition in enumerate(mask._spec.layout.partitions):
            if partition is not None and not used & set(partition.mesh_dims):
                partitions[dim + d] = partition
    return Layout.of_partitions(layout.mesh, layout.shape, layout.dtype, partitions)
