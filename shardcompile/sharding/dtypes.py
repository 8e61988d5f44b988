"""What kernels and backends can do with elements of a dtype."""

from __future__ import annotations

import torch

_ORDINARY = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
}
"""The dtypes whose elements every backend moves, and that are added up, some in a wider dtype."""

_FEW_KERNELS = {torch.uint16, torch.uint32}
"""Of these torch selects no rows."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
"""The dtypes of elements that a scale outside of the tensor's memory belongs to."""


def is_ordinary(dtype: torch.dtype) -> bool:
    """Whether elements can be copied and added up.

    Of float8 and uint64 torch adds up none. Of others, such as int4, float4 and bits8, it has hardly a kernel, and not
    each of them even a copy.
    """
    return dtype in _ORDINARY


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of integers as which elements travel that kernels do not know well: a view of the same memory."""
    return dtype if dtype in _ORDINARY - _FEW_KERNELS else _INTEGERS[dtype.itemsize]
