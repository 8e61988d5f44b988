"""Private names of torch around higher-order ops: control flow, regions, flex attention. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # 2.11 - 2.15
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph  # 2.11 - 2.15
from torch._higher_order_ops.map import map_impl  # 2.11 - 2.15
from torch._higher_order_ops.scan import scan_op  # 2.11 - 2.15
from torch.nn.attention.flex_attention import _vmap_for_bhqkv  # 2.11 - 2.15


def control_flow_ops() -> list[object]:
    """Higher-order ops that trace a function on tensors, as a tensor's `__torch_function__` sees them."""
    higher_order = torch.ops.higher_order
    return [higher_order.cond, map_impl, scan_op, higher_order.while_loop]


def run_regions_in_line(sharded: type) -> None:
    """Have a nested region with sharded inputs run in line: its ops become nodes of the graph around it."""

    @invoke_subgraph.py_impl(sharded)
    def in_line(subgraph: Callable[..., object], identifier: object, *operands: object) -> object:
        return subgraph(*operands)


def over_scores(function: Callable[..., torch.Tensor], of_scores: bool, others: int) -> Callable[..., torch.Tensor]:
    """Map a `score_mod` or `mask_mod` of `flex_attention` over all scores: [batch, heads, rows, columns].

    Args:
        function: takes the indices of batch, head, row and column, after the score if `of_scores`. It returns a score,
            or whether the score counts.
        of_scores: whether the first argument of `function` is the score.
        others: the number of further tensors that `function` takes whole.
    """
    mapped = _vmap_for_bhqkv(function, prefix=(0,) if of_scores else (), suffix=(None,) * others)

    def run(*args: torch.Tensor) -> torch.Tensor:
        with TransformGetItemToIndex():
            return mapped(*args)

    return run
