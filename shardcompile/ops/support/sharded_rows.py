"""Building blocks of sharded decompositions: layouts of operands, local shards in a layout, and rows of a local shard.

Indices of rows are ints in eager mode and, inside a trace, symbols that get their values when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import derive, derive_spread, shard_size
from shardcompile.ops.support.local_shards import Scalar, index_copy
from shardcompile.ops.support.strides import in_order
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Partition, Spec, contiguous_stride, transfer_dtype_of

aten = torch.ops.aten
_T = TypeVar("_T", bound=Tensor)


def wrap(like: Sharded, local: Tensor, layout: Layout, stride: Sequence[IntLike]) -> Sharded:
    """Wraps a shard that no other tensor uses in the class of `like`, stored in the order of dims of the strides."""
    return type(like)._wrap(in_order(local, stride), Spec.of(layout, tuple(stride)))


def layout_of(x: Tensor, mesh: DeviceMesh) -> Layout:
    """Returns the layout of a tensor; that of a plain one is replicated."""
    return x._spec.layout if isinstance(x, Sharded) else Layout.whole(mesh, tuple(x.shape), x.dtype)


def local_shard_in(x: Tensor, layout: Layout) -> Tensor:
    """Redistributes a sharded or plain tensor to another layout, and returns its local shard."""
    plan = find_plan(layout_of(x, layout.mesh), layout.with_dtype(x.dtype))
    return run_plan(plan, x._local_tensor if isinstance(x, Sharded) else x)


def reduced(x: _T) -> _T:
    """Carries out all pending reductions of a tensor."""
    if isinstance(x, Sharded) and x._spec.layout.is_partial:
        out = wrap(x, local_shard_in(x, x._spec.layout.reduced()), x._spec.layout.reduced(), x._spec.stride)
        return out  # type: ignore[return-value]
    return x


def with_partition(layout: Layout, dim: int, partition: Partition) -> Layout:
    """Replaces the partition of a dim in a layout, and so its size, by another one over the same mesh dims."""
    shape = [partition.size if d == dim else n for d, n in enumerate(layout.shape)]
    return Layout.of(
        layout.mesh, layout.placements, shape, layout.dtype, replace_partition(layout.partitions, dim, partition)
    )


def replace_partition(
    partitions: Sequence[Partition | None], dim: int, partition: Partition | None
) -> list[Partition | None]:
    """Returns the partitions of all dims with that of one dim replaced."""
    return [partition if d == dim else c for d, c in enumerate(partitions)]


def first_row(partition: Partition, layout: Layout) -> IntLike:
    """Returns the global index of the first row of this rank's local shard."""
    return derive("offset", [partition], [], partition.size, layout.mesh)[1]


def has_static_sizes(x: Tensor) -> bool:
    """Whether a trace has specialised on the shard sizes of some dim. Those of an empty dim do not count: all are 0.

    Every rank then has a graph of its own. AOTAutograd may save other tensors of each, and so recompute other
    collectives in the backward pass: what a rank sends must not depend on what is saved.
    """
    partitions = x._spec.layout.partitions if isinstance(x, Sharded) else ()
    return any(
        c is not None
        and c.is_traced
        and isinstance(c.trace.local_size, int)
        and not (isinstance(c.size, int) and c.size == 0)
        for c in partitions
    )


def statically_same(a: Sequence[IntLike], b: Sequence[IntLike]) -> bool:
    """Whether sizes are known to be equal, without a guard."""
    return all(m is n or compat.statically_known_true(m == n) for m, n in zip(a, b, strict=True))


def sliced_partition(
    partition: Partition, start: IntLike, step: int, count: IntLike, mesh: DeviceMesh
) -> tuple[Partition, IntLike]:
    """Returns the partition of `count` rows ``start, start + step, ...``, and the index in this rank's local shard of
    the first of them.
    """
    found, row = derive("slice", [partition], [start, step, count], count, mesh)
    if found.known_sizes is not None and partition.known_sizes is None:
        return found, row  # no rows at all; a static partition remembers no symbols
    unpadded = partition.provenance.unpadded
    if unpadded is not None and step == 1 and statically_same((start, count), (unpadded[1], unpadded[0].size)):
        return unpadded[0], row
    return found.with_slice(partition, start, step), row


def base_of(partition: Partition, size: IntLike, start: IntLike, step: int) -> Partition | None:
    """Returns the partition of the `size` rows that were sliced, if a partition records that slice; otherwise None."""
    base = partition.provenance.sliced_from
    matches = base is not None and statically_same((base[0].size, base[1], base[2]), (size, start, step))
    return base[0] if base is not None and matches else None


def are_ints(*values: IntLike) -> bool:
    """Whether no value is a symbol."""
    return all(isinstance(v, int) for v in values)


def positions(x: Tensor, first: IntLike, step: int, count: IntLike) -> Tensor:
    """Returns row indices ``first, first + step, ...`` as a plain tensor on the device of a shard."""
    with compat.fake_mode_like(x):
        return torch.ops.prims.iota.default(
            count, start=first, step=step, dtype=torch.int64, device=x.device, requires_grad=False
        )


def take_rows(x: Tensor, dim: int, first: IntLike, step: int, count: IntLike) -> Tensor:
    """Takes rows of a shard: a view, or a copy inside a trace where their indices are symbols."""
    if are_ints(first, count):
        return aten.slice.Tensor(x, dim, first, first + count * step, step)
    transfer_dtype, rows = transfer_dtype_of(x.dtype), positions(x, first, step, count)
    if transfer_dtype is x.dtype:
        return aten.index_select.default(x, dim, rows)
    return aten.view.dtype(aten.index_select.default(aten.view.dtype(x, transfer_dtype), dim, rows), x.dtype)


def write_rows(x: Tensor, rows: Tensor, dim: int, first: IntLike, step: int, count: IntLike) -> Tensor:
    """Returns a copy of a shard in which some rows are replaced."""
    if are_ints(first, count):
        return aten.slice_scatter.default(x, rows, dim, first, first + count * step, step)
    return index_copy(x, dim, positions(x, first, step, count), rows)


def place_rows_at(x: Sharded, dim: int, begin: IntLike, step: int, size: IntLike, value: Scalar) -> Sharded:
    """Places row i of a sharded dim at row ``begin + i * step`` of `size` rows, and fills the others with a value."""
    partition, row = derive_spread(x._spec.layout.partition_of(dim), begin, step, size, x._spec.layout.mesh)
    return place_rows(x, dim, partition, row, step, value)


def place_rows(x: Sharded, dim: int, partition: Partition, row: IntLike, step: int, value: Scalar) -> Sharded:
    """Same as `place_rows_at`, for a given partition, in which the shard's first row has the local index `row`."""
    layout, local = x._spec.layout, x._local_tensor
    size, count = shard_size(partition, layout.mesh), local.shape[dim]
    target = with_partition(layout, dim, partition)
    if step == 1:
        before, after = _rows_like(local, dim, row, value), _rows_like(local, dim, size - row - count, value)
        out = aten.cat.default([before, local, after], dim)
    else:
        out = write_rows(_rows_like(local, dim, size, value), local, dim, row, step, count)
    return wrap(x, out, target, contiguous_stride(target.shape))


def _rows_like(x: Tensor, dim: int, count: IntLike, value: Scalar) -> Tensor:
    torch._check(count >= 0)
    return x.new_full([count if d == dim else n for d, n in enumerate(x.shape)], value)
