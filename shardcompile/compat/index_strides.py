"""How far an index moves when one of its variables moves by one: Inductor's question, answered soon for symbols."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import sympy

from shardcompile.compat.patch import Patch, replace

Question = Callable[..., sympy.Expr]


def strides_by_terms(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.codegen import cpp  # 2.11 - 2.15

    replace(stack, cpp, "stride_at_vec_range", _by_terms)  # 2.11 - 2.15


def _by_terms(of_all: Question) -> Question:
    """Ask torch only about the factors in which the variable is more than a number of steps.

    The stride of a sum is the sum of the strides of its terms. A term without the variable has the stride 0, and the
    variable itself has the stride 1. A factor without the variable is a factor of the stride.
    """

    @functools.lru_cache
    def stride(index: sympy.Expr, var: sympy.Symbol, vec_length: int | None = None) -> sympy.Expr:
        if index.has(sympy.Rel):
            return of_all(index, var, vec_length)
        strides: list[sympy.Expr] = []
        for term in sympy.Add.make_args(sympy.expand_mul(index)):
            if term.has(var):
                factor, rest = term.as_independent(var, as_Add=False)
                strides.append(factor * (1 if rest == var else of_all(rest, var, vec_length)))
        return sympy.expand_mul(sympy.Add(*strides))

    return stride


STRIDES_BY_TERMS = Patch(
    "strides_by_terms",
    "torch._inductor.codegen.cpp.stride_at_vec_range",
    "To choose what it vectorizes, Inductor's C++ code generation asks how far an index moves with a loop's variable. "
    "It simplifies the whole index for each answer. Where sizes are symbols, as those of shards are, that took a "
    "quarter of the time in which a transformer is compiled.",
    "https://github.com/pytorch/pytorch/issues/133734, https://github.com/pytorch/pytorch/pull/186319 (open): "
    "stride_at and simplify_index_in_vec_range call sympy.simplify on sums of products. The stride of a sum is the sum "
    "of its terms' strides, and most terms are the variable times what does not depend on it.",
    "2.11 - 2.15",
    strides_by_terms,
)
