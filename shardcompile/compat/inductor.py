"""What Inductor is told of collectives and of the order of nodes. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import config  # 2.11 - 2.15
from torch.utils._ordered_set import OrderedSet  # 2.11 - 2.15

from shardcompile.compat.gpu_kernels import GRIDS_OF_NO_ROWS, NO_CAPTURES
from shardcompile.compat.patch import Patch, put_in_once, replace


def lowered_when_traced(op: torch._ops.OpOverload, fake: Callable[..., object]) -> Callable[..., object]:
    """The fake kernel of a collective, which teaches Inductor the op when a trace meets it for the first time.

    Inductor's lowerings take more than a second to import, which eager programs need not pay.
    """

    def traced(*args: object) -> object:
        _lower_as_collective(op)
        for patch in OF_COLLECTIVES:
            put_in_once(patch)
        return fake(*args)

    return traced


@functools.cache
def _lower_as_collective(op: torch._ops.OpOverload) -> None:
    """Have Inductor treat an op as a collective: keep its order, and its send buffer alive until the wait.

    As an ordinary fallback the buffer would be reused while it is still being sent.
    """
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def lowering(*args: Any) -> object:
        kernel: Any = ir._CollectiveKernel.create_out_of_place(op, *args)
        return torch.utils._pytree.tree_map(ir.TensorBox.create, kernel)

    # No constraint on strides: to ask for those of the trace, Inductor would compare symbolic strides, and so
    # specialise on the size of this rank's block.
    register_lowering(op, type_promotion_kind=None)(lowering)


def _payloads_until_the_wait(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir

    def with_all(volatile_reads: Callable[[Any], Sequence[Any]]) -> Callable[[Any], Sequence[Any]]:
        @functools.wraps(volatile_reads)
        def reads(wait: Any) -> list[Any]:
            found = list(volatile_reads(wait))
            for awaited in torch.utils._pytree.tree_leaves(wait.inputs):
                started = awaited.inputs[0] if isinstance(awaited, ir.MultiOutput) else awaited
                if isinstance(started, ir._CollectiveKernel) and started is not wait:
                    found += [i for i in started.inputs if isinstance(i, ir.IRNode) and i not in found]
            return found

        return reads

    replace(stack, ir._WaitKernel, "get_volatile_reads", with_all)  # 2.11 - 2.15


PAYLOADS_UNTIL_THE_WAIT = Patch(
    "payloads_until_the_wait",
    "torch._inductor.ir._WaitKernel.get_volatile_reads",
    "Inductor keeps the first tensor that a collective is given until the wait, and reuses the memory of the others "
    "while they are being sent: wrong values, without a word.",
    "_WaitKernel.get_volatile_reads returns inputs[0] of a collective with one result; one with a list of inputs and "
    "one result, such as a bucket, has more.",
    "2.11 - 2.15",
    _payloads_until_the_wait,
)

OF_COLLECTIVES = (PAYLOADS_UNTIL_THE_WAIT, GRIDS_OF_NO_ROWS, NO_CAPTURES)
"""Put in for good when a trace meets a collective of ours."""
"""Put in for good when a trace meets a collective of ours."""


def preserve_node_ordering(graph: torch.fx.Graph, before: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]) -> None:
    """Have Inductor run, for each node, others before it that it does not read."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering as preserve  # 2.11 - 2.15

    preserve(graph, {node: OrderedSet(others) for node, others in before.items()})


def inductor_has(option: str) -> bool:
    """Whether the installed Inductor has a setting of this name."""
    return option in config._config  # type: ignore[attr-defined]  # 2.11 - 2.15
