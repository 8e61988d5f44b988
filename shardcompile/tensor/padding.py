"""Padding with rows of the tensor itself, where a spatial dim is sharded: the ranks at its ends add them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcompile.ops.view.rows import has_static_sizes
from shardcompile.sharded import Sharded
from shardcompile.tensor.autograd import Redistribute, redistributed

Rows = tuple[Tensor, Tensor]
"""In front of a tensor, and behind it."""


def _reflect(x: Tensor, dim: int, front: int, back: int) -> Rows:
    rows = x.shape[dim]
    ends = (x.narrow(dim, 1, front), x.narrow(dim, rows - 1 - back, back))
    return tuple(_gathered_back(_whole(end, dim).flip(dim)) for end in ends)  # type: ignore[return-value]


def _repeat(x: Tensor, dim: int, front: int, back: int) -> Rows:
    def times(row: Tensor, count: int) -> Tensor:
        return row.expand([count if d == dim else -1 for d in range(x.ndim)])

    ends = (_whole(x.narrow(dim, row, 1), dim) for row in (0, x.shape[dim] - 1))
    return tuple(times(end, count) for end, count in zip(ends, (front, back), strict=True))  # type: ignore[return-value]


def _around(x: Tensor, dim: int, front: int, back: int) -> Rows:
    return x.narrow(dim, x.shape[dim] - front, front), x.narrow(dim, 0, back)


_BORDERS: dict[str, Callable[[Tensor, int, int, int], Rows]] = {
    "reflect": _reflect,
    "replicate": _repeat,
    "circular": _around,
}
"""By mode, the rows in front and behind."""


def _whole(x: Tensor, dim: int) -> Tensor:
    """With one dim whole on every rank."""
    if not isinstance(x, Sharded) or x._spec.layout.partitions[dim] is None:
        return x
    return redistributed(x, x._spec.layout.gathered(dim))


def _gathered_back(x: Tensor) -> Tensor:
    """The same rows, whose gradient, which comes sharded, becomes whole before it is turned."""
    return Redistribute.apply(x, x._spec.layout, False, None) if isinstance(x, Sharded) else x


def pad(
    func: Callable[..., object], input: Tensor, pad: Sequence[int], mode: str = "constant", value: object = None
) -> object:
    """``torch.nn.functional.pad``; constants, and what torch refuses, are left to torch."""
    if not _repeats_rows(input, pad, mode):
        return func(input, pad, mode, value)
    for i in range(len(pad) // 2):
        dim, front, back = input.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        if front == 0 and back == 0:
            continue
        in_front, behind = _BORDERS[mode](input, dim, front, back)
        parts = [_whole(in_front, dim)] * (front > 0) + [input] + [_whole(behind, dim)] * (back > 0)
        input = torch.cat(parts, dim)
    return input


def _repeats_rows(x: Tensor, pad: Sequence[int], mode: str) -> bool:
    spatial = len(pad) // 2
    if mode not in _BORDERS or not isinstance(x, Sharded) or not all(isinstance(n, int) and n >= 0 for n in pad):
        return False
    if len(pad) % 2 or x.ndim - spatial not in (1, 2) or has_static_sizes(x):
        return False
    if all(c is None for c in x._spec.layout.partitions[-spatial:]):
        return False
    # As torch checks: a row is repeated at most once, but for the first and the last one in "replicate".
    sizes = [x.shape[x.ndim - 1 - i] for i in range(spatial)]
    most = {"reflect": [n - 1 for n in sizes], "circular": sizes, "replicate": [max(pad)] * spatial}[mode]
    return all(bool(max(pad[2 * i : 2 * i + 2]) <= n) for i, n in enumerate(most)) and all(bool(n > 0) for n in sizes)
