"""What is captured in CUDA graphs of a graph with collectives of ours. The patches at the end give the reasons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardcompile.compat.patch import Patch, replace
from shardcompile.compat.sizes import size_hint

if TYPE_CHECKING:
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex  # 2.11 - 2.15
    from torch._inductor.output_code import CompiledFxGraph  # 2.11 - 2.15
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler  # 2.11 - 2.15

FEWEST_KERNELS = 8
"""The fewest kernels that are captured together: an estimate of how many launches take as long as a replay."""


def captures_with_collectives(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.scheduler import Scheduler  # 2.11 - 2.15

    replace(stack, Scheduler, "should_partition", _with_what_no_graph_may_hold)
    replace(stack, Scheduler, "graph_partition", _without_short_runs)
    for reorder in ("maybe_reorder_for_minimizing_partition", "reorder_for_partition_with_simple_dependency"):
        replace(stack, Scheduler, reorder, _unless_ours)


def copies_of_late_sizes(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import output_code

    if hasattr(output_code, "complex_memory_overlap"):  # 2.11 - 2.12
        replace(stack, output_code, "complex_memory_overlap", _by_hint)


def _by_hint(overlaps: Callable[[object], bool]) -> Callable[[object], bool]:
    """Decide by hints, which are the same on every rank, whether the rows of an input overlap."""

    @functools.wraps(overlaps)
    def asked(x: object) -> bool:
        if isinstance(x, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride())):
            shape, strides = ([size_hint(n) for n in numbers] for numbers in (x.shape, x.stride()))
            return overlaps(torch.empty_strided(shape, strides, device="meta"))
        return overlaps(x)

    return asked


def backward_before_forward(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import output_code

    replace(stack, output_code, "maybe_handle_backward_generation", _of_a_forward_that_has_not_run)  # 2.11 - 2.15


def _of_a_forward_that_has_not_run(handle: Callable[..., None]) -> Callable[..., None]:
    """Have a backward pass that is not captured look for the manager of CUDA graphs when it runs."""

    @functools.wraps(handle)
    def handled(compiled: CompiledFxGraph, forward_device: BoxedDeviceIndex | None) -> None:
        # Heavy, and only a compilation needs it.
        from torch._inductor import config
        from torch._inductor.cudagraph_trees import get_manager  # 2.11 - 2.15

        device: int | None = None if forward_device is None else forward_device.value
        of_a_forward = compiled.fx_kwargs["is_backward"] and config.triton.cudagraph_trees
        if not of_a_forward or device is None or get_manager(device, create_if_none_exists=False) is not None:
            return handle(compiled, forward_device)
        call = compiled.current_callable
        assert call is not None, "a graph that was compiled"

        def run(inputs: Sequence[Any]) -> object:
            manager = get_manager(device, create_if_none_exists=False)
            if manager is not None:
                manager.set_to_running_backward()
            return call(inputs)

        compiled.current_callable = run
        return None

    return handled


def _with_what_no_graph_may_hold(should_partition: Callable[..., object]) -> Callable[..., object]:
    """Have collectives, waits, parts of joined results and joined results stay outside of captures."""

    @functools.wraps(should_partition)
    def asked(scheduler: Scheduler, node: BaseSchedulerNode, *args: object, **kwargs: object) -> object:
        reason = should_partition(scheduler, node, *args, **kwargs)
        if reason or not _holds_ours(scheduler):
            return reason
        if node in vars(scheduler).get("_shardcompile_short", ()):
            return "too few kernels to be captured"
        return next(filter(None, map(_why_outside, node.get_nodes())), None)

    return asked


def _why_outside(node: BaseSchedulerNode) -> str | None:
    # Heavy, and only a compilation needs it.
    from torch._inductor.ir import ConcatKernel, NonOwningLayout, _CollectiveKernel  # 2.11 - 2.15

    if isinstance(node.node, _CollectiveKernel):
        return "collectives and their waits beside collectives of shardcompile"
    if isinstance(node.node, ConcatKernel):
        return "results that parts were written to"
    if any(isinstance(out.node.layout, NonOwningLayout) for out in node.get_outputs()):
        return "parts of a result"
    return None


def _without_short_runs(graph_partition: Callable[..., object]) -> Callable[..., object]:
    """Have runs of a few kernels stay outside of captures."""

    @functools.wraps(graph_partition)
    def partition(scheduler: Scheduler) -> object:
        if _holds_ours(scheduler):
            vars(scheduler)["_shardcompile_short"] = set(_short_runs(scheduler))
        return graph_partition(scheduler)

    return partition


def _short_runs(scheduler: Scheduler) -> Iterable[BaseSchedulerNode]:
    # Heavy, and only a compilation needs it.
    from torch._inductor.scheduler import NopKernelSchedulerNode  # 2.11 - 2.15

    run: list[BaseSchedulerNode] = []
    for node in (*scheduler.nodes, None):
        if node is not None and scheduler.should_partition(node) is None:
            run.append(node)
            continue
        if sum(not isinstance(n, NopKernelSchedulerNode) for n in run) < FEWEST_KERNELS:
            yield from run
        run = []


def _unless_ours(reorder: Callable[..., Sequence[BaseSchedulerNode]]) -> Callable[..., Sequence[BaseSchedulerNode]]:
    """Keep the order of nodes, which our passes have chosen so that computation hides communication."""

    @functools.wraps(reorder)
    def reordered(scheduler: Scheduler, nodes: Sequence[BaseSchedulerNode]) -> Sequence[BaseSchedulerNode]:
        return nodes if _holds_ours(scheduler) else reorder(scheduler, nodes)

    return reordered


def _holds_ours(scheduler: Scheduler) -> bool:
    """Whether the scheduler's graph has an op of ours that no CUDA graph may hold."""
    # Heavy, and only a compilation needs it.
    from torch._inductor.virtualized import V  # 2.11 - 2.15

    known = vars(scheduler)
    if "_shardcompile_ours" not in known:
        known["_shardcompile_ours"] = any(_is_ours(operation) for operation in V.graph.operations)
    return bool(known["_shardcompile_ours"])


