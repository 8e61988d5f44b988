"""When the patches of a compilation are put in, and when they are taken out. `patches` lists them."""

from __future__ import annotations

import contextlib

from torch._dynamo.callback import callback_handler as _compile_callbacks  # 2.11 - 2.15
from torch._guards import TracingContext  # 2.11 - 2.15

from shardcompile.compat.patch import put_in
from shardcompile.compat.patches import OF_A_COMPILATION, OF_RANKS_ALIKE, put_into_trace
from shardcompile.compat.settings import settle, trace_obliviously


def trace_size_obliviously() -> None:
    """Make the running compilation trace without specialising on sizes of 0 and 1.

    Torch's own switch (`backed_size_oblivious`) does this. Torch reads it throughout a compilation. The switch and the
    patches are restored when the compilation ends.
    """
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        if context.fake_mode.shape_env is not None:
            put_into_trace(context.fake_mode.shape_env)
            # Torch keeps what ops give on fake tensors. With sizes that are symbols, it takes longer to make and read
            # these entries than to run the ops' fake kernels.
            context.fake_mode.cache_enabled = False  # 2.11 - 2.15
        # Without `fullgraph` Dynamo would break the graph where we read the sizes of a derived partition. For an
        # `item` in the user's code it consults another switch.
        context.fake_mode.allow_scalar_outputs = True  # 2.11 - 2.15
    make_decisions_rank_invariant()
    for stack in _COMPILATION:
        if trace_obliviously(stack):
            put_in(OF_A_COMPILATION, stack)


def make_decisions_rank_invariant() -> None:
    """Have the running compilation decide on collectives by the program, not by this rank's numbers.

    Every graph with sharded tensors needs this: plain inputs, strides and memory differ from rank to rank.
    """
    if _COMPILATION or not _tells_its_end():
        return
    stack = contextlib.ExitStack()
    _COMPILATION.append(stack)
    settle(stack)
    put_in(OF_RANKS_ALIKE, stack)
    # One callback serves all patches: torch skips the callback after one that removes itself from the list.
    _compile_callbacks.register_end_callback(_restore)


def _restore(_: object) -> None:
    _COMPILATION.pop().close()
    _compile_callbacks.remove_end_callback(_restore)


def _tells_its_end() -> bool:
    """Whether the running compilation calls back when it ends. That of `torch.export` (2.15) does not."""
    pending = "_CompilationCallbackHandler__pending_callbacks_counter"  # 2.11 - 2.15
    return bool(getattr(_compile_callbacks, pending) > 0)


_COMPILATION: list[contextlib.ExitStack] = []
"""The patches of the running compilation, as a stack that takes them out; empty if no patch is in place."""
