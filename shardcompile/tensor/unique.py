"""Values that differ, along a sharded dim: the first rows of all runs of equal ones stay on their ranks.

Nobody knows before the run how many there are: like what a mask keeps, they are a partition whose sizes the run gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import gather_counts
from shardcompile.ops.view.rows import first_row, has_static_sizes, positions
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, is_sharded_once
from shardcompile.tensor.aligned_rows import one_or_all, wrapped
from shardcompile.tensor.autograd import in_one_piece
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
    """``torch.unique`` of all elements, always sorted: each rank has a part of the values, in their order."""
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
    """``torch.unique_consecutive`` of all elements: the first of each run stays on its rank."""
    if not _serves(input, dim):
        return func(input, return_inverse=return_inverse, return_counts=return_counts, dim=dim)
    return one_or_all(_distinct(input, False, return_inverse, return_counts))


def _serves(x: Tensor, dim: int | None) -> bool:
    """Whether one mesh dim shards one dim of a tensor. A gradient is left to torch, which refuses it."""
    if dim is not None or not isinstance(x, Sharded) or not x.ndim or x.is_complex() or has_static_sizes(x):
        return False
    layout = x._spec.layout
    partitions = [c for c in layout.partitions if c is not None]
    if layout.is_partial or len(partitions) != 1 or not is_sharded_once(partitions[0]):
        return False
    return not (x.requires_grad and torch.is_grad_enabled())


@torch.compiler.allow_in_graph  # one node for Dynamo; AOTAutograd traces what it does
def _distinct(x: Any, by_order: bool, inverse: bool, counts: bool) -> tuple[Any, ...]:
    """Values, and if they are wanted the number of each element's value, and how often each value occurs."""
    flat = x.detach().reshape(-1)
    if flat._spec.layout.is_replicated:  # a view that could not keep the partition
        op = aten._unique2 if by_order else aten.unique_consecutive
        values, number, often = op(flat, *[True] * by_order, inverse, counts)
        return values, *([number.view(x.shape)] if inverse else []), *([often] if counts else [])
    with compat.unrecorded_symbols(x._local_tensor):
        rows, order = aten.sort.stable(flat, stable=True) if by_order else (in_one_piece(flat), None)
        layout = rows._spec.layout
        before = aten.roll.default(rows, [1], [0])
        start: Any = first_row(layout.partition_of(0), layout)
        shard = rows._local_tensor
        heads = (positions(shard, start, 1, shard.shape[0]) == 0) | (shard != before._local_tensor)
    kept = kept_rows(heads, layout)
    with compat.unrecorded_symbols(x._local_tensor):
        found = Layout.of_partitions(layout.mesh, [kept.size], layout.dtype, [kept.partition])
        results: list[Tensor] = [wrapped(kept.taken(shard, 0), found)]
        if inverse:
            number = aten.cumsum.default(wrapped(heads, layout), 0) - 1
            if order is not None:
                number = aten.index_put.default(torch.empty_like(order), [order], number)
            results.append(number.view(x.shape))
        if counts:
            results.append(_lengths(kept.indices + start, found, layout.shape[0]))
    return tuple(results)


def _lengths(starts: Tensor, layout: Layout, end: IntLike) -> Tensor:
    """How long each run is, from where it starts. One small collective tells where the runs of other ranks start."""
    (mesh_dim,) = layout.partition_of(0).mesh_dims
    total = starts.new_full([1], end)  # type: ignore[arg-type]
    first = torch.cat([starts, total]).amin().view(1)
    others = gather_counts(first, compat.group_name_of(layout.mesh, mesh_dim)).view(-1).to(starts.device)
    last = torch.cat([starts, total.new_full([1], -1)]).amax()
    behind = torch.where(others > last, others, total).amin().view(1)
    ends = torch.cat([starts, behind]).narrow(0, 1, starts.shape[0])
    return wrapped(ends - starts, layout)