def _is_ours(operation: object) -> bool:
    op = getattr(operation, "op_overload", None)
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "shardcompile":
        return False
    return torch.Tag.cudagraph_unsafe in op.tags


CAPTURES_BESIDE_COLLECTIVES = Patch(
    "captures_with_collectives",
    "torch._inductor.scheduler.Scheduler.should_partition, graph_partition, "
    "maybe_reorder_for_minimizing_partition, reorder_for_partition_with_simple_dependency",
    "With mode='reduce-overhead', Inductor divides a graph at ops that no CUDA graph may hold, into functions to be "
    "captured. It makes the result of a join anew in each function that writes a part of it. It also captures what "
    "waits for a collective that is started outside. Both give wrong values, without a word. And it moves waits to "
    "where they divide least, in front of the computation that hides the collective.",
    "get_graph_partition_signature does not know that a buffer with a NonOwningLayout is a part of another one: that "
    "is neither returned nor passed on, and the next partition allocates it again. wait_tensor has no cudagraph_unsafe "
    "tag, which is right only for collectives that are captured with it.",
    "2.11 - 2.15",
    captures_with_collectives,
)

COPIES_OF_LATE_SIZES = Patch(
    "copies_of_late_sizes",
    "torch._inductor.output_code.complex_memory_overlap",
    "With mode='reduce-overhead', Inductor asks whether expanded dims of a graph's inputs have one row. Ranks would "
    "answer differently, and of rows whose number a run gives it cannot be answered: the compilation fails.",
    "Mended in 2.13, which copies such inputs byte by byte and asks nothing. GuardOnDataDependentSymNode: "
    "Ne(u24, 1), in get_expanded_dims.",
    "2.11 - 2.12",
    copies_of_late_sizes,
)

BACKWARD_BEFORE_FORWARD = Patch(
    "backward_before_forward",
    "torch._inductor.output_code.maybe_handle_backward_generation",
    "With mode='reduce-overhead', a backward pass that is not captured fails to compile if its forward pass is "
    "captured and has not run yet. With symbolic sizes, both are compiled before the first of them runs.",
    "maybe_handle_backward_generation takes the manager of the forward pass when it compiles, and asserts that there "
    "is one. The manager is made when the forward pass first runs. It could be looked up in compiled_artifact.",
    "2.11 - 2.15",
    backward_before_forward,
)

OF_CUDA_GRAPHS = (CAPTURES_BESIDE_COLLECTIVES, COPIES_OF_LATE_SIZES, BACKWARD_BEFORE_FORWARD)
