"""Answers to what torch's kernels ask about the shard sizes in a trace. `patches` gives the reasons."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import sympy
import torch
from torch import Tensor
from torch._functorch._aot_autograd import subclass_utils  # 2.11 - 2.15
from torch._subclasses import fake_tensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode  # 2.11 - 2.15
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # 2.11 - 2.15
from torch.utils._sympy.functions import Max  # 2.11 - 2.15
from torch.utils._sympy.symbol import SymT, symbol_is_type  # 2.11 - 2.15

from shardcompile import errors
from shardcompile.compat.patch import replace, replace_entry
from shardcompile.compat.shard_symbols import describes_plain_value, describes_shard
from shardcompile.compat.sizes import IntLike, statically_known_true
from shardcompile.compat.tracing import UNKNOWN_SIZE

_COMPARED_IN_CPP = "c10/core/SymInt.h"
"""The file that is named when a C++ kernel compares sizes. Python code names another file."""
_SIZES_IN_CPP = "c10/core/SymbolicShapeMeta.cpp"
"""The file that is named when a C++ kernel that knows no symbols asks for sizes as numbers."""
_MADE_IN_CPP = "ATen/EmptyTensor.h"
"""The file that is named when torch checks the sizes of a new tensor."""

_TORCH = Path(torch.__file__).parent
_SYMBOLS_OF_TORCH = tuple(str(_TORCH / name) for name in ("__init__.py", "fx/"))
_FORMULAS_OF_TORCH = {
    str(_TORCH / name) for name in ("_refs/__init__.py", "_decomp/decompositions.py", "_meta_registrations.py")
}  # 2.11 - 2.15

_MANY = sympy.Integer(64)

Decide = Callable[[SymNode, str, int], bool]
"""A method of `SymNode` that takes a decision: of the node, the file and the line that ask."""


def ones_in_kernels_by_hint(stack: contextlib.ExitStack) -> None:
    replace(stack, SymNode, "guard_bool", _asking_hints)  # 2.11 - 2.15


def _asking_hints(decide: Decide) -> Decide:
    """Answer kernels and torch's formulas that ask whether a shard has 0 or 1 rows by hints, which all ranks share.

    Where only a run gives the number of rows, they get the answer for many rows.
    """

    def answered(node: SymNode, file: str, line: int) -> bool:
        try:
            return decide(node, file, line)
        except UNKNOWN_SIZE:
            if not _guard_several(node):
                raise
        return decide(node, file, line)

    def decided(node: SymNode, file: str, line: int) -> bool:
        if not file.endswith(_COMPARED_IN_CPP) and not (file == "" and _is_asked_by_formulas()):
            return answered(node, file, line)
        if _whether_few_late_rows(node):
            return _for_many_rows(node)
        shared = _with_few_rows(node)
        if shared is None:
            return answered(node, file, line)
        env = _shape_env(node)
        if not env.evaluate_expr(sympy.Ne(shared, 0)):  # 2.11 - 2.15: a guard, which all ranks share
            return isinstance(node.expr, sympy.Eq)
        with env.suppress_guards():
            return decide(node, file, line)

    return decided


def _guard_several(node: SymNode) -> bool:
    """Guard that the sizes that a condition is about and that all ranks share are at least 2. Returns whether it did.

    Without the switch torch takes every size for at least 2 that is so in this call: rows that only a run gives,
    together with those of a tensor, are not 0 then.
    """
    env, guarded = _shape_env(node), False
    for symbol in () if node.is_constant() else node.expr.free_symbols:
        known = env.backed_var_to_val.get(symbol)  # 2.12 - 2.15
        if known is None or known < 2 or env.bound_sympy(symbol).lower >= 2 or _is_of_shard(node, symbol):
            continue
        guarded = env.evaluate_expr(sympy.Ge(symbol, 2)) is sympy.true or guarded
    return guarded


def _is_asked_by_formulas() -> bool:
    """Whether what torch has written in Python for an op asks: its shape, or the ops that it is made of.

    Not the program that is compiled: which way that takes is its own matter.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SYMBOLS_OF_TORCH):
        frame = frame.f_back
    return frame.f_code.co_filename in _FORMULAS_OF_TORCH


