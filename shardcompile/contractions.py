"""The functions that packages look for in the package of a tensor's class.

`opt_einsum` derives a library's name from the first part of a class's module. It asks that library for `tensordot`,
`transpose` and `einsum`; where it has none, it takes the tensor for an array of numpy's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """`torch.einsum`.

    Args:
        equation: any characters may name dims, as in numpy; torch knows 52.
        operands: sharded or plain.
    """
    names = dict.fromkeys(c for c in equation if c not in ",->. ")
    if not all(c.isascii() for c in names):
        letters = map(chr, [*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)])
        equation = equation.translate({ord(c): new for c, new in zip(names, letters, strict=False)})
    return torch.einsum(equation, *operands)


def tensordot(x: Tensor, y: Tensor, axes: object = 2) -> Tensor:
    """`torch.tensordot` with numpy's name for its dims.

    Args:
        x: sharded or plain.
        y: likewise.
        axes: how many dims, or which of `x` and which of `y`.
    """
    return torch.tensordot(x, y, dims=axes)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The dims of `x` in another order.

    Args:
        x: sharded or plain.
        axes: all dims.
    """
    return x.permute(*axes)
