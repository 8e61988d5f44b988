"""What Inductor knows of reads and writes, of memory, and of dims of one row. `patches` says why."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from shardcompile.compat.patch import replace

if TYPE_CHECKING:
    from torch._inductor.ir import ExpandView  # 2.11 - 2.15

Reindexer = Callable[[Sequence[sympy.Expr]], Sequence[sympy.Expr]]


def reads_after_writes(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.scheduler import SchedulerNode  # 2.11 - 2.15

    replace(stack, SchedulerNode, "_compute_attrs", _keeping_orders)  # 2.11 - 2.15


def parts_own_no_memory(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen  # 2.11 - 2.15

    replace(stack, PythonWrapperCodegen, "can_reuse", _unless_another_owns_it)  # 2.11 - 2.15


def broadcast_by_guards(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import ExpandView

    replace(stack, ExpandView, "make_reindexer", _of_dims_known_to_be_one)  # 2.11 - 2.15


def _of_dims_known_to_be_one(make: Callable[..., Reindexer]) -> Callable[..., Reindexer]:
    """Have a dim be read at 0 where guards say that its extent is 1, and not only where it is the number."""
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
    """Have no result take over memory that belongs to another buffer."""

    @functools.wraps(can_reuse)
    def reusable(wrapper: Any, buffer: Any, result: Any = None) -> bool:
        if result is not None and buffer.node is not None and buffer.node.get_inputs_that_alias_output():
            return False
        return can_reuse(wrapper, buffer, result)

    return reusable


def _keeping_orders(compute: Callable[..., None]) -> Callable[..., None]:
    """Have a node keep what it has to wait for when its loops are made anew."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.dependencies import StarDep, WeakDep  # 2.11 - 2.15
    from torch.utils._ordered_set import OrderedSet  # 2.11 - 2.15

    @functools.wraps(compute)
    def computed(node: Any, *args: object, **kwargs: object) -> None:
        before = getattr(node, "read_writes", None)  # a new node has none
        compute(node, *args, **kwargs)
        if before is not None:
            added = OrderedSet(d for d in before.reads if isinstance(d, StarDep | WeakDep))
            node.set_read_writes(node.read_writes.with_read(added).rename(node.mutation_renames))

    return computed
