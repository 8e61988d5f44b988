"""Nodes of autograd's graph that give a small tensor's values many times over. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from shardcompile.compat.sizes import size_hint


def last_repetition(x: Tensor) -> tuple[Any, int] | None:
    """The node that has repeated a small tensor, as lookups in a table and expansions do, and elements of that tensor.

    Args:
        x: a plain tensor.

    Returns:
        Nothing if `x` was not made so, or if somebody looks at its gradient.
    """
    if x.grad_fn is None or x.retains_grad or x._backward_hooks:
        return None
    node: Any = x.grad_fn
    while node is not None and node.name() == "UnsqueezeBackward0":
        node = node.next_functions[0][0]
    name = "" if node is None else node.name()
    if name == "EmbeddingBackward0" and not node._saved_sparse:
        return node, size_hint(node._saved_weight_sym_argsize_0) * size_hint(x.shape[-1])
    if name in ("ExpandBackward0", "RepeatBackward0"):
        return node, math.prod(map(size_hint, node._saved_self_sym_sizes))
    return None
