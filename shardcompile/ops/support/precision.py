"""Half precision is added up in single precision, as the plain kernels do."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are added up."""
    return torch.float32 if dtype in HALVES else dtype


def widened(x: Tensor) -> Tensor:
    """A tensor in the dtype in which it is added up."""
    return x.float() if x.dtype in HALVES else x
