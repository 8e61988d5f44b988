"""Keeping blocks stored in the order of dims that the strides of the global tensor state.

Views, and whether a view is possible at all, are decided by global strides; a block that is stored in another order, as
after a redistribution, would have to be copied where the global tensor would not, and on some ranks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.layout import IntLike, contiguous_stride, order_of


def in_order(local: Tensor, stride: Sequence[IntLike]) -> Tensor:
    """A block, copied if it is not stored densely in the order of global strides.

    Args:
        local: the block.
        stride: strides of the global tensor.
    """
    order = order_of(stride)
    shape = [compat.size_hint(local.shape[d]) for d in order]
    dense = contiguous_stride(shape)
    stored = [compat.size_hint(local.stride(d)) for d in order]
    back = sorted(range(len(order)), key=order.__getitem__)
    if 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, stored, dense, strict=True)):
        if 1 in shape and type(local) is Tensor and tuple(stored) != tuple(dense):
            # Strides of extents of 1 mean nothing, but there are kernels that read them.
            return local.as_strided(local.shape, [dense[i] for i in back])
        return local
    # Not `contiguous`: inside a trace that asks for the size of the block, and specialises on the answer.
    return local.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def all_in_order(out: Any, specs: Sequence[Any]) -> Any:
    """The results of a local op in the order of their specs; a spec is None for what is no tensor."""
    if isinstance(out, Tensor):
        return out if specs[0] is None else in_order(out, specs[0].stride)
    if len(specs) == 1 and isinstance(specs[0], list):
        return [o if s is None else in_order(o, s.stride) for o, s in zip(out, specs[0], strict=True)]
    return tuple(o if s is None or o is None else in_order(o, s.stride) for o, s in zip(out, specs, strict=True))
