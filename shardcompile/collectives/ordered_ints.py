"""Order-preserving integer encodings of floats, so that maxima and minima over ranks propagate NaN as torch does.

The reductions of gloo and NCCL drop a NaN in one of the two operands. So floats are reduced as integers of the same
order, in which NaN is the largest value (for a maximum) or the smallest (for a minimum).
"""

from __future__ import annotations

import torch
from torch import Tensor

_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
UNSIGNED = {*_WIDER, torch.uint64}
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def encode(x: Tensor, reduce_op: str) -> Tensor:
    """Encodes floats of at least single precision as integers of the same order."""
    bits = x.view(_INTEGERS[x.dtype])
    limits = torch.iinfo(bits.dtype)
    # Floats are stored as sign and magnitude: for negative ones all bits but the sign are flipped.
    ordered = torch.where(bits < 0, bits ^ limits.max, bits)
    return torch.where(x.isnan(), limits.max if reduce_op == "max" else limits.min, ordered)


def signed(x: Tensor) -> Tensor:
    """Encodes unsigned integers as signed ones of the same order: torch has few kernels for unsigned ones."""
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
    return torch.where(x.isnan(), torch.nan, x)  # not in place: Inductor cannot write to a view of another dtype
