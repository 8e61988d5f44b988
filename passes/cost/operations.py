"""How many operations the products of a graph take, and in which numbers: what prices them beside their bytes."""

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
from shardcompile.passes.graph import rank_dependent_sizes

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
"""Ops that torch's registry of operations does not have, by one that costs the same."""

_FORMULAS = {aten._grouped_mm: lambda a, b, *rest, **named: 2 * math.prod(a) * b[-1]}
"""Operations of products that are missing there as well."""


@functools.cache
def say_once(text: str) -> None:
    """Log a warning, once in a process."""
    _LOG.warning(text)


def formula_of(node: Node) -> Callable[..., float] | None:
    """The formula for the operations of a node; None of what is no product."""
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    return _FORMULAS.get(packet) or flop_registry.get(_LIKE.get(packet, packet))


def flops_of(node: Node) -> float:
    """Operations of a product, from torch's own formulas; 0 of other ops, which their memory traffic prices."""
    formula = formula_of(node)
    if formula is None:
        return 0.0
    ours = getattr(node.target, "namespace", "") == "shardcompile"  # what it is told besides is no matter of operations
    named = () if ours else tuple((k, _numbers(v)) for k, v in node.kwargs.items())
    return _count_flops(formula, str(node.target), _numbers(node.args), named, _numbers(node.meta.get("val")))


@functools.lru_cache(maxsize=4096)
def _count_flops(
    formula: Callable[..., float],
    op: str,
    args: tuple[object, ...],
    kwargs: tuple[tuple[str, object], ...],
    result: object,
) -> float:
    """What a formula says. The layers of a model ask for the same."""
    try:
        return float(formula(*args, **dict(kwargs), out_val=result))
    except Exception as error:  # a formula of an op that wants real tensors, or of another version of the op
        say_once(f"the operations of {op} cannot be counted, its bytes price it: {error}")
        return 0.0


def _numbers(value: object) -> Any:
    """A tensor's sizes as numbers, a symbol's hint; lists of them, and arguments that are nodes, alike."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tuple(compat.size_hint(s) for s in value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(map(_numbers, value))
    return compat.size_hint(value) if isinstance(value, torch.SymInt) else value


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of the numbers that are multiplied. A kernel of half precision may read and give sums in single
    precision.
    """
    values = [t.dtype for n in (node, *node.all_input_nodes) for t in rank_dependent_sizes.tensors(n)]
    floating = [d for d in values if d.is_floating_point or d.is_complex]
    return min(floating, key=lambda d: d.itemsize) if floating else (values or [torch.float32])[0]
