"""Extents that are formulas, and 1, where torch broadcasts. `patches` says why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch._subclasses.fake_impls as fake_impls
from torch.utils._sympy.functions import Min  # 2.11 - 2.15

from shardcompile.compat.patch import replace
from shardcompile.compat.sizes import is_unbacked, size_hint


def ones_of_formulas(stack: contextlib.ExitStack) -> None:
    replace(stack, torch._refs, "_maybe_broadcast", _with_ones_as_numbers)  # 2.11 - 2.15
    replace(stack, fake_impls, "infer_size", _of_ones_as_numbers)  # 2.11 - 2.15


def _with_ones_as_numbers(broadcast: Callable[..., object]) -> Callable[..., object]:
    """Have extents that are 1, and are broadcast to what is not 1, be numbers, with guards."""

    def broadcast_tensors(*args: Any, **kwargs: object) -> object:
        given = list(args)
        tensors = [n for n, a in enumerate(args) if isinstance(a, torch.Tensor)]
        for dim in range(-1, -1 - max((args[n].ndim for n in tensors), default=0), -1):
            long = [n for n in tensors if args[n].ndim >= -dim]
            extents = [args[n].shape[dim] for n in long]
            if not _some_are_ones(extents):
                continue
            for n, extent in zip(long, extents, strict=True):
                if _is_formula_of_one(extent):
                    given[n] = given[n].select(dim, 0).unsqueeze(dim)
        return broadcast(*given, **kwargs)

    return broadcast_tensors


def _of_ones_as_numbers(infer: Callable[..., object]) -> Callable[..., object]:
    """The same for two shapes of which one is worked out."""

    def inferred(a: Sequence[Any], b: Sequence[Any]) -> object:
        shapes = list(a), list(b)
        for dim in range(-1, -1 - min(map(len, shapes)), -1):
            if _some_are_ones([shape[dim] for shape in shapes]):
                for shape in shapes:
                    shape[dim] = 1 if _is_formula_of_one(shape[dim]) else shape[dim]
        return infer(*shapes)

    return inferred


def _some_are_ones(extents: Sequence[Any]) -> bool:
    return not any(map(is_unbacked, extents)) and {size_hint(e) == 1 for e in extents} == {True, False}


def _is_formula_of_one(extent: Any) -> bool:
    """Whether an extent that is no number and no symbol is 1, with guards."""
    # One whose hint is another number is not asked: a block has another number of rows on each rank.
    if not isinstance(extent, torch.SymInt) or extent.node.expr.is_Symbol or size_hint(extent) != 1 or extent != 1:
        return False
    if isinstance(extent.node.expr, Min):
        for bound in extent.node.expr.args:  # torch learns a range from this, and not from the equation
            extent.node.shape_env.evaluate_expr(sympy.Ge(bound, 1))  # 2.11 - 2.15
    return True
