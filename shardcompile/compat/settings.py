"""Settings of torch that hold while a graph of sharded tensors is compiled, with any backend."""

from __future__ import annotations

import contextlib

import torch
from torch._functorch import config as _functorch_config  # 2.11 - 2.15
from torch._inductor import config as _inductor_config  # 2.11 - 2.15

from shardcompile.compat.partitioner import Partitioner


def settle(stack: contextlib.ExitStack) -> None:
    """Changes torch's settings until a stack is closed.

    - Inductor partitions joint graphs with `Partitioner`.
    - A backward graph is compiled together with its forward graph. Torch would compile one that needs no sizes of the
      forward pass at its first call, when these settings and the patches of a compilation are gone.
    - From 2.15 on, Inductor does not write to saved tensors. This version repeats the wait for a result that the
      backward pass needs, and saves both results: two tensors of one memory.
    """
    inner = _inductor_config.custom_partitioner_fn
    if not isinstance(inner, Partitioner):
        stack.enter_context(_inductor_config.patch(custom_partitioner_fn=Partitioner(inner)))
    stack.enter_context(_functorch_config.patch(force_non_lazy_backward_lowering=True))
    if torch.__version__ >= "2.15":
        stack.enter_context(_functorch_config.patch(donated_buffer=False))
