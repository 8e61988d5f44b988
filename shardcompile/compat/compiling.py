"""When the patches of a compilation are put in, and put back. `patches` lists them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch.fx.experimental._config as _symbolic_shapes_config
from torch._dynamo.callback import callback_handler as _compile_callbacks  # 2.11 - 2.15
from torch._guards import TracingContext  # 2.11 - 2.15
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # 2.11 - 2.15

from shardcompile.compat.patch import put_in, replace
from shardcompile.compat.patches import OF_A_COMPILATION, OF_A_TRACE, OF_RANKS_ALIKE


def trace_size_obliviously() -> None:
    """Make the compilation that is running trace without specialising on sizes of 0 and 1.

    The switch is torch's own (`backed_size_oblivious`). It is read all through a compilation, and goes back to what it
    was when the compilation ends. So do the patches.
    """
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        if context.fake_mode.shape_env is not None:
            _put_into_trace(context.fake_mode.shape_env)
        # Without `fullgraph` Dynamo would break the graph where we read the sizes of a derived cut. It asks its own
        # switch for a user's `item`.
        context.fake_mode.allow_scalar_outputs = True  # 2.11 - 2.15
    keep_ranks_alike()
    if _symbolic_shapes_config.backed_size_oblivious:
        return
    _symbolic_shapes_config.backed_size_oblivious = True
    stack = _COMPILATION[0]
    stack.callback(setattr, _symbolic_shapes_config, "backed_size_oblivious", False)
    # Dynamo may trace again, and makes the symbols of tensors that are not cut before it meets one that is.
    replace(stack, ShapeEnv, "__init__", _with_patches)
    put_in(OF_A_COMPILATION, stack)


def _put_into_trace(shape_env: ShapeEnv) -> None:
    if not vars(shape_env).keys() & {"suppress_guards", "create_symbol"}:
        put_in(OF_A_TRACE, shape_env)


def _with_patches(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def initialised(shape_env: ShapeEnv, *args: object, **kwargs: object) -> None:
        init(shape_env, *args, **kwargs)
        _put_into_trace(shape_env)

    return initialised


def keep_ranks_alike() -> None:
    """Have the compilation that is running decide on collectives by the program, not by this rank's numbers.

    For all graphs with sharded tensors: blocks of parameters, and those of a tensor that the program cuts, have known
    sizes, which differ from rank to rank.
    """
    if _COMPILATION:
        return
    _COMPILATION.append(contextlib.ExitStack())
    put_in(OF_RANKS_ALIKE, _COMPILATION[0])

    def restore(_: object) -> None:
        _COMPILATION.pop().close()
        _compile_callbacks.remove_end_callback(restore)

    # One for all patches: torch goes on in its list of callbacks behind one that takes itself out.
    _compile_callbacks.register_end_callback(restore)


_COMPILATION: list[contextlib.ExitStack] = []
"""What is put back when the compilation ends that is running; empty if nothing is in place."""
