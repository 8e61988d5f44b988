"""Maxima and minima over ranks that heed NaN, as those of torch do.

The reductions of gloo and NCCL drop a NaN if they meet it in the wrong operand. So floats travel as integers of the
same order, in which a NaN is the largest (for a maximum) or the smallest (for a minimum).
"""

from __future__ import annotations

import torch
from torch import Tensor

_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
UNSIGNED = {*_WIDER, torch.uint64}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def encode(x: Tensor, reduce_op: str) -> Tensor:
    """Integers in the order of the floats `x`, which are at least single precision."""
    bits = x.view(_INTEGERS[x.dtype])
    limits = torch.iinfo(bits.dtype)
    # Negative floats are stored as sign and magnitude: all but the sign bit turns round.
    ordered = torch.where(bits < 0, bits ^ limits.max, bits)
    return torch.where(x.isnan(), limits.max if reduce_op == "max" else limits.min, ordered)


def signed(x: Tensor) -> Tensor:
    """Signed integers in the order of unsigned ones: torch compares and selects hardly any of these."""
    if x.dtype in _WIDER:
        return x.to(_WIDER[x.dtype])
    return x.view(torch.int64) ^ torch.iinfo(torch.int64).min


def unsigned(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `signed`."""
    if dtype in _WIDER:
        return ordered.to(dtype)
    return (ordered ^ torch.iinfo(torch.int64).min).view(dtype)


def decode(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `encode`."""
    bits = torch.where(ordered < 0, ordered ^ torch.iinfo(ordered.dtype).max, ordered)
    x = bits.view(dtype)
    return torch.where(x.isnan(), torch.nan, x)  # no view: Inductor cannot write to one of another dtype
