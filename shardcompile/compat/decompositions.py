"""Replacements for decompositions of torch that ask for the shard sizes. `patches` gives the reasons."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch._decomp import decomposition_table  # 2.11 - 2.15

from shardcompile.compat.patch import replace_entry
from shardcompile.compat.sizes import is_unbacked


def decompositions_ask_no_sizes(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import decomposition  # 2.11 - 2.15

    aten = torch.ops.aten
    changed = {
        aten.cat.default: _unless_of_shards,
        aten.bmm.default: _unless_column_by_row,
        aten.add.Tensor: _unless_a_run_gives_sizes,
    }
    put = {aten._unsafe_masked_index_put_accumulate.default: _as_if_not_empty}
    for name, table, by_op in (
        ("torch._inductor.decomposition.decompositions", decomposition.decompositions, changed),
        ("torch._inductor.decomposition.fast_random_decomps()", decomposition.fast_random_decomps(), changed),
        ("torch._decomp.decomposition_table", decomposition_table, put),  # the one that fake tensors use
    ):
        for op, by in by_op.items():
            replace_entry(stack, name, table, op, by)


def _unless_of_shards(cat: Callable[..., object]) -> Callable[..., object]:
    """No decomposition of a join: it drops tensors without rows, and expands a tensor that is joined with itself."""

    def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> object:
        shards = len(tensors) > 1 and len({x.ndim for x in tensors}) == 1
        return NotImplemented if shards else cat(tensors, dim)

    return joined


def _unless_column_by_row(bmm: Callable[..., object]) -> Callable[..., object]:
    """No decomposition of a column times a row, which makes contiguous copies and multiplies them by elements."""

    def product(a: torch.Tensor, b: torch.Tensor, *args: object) -> object:
        one = isinstance(a.shape[2], int) and a.shape[2] == 1
        return NotImplemented if one else bmm(a, b, *args)

    return product


def _unless_a_run_gives_sizes(add: Callable[..., object]) -> Callable[..., object]:
    """No decomposition of a sum of unknown size: it views complex numbers as pairs, which fails without rows."""

    def total(x: object, y: object, **options: object) -> object:
        unknown = any(isinstance(t, torch.Tensor) and any(map(is_unbacked, t.shape)) for t in (x, y))
        return NotImplemented if unknown else add(x, y, **options)

    return total


def _as_if_not_empty(put: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Do not ask whether `x` is empty if its size is known only at run time. The result has the same shape anyway."""

    def put_as_if_not_empty(
        x: torch.Tensor, mask: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor
    ) -> torch.Tensor:
        if not any(map(is_unbacked, x.shape)):
            return put(x, mask, indices, values)
        return torch.ops.aten._unsafe_index_put(x, indices, values.masked_fill(~mask, 0), accumulate=True)

    return put_as_if_not_empty
