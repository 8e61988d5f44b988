"""What Inductor's scheduler knows of reads and writes, and of memory. `patches` says why."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from shardcompile.compat.patch import replace


def reads_after_writes(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.scheduler import SchedulerNode  # 2.11 - 2.15

    replace(stack, SchedulerNode, "_compute_attrs", _keeping_orders)  # 2.11 - 2.15


def parts_own_no_memory(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen  # 2.11 - 2.15

    replace(stack, PythonWrapperCodegen, "can_reuse", _unless_another_owns_it)  # 2.11 - 2.15


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
