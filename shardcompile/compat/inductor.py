"""How Inductor treats our collectives and keeps the order of nodes. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DispatchKey
from torch._inductor import config  # 2.11 - 2.15
from torch.utils._ordered_set import OrderedSet  # 2.11 - 2.15

from shardcompile.compat.cuda_graphs import OF_CUDA_GRAPHS
from shardcompile.compat.gpu_kernels import GRIDS_OF_NO_ROWS
from shardcompile.compat.partitioner import around
from shardcompile.compat.patch import Patch, put_in_once, replace

if TYPE_CHECKING:
    from torch._inductor.ir import IRNode, _WaitKernel  # 2.11 - 2.15

VolatileReads = Callable[["_WaitKernel"], "Sequence[IRNode]"]


def lower_when_traced(op: Callable[[], torch._ops.OpOverload], fake: Callable[..., object]) -> Callable[..., object]:
    """A fake kernel of a collective that registers the op, which need not exist yet, with Inductor at its first trace.

    The import of Inductor's lowerings takes more than a second. Eager programs do not need them.
    """

    def traced(*args: object) -> object:
        _lower_as_collective(op())
        for patch in OF_COLLECTIVES:
            put_in_once(patch)
        return fake(*args)

    return traced


@functools.cache
def _lower_as_collective(op: torch._ops.OpOverload) -> None:
    """Have Inductor treat an op as a collective: keep its order, and keep its send buffer alive until the wait.

    For an ordinary fallback kernel, Inductor would reuse the buffer while it is still being sent.
    """
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def lowering(*args: object) -> object:
        create: Callable[..., Any] = ir._CollectiveKernel.create_out_of_place
        return torch.utils._pytree.tree_map(ir.TensorBox.create, create(op, *args))

    # The lowering states no constraint on strides. To require those of the trace, Inductor would compare symbolic
    # strides, and so specialise on the size of this rank's local shard.
    register_lowering(op, type_promotion_kind=None)(lowering)


def _payloads_until_the_wait(stack: contextlib.ExitStack) -> None:
    # Heavy, and only a compilation needs it.
    from torch._inductor import ir

    def with_all(volatile_reads: VolatileReads) -> VolatileReads:
        @functools.wraps(volatile_reads)
        def reads(wait: _WaitKernel) -> list[IRNode]:
            found = list(volatile_reads(wait))
            for awaited in torch.utils._pytree.tree_leaves(wait.inputs):
                started = awaited.inputs[0] if isinstance(awaited, ir.MultiOutput) else awaited
                if isinstance(started, ir._CollectiveKernel) and started is not wait:
                    found += [i for i in started.inputs if isinstance(i, ir.IRNode) and i not in found]
            return found

        return reads

    replace(stack, ir._WaitKernel, "get_volatile_reads", with_all)  # 2.11 - 2.15


PAYLOADS_UNTIL_THE_WAIT = Patch(
    "payloads_until_the_wait",
    "torch._inductor.ir._WaitKernel.get_volatile_reads",
    "Inductor keeps the first input of a collective alive until the wait, and reuses the memory of the other inputs "
    "while they are being sent: silently wrong values.",
    "_WaitKernel.get_volatile_reads returns inputs[0] of a collective with one result; one with a list of inputs and "
    "one result, such as a bucket, has more.",
    "2.11 - 2.15",
    _payloads_until_the_wait,
)

OF_COLLECTIVES = (PAYLOADS_UNTIL_THE_WAIT, GRIDS_OF_NO_ROWS, *OF_CUDA_GRAPHS)
"""Put in for good when a trace meets a collective of ours."""


def preserve_node_ordering(graph: torch.fx.Graph, before: Mapping[torch.fx.Node, Sequence[torch.fx.Node]]) -> None:
    """Have Inductor run other nodes before a node that does not read them.

    Args:
        graph: gets the edges that hold this order.
        before: for each node, the nodes that must run first.
    """
    # Heavy, and only a compilation needs it.
    from torch._inductor.fx_passes import control_dependencies  # 2.11 - 2.15

    edges = control_dependencies.control_deps
    for key in {DispatchKey.CompositeExplicitAutograd, DispatchKey.Autograd} - edges.py_kernels.keys():
        edges.py_impl(key)(_called)  # 2.11 cannot run them outside of Inductor
    preserve = control_dependencies.preserve_node_ordering
    preserve(graph, {node: OrderedSet(others) for node, others in before.items()})


def _called(_: object, call: Callable[..., object], *args: object, **kwargs: object) -> object:
    """What a node with such edges does."""
    return call(*args, **kwargs)


def load_inductor() -> None:
    """Import what torch would import when it first compiles with Inductor: the better part of a second of CPU.

    No thread is started by it, so that the process can still be forked.
    """
    importlib.import_module("torch._inductor.compile_fx")  # 2.11 - 2.15


def compile_with_inductor(
    model: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    defaults: Mapping[str, object],
    mode: str | None,
    options: Mapping[str, object],
) -> Callable[..., object]:
    """Compiles with Inductor what Dynamo captured.

    Args:
        model: the captured graph.
        inputs: its example inputs.
        defaults: settings that `mode` and `options` override.
        mode: one of Inductor's modes, which stands for settings that `options` override.
        options: settings.
    """
    # Heavy, and only a compilation needs it.
    from torch._inductor import list_mode_options  # 2.11 - 2.15
    from torch._inductor.compile_fx import compile_fx  # 2.11 - 2.15

    of_mode = {} if mode is None else list_mode_options(mode)
    settings = {**defaults, **of_mode, **options}
    inner = settings.get("custom_partitioner_fn", config.custom_partitioner_fn)
    settings["custom_partitioner_fn"] = around(inner)  # type: ignore[arg-type]
    compiled: Any = compile_fx(model, inputs, config_patches=settings)
    return compiled


def inductor_has(option: str) -> bool:
    """Whether the installed Inductor has a setting of this name."""
    return option in config._config  # type: ignore[attr-defined]  # 2.11 - 2.15
