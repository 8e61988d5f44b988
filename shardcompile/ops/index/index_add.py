"""Adds rows of a sharded source to the rows that an index names: sums over edges, and gradients of gathers.

Where the partition of the target's rows is known, a gather plan sends sums to the ranks that hold them
(`planned_gathers`). Elsewhere each rank adds its source rows into zeros, and the results of the ranks are a pending
sum. Source rows stay on their ranks, at the cost of a reduction of the target's size, which is why targets larger than
the source are left to the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial

from shardcompile import compat
from shardcompile.collectives import Reduction
from shardcompile.ops import NotServed, OpCall, ShardedDecomposition, TensorArg, state
from shardcompile.ops.index.flat_index import planned_flat_index
from shardcompile.ops.index.planned_gathers import column_of, combined, on_device_of, zeros_in
from shardcompile.ops.index.rule import neighbours
from shardcompile.ops.support.sharded_rows import local_shard_in, reduced, wrap
from shardcompile.ops.view.segmented import layout_with_contiguous_shards, with_contiguous_shards
from shardcompile.sharded import Sharded, shard_of
from shardcompile.sharding import IntLike, Layout, Partition, contiguous_stride

aten = torch.ops.aten


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor | NotServed:
    """``aten.index_add`` of a source that is sharded along `dim`."""
    if not x.ndim:
        return NotServed("the target has no dims")
    if index.ndim != 1:
        return NotServed("the index is not 1-d")
    if source.ndim != x.ndim:
        return NotServed("source and target differ in number of dims")
    dim = dim % x.ndim
    if not _matches(source, dim, x):
        return NotServed(_mismatch(source, dim, x))
    found = combined(x, dim, index, source if alpha == 1 else source * alpha, aten.index_add.default)
    if not isinstance(found, NotServed):
        return found
    if not _has_as_many_elements(source, x):
        return NotServed(_both(found.reason, "the target has more elements than the source"))
    added = reduced(source)
    layout = added._spec.layout
    partition = layout.partition_of(dim)
    local_index = local_shard_in(index, Layout.of_partitions(layout.mesh, index.shape, index.dtype, [partition]))
    return _add_into_zeros(
        x, dim, added, lambda zeros: aten.index_add.default(zeros, dim, local_index, added._local_tensor, alpha=alpha)
    )


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | NotServed:
    """``aten.scatter_add`` of a source that is sharded along `dim`."""
    misfit = _misfit(x, index, source)
    if misfit:
        return NotServed(misfit)
    dim = dim % x.ndim
    if not _matches(source, dim, x):
        return NotServed(_mismatch(source, dim, x))
    column = column_of(index, dim, x.shape)
    reason = "the index does not name entire rows"
    if column is not None:
        found = combined(x, dim, column, source, aten.scatter_add.default)
        if not isinstance(found, NotServed):
            return found
        reason = found.reason
    if not _has_as_many_elements(source, x):
        return NotServed(_both(reason, "the target has more elements than the source"))
    added = reduced(source)
    local_index = local_shard_in(index, added._spec.layout)
    return _add_into_zeros(
        x, dim, added, lambda zeros: aten.scatter_add.default(zeros, dim, local_index, added._local_tensor)
    )


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: Reduction, *, include_self: bool = True
) -> Tensor | NotServed:
    """``aten.scatter_reduce`` of a source that is sharded along `dim`, by an index of entire rows."""
    misfit = _misfit(x, index, source)
    if misfit:
        return NotServed(misfit)
    dim = dim % x.ndim
    if not _matches(source, dim, x):
        return NotServed(_mismatch(source, dim, x))
    if reduce == "mean" and not x.dtype.is_floating_point:
        return NotServed("the mean is not of floating point numbers")
    if x.dtype.is_complex:
        return NotServed("the dtype is complex")
    column = column_of(index, dim, x.shape)
    if column is None:
        return NotServed("the index does not name entire rows")
    return combined(x, dim, column, source, aten.scatter_reduce.two, reduce, include_self=include_self)


def index_put(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Tensor | NotServed:
    """``aten.index_put`` by an index of one dim, by indices of adjacent dims, or of one value by a mask."""
    indices = on_device_of(indices, x)
    at = [d for d, index in enumerate(indices) if index is not None]
    if len(at) == 1 and indices[at[0]].dtype is torch.bool and values.ndim == 0 and indices[at[0]].ndim:
        mask, trailing = indices[at[0]], x.ndim - at[0] - indices[at[0]].ndim
        if trailing < 0 or not _same(mask.shape, x.shape[at[0] : x.ndim - trailing]):
            return NotServed("the mask and the dims that it indexes differ in shape")
        value = values.to(x.dtype)
        return torch.where(mask[(..., *[None] * trailing)], x + value if accumulate else value, x)
    if len(at) > 1:
        return _put_flattened(x, indices, values, accumulate)
    if not at:
        return NotServed("no dim is indexed")
    if not indices[at[0]].ndim:
        return NotServed("the index has no dims")
    dim, index = at[0], indices[at[0]]
    if index.dtype in (torch.bool, torch.uint8):
        return NotServed("the index is a mask")
    if values.ndim != x.ndim + index.ndim - 1 or not _same(values.shape[dim : dim + index.ndim], index.shape):
        return NotServed("the values are broadcast to the indexed rows")
    if index.ndim == 1:
        values = _shard_like_index(values, dim, index)
    else:
        index, values = index.flatten(), values.flatten(dim, dim + index.ndim - 1)
    reduce: Reduction = "sum" if accumulate else "any"
    mismatch = _mismatch(values, dim, x).replace("source", "values")
    found = (
        NotServed(mismatch)
        if mismatch
        else combined(x, dim, index, values, aten.index_put.default, reduce, include_self=accumulate)
    )
    if not accumulate or not isinstance(found, NotServed):
        return found
    return index_add(x, dim, torch.where(index < 0, index + x.shape[dim], index), values)


def _put_flattened(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool) -> Tensor | NotServed:
    """``aten.index_put`` by indices of several adjacent dims: these are flattened, written to, and unflattened."""
    at = neighbours(indices)
    if not at:
        return NotServed("the indexed dims are not adjacent, or an index is a mask")
    if not isinstance(values, Sharded):
        return NotServed("the values are not sharded")
    sizes = [x.shape[d] for d in at]
    total = math.prod(sizes)
    own_partitions = x._spec.layout.partitions[at[0] : at[-1] + 1] if isinstance(x, Sharded) else ()
    candidates = (_partition_of_table(values._spec.layout, x.ndim, at, total), *own_partitions)
    partition = next((c for c in candidates if c is not None), None)
    flat_index = planned_flat_index(partition, sizes, [indices[d] for d in at])
    if isinstance(flat_index, NotServed):
        return flat_index
    shape = [*x.shape[: at[0]], total, *x.shape[at[-1] + 1 :]]
    rows = x.new_zeros(shape) if compat.is_new_zeros(shard_of(x)) else x.reshape(shape)
    written = index_put(rows, [*[None] * at[0], flat_index], values, accumulate)
    return written if isinstance(written, NotServed) else written.unflatten(at[0], sizes)


def _partition_of_table(values: Layout, ndim: int, at: Sequence[int], total: IntLike) -> Partition | None:
    """The partition of the flattened rows from which several index tensors gathered values; None if there were not
    `total` such rows.

    Args:
        values: layout of the values.
        ndim: number of dims of the table.
        at: dims of the table that are indexed.
        total: size of these dims when flattened.
    """
    trailing = ndim - 1 - at[-1]
    gathered = values.partitions[at[0] : len(values.partitions) - trailing]
    tables = [c.indexed_rows_of_size(total) for c in gathered if c is not None]
    return next((c for c in tables if c is not None), None)


def _put_segments(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor | NotServed:
    """``aten.index_put`` into new zeros with a flattened dim: remakes the zeros with shards of contiguous rows."""
    if not isinstance(x, Sharded):
        return NotServed("the target is not sharded")
    layout = layout_with_contiguous_shards(x._spec.layout)
    shard = zeros_in(x, layout)
    if shard is None:
        return NotServed("the target is not known to be zeros")
    zeros = wrap(x, shard, layout, x._spec.stride)
    return aten.index_put.default(zeros, with_contiguous_shards(indices), with_contiguous_shards(values), accumulate)  # type: ignore[no-any-return]


def embedding_backward(
    grad: Tensor, indices: Tensor, rows: IntLike, padding: int, by_frequency: bool
) -> Tensor | NotServed:
    """The gradient of an embedding table, partitioned like the table that the embeddings were gathered from."""
    if by_frequency:
        return NotServed("the gradient is scaled by frequency")
    if not isinstance(grad, Sharded):
        return NotServed("the gradient is not sharded")
    if not indices.ndim or grad.ndim < 2:
        return NotServed("the indices have no dims")
    if padding >= 0:
        grad = grad.masked_fill((indices == padding).unsqueeze(-1), 0)
    flat_grad, flat_indices = grad.flatten(0, -2), indices.flatten()
    zeros = grad.new_zeros([rows, grad.shape[-1]])
    return combined(zeros, 0, flat_indices, flat_grad, aten.embedding_dense_backward.default)


def _shard_like_index(values: Tensor, dim: int, index: Tensor) -> Tensor:
    """Shards replicated values like the sharded index of their rows: each rank takes its own."""
    partition = index._spec.layout.partitions[0] if isinstance(index, Sharded) else None
    if partition is None or (isinstance(values, Sharded) and not values._spec.layout.is_replicated):
        return values
    assert isinstance(index, Sharded), "a plain index has no partition"
    partitions = [partition if d == dim else None for d in range(values.ndim)]
    layout = Layout.of_partitions(index._spec.layout.mesh, tuple(values.shape), values.dtype, partitions)
    return wrap(index, local_shard_in(values, layout), layout, contiguous_stride(layout.shape))


def _same(a: Sequence[IntLike], b: Sequence[IntLike]) -> bool:
    return all(compat.guard_equal(m, n) for m, n in zip(a, b, strict=True))


def _misfit(x: Tensor, index: Tensor, source: Tensor) -> str:
    """Why the shapes rule out `scatter_add` and `scatter_reduce`; empty if they do not."""
    if not x.ndim:
        return "the target has no dims"
    if not index.ndim == source.ndim == x.ndim:
        return "index, source and target differ in number of dims"
    return "" if _same(index.shape, source.shape) else "index and source differ in shape"


def _matches(source: Tensor, dim: int, x: Tensor) -> TypeGuard[Sharded]:
    """Whether the source is sharded along `dim`, and has the dtype of the target and its sizes along the other dims."""
    return not _mismatch(source, dim, x)


def _both(reason: str, other: str) -> str:
    """Joins two reasons."""
    return f"{reason}, and {other}"


def _mismatch(source: Tensor, dim: int, x: Tensor) -> str:
    """Why `_matches` does not hold; empty if it does."""
    if not isinstance(source, Sharded) or source._spec.layout.partitions[dim] is None:
        return "the dim is not sharded in the source"
    if x.dtype is not source.dtype:
        return "source and target differ in dtype"
    if x.dtype is torch.bool:
        return "the dtype is bool"
    others = [d for d in range(x.ndim) if d != dim]
    same = _same([x.shape[d] for d in others], [source.shape[d] for d in others])
    return "" if same else "source and target differ in size along another dim"


def _has_as_many_elements(source: Tensor, x: Tensor) -> bool:
    """Whether the source has at least as many elements as the target."""
    return math.prod(map(compat.size_hint, x.shape)) <= math.prod(map(compat.size_hint, source.shape))


def _add_into_zeros(x: Tensor, dim: int, source: Sharded, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Adds the local source rows into zeros of the target's size, and the pending sum of all ranks to the target."""
    layout, shard = source._spec.layout, source._local_tensor
    over = layout.partition_of(dim).mesh_dims
    placements = [Partial("sum") if m in over else p for m, p in enumerate(layout.placements)]
    partitions = [None if d == dim else c for d, c in enumerate(layout.partitions)]
    sums = add(shard.new_zeros([x.shape[dim] if d == dim else n for d, n in enumerate(shard.shape)]))
    pending = Layout.of(layout.mesh, placements, tuple(x.shape), x.dtype, partitions)
    return x + wrap(source, sums, pending, contiguous_stride(x.shape))


