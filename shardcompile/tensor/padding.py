"""Reflection, replication and circular padding along a sharded spatial dim: the ranks at its ends add the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcompile.ops.support.sharded_rows import has_static_sizes
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import Redistribute, redistributed

Rows = tuple[Tensor, Tensor]
"""The padding rows before a tensor, and those after it."""


def _reflect(x: Tensor, dim: int, before: int, after: int) -> Rows:
    rows = x.shape[dim]
    ends = (x.narrow(dim, 1, before), x.narrow(dim, rows - 1 - after, after))
    return tuple(_with_gathered_gradient(_gathered(end, dim).flip(dim)) for end in ends)  # type: ignore[return-value]


def _replicate(x: Tensor, dim: int, before: int, after: int) -> Rows:
    def expand(row: Tensor, count: int) -> Tensor:
        return row.expand([count if d == dim else -1 for d in range(x.ndim)])

    ends = (_gathered(x.narrow(dim, row, 1), dim) for row in (0, x.shape[dim] - 1))
    return tuple(expand(end, count) for end, count in zip(ends, (before, after), strict=True))  # type: ignore[return-value]


def _circular(x: Tensor, dim: int, before: int, after: int) -> Rows:
    return x.narrow(dim, x.shape[dim] - before, before), x.narrow(dim, 0, after)


_PADDING_ROWS: dict[str, Callable[[Tensor, int, int, int], Rows]] = {
    "reflect": _reflect,
    "replicate": _replicate,
    "circular": _circular,
}
"""Functions that return the padding rows, by mode."""


def _gathered(x: Tensor, dim: int) -> Tensor:
    """Gathers one dim of a tensor."""
    if not isinstance(x, Sharded) or x._spec.layout.partitions[dim] is None:
        return x
    return redistributed(x, x._spec.layout.gathered(dim))


def _with_gathered_gradient(x: Tensor) -> Tensor:
    """Returns the same rows; their gradient, which arrives sharded, is gathered before the backward pass flips it."""
    return Redistribute.apply(x, x._spec.layout, False, None) if isinstance(x, Sharded) else x


def pad(
    func: Callable[..., object], input: Tensor, pad: Sequence[int], mode: str = "constant", value: object = None
) -> object:
    """Implements ``torch.nn.functional.pad``; constant padding, and arguments that torch refuses, are left to torch."""
    if not _is_supported(input, pad, mode):
        return func(input, pad, mode, value)
    for i in range(len(pad) // 2):
        dim, before, after = input.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        if before == 0 and after == 0:
            continue
        rows_before, rows_after = _PADDING_ROWS[mode](input, dim, before, after)
        parts = [_gathered(rows_before, dim)] * (before > 0) + [input] + [_gathered(rows_after, dim)] * (after > 0)
        input = torch.cat(parts, dim)
    return input


def _is_supported(x: Tensor, pad: Sequence[int], mode: str) -> bool:
    spatial = len(pad) // 2
    if mode not in _PADDING_ROWS or not isinstance(x, Sharded) or not all(isinstance(n, int) and n >= 0 for n in pad):
        return False
    if len(pad) % 2 or x.ndim - spatial not in (1, 2) or has_static_sizes(x):
        return False
    if all(c is None for c in x._spec.layout.partitions[-spatial:]):
        return False
    # The limits of torch: a row is repeated at most once, except for the first and last row in mode "replicate".
    sizes = [x.shape[x.ndim - 1 - i] for i in range(spatial)]
    limits = {"reflect": [n - 1 for n in sizes], "circular": sizes, "replicate": [max(pad)] * spatial}[mode]
    return all(bool(max(pad[2 * i : 2 * i + 2]) <= n) for i, n in enumerate(limits)) and all(bool(n > 0) for n in sizes)
