"""What torch's kernels ask of the sizes of blocks while they are traced. `patches` says why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import _prims_common
from torch.fx.experimental.sym_node import SymNode  # 2.11 - 2.15

from shardcompile.compat.patch import replace
from shardcompile.compat.sizes import is_unbacked

_COMPARED_IN_CPP = "c10/core/SymInt.h"
"""Where C++ kernels compare sizes; what Python code asks has another file's name."""


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
    """Whether a question is if an extent, or a product of extents, of blocks is 0 or 1."""
    question = None if node.is_constant() else node.expr
    if not isinstance(question, (sympy.Eq, sympy.Ne)) or not {*question.args} & {sympy.S.Zero, sympy.S.One}:
        return False
    sources = node.shape_env.var_to_sources  # 2.11 - 2.15
    return all(
        getattr(getattr(source, "base", None), "member", None) == "_local_tensor"
        for symbol in question.free_symbols
        for source in sources.get(symbol, [None])[:1]
    )


def storage_of_no_rows(stack: contextlib.ExitStack) -> None:
    replace(stack, _prims_common, "compute_required_storage_length", _at_least_none)  # 2.11 - 2.15


def _at_least_none(length_of: Callable[..., Any]) -> Callable[..., object]:
    """Have a tensor of unknown extents need no less than no storage: where one is 0 the formula may be below that."""

    def length(*args: object) -> object:
        found = length_of(*args)
        return torch.sym_max(found, 0) if is_unbacked(found) else found

    return length