def _was_gathered(source: object, dim: int, size: IntLike) -> bool:
    """Whether the source was gathered from sharded rows, as many as the `size` of the target."""
    partition = source.layout.partitions[dim] if isinstance(source, TensorArg) and 0 <= dim < source.ndim else None
    return partition is not None and partition.indexed_rows_of_size(size) is not None


def _adds_to_rows(call: OpCall) -> bool:
    """`_was_gathered` for ops that take a target, a dim, an index and a source."""
    target, dim = call.args[0], call.args[1] % max(call.args[0].ndim, 1)
    return bool(target.ndim) and _was_gathered(call.args[3], dim, target.shape[dim])


def _puts_into_rows(call: OpCall) -> bool:
    """`_was_gathered` for ``index_put``."""
    target, indices, values = call.args[:3]
    at = [d for d, index in enumerate(indices) if index is not None]
    if len(at) == 1:
        return _was_gathered(values, at[0], target.shape[at[0]])
    at = neighbours(indices)
    if not at or not isinstance(values, TensorArg):
        return False
    total = math.prod(target.shape[d] for d in at)
    return _partition_of_table(values.layout, target.ndim, at, total) is not None


def _adds_to_table(call: OpCall) -> bool:
    """`_was_gathered` for the gradient of an embedding."""
    return any(_was_gathered(call.args[0], d, call.args[2]) for d in range(call.args[0].ndim - 1))


state(aten.index_add.default, sharded=ShardedDecomposition(index_add, preferred=_adds_to_rows))
state(
    aten.index_put.default,
    sharded=ShardedDecomposition(index_put, preferred=_puts_into_rows, segmented=_put_segments),
)
state(aten.scatter_add.default, sharded=ShardedDecomposition(scatter_add, preferred=_adds_to_rows))
state(aten.scatter_reduce.two, sharded=ShardedDecomposition(scatter_reduce, preferred=_adds_to_rows))
state(
    aten.embedding_dense_backward.default,
    sharded=ShardedDecomposition(embedding_backward, preferred=_adds_to_table),
)
state(aten.index_add.default, not_decomposed="torch's decomposition fails for an index of 0 dims")
