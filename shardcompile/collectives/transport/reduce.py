"""Local reductions over terms received from all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shardcompile.errors import CollectiveError
from shardcompile.sharding import is_ordinary
from shardcompile.sharding.layout import REDUCE_OPS

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
}
"""Maps dtypes that kernels or backends do not reduce to the wider ones they are reduced in. Sums still wrap around."""


def reduced_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which terms of a dtype are reduced."""
    return _WIDER.get(dtype, dtype)


def check_reduction(reduce_op: str, dtype: torch.dtype) -> None:
    """Checks that `reduce_rows` supports a reduction, before anything is sent.

    Raises:
        CollectiveError: there is no such reduction of this dtype.
    """
    exists = reduce_op in REDUCE_OPS
    ordered, divisible = not dtype.is_complex, dtype.is_floating_point or dtype.is_complex
    if not is_ordinary(dtype):
        raise CollectiveError(f"there is no reduction {reduce_op} of {dtype}; convert the terms to another dtype first")
    if not exists or (reduce_op == "avg" and not divisible) or (reduce_op in ("max", "min") and not ordered):
        raise CollectiveError(f"there is no reduction {reduce_op} of {dtype}")


def reduce_rows(parts: Tensor, reduce_op: str, out: Tensor) -> None:
    """Reduces over the first dim, in rank order, into a tensor of the same dtype."""
    wide = reduced_in(parts.dtype)
    if wide is not parts.dtype:
        wide_out = out.to(wide)
        reduce_rows(parts.to(wide), reduce_op, wide_out)
        out.copy_(wide_out)
    elif reduce_op == "sum":
        torch.sum(parts, 0, dtype=parts.dtype, out=out)
    elif reduce_op == "avg":
        torch.mean(parts, 0, out=out)
    elif reduce_op == "product":
        torch.prod(parts, 0, dtype=parts.dtype, out=out)
    else:
        (torch.amax if reduce_op == "max" else torch.amin)(parts, 0, out=out)
