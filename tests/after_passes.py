"""Graphs that run as the passes leave them, without Inductor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from shardcompile.passes import Pipeline
from shardcompile.passes.pipeline import before_division


def graph_after_passes(off: Sequence[str] = ()) -> Any:
    """A backend that runs the passes and then the graph, node by node: no fusion changes the last bit of anything.

    As in a compilation by Inductor, some passes run on the graph of forward and backward together as well.

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
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def compiler(module: GraphModule, _: Any) -> Any:
        Pipeline(off=off)(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiler, partition_fn=partition)
