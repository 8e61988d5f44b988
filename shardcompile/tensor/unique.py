"""`unique` and `unique_consecutive` of a sharded tensor: the first element of each run of equal ones stays on its rank.

The count of results is data-dependent: like the rows that a mask keeps, they form a dynamic partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import gather_counts
from shardcompile.ops.support.sharded_rows import first_row, has_static_sizes, positions
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, is_sharded_once
from shardcompile.tensor.aligned_rows import one_or_all, wrapped
from shardcompile.tensor.autograd import with_contiguous_shards
from shardcompile.tensor.kept_rows import kept_rows

aten = torch.ops.aten


def unique(
    func: Callable[..., object],
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> object:
    """Implements ``torch.unique`` of all elements, always sorted: each rank has a contiguous part of the values."""
    if not _serves(input, dim):
        return func(input, sorted=sorted, return_inverse=return_inverse, return_counts=return_counts, dim=dim)
    return one_or_all(_distinct(input, True, return_inverse, return_counts))


def unique_consecutive(
    func: Callable[..., object],
    input: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> object:
    """Implements ``torch.unique_consecutive`` of all elements: the first element of each run stays on its rank."""
    if not _serves(input, dim):
        return func(input, return_inverse=return_inverse, return_counts=return_counts, dim=dim)
    return one_or_all(_distinct(input, False, return_inverse, return_counts))


def _serves(x: Tensor, dim: int | None) -> bool:
    """Returns whether one mesh dim shards one dim of a tensor, without a gradient, which torch refuses."""
    if dim is not None or not isinstance(x, Sharded) or not x.ndim or x.is_complex() or has_static_sizes(x):
        return False
    layout = x._spec.layout
    partitions = [c for c in layout.partitions if c is not None]
    if layout.is_partial or len(partitions) != 1 or not is_sharded_once(partitions[0]):
        return False
    return not (x.requires_grad and torch.is_grad_enabled())


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _distinct(x: Any, by_order: bool, inverse: bool, counts: bool) -> tuple[Any, ...]:
    """Returns the distinct values, and on request the inverse indices and the counts, as ``torch.unique`` does."""
    flat = x.detach().reshape(-1)
    if flat._spec.layout.is_replicated:  # the view could not keep the partition
        op = aten._unique2 if by_order else aten.unique_consecutive
        values, inverse_indices, value_counts = op(flat, *[True] * by_order, inverse, counts)
        return values, *([inverse_indices.view(x.shape)] if inverse else []), *([value_counts] if counts else [])
    with compat.unrecorded_symbols(x._local_tensor):
        rows, order = aten.sort.stable(flat, stable=True) if by_order else (with_contiguous_shards(flat), None)
        layout = rows._spec.layout
        previous = aten.roll.default(rows, [1], [0])
        start: Any = first_row(layout.partition_of(0), layout)
        shard = rows._local_tensor
        is_first = (positions(shard, start, 1, shard.shape[0]) == 0) | (shard != previous._local_tensor)
    kept = kept_rows(is_first, layout)
    with compat.unrecorded_symbols(x._local_tensor):
        result_layout = Layout.of_partitions(layout.mesh, [kept.size], layout.dtype, [kept.partition])
        results: list[Tensor] = [wrapped(kept.select(shard, 0), result_layout)]
        if inverse:
            inverse_indices = aten.cumsum.default(wrapped(is_first, layout), 0) - 1
            if order is not None:
                inverse_indices = aten.index_put.default(torch.empty_like(order), [order], inverse_indices)
            results.append(inverse_indices.view(x.shape))
        if counts:
            results.append(_run_lengths(kept.indices + start, result_layout, layout.shape[0]))
    return tuple(results)


def _run_lengths(starts: Tensor, layout: Layout, end: IntLike) -> Tensor:
    """Computes the length of each run from its start. One small collective exchanges the first start of each rank."""
    (mesh_dim,) = layout.partition_of(0).mesh_dims
    total = starts.new_full([1], end)  # type: ignore[arg-type]
    first = torch.cat([starts, total]).amin().view(1)
    first_of_ranks = gather_counts(first, compat.group_name_of(layout.mesh, mesh_dim)).view(-1).to(starts.device)
    last = torch.cat([starts, total.new_full([1], -1)]).amax()
    next_start = torch.where(first_of_ranks > last, first_of_ranks, total).amin().view(1)
    ends = torch.cat([starts, next_start]).narrow(0, 1, starts.shape[0])
    return wrapped(ends - starts, layout)
