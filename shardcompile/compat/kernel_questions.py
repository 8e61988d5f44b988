"""What torch's kernels ask of the sizes of blocks while they are traced. `patches` says why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._functorch._aot_autograd import subclass_utils  # 2.11 - 2.15
from torch._subclasses import fake_tensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode  # 2.11 - 2.15
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # 2.11 - 2.15

from shardcompile import errors
from shardcompile.compat.block_symbols import tells_of_block
from shardcompile.compat.patch import replace
from shardcompile.compat.sizes import surely

_COMPARED_IN_CPP = "c10/core/SymInt.h"
"""Where C++ kernels compare sizes; what Python code asks has another file's name."""
_SIZES_IN_CPP = "c10/core/SymbolicShapeMeta.cpp"
"""Where C++ kernels that know no symbols get sizes as numbers."""
_MADE_IN_CPP = "ATen/EmptyTensor.h"
"""Where the sizes of new tensors are checked."""


def ones_in_kernels_by_hint(stack: contextlib.ExitStack) -> None:
    replace(stack, SymNode, "guard_bool", _asking_hints)  # 2.11 - 2.15


def _asking_hints(decide: Callable[[Any, str, int], bool]) -> Callable[..., object]:
    """Have C++ kernels that ask whether a block has 0 or 1 rows be answered by hints, which all ranks share."""

    def decided(node: Any, file: str, line: int) -> bool:
        if not file.endswith(_COMPARED_IN_CPP) or not _whether_few_rows(node):
            return decide(node, file, line)
        with node.shape_env.suppress_guards():
            return decide(node, file, line)

    return decided


def _whether_few_rows(node: Any) -> bool:
    """Whether it is asked if extents of blocks are 0 or 1; also as strides are compared: 3 * n == 3."""
    question = None if node.is_constant() else node.expr
    if not isinstance(question, (sympy.Eq, sympy.Ne)):
        return False
    symbols = question.free_symbols
    if sympy.S.Zero not in question.args:
        parts = sympy.fraction(question.lhs / question.rhs)  # what both have in common is no part of the question
        if sympy.S.One not in parts:
            return False
        symbols = parts[0].free_symbols | parts[1].free_symbols
    return all(_is_of_block(node.shape_env, symbol) for symbol in symbols)


def _is_of_block(shape_env: ShapeEnv, symbol: sympy.Symbol) -> bool:
    return tells_of_block(shape_env.var_to_sources.get(symbol, [None])[0])  # 2.11 - 2.15


def plain_extents_are_guarded(stack: contextlib.ExitStack) -> None:
    replace(stack, symbolic_shapes, "_guard_or", _guarding_plain_extents)  # 2.11 - 2.15
    if hasattr(subclass_utils, "_safe_metadata_eq"):  # 2.15
        replace(stack, subclass_utils, "_safe_metadata_eq", _equal_for_all_extents)


def _equal_for_all_extents(_: Callable[..., bool]) -> Callable[..., object]:
    """Have AOTAutograd take sizes of a block for those of the whole tensor only where they are for all extents.

    It counts the results of a graph by the answer. One that holds for the extents of this call alone makes it expect
    another number of results than it gets.
    """

    def equal(outer: Iterable[Any], inner: Iterable[Any]) -> bool:
        return surely(symbolic_shapes.sym_eq(tuple(outer), tuple(inner)))

    return equal


def _guarding_plain_extents(decide: Callable[[Any, bool], bool]) -> Callable[..., object]:
    """Have extents that are no block's, and that all ranks share, be guarded as without the switch."""

    def decided(question: Any, default: bool) -> bool:
        if isinstance(question, torch.SymBool) and _is_of_whole_tensors(question.node):
            return bool(question)
        return decide(question, default)

    return decided


def _is_of_whole_tensors(node: Any) -> bool:
    """Whether a question is about extents that are no block's, and whose numbers are known while tracing."""
    if node.is_constant() or not node.has_hint():
        return False
    symbols = node.expr.free_symbols
    return bool(symbols) and not any(_is_of_block(node.shape_env, symbol) for symbol in symbols)


def storage_of_no_rows(stack: contextlib.ExitStack) -> None:
    replace(stack, SymNode, "expect_true", _leaving_sizes_to_kernels)  # 2.11 - 2.15


def _leaving_sizes_to_kernels(expect: Callable[[Any, str, int], bool]) -> Callable[..., object]:
    """Have a trace not assert that the size of a new tensor, worked out from what a run gives, is at least 0.

    The kernel that makes the tensor refuses sizes below 0. The length of a storage is worked out as if there were
    elements, and is below 0 where there are none.
    """

    def expected(node: Any, file: str, line: int) -> bool:
        if file.endswith(_MADE_IN_CPP) and not node.is_constant() and not node.has_hint():
            size = node.expr.args[0] if isinstance(node.expr, sympy.Ge) else None
            if size is not None and not size.is_Symbol:
                return True
        return expect(node, file, line)

    return expected


def sizes_stay_symbols(stack: contextlib.ExitStack) -> None:
    handlers = fake_tensor._DISPATCH_META_HANDLERS  # 2.11 - 2.15
    size = torch.ops.aten.size.default
    stack.callback(handlers.__setitem__, size, handlers[size])
    handlers[size] = _not_of_blocks(handlers[size])
    replace(stack, SymNode, "guard_int", _not_for_kernels)  # 2.11 - 2.15


def _not_of_blocks(sizes_of: Callable[..., object]) -> Callable[..., object]:
    """Have what asks for the sizes of a block as numbers be refused where nothing would guard them."""

    def sizes(args: Sequence[Tensor]) -> object:
        for extent in args[0].shape:
            if isinstance(extent, torch.SymInt):
                _refuse_a_number(extent.node)
        return sizes_of(args)

    return sizes


def _not_for_kernels(number_of: Callable[[Any, str, int], int]) -> Callable[..., object]:
    """The same for newer versions of torch (2.15), which ask one by one."""

    def number(node: Any, file: str, line: int) -> int:
        if file.endswith(_SIZES_IN_CPP):
            _refuse_a_number(node)
        return number_of(node, file, line)

    return number


def _refuse_a_number(extent: Any) -> None:
    """Raise if a hint would be taken for the extent of a block, as nothing guards it."""
    if not ShapeEnv._suppress_guards_tls() or extent.is_constant():  # 2.11 - 2.15
        return
    if any(_is_of_block(extent.shape_env, symbol) for symbol in extent.expr.free_symbols):
        raise errors.UnsupportedOpError(
            f"a kernel of torch's asks for an extent of a block, {extent.expr}, as a number, which is another one on "
            "other ranks: a write through windows (`unfold`) does so in a compiled function. Write to the tensor "
            "itself, by slices or by an index, or write outside of the compiled function"
        )
