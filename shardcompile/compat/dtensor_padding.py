"""Have DTensor trace the same padding on every rank. `patches` gives the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import placement_types

from shardcompile.compat.patch import replace


def pads_on_all_ranks(stack: contextlib.ExitStack) -> None:
    pads = _by_nothing_too(lambda x, _: torch.constant_pad_nd(x, [0, 0]))
    replace(stack, placement_types, "pad_tensor", pads)  # 2.11 - 2.15
    unpads = _by_nothing_too(lambda x, dim: x.narrow(dim, 0, x.size(dim)))
    replace(stack, placement_types, "unpad_tensor", unpads)  # 2.11 - 2.15


def _by_nothing_too(same: Callable[[Tensor, int], Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Have a function that adds or removes padding leave a node in the graph even if the amount is 0."""

    def leaving_a_node(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def changed(x: Tensor, dim: int, amount: int | torch.SymInt) -> Tensor:
            return same(x, dim) if isinstance(amount, int) and amount == 0 else change(x, dim, amount)

        return changed

    return leaving_a_node
