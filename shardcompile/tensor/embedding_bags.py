"""`embedding_bag` as a lookup and a reduction over each bag.

Torch's op has flat indices and numbers at which bags start, from which nobody can tell which bags a rank has. Here bags
of equal length stay apart, so that whatever is sharded (bags, what is in them, rows or columns of the table) stays
where it is; of bags given by offsets, each rank adds up what it has of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nnf

from shardcompile.ops.support.precision import widened
from shardcompile.ops.view.rows import has_static_sizes
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
    """``torch.nn.functional.embedding_bag``; what has no form of its own, and what torch refuses, is left to torch."""
    simple = max_norm is None and not (scale_grad_by_freq or sparse)
    if not simple or not _fits(indices, table, offsets, mode, per_sample_weights, padding_idx):
        return func(
            *(indices, table, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights),
            *(include_last_offset, padding_idx),
        )
    rows = nnf.embedding(indices, table)
    padding = None if padding_idx is None else padding_idx % table.shape[0]
    counts = None if padding is None else (indices != padding).unsqueeze(-1)
    if mode == "max":
        return _largest(rows, (indices == indices).unsqueeze(-1) if counts is None else counts)
    rows = widened(rows) if per_sample_weights is None else widened(rows) * widened(per_sample_weights).unsqueeze(-1)
    rows = rows if counts is None else torch.where(counts, rows, 0)
    add = (lambda x: x.sum(1)) if offsets is None else _adder(offsets, indices, include_last_offset)
    total = add(rows)
    if mode == "mean" and offsets is None and counts is None:
        total = total / indices.shape[1]
    elif mode == "mean":
        counts = torch.ones_like(indices).unsqueeze(-1) if counts is None else counts
        total = total / add(counts.to(rows.dtype)).clamp(min=1)
    return total.to(table.dtype)


def _adder(offsets: Tensor, indices: Tensor, include_last: bool) -> Callable[[Tensor], Tensor]:
    """What adds up rows [indices, columns] by bags, to [bags, columns].

    Offsets that torch would refuse lead to bags that are not there, which the addition refuses.
    """
    if isinstance(offsets, Sharded):
        offsets = redistributed(offsets, offsets._spec.layout.replicated())
    many = indices.shape[0]
    starts = offsets[:-1] if include_last else offsets
    bags = starts.shape[0]
    positions = torch.arange(many, dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(starts.contiguous(), positions, right=True) - 1
    bag = torch.where(offsets[-1] > many, bags, bag)
    return lambda rows: rows.new_zeros([bags, rows.shape[1]]).index_add(0, bag, rows)


def _fits(
    indices: Tensor, table: Tensor, offsets: Tensor | None, mode: str, weights: Tensor | None, padding_idx: int | None
) -> bool:
    """Whether something is sharded, and the arguments are what torch accepts."""
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
        nothing = indices.ndim == 2 and isinstance(indices.shape[1], int) and indices.shape[1] == 0
        if offsets is not None or indices.ndim != 2 or nothing:
            return False
    elif indices.ndim != 1 or offsets.ndim != 1 or offsets.is_floating_point() or offsets.shape[0] in (0, 1):
        return False
    if isinstance(offsets, Tensor) and isinstance(indices.shape[0], int) and indices.shape[0] == 0:
        return False  # no row would tell of offsets that torch refuses
    if padding_idx is not None and not -table.shape[0] <= padding_idx < table.shape[0]:
        return False
    return weights is None or (mode == "sum" and weights.shape == indices.shape and weights.dtype == table.dtype)


def _largest(rows: Any, counts: Tensor) -> Tensor:
    """The largest row of each bag by columns: the first of equal ones, and a NaN if it is the first of all."""
    rows = redistributed(rows, rows._spec.layout.reduced())
    values, size = rows.detach(), rows.shape[1]
    at = torch.arange(size, device=rows.device).unsqueeze(-1)
    numbers = torch.where(values.isnan() | ~counts, -math.inf, values)
    best = torch.where(counts & (values == numbers.amax(1, keepdim=True)), at, size).amin(1, keepdim=True)
    first = torch.where(counts, at, size).amin(1, keepdim=True)
    starts_with_nan = (values.isnan() & (at == first)).any(1, keepdim=True)
    return torch.where(at == torch.where(starts_with_nan, first, best), rows, 0).sum(1)
