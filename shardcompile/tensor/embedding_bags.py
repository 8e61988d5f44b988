"""`embedding_bag` on sharded tensors, as an embedding lookup and a reduction over each bag.

The op of torch takes flat indices and the offsets of bags, which do not show which bags a rank has. Here bags of equal
length keep a dim of their own, so a sharded dim (bags, entries of a bag, rows or columns of the table) stays sharded.
For bags that are given by offsets each rank reduces its local entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from shardcompile.ops.support.precision import widened
from shardcompile.ops.support.sharded_rows import has_static_sizes
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import redistributed


def embedding_bag(
    func: Callable[..., Tensor],
    indices: Tensor,
    table: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Implements ``torch.nn.functional.embedding_bag``; arguments that `_fits` does not accept are left to torch."""
    simple = max_norm is None and not (scale_grad_by_freq or sparse)
    if not simple or not _fits(indices, table, offsets, mode, per_sample_weights, padding_idx):
        return func(
            *(indices, table, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights),
            *(include_last_offset, padding_idx),
        )
    rows = nnf.embedding(indices, table)
    padding = None if padding_idx is None else padding_idx % table.shape[0]
    mask = None if padding is None else (indices != padding).unsqueeze(-1)
    if mode == "max":
        return _max_over_bags(rows, (indices == indices).unsqueeze(-1) if mask is None else mask)
    rows = widened(rows) if per_sample_weights is None else widened(rows) * widened(per_sample_weights).unsqueeze(-1)
    rows = rows if mask is None else torch.where(mask, rows, 0)
    sum_bags = (lambda x: x.sum(1)) if offsets is None else _segment_sum(offsets, indices, include_last_offset)
    total = sum_bags(rows)
    if mode == "mean" and offsets is None and mask is None:
        total = total / indices.shape[1]
    elif mode == "mean":
        mask = torch.ones_like(indices).unsqueeze(-1) if mask is None else mask
        total = total / sum_bags(mask.to(rows.dtype)).clamp(min=1)
    return total.to(table.dtype)


def _segment_sum(offsets: Tensor, indices: Tensor, include_last: bool) -> Callable[[Tensor], Tensor]:
    """Returns a function that sums rows [indices, columns] over the bags, to [bags, columns].

    Offsets that torch would refuse lead to indices of bags that are out of range, which `index_add` refuses.
    """
    if isinstance(offsets, Sharded):
        offsets = redistributed(offsets, offsets._spec.layout.replicated())
    num_indices = indices.shape[0]
    starts = offsets[:-1] if include_last else offsets
    num_bags = starts.shape[0]
    positions = torch.arange(num_indices, dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(starts.contiguous(), positions, right=True) - 1
    bag = torch.where(offsets[-1] > num_indices, num_bags, bag)
    return lambda rows: rows.new_zeros([num_bags, rows.shape[1]]).index_add(0, bag, rows)


def _fits(
    indices: Tensor, table: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None, padding_idx: int | None
) -> bool:
    """Returns whether a tensor is sharded and torch accepts the arguments."""
    tensors = [x for x in (indices, table, weights) if isinstance(x, Tensor)]
    if not any(c is not None for x in tensors if isinstance(x, Sharded) for c in x._spec.layout.partitions):
        return False
    if any(map(has_static_sizes, tensors)):
        return False
    if table.ndim != 2 or indices.is_floating_point() or not table.is_floating_point():
        return False
    if mode not in (("sum", "mean", "max") if offsets is None else ("sum", "mean")):
        return False
    if not isinstance(offsets, Tensor):
        empty_bags = indices.ndim == 2 and isinstance(indices.shape[1], int) and indices.shape[1] == 0
        if offsets is not None or indices.ndim != 2 or empty_bags:
            return False
    elif indices.ndim != 1 or offsets.ndim != 1 or offsets.is_floating_point() or offsets.shape[0] in (0, 1):
        return False
    if isinstance(offsets, Tensor) and isinstance(indices.shape[0], int) and indices.shape[0] == 0:
        return False  # without rows `index_add` would not detect wrong offsets
    if padding_idx is not None and not -table.shape[0] <= padding_idx < table.shape[0]:
        return False
    return weights is None or (mode == "sum" and weights.shape == indices.shape and weights.dtype == table.dtype)


def _max_over_bags(rows: Any, mask: Tensor) -> Tensor:
    """Returns the maximum of each column over each bag, among the entries that a mask selects.

    As in torch, the gradient goes to the first of equal values, and a NaN is the maximum only if it is the first entry.
    """
    rows = redistributed(rows, rows._spec.layout.reduced())
    values, size = rows.detach(), rows.shape[1]
    index = torch.arange(size, device=rows.device).unsqueeze(-1)
    finite = torch.where(values.isnan() | ~mask, -math.inf, values)
    argmax = torch.where(mask & (values == finite.amax(1, keepdim=True)), index, size).amin(1, keepdim=True)
    first = torch.where(mask, index, size).amin(1, keepdim=True)
    starts_with_nan = (values.isnan() & (index == first)).any(1, keepdim=True)
    return torch.where(index == torch.where(starts_with_nan, first, argmax), rows, 0).sum(1)
