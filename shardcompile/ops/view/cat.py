"""Concatenation along a sharded dim: every rank gets as many rows as it has in all tensors together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from shardcompile import compat
from shardcompile.collectives import derive, shard_size
from shardcompile.ops import NotServed, state
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.sharded_rows import local_shard_in, replace_partition, sliced_partition, wrap
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Partition, contiguous_stride

aten = torch.ops.aten
_T = TypeVar("_T", bound=Tensor)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | NotServed:
    """``aten.cat`` along a sharded dim: every rank gets as many rows as it has in all tensors together."""
    ndim = max(t.ndim for t in tensors)
    kept = [t for t in tensors if t.ndim == ndim]  # torch.cat skips tensors of shape [0]
    dim = dim % max(ndim, 1)
    partitions = [t._spec.layout.partitions[dim] if ndim and isinstance(t, Sharded) else None for t in kept]
    widest = max((c for c in partitions if c is not None), key=lambda c: len(c.mesh_dims), default=None)
    if widest is None:
        return NotServed("no tensor is sharded along the concatenated dim")
    like = next(t for t in tensors if isinstance(t, Sharded))
    mesh = like._spec.layout.mesh
    meta = global_meta(aten.cat.default, (list(tensors), dim), {})
    parts: list[Any] = [
        c if c is None or c.mesh_dims == widest.mesh_dims else Partition.chunk(widest.mesh_dims, widest.parts, c.size)
        for c in partitions
    ]
    sizes = [t.shape[dim] for t in kept]
    joined, pieces = _join([n if c is None else c for c, n in zip(parts, sizes, strict=True)], sizes, mesh)
    placements, others = _common_placements(kept, dim, widest, mesh)
    shards = []
    for t, partition in zip(kept, pieces, strict=True):
        target = Layout.of(mesh, placements, t.shape, t.dtype, replace_partition(others, dim, partition))
        shards.append(local_shard_in(t, target).to(meta.dtype))
    layout = Layout.of(
        mesh, placements, compat.global_sizes(meta.shape), meta.dtype, replace_partition(others, dim, joined)
    )
    out = _with_shard_symbol(aten.cat.default(shards, dim), dim, joined, mesh)
    return wrap(like, out, layout, compat.retrace(meta.stride()))


def _with_shard_symbol(x: Tensor, dim: int, partition: Partition, mesh: DeviceMesh) -> Tensor:
    """Inside a trace, gives a local shard the symbol of its partition as its size, in place of a sum of other symbols.

    Both are equal when the graph runs, but the compiler cannot know. And the backward graph could not read the terms of
    a sum off the gradients that it is given.
    """
    if not partition.is_traced:
        return x
    shape = [shard_size(partition, mesh) if d == dim else n for d, n in enumerate(x.shape)]
    dense = x.contiguous()
    return aten.as_strided.default(dense, shape, contiguous_stride(shape))


def _join(
    partitions: Sequence[Partition | IntLike], sizes: Sequence[IntLike], mesh: DeviceMesh
) -> tuple[Partition, list[Partition]]:
    """Returns the partition of concatenated tensors, and the one to which each of them has to be redistributed."""
    total: IntLike = sum(sizes)
    joined, _ = derive("cat", partitions, [], total, mesh)
    sharded = [c for c in partitions if isinstance(c, Partition)]
    pieces: list[Partition] = []
    start: IntLike = 0
    for partition, size in zip(partitions, sizes, strict=True):
        if isinstance(partition, Partition) and len(sharded) == 1:
            pieces.append(partition)  # need not be redistributed
        else:
            pieces.append(sliced_partition(joined, start, 1, size, mesh)[0])
        start = start + size
    return joined, pieces


def _common_placements(
    tensors: Sequence[Tensor], dim: int, partition: Partition, mesh: DeviceMesh
) -> tuple[list[Placement], list[Partition | None]]:
    """Placements, and partitions of the other dims, to which all tensors are redistributed."""
    placements: list[Placement] = [Replicate()] * len(mesh.shape)
    partitions: list[Partition | None] = [None] * tensors[0].ndim
    for m in partition.mesh_dims:
        placements[m] = torch.distributed.tensor.Shard(dim)
    layouts = [t._spec.layout for t in tensors if isinstance(t, Sharded)]
    free = {m for m in range(len(mesh.shape)) if m not in partition.mesh_dims}
    for m in sorted(free):
        now = [x.placements[m] for x in layouts]
        if len(layouts) == len(tensors) and all(p == now[0] and p.is_partial() for p in now):
            placements[m] = now[0]
    for layout in layouts:
        for d, c in enumerate(layout.partitions):
            if d != dim and c is not None and partitions[d] is None and set(c.mesh_dims) <= free:
                partitions[d] = c
                free -= set(c.mesh_dims)
                for m in c.mesh_dims:
                    placements[m] = torch.distributed.tensor.Shard(d)
    return placements, partitions


state(aten.cat.default, sharded=cat)
