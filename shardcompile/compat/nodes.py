"""Nodes of autograd's graph that repeat the values of a small tensor. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from shardcompile.compat.sizes import size_hint

_REPEAT = {"EmbeddingBackward0", "ExpandBackward0", "RepeatBackward0", "AddBackward0", "SubBackward0"}


def last_repetition(x: Tensor) -> tuple[Node, int] | None:
    """The node that repeated a small tensor, and the number of elements of that tensor.

    A lookup in a table repeats rows. So do an expansion, and a sum with a larger tensor that has no gradient.

    Args:
        x: a plain tensor.

    Returns:
        None if no such node made `x`, or if a hook or `retain_grad` reads its gradient.
    """
    if x.grad_fn is None or x.retains_grad or x._backward_hooks:
        return None
    node: Any = x.grad_fn
    while node is not None and node.name() == "UnsqueezeBackward0":
        node = node.next_functions[0][0]
    if node is None or node.name() not in _REPEAT or getattr(node, "_saved_sparse", False):
        return None
    sources = [(source, i) for source, i in node.next_functions if source is not None]
    if len(sources) != 1:
        return None
    ((source, i),) = sources
    return node, math.prod(map(size_hint, source._input_metadata[i].shape))