def _shape_env(node: SymNode) -> ShapeEnv:
    return cast(ShapeEnv, node.shape_env)  # torch 2.15 declares it optional


def _with_few_rows(node: SymNode) -> sympy.Expr | None:
    """If a condition asks whether a count of a shard's elements is 0 or 1: the count's factors that all ranks share.

    If these are 0, so is the count. Where the condition asks for 1, they do not matter, and 1 stands for them: by its
    hint, a shard has more than one row. A comparison of strides asks for 1, too: 3 * n == 3. None for other conditions.
    """
    question = None if node.is_constant() else node.expr
    if not isinstance(question, (sympy.Eq, sympy.Ne)):
        return None
    asks_for_none = sympy.S.Zero in question.args
    if asks_for_none:
        count = question.lhs + question.rhs
    else:
        parts = sympy.fraction(question.lhs / question.rhs)  # common factors do not matter
        if sympy.S.One not in parts:
            return None
        count = parts[0] * parts[1]
    factors = {f: {_is_of_shard(node, symbol) for symbol in f.free_symbols} for f in sympy.Mul.make_args(count)}
    kinds = list(factors.values())
    if {True} not in kinds or {True, False} in kinds:
        return None
    shared = sympy.Mul(*(f for f, kind in factors.items() if kind == {False}))
    return shared if asks_for_none else sympy.S.One


def _whether_few_late_rows(node: SymNode) -> bool:
    """Whether a condition compares with 0 or 1 a count of elements with an unbacked size among its factors.

    Kernels and gradients that ask have a shorter way for few rows, as that of `cumsum`: 3 * u <= 1. The longer one
    gives the same for any number, or raises when the graph runs. A difference, or a number that may be negative, is no
    count: torch raises for it. Other factors may be backed, as in s * u == 0, where another dim has a dynamic size.
    """
    question = None if node.is_constant() else node.expr
    if not isinstance(question, sympy.core.relational.Relational):
        return False
    counts = [side for side in question.args if side not in (sympy.S.Zero, sympy.S.One)]
    if len(counts) != 1 or not counts[0].free_symbols:
        return False
    terms = sympy.Add.make_args(counts[0])
    bounds = [_shape_env(node).bound_sympy(symbol).lower for symbol in counts[0].free_symbols]  # 2.11 - 2.15
    return (
        all(term.as_coeff_Mul()[0].is_positive for term in terms)
        and all(lower >= 0 for lower in bounds)
        and any(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in counts[0].free_symbols)
    )


def _for_many_rows(node: SymNode) -> bool:
    """Decides a condition for many rows of all shards; a guard decides what remains of global sizes."""
    differing = [s for s in node.expr.free_symbols if symbol_is_type(s, SymT.UNBACKED_INT) or _is_of_shard(node, s)]
    rest = node.expr.xreplace(dict.fromkeys(differing, _MANY))
    return bool(_shape_env(node).evaluate_expr(rest) if rest.free_symbols else rest)  # 2.11 - 2.15


def _is_of_shard(node: SymNode, symbol: sympy.Symbol) -> bool:
    return describes_shard(_shape_env(node).var_to_sources.get(symbol, [None])[0])  # 2.11 - 2.15


def plain_sizes_are_guarded(stack: contextlib.ExitStack) -> None:
    replace(stack, symbolic_shapes, "_guard_or", _guarding_plain_sizes)  # 2.11 - 2.15
    if hasattr(subclass_utils, "_safe_metadata_eq"):  # 2.15
        replace(stack, subclass_utils, "_safe_metadata_eq", _equal_for_all_sizes)


def _equal_for_all_sizes(_: Callable[..., bool]) -> Callable[..., object]:
    """Have AOTAutograd treat sizes of a shard and of the whole tensor as equal only if they are so for all sizes.

    AOTAutograd counts the results of a graph by the answer. If the sizes are equal for the sizes of this call alone,
    it would expect more or fewer results than the graph returns.
    """

    def equal(outer: Iterable[IntLike], inner: Iterable[IntLike]) -> bool:
        return statically_known_true(symbolic_shapes.sym_eq(tuple(outer), tuple(inner)))

    return equal


