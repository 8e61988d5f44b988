"""Accumulation of half precision in single precision, as torch's kernels do it."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements of `dtype` are accumulated."""
    return torch.float32 if dtype in HALVES else dtype


def widened(x: Tensor) -> Tensor:
    """Converts a tensor to the dtype in which it is accumulated."""
    return x.float() if x.dtype in HALVES else x
