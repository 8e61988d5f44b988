"""Slices whose extents torch 2.11 calls unknown."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_impls import op_implementations_dict  # 2.11
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true, sym_and

from shardcompile.compat.patch import Patch


def slices_by_formula(stack: contextlib.ExitStack) -> None:
    op = torch.ops.aten.slice.Tensor
    found = op_implementations_dict[op]
    op_implementations_dict[op] = _by_formula(found)
    stack.callback(op_implementations_dict.__setitem__, op, found)


def _by_formula(slice_forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Have a slice's extent be a formula where torch would make a symbol for it, as torch 2.12 does."""

    def sliced(
        mode: object,
        op: object,
        x: Tensor,
        dim: int = 0,
        start: int | SymInt | None = None,
        end: int | SymInt | None = None,
        step: int = 1,
    ) -> Tensor:
        if x.dim() == 0 or not -x.dim() <= dim < x.dim() or step <= 0:
            return slice_forward(mode, op, x, dim, start, end, step)
        extent = x.shape[dim]
        first = 0 if start is None else _place(extent, start)
        to_the_end = end is None or statically_known_true(end == sys.maxsize)
        last = extent if end is None or to_the_end else _place(extent, end)
        if first is None or last is None:
            return slice_forward(mode, op, x, dim, start, end, step)
        shape, strides = list(x.shape), list(x.stride())
        length = last - first
        if not guard_or_false(length >= 0):
            length = torch.sym_max(length, 0)
        shape[dim] = (length + step - 1) // step
        strides[dim] = strides[dim] * step
        return x.as_strided(shape, strides, x.storage_offset() + first * x.stride(dim))

    return sliced


def _place(extent: int | SymInt, index: int | SymInt) -> int | SymInt | None:
    """Where a bound of a slice is, or None if not even its sign is known."""
    if guard_or_false(sym_and(index >= 0, index <= extent)):
        return index
    if guard_or_false(sym_and(index < 0, index >= -extent)):
        return index + extent
    if guard_or_false(index >= 0):
        return torch.sym_min(index, extent)  # type: ignore[no-any-return]
    if guard_or_false(index < 0):
        return torch.sym_max(index + extent, 0)  # type: ignore[no-any-return]
    return None


SLICES_BY_FORMULA = Patch(
    "slices_by_formula",
    "torch._subclasses.fake_impls.op_implementations_dict[aten.slice.Tensor]",
    "If it is not known which of a slice's bounds is larger, or whether they lie within the extent, the trace makes a "
    "symbol that nothing defines. Slices of extents that are symbols do not compile.",
    "Mended in 2.12: _compute_slice_index takes sym_min and sym_max, and slice_forward max(end - start, 0). "
    "DynamicOutputShapeException: aten.slice.Tensor, or PendingUnbackedSymbolNotFound.",
    "2.11",
    slices_by_formula,
)
