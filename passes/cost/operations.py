"""Counts the operations of the matrix products of a graph, and their dtypes, for the cost model."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from shardcompile import compat
from shardcompile.passes.graph import node_sizes

aten = torch.ops.aten
_LOG = logging.getLogger("shardcompile")

_LIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    torch.ops.shardcompile.attend: aten._scaled_dot_product_flash_attention,
    torch.ops.shardcompile.attend_backward: aten._scaled_dot_product_flash_attention_backward,
    torch.ops.shardcompile.convolution: aten.convolution,
    torch.ops.shardcompile.convolution_backward: aten.convolution_backward,
}
"""Ops that torch's FLOP registry lacks, by an op that takes the same operations."""

_FORMULAS = {aten._grouped_mm: lambda a, b, *rest, **named: 2 * math.prod(a) * b[-1]}
"""Formulas for products that the registry lacks."""


@functools.cache
def say_once(text: str) -> None:
    """Logs a warning, once per process."""
    _LOG.warning(text)


def formula_of(node: Node) -> Callable[..., float] | None:
    """Returns the formula for the operations of a node, or None if it is no product."""
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    return _FORMULAS.get(packet) or flop_registry.get(_LIKE.get(packet, packet))


def flops_of(node: Node) -> float:
    """Returns the operations of a product, by torch's own formulas; 0 for other ops, whose memory traffic decides."""
    formula = formula_of(node)
    if formula is None:
        return 0.0
    ours = getattr(node.target, "namespace", "") == "shardcompile"  # their keyword arguments do not change the count
    named = () if ours else tuple((k, _hinted(v)) for k, v in node.kwargs.items())
    return _count_flops(formula, str(node.target), _hinted(node.args), named, _hinted(node.meta.get("val")))


@functools.lru_cache(maxsize=4096)
def _count_flops(
    formula: Callable[..., float],
    op: str,
    args: tuple[object, ...],
    kwargs: tuple[tuple[str, object], ...],
    result: object,
) -> float:
    """Evaluates a formula. It is cached because the layers of a model ask for the same."""
    try:
        return float(formula(*args, **dict(kwargs), out_val=result))
    except Exception as error:  # a formula that needs real tensors, or one of another version of the op
        say_once(f"the operations of {op} cannot be counted, its bytes decide its cost: {error}")
        return 0.0


def _hinted(value: object) -> Any:
    """Replaces tensors by their sizes and symbols by their hints, also within lists and arguments that are nodes."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tuple(compat.size_hint(s) for s in value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(map(_hinted, value))
    return compat.size_hint(value) if isinstance(value, torch.SymInt) else value


def dtype_of(node: Node) -> torch.dtype:
    """Returns the dtype of the factors of a product.

    A kernel of half precision may read and return sums in single precision.
    """
    values = [t.dtype for n in (node, *node.all_input_nodes) for t in node_sizes.tensors(n)]
    floating = [d for d in values if d.is_floating_point or d.is_complex]
    return min(floating, key=lambda d: d.itemsize) if floating else (values or [torch.float32])[0]
