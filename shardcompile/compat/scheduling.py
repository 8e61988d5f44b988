"""Changes to what Inductor knows of reads and writes, of memory, and of sizes of 0 and 1.

`patches`, and the patches at the end, give the reasons.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from unittest import mock

import sympy
import torch

from shardcompile.compat.patch import Patch, replace

if TYPE_CHECKING:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen  # 2.11 - 2.15
    from torch._inductor.ir import ComputedBuffer, ExpandView  # 2.11 - 2.15
    from torch._inductor.scheduler import SchedulerBuffer, SchedulerNode  # 2.11 - 2.15
    from torch.utils._ordered_set import OrderedSet  # 2.11 - 2.15

Reindexer = Callable[[Sequence[sympy.Expr]], Sequence[sympy.Expr]]
Symbols = Callable[..., "OrderedSet[sympy.Symbol]"]


def reads_after_writes(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.scheduler import SchedulerNode  # 2.11 - 2.15

    replace(stack, SchedulerNode, "_compute_attrs", _keeping_orders)  # 2.11 - 2.15


def parts_own_no_memory(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen  # 2.11 - 2.15

    replace(stack, PythonWrapperCodegen, "can_reuse", _unless_another_owns_it)  # 2.11 - 2.15


def rows_of_groups(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import lowering  # 2.11 - 2.15

    as_traced = {torch.ops.aten._grouped_mm.default: lowering.constrain_to_fx_strides}
    stack.enter_context(mock.patch.dict(lowering._maybe_layout_constraints, as_traced))  # 2.11 - 2.15


def broadcast_by_guards(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import ExpandView

    replace(stack, ExpandView, "make_reindexer", _of_dims_known_to_be_one)  # 2.11 - 2.15


def numbers_of_written_rows(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import ComputedBuffer  # 2.11 - 2.15

    replace(stack, ComputedBuffer, "get_free_symbol_uses", _and_of_indices)  # 2.11 - 2.15


def _and_of_indices(symbols: Symbols) -> Symbols:
    """Have the symbols that a loop uses include those of the indices that it computes itself."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import get_free_symbols  # 2.11 - 2.15

    @functools.wraps(symbols)
    def used(buffer: ComputedBuffer, unbacked_only: bool = False) -> OrderedSet[sympy.Symbol]:
        found = symbols(buffer, unbacked_only)
        if buffer.has_store_function():
            for computed in buffer.get_read_writes().index_exprs:
                found |= get_free_symbols(computed.index, unbacked_only)
        return found

    return used


def _of_dims_known_to_be_one(make: Callable[..., Reindexer]) -> Callable[..., Reindexer]:
    """Read a dim at index 0 if guards say that its size is 1, and not only if the size is the number 1."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.virtualized import V  # 2.11 - 2.15

    @functools.wraps(make)
    def made(view: ExpandView) -> Reindexer:
        reindex = make(view)
        ones = [V.graph.sizevars.is_size_one_or_false(n) for n in view.data.get_size()]

        def reindexed(index: Sequence[sympy.Expr]) -> Sequence[sympy.Expr]:
            return [sympy.S.Zero if one else i for one, i in zip(ones, reindex(index), strict=True)]

        return reindexed

    return made


def _unless_another_owns_it(can_reuse: Callable[..., bool]) -> Callable[..., bool]:
    """Forbid a result to reuse the memory of a buffer that is a view of another buffer."""

    @functools.wraps(can_reuse)
    def reusable(wrapper: PythonWrapperCodegen, buffer: SchedulerBuffer, result: object = None) -> bool:
        if result is not None and buffer.node is not None and buffer.node.get_inputs_that_alias_output():
            return False
        return can_reuse(wrapper, buffer, result)

    return reusable


def _keeping_orders(compute: Callable[..., None]) -> Callable[..., None]:
    """Have a node keep the writes that it must run after when Inductor makes its loops anew."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.dependencies import Dep, StarDep, WeakDep  # 2.11 - 2.15
    from torch.utils._ordered_set import OrderedSet  # 2.11 - 2.15

    @functools.wraps(compute)
    def computed(node: SchedulerNode, *args: object, **kwargs: object) -> None:
        before = getattr(node, "read_writes", None)  # a new node has none
        compute(node, *args, **kwargs)
        if before is not None:
            added: OrderedSet[Dep] = OrderedSet(d for d in before.reads if isinstance(d, StarDep | WeakDep))
            node.set_read_writes(node.read_writes.with_read(added).rename(node.mutation_renames))

    return computed


NUMBERS_OF_WRITTEN_ROWS = Patch(
    "numbers_of_written_rows",
    "torch._inductor.ir.ComputedBuffer.get_free_symbol_uses",
    "A loop may compute the indices at which it writes rows. If they depend on a number that is known at run time "
    "only, the code may use this number before it defines it: UnboundLocalError.",
    "ReadWrites.get_free_symbol_uses has the symbols of reads and writes, but not of index_exprs: an index that a loop "
    "computes itself is indirect, and its symbols are in its expression alone.",
    "2.11 - 2.15",
    numbers_of_written_rows,
)

ROWS_OF_GROUPS = Patch(
    "rows_of_groups",
    "torch._inductor.lowering._maybe_layout_constraints[aten._grouped_mm]",
    "Inductor chooses how the inputs of a grouped product are stored. It may store them column by column, and the "
    "kernel refuses that unless the columns are a multiple of 16 bytes.",
    "F.grouped_mm(x.t().contiguous(), w, offs=offs) compiled for 7 rows of bfloat16: strides should be multiple of 16 "
    "bytes. The lowering of _grouped_mm asks for dense inputs in any order (require_dense).",
    "2.11 - 2.15",
    rows_of_groups,
)

BROADCAST_BY_GUARDS = Patch(
    "broadcast_by_guards",
    "torch._inductor.ir.ExpandView.make_reindexer",
    "A size may be an expression, such as s // 3, that a guard says is 1. Such a dim is broadcast, but the code "
    "reads it at every index: silently wrong values, from outside the tensor.",
    "Mended in 2.15. F.linear(x.unfold(1, 3, 3).clone(), w) of a dynamic (1, 5) is wrong on CPUs.",
    "2.11 - 2.14",
    broadcast_by_guards,
)
