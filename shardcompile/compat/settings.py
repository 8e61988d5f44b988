"""Settings of torch that hold while a graph of sharded tensors is compiled, with any backend."""

from __future__ import annotations

import contextlib

from torch._functorch import config as _functorch_config  # 2.11 - 2.15
from torch._inductor import config as _inductor_config  # 2.11 - 2.15
from torch.fx.experimental import _config as _symbolic_shapes_config  # 2.11 - 2.15

from shardcompile.compat.fingerprints import running_version
from shardcompile.compat.partitioner import around

SETTINGS = (
    (
        "torch._inductor.config.custom_partitioner_fn",
        "Inductor partitions joint graphs with a partitioner that keeps collectives where they are.",
    ),
    (
        "torch._inductor.config.shape_padding",
        "For GPUs, Inductor would pad the operands of matrix products before passes see the graph, by the rows of a "
        "shard, with a guard that holds on some ranks only, and by times that each rank measures for itself.",
    ),
    (
        "torch._functorch.config.force_non_lazy_backward_lowering",
        "A backward graph is compiled together with its forward graph. Torch would compile one that needs no sizes of "
        "the forward pass at its first call, when these settings and the patches of a compilation are gone.",
    ),
    (
        "torch._functorch.config.donated_buffer (2.11, 2.15)",
        "Inductor does not write to saved tensors. Torch 2.15 repeats the wait for a result that the backward pass "
        "needs, and saves both results: two tensors of one memory. Torch 2.11 takes saved sizes for tensors when it "
        "looks for those to write to, and fails.",
    ),
    (
        "torch._inductor.config.reorder_for_locality (2.11)",
        "Torch 2.11 moves random ops past each other, so that they draw other values than in eager mode "
        "(https://github.com/pytorch/pytorch/pull/176842).",
    ),
    (
        "torch.fx.experimental._config.backed_size_oblivious",
        "Sizes of 0 and 1 are symbols: a shard may have any size on any rank.",
    ),
)
"""Each setting with its reason."""


def settle(stack: contextlib.ExitStack) -> None:
    """Changes the settings that every graph with sharded tensors needs until a stack is closed."""
    stack.enter_context(_inductor_config.patch(custom_partitioner_fn=around(_inductor_config.custom_partitioner_fn)))
    stack.enter_context(_inductor_config.patch(shape_padding=False))
    stack.enter_context(_functorch_config.patch(force_non_lazy_backward_lowering=True))
    if running_version() == (2, 11):
        stack.enter_context(_inductor_config.patch(reorder_for_locality=False))
    if running_version() >= (2, 15) or running_version() == (2, 11):
        stack.enter_context(_functorch_config.patch(donated_buffer=False))


def trace_obliviously(stack: contextlib.ExitStack) -> bool:
    """Switches on torch's tracing without regard to sizes of 0 and 1, until a stack is closed.

    Returns:
        whether it was off.
    """
    if _symbolic_shapes_config.backed_size_oblivious:
        return False
    stack.enter_context(_symbolic_shapes_config.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
    return True
