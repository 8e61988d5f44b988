"""Classifies dtypes by what kernels and communication backends support."""

from __future__ import annotations

import torch

_ORDINARY = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
}
"""The dtypes that every backend can send and reduce, some of them by way of a wider dtype."""

_FEW_KERNELS = {torch.uint16, torch.uint32}
"""The ordinary dtypes for which torch has no kernels that select rows."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""The quantized dtypes, whose scale is stored outside of the tensor's memory."""


def is_ordinary(dtype: torch.dtype) -> bool:
    """Whether elements can be copied and reduced.

    Torch has no reductions for float8 and uint64. It has hardly any kernels for others, such as int4, float4 and bits8;
    some of them cannot even be copied.
    """
    return dtype in _ORDINARY


def transfer_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which elements are sent: an integer view of the same memory where kernels lack support."""
    return dtype if dtype in _ORDINARY - _FEW_KERNELS else _INTEGERS[dtype.itemsize]
