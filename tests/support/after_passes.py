"""Graphs that run as the passes leave them, without Inductor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves

from shardcompile.passes import Pipeline
from shardcompile.passes.pipeline import before_division


def graph_after_passes(off: Sequence[str] = ()) -> Any:
    """A backend that runs the passes and then the graph, node by node: no fusion changes the last bit of anything.

    As in a compilation by Inductor, ops are decomposed, and some passes run on the graph of forward and backward
    together as well.

    Args:
        off: names of passes to leave out.

    Returns:
        The same object for the same names: Dynamo takes what another rank of this process has compiled with the same
        backend only.
    """
    return _backend(tuple(off))


@functools.cache
def _backend(off: tuple[str, ...]) -> Any:
    def partition(joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        before_division(Pipeline(off=off))(joint.graph)
        check_values(joint.graph)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def compiler(module: GraphModule, _: Any) -> Any:
        Pipeline(off=off)(module.graph)
        check_values(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiler, partition_fn=partition, decompositions=select_decomp_table())


def check_values(graph: Graph) -> None:
    """Each node's fake value has the dtype and the number of dims that its op gives for its inputs.

    Fake values are made when a node is added. What a pass puts in the place of a node may be of another kind, which
    some kernels refuse, and others take.
    """
    for node in graph.nodes:
        found = node.meta.get("val")
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not kinds(found):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        mode = next(x.fake_mode for x in tree_leaves(found) if isinstance(x, FakeTensor))
        with mode, mode.shape_env.ignore_fresh_unbacked_symbols():
            again = node.target(*args, **kwargs)
        assert kinds(again) == kinds(found), f"{node.format_node()}: {kinds(found)}, but its inputs give {kinds(again)}"


def kinds(values: Any) -> list[tuple[torch.dtype, int]]:
    """Dtypes and numbers of dims of tensors."""
    return [(x.dtype, x.ndim) for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
