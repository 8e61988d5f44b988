"""Slices whose sizes torch 2.11 calls unknown."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TypeAlias

import sympy
import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_impls import op_implementations_dict  # 2.11
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true, sym_and
from torch.utils._sympy.functions import Max, Min

from shardcompile.compat.patch import Patch, replace_entry
from shardcompile.compat.sizes import Formula

Size: TypeAlias = int | SymInt


def slices_by_formula(stack: contextlib.ExitStack) -> None:
    replace_entry(
        stack,
        "torch._subclasses.fake_impls.op_implementations_dict",
        op_implementations_dict,
        torch.ops.aten.slice.Tensor,
        _by_formula,
    )


def _by_formula(slice_forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Have a slice's size be a formula where torch would make a symbol for it, as torch 2.12 does."""

    def sliced(
        mode: object,
        op: object,
        x: Tensor,
        dim: int = 0,
        start: Size | None = None,
        end: Size | None = None,
        step: int = 1,
    ) -> Tensor:
        if x.dim() == 0 or not -x.dim() <= dim < x.dim() or step <= 0:
            return slice_forward(mode, op, x, dim, start, end, step)
        size = x.shape[dim]
        first = 0 if start is None else _place(size, start)
        last = size if end is None or statically_known_true(end == sys.maxsize) else _place(size, end)
        if first is None or last is None:
            return slice_forward(mode, op, x, dim, start, end, step)
        shape: list[Size] = list(x.shape)
        strides = list(x.stride())
        length = last - first
        if not guard_or_false(length >= 0):
            length = torch.sym_max(length, 0)
        shape[dim] = (length + step - 1) // step
        strides[dim] = strides[dim] * step
        return x.as_strided(shape, strides, x.storage_offset() + first * x.stride(dim))

    return sliced


def _place(size: Size, index: Size) -> Size | None:
    """Where a bound of a slice is, or None if not even its sign is known."""
    if guard_or_false(sym_and(index >= 0, index <= size)):
        return index
    if guard_or_false(sym_and(index < 0, index >= -size)):
        return index + size
    if guard_or_false(index >= 0):
        return torch.sym_min(index, size)  # type: ignore[no-any-return]
    if guard_or_false(index < 0):
        return torch.sym_max(index + size, 0)  # type: ignore[no-any-return]
    return None


def parts_to_the_end(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.lowering import lowerings

    replace_entry(
        stack, "torch._inductor.lowering.lowerings", lowerings, torch.ops.aten.slice.Tensor, _lowered_by_formula
    )  # 2.11


def _lowered_by_formula(lowering: Callable[..., object]) -> Callable[..., object]:
    """Have Inductor work out the bounds of a slice as `_by_formula` does, unless the slice made a symbol."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import SliceView, TensorBox
    from torch._inductor.virtualized import V

    def place(size: Formula, index: Formula) -> Formula | None:
        holds = V.graph.sizevars.guard_or_false
        if holds(sympy.And(sympy.Ge(index, 0), sympy.Le(index, size))):
            return index
        if holds(sympy.Ge(index, 0)):
            return Min(index, size)
        return Max(index + size, 0) if holds(sympy.Lt(index, 0)) else None

    def lower(x: TensorBox, dim: int = 0, start: Formula = 0, end: Formula | None = None, step: Formula = 1) -> object:
        size = x.get_size()[dim]
        end = size if end is None or end == sys.maxsize else end
        numbers = not any(isinstance(n, sympy.Expr) and n.free_symbols for n in (size, start, end))
        whole = start == 0 and step == 1 and end == size
        if numbers or whole or "unbacked_bindings" in V.graph.current_node.meta:
            return lowering(x, dim, start, end, step)
        first, last = place(size, start or 0), place(size, end)
        if first is None or last is None:
            return lowering(x, dim, start, end, step)
        return TensorBox(SliceView.create(x.data, dim, first, last, step))

    return lower


SLICES_BY_FORMULA = Patch(
    "slices_by_formula",
    "torch._subclasses.fake_impls.op_implementations_dict[aten.slice.Tensor]",
    "If it is not known which of a slice's bounds is larger, or whether they lie within the size, the trace makes a "
    "symbol that nothing defines. Slices of sizes that are symbols do not compile.",
    "Mended in 2.12: _compute_slice_index takes sym_min and sym_max, and slice_forward max(end - start, 0). "
    "DynamicOutputShapeException: aten.slice.Tensor, or PendingUnbackedSymbolNotFound.",
    "2.11",
    slices_by_formula,
)

PARTS_TO_THE_END = Patch(
    "parts_to_the_end",
    "torch._inductor.lowering.lowerings[aten.slice.Tensor]",
    "A slice to the end of a dim has the largest integer as its end. If the size is unbacked, "
    "Inductor treats that end as unknown. So it does with an end of which it cannot tell whether it lies within the "
    "size. The trace did not, and the compilation fails.",
    "https://github.com/pytorch/pytorch/issues/174340; torch 2.12 takes sys.maxsize for the size, as the fake "
    "kernel of aten.slice did before, and Min and Max for other ends. KeyError: 'unbacked_bindings'.",
    "2.11",
    parts_to_the_end,
)
