"""The strides of tensors that the forward pass saves, and of those that views read by strides. `patches` says why."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import sympy
import torch
from torch._functorch._aot_autograd import graph_compile  # 2.11 - 2.15
from torch._functorch._aot_autograd.schemas import SubclassMeta, ViewAndMutationMeta  # 2.11 - 2.15
from torch._functorch._aot_autograd.subclass_utils import (
    compute_inner_mutated_inp_indices_from_subclass_meta,  # 2.11 - 2.15
)
from torch.utils._sympy.functions import Max  # 2.11 - 2.15

from shardcompile.compat.patch import replace
from shardcompile.compat.sizes import Formula, IntLike, expression_of, is_unbacked

if TYPE_CHECKING:
    from torch._inductor.graph import GraphLowering  # 2.11 - 2.15


def saved_after_written(stack: contextlib.ExitStack) -> None:
    replace(stack, graph_compile, "_aot_stage2b_bw_compile", _counting_what_is_written)  # 2.11 - 2.15


def _counting_what_is_written(compile_backward: Callable[..., object]) -> Callable[..., object]:
    """Have AOTAutograd look up the strides of saved tensors after those of all results of the forward pass."""

    @functools.wraps(compile_backward)
    def compiled(
        module: object,
        of_shards: SubclassMeta | None,
        metadata: ViewAndMutationMeta,
        strides: list[object] | None,
        *rest: object,
    ) -> object:
        if of_shards is not None and strides is not None:
            inner = of_shards.fw_metadata
            written = len(compute_inner_mutated_inp_indices_from_subclass_meta(metadata, inner))
            strides = strides[max(written - inner.num_mutated_inp_runtime_indices, 0) :]
        return compile_backward(module, of_shards, metadata, strides, *rest)

    return compiled


def saved_as_traced(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.graph import GraphLowering  # 2.11 - 2.15

    replace(stack, GraphLowering, "run_node", _keeping_orders)  # 2.11 - 2.15


def _keeping_orders(lower: Callable[..., object]) -> Callable[..., object]:
    """Have Inductor keep the order of dims of results whose strides are unbacked."""
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir  # 2.11 - 2.15

    @functools.wraps(lower)
    def lowered(graph: GraphLowering, node: torch.fx.Node) -> object:
        result = lower(graph, node)
        value = node.meta.get("val")
        if not isinstance(result, ir.TensorBox) or not isinstance(value, torch.Tensor):
            return result
        if not any(map(_reads_as_traced, node.users)) or not any(map(is_unbacked, value.stride())):
            return result
        strides = result.maybe_get_stride() if isinstance(result.maybe_get_layout(), ir.FixedLayout) else None
        if strides is not None and [*map(_formula, strides)] == [*map(_formula, value.stride())]:
            return result
        order = ir.get_stride_order(value.stride(), graph.sizevars.shape_env)
        return ir.ExternKernel.require_stride_order(result, order)

    return lowered


def _reads_as_traced(user: torch.fx.Node) -> bool:
    """Whether a user of a tensor takes it to have the strides that the graph says."""
    return user.op == "output" or user.target is torch.ops.aten.as_strided.default


def _formula(stride: IntLike | Formula) -> Formula:
    """The formula of a stride if no size is 0."""
    found: Formula = sympy.sympify(expression_of(stride))
    return sympy.expand(found.replace(Max, lambda *terms: Max(*(t for t in terms if t != 1))))
