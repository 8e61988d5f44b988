"""Values of every dtype that torch has, made of bytes, and compared by bytes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardcompile import ShardTensor

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
QUANTIZED = [d for d in DTYPES if str(d).startswith(("torch.q", "torch.uq", "torch.quint"))]
DENSE = [d for d in DTYPES if d not in QUANTIZED]

_SHELLS = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
_SHELLS |= {"bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2"}
SHELLS = [d for d in DENSE if str(d).removeprefix("torch.") in _SHELLS]
"""The dtypes of memory that torch has no numbers for."""

NUMBERS = [d for d in DENSE if d not in SHELLS]
"""The dtypes to and from which torch casts."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_integers(x: Tensor) -> Tensor:
    """A view of the same memory as integers of the same size."""
    return x.view(_INTEGERS[x.itemsize])


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers of a dtype, none of them NaN, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    if dtype.itemsize > 1 and (dtype.is_floating_point or dtype.is_complex):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    high = 2 if dtype is torch.bool else 120
    return (
        torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), generator=generator)
        .to(torch.uint8)
        .view(dtype)
        .view(shape)
    )


def bits(x: Any) -> Any:
    """What a result is made of, to be compared by ``==``: dtype, shape and bytes of tensors."""
    if isinstance(x, (list, tuple)):
        return [bits(y) for y in x]
    if isinstance(x, ShardTensor):
        x = x.full_tensor()
    if not isinstance(x, Tensor):
        return x
    flat = as_integers(x.detach()).contiguous().view(-1)
    return x.dtype, tuple(x.shape), flat.view(torch.uint8).tolist() if flat.numel() else []
