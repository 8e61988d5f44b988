"""How torch tells strides that are symbols: of results as a whole."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta  # 2.11 - 2.15

from shardcompile.compat.patch import Patch, put_in_for_good, replace


def strides_behind_sizes(stack: contextlib.ExitStack) -> None:
    if torch.__version__ < "2.12":  # it runs in each call of what is compiled
        replace(stack, SubclassCreationMeta, "compute_outer_size_and_stride", lambda _: _sizes_and_then_strides)  # 2.11


def _sizes_and_then_strides(self: Any, all_args: Sequence[Any], *, curr_start_idx: int) -> tuple[tuple[Any, ...], ...]:
    """The size and the strides of a tensor subclass, from those of a graph's values that follow its inner tensors."""
    symbols = iter(all_args[curr_start_idx:])
    stated = (self.outer_size, self.outer_stride)
    return tuple(tuple(next(symbols) if n is None else n for n in numbers) for numbers in stated)


put_in_for_good(
    Patch(
        "strides_behind_sizes",
        "torch._functorch._aot_autograd.schemas.SubclassCreationMeta.compute_outer_size_and_stride",
        "Where they are symbols, a graph returns the size of a sharded result, then its strides. These are read where "
        "the size stands: the result says other strides than its blocks have.",
        "https://github.com/pytorch/pytorch/pull/176740",
        "2.11",
        strides_behind_sizes,
    )
)