def _guarding_plain_sizes(decide: Callable[[object, bool], bool]) -> Callable[[object, bool], bool]:
    """Guard the sizes of plain tensors, which all ranks share, as torch does without the switch."""

    def decided(question: object, default: bool) -> bool:
        if isinstance(question, torch.SymBool) and _is_of_plain_tensors(question.node):
            return bool(question)
        return decide(question, default)

    return decided


def _is_of_plain_tensors(node: SymNode) -> bool:
    """Whether a condition is about sizes that all ranks share, of which a plain tensor has one.

    Where sharded tensors alone have them, one graph serves a size of 1, too. A difference of maxima, as that of one
    row that is sharded off a dim, may always be 1, which no formula tells.
    """
    if node.is_constant() or not node.has_hint():
        return False
    symbols = node.expr.free_symbols
    if any(_is_of_shard(node, symbol) for symbol in symbols):
        return False
    if node.expr.has(Max):
        return True
    return any(describes_plain_value(_shape_env(node), symbol) for symbol in symbols)


def storage_of_no_rows(stack: contextlib.ExitStack) -> None:
    replace(stack, SymNode, "expect_true", _leaving_sizes_to_kernels)  # 2.11 - 2.15


def _leaving_sizes_to_kernels(expect: Decide) -> Decide:
    """Leave out the trace's assertion that the size of a new tensor, a formula of run-time sizes, is at least 0.

    The kernel that makes the tensor refuses negative sizes anyway. Torch computes the length of a storage as if the
    tensor had elements. If it has none, the formula is negative.
    """

    def expected(node: SymNode, file: str, line: int) -> bool:
        if file.endswith(_MADE_IN_CPP) and not node.is_constant() and not node.has_hint():
            size = node.expr.args[0] if isinstance(node.expr, sympy.Ge) else None
            if size is not None and not size.is_Symbol:
                return True
        return expect(node, file, line)

    return expected


def sizes_stay_symbols(stack: contextlib.ExitStack) -> None:
    handlers = fake_tensor._DISPATCH_META_HANDLERS  # 2.11 - 2.15
    replace_entry(
        stack,
        "torch._subclasses.fake_tensor._DISPATCH_META_HANDLERS",
        handlers,
        torch.ops.aten.size.default,
        _not_of_shards,
    )
    replace(stack, SymNode, "guard_int", _not_for_kernels)  # 2.11 - 2.15


def _not_of_shards(sizes_of: Callable[..., object]) -> Callable[..., object]:
    """Refuse to give the sizes of a shard as numbers if nothing guards these numbers."""

    def sizes(args: Sequence[Tensor]) -> object:
        for size in args[0].shape:
            if isinstance(size, torch.SymInt):
                _refuse_a_number(size.node)
        return sizes_of(args)

    return sizes


def _not_for_kernels(number_of: Callable[[SymNode, str, int], int]) -> Callable[[SymNode, str, int], int]:
    """The same as `_not_of_shards` for torch 2.15, whose kernels ask for one size at a time."""

    def number(node: SymNode, file: str, line: int) -> int:
        if file.endswith(_SIZES_IN_CPP):
            _refuse_a_number(node)
        return number_of(node, file, line)

    return number


def _refuse_a_number(size: SymNode) -> None:
    """Raise if torch would take a hint for the size of a shard, with no guard."""
    if not ShapeEnv._suppress_guards_tls() or size.is_constant():  # 2.11 - 2.15
        return
    if any(_is_of_shard(size, symbol) for symbol in size.expr.free_symbols):
        raise errors.UnsupportedOpError(
            f"a torch kernel asks for a size of a shard, {size.expr}, as a number, but other ranks have other "
            "numbers. In a compiled function, a write through windows (`unfold`) does so. Write to the tensor itself, "
            "by slices or by an index, or write outside the compiled function"
        )
