"""The functions `einsum`, `tensordot` and `transpose`, by which `opt_einsum` contracts sharded tensors.

`opt_einsum` takes the first part of the module of a tensor's class as the name of its array library, here
`shardcompile`, and looks these functions up in it. Without them it would treat the tensor as a numpy array.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Computes `torch.einsum`, with any characters as subscripts.

    Args:
        equation: subscripts may be any characters, as in numpy; torch allows the 52 letters only.
        operands: sharded or plain.
    """
    names = dict.fromkeys(c for c in equation if c not in ",->. ")
    if not all(c.isascii() for c in names):
        letters = map(chr, [*range(ord("a"), ord("z") + 1), *range(ord("A"), ord("Z") + 1)])
        equation = equation.translate({ord(c): new for c, new in zip(names, letters, strict=False)})
    return torch.einsum(equation, *operands)


def tensordot(x: Tensor, y: Tensor, axes: object = 2) -> Tensor:
    """Computes `torch.tensordot`, with numpy's name `axes` for its dims.

    Args:
        x: sharded or plain.
        y: sharded or plain.
        axes: the number of contracted dims, or the contracted dims of `x` and those of `y`.
    """
    return torch.tensordot(x, y, dims=axes)


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Permutes the dims of `x`, as `numpy.transpose`.

    Args:
        x: sharded or plain.
        axes: all dims in their new order.
    """
    return x.permute(*axes)
