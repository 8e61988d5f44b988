"""Private names of torch around higher-order ops: control flow, regions, flex attention. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # 2.11 - 2.15
from torch._dynamo.variables import higher_order_ops as _traced  # 2.11 - 2.15
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph  # 2.11 - 2.15
from torch._higher_order_ops.map import map_impl  # 2.11 - 2.15
from torch._higher_order_ops.scan import scan_op  # 2.11 - 2.15
from torch.nn.attention.flex_attention import _vmap_for_bhqkv  # 2.11 - 2.15


def control_flow_ops() -> list[object]:
    """Higher-order ops that trace a function on tensors, as a tensor's `__torch_function__` sees them."""
    higher_order = torch.ops.higher_order
    return [higher_order.cond, map_impl, scan_op, higher_order.while_loop]


def tell_storages(sharded: Any) -> None:
    """Have Dynamo take a sharded tensor's block for the memory that the arguments of a loop must not share.

    It asks before it calls the op, and raises for all tensors with tensors inside.
    """
    storages_of = getattr(_traced, "get_tensor_storages", None)  # 2.13 - 2.15
    if storages_of is None:
        return

    @functools.wraps(storages_of)
    def of_block(x: Any) -> object:
        return storages_of(x._local_tensor if isinstance(x, sharded) else x)

    _traced.get_tensor_storages = of_block  # type: ignore[assignment]


def run_regions_in_line(sharded: type) -> None:
    """Have a nested region that is given sharded tensors become part of the graph around it, as what it computes."""

    @invoke_subgraph.py_impl(sharded)
    def in_line(subgraph: Any, identifier: object, *operands: Any) -> object:
        return subgraph(*operands)


def over_scores(function: Callable[..., torch.Tensor], of_scores: bool, others: int) -> Callable[..., torch.Tensor]:
    """A function of one score, as `flex_attention` takes it, over all of them: [batch, heads, rows, columns].

    Args:
        function: from a score, if `of_scores`, and four numbers to a score, or to whether it counts.
        of_scores: whether its first argument is the score.
        others: how many tensors it takes besides, whole.
    """
    mapped = _vmap_for_bhqkv(function, prefix=(0,) if of_scores else (), suffix=(None,) * others)

    def run(*args: Any) -> torch.Tensor:
        with TransformGetItemToIndex():
            return mapped(*args)

    return run
