"""What is put in the place of torch's decompositions that ask for the sizes of blocks. `patches` says why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table  # 2.11 - 2.15

from shardcompile.compat.sizes import is_unbacked


def decompositions_ask_no_sizes(stack: contextlib.ExitStack) -> None:
    """See `shardcompile.compat.patches`."""
    # Heavy, and only a compilation needs it.
    from torch._inductor import decomposition  # 2.11 - 2.15

    aten = torch.ops.aten
    changed = {
        aten.cat.default: _unless_of_blocks,
        aten.bmm.default: _unless_column_by_row,
        aten.add.Tensor: _unless_a_run_gives_sizes,
    }
    put = {aten._unsafe_masked_index_put_accumulate.default: _as_if_not_empty}
    for table, by_op in (
        (decomposition.decompositions, changed),
        (decomposition.fast_random_decomps(), changed),
        (decomposition_table, put),  # which fake tensors go by
    ):
        for op, by in by_op.items():
            stack.callback(table.__setitem__, op, table[op])
            table[op] = by(table[op])


def _unless_of_blocks(cat: Callable[..., object]) -> Callable[..., object]:
    """Tensors without rows would be left out, and one that is joined with itself would be expanded and flattened."""

    def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> object:
        blocks = len(tensors) > 1 and len({x.ndim for x in tensors}) == 1
        return NotImplemented if blocks else cat(tensors, dim)

    return joined


def _unless_column_by_row(bmm: Callable[..., object]) -> Callable[..., object]:
    """One column by one row would be a product by elements, made contiguous."""

    def product(a: torch.Tensor, b: torch.Tensor, *args: object) -> object:
        one = isinstance(a.shape[2], int) and a.shape[2] == 1
        return NotImplemented if one else bmm(a, b, *args)

    return product


def _unless_a_run_gives_sizes(add: Callable[..., object]) -> Callable[..., object]:
    """A sum of complex numbers would be one of pairs, viewed as complex numbers: of no rows that is refused."""

    def total(x: object, y: object, **options: object) -> object:
        unknown = any(isinstance(t, torch.Tensor) and any(map(is_unbacked, t.shape)) for t in (x, y))
        return NotImplemented if unknown else add(x, y, **options)

    return total


def _as_if_not_empty(put: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The result has the same shape whether `x` has elements or not, so of a size that a run gives it is not asked."""

    def sums(x: torch.Tensor, mask: torch.Tensor, indices: list[Any], values: torch.Tensor) -> torch.Tensor:
        if not any(map(is_unbacked, x.shape)):
            return put(x, mask, indices, values)
        return torch.ops.aten._unsafe_index_put(x, indices, values.masked_fill(~mask, 0), accumulate=True)

    return sums
