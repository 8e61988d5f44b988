"""Traces that learn a size in the backward pass. Private names of torch 2.11 to 2.15.

AOTAutograd traces the forward pass twice: alone, to count what it returns, then together with the backward pass. Sizes
of a sharded result that are symbols are results of their own. The backward pass may find that a symbol is a number: the
halves of a `glu` have to add up to its input. Then the second trace returns fewer results than were counted. The
partitioner takes gradients for results of the forward pass ("Node ... was invalid, but is output"). DTensor has the
same fault. What was learnt holds from then on, so that another pair of traces agrees.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch._functorch._aot_autograd import graph_compile  # 2.11 - 2.15
from torch._functorch._aot_autograd.descriptors import (  # 2.11 - 2.15
    BackwardTokenAOTOutput,
    GradAOTOutput,
    PhiloxUpdatedBackwardOffsetAOTOutput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.partitioners import default_partition  # 2.11 - 2.15
from torch.fx import GraphModule

from shardcompile.compat.patch import replace

_OF_BACKWARD_PASS = (GradAOTOutput, BackwardTokenAOTOutput, PhiloxUpdatedBackwardOffsetAOTOutput)
MOST_TRACES = 4
"""Each further one has found another symbol to be a number; programs that need more than two are not known."""


class _LearntLate(Exception):
    """The traces do not agree on the results that the forward pass has."""


def tracing_again(aot: Callable[..., Any]) -> Callable[..., object]:
    """``aot_module_simplified``, called again where its two traces disagree.

    Args:
        aot: the function.
    """

    @functools.wraps(aot)
    def traced(mod: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        partition = kwargs.get("partition_fn") or default_partition
        for _ in range(MOST_TRACES - 1):
            with contextlib.ExitStack() as meanwhile, contextlib.suppress(_LearntLate):
                for stage in ("aot_stage2_autograd", "aot_stage2_inference"):
                    replace(meanwhile, graph_compile, stage, _check_parts)  # 2.11 - 2.15
                return aot(mod, args, *rest, **{**kwargs, "partition_fn": _check(partition)})
        return aot(mod, args, *rest, **kwargs)

    return traced


def _check(partition: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(partition)
    def checked(joint: GraphModule, inputs: Sequence[object], **kwargs: object) -> object:
        if _forward_results(joint) not in (None, kwargs.get("num_fwd_outputs")):
            raise _LearntLate
        return partition(joint, inputs, **kwargs)

    return checked


def _check_parts(stage: Callable[..., object]) -> Callable[..., object]:
    """Compare the parts of sharded results in the two traces, in order: an equal number of them does not suffice."""

    @functools.wraps(stage)
    def checked(state: Any, captured: Any, *args: object, **kwargs: object) -> object:
        described = captured.graph_module.graph.output_node().meta.get("desc")
        metas = state.fw_metadata.subclass_fw_graph_out_meta  # 2.11 - 2.15
        if described is not None and metas is not None:
            counted = [part for meta in metas for part in getattr(meta, "attrs", ())]
            parts = [d for d in described if isinstance(d, SubclassGetAttrAOTOutput)]
            if counted != [d.attr for d in parts if not isinstance(_root(d), _OF_BACKWARD_PASS)]:
                raise _LearntLate
        return stage(state, captured, *args, **kwargs)

    return checked


def _forward_results(joint: GraphModule) -> int | None:
    """How many results of a joint graph are those of the forward pass; None if the graph does not say.

    The others are gradients, and nothing is said of one that is not wanted.
    """
    described = joint.graph.output_node().meta.get("desc")
    if described is None:
        return None
    return sum(1 for d in described if d is not None and not isinstance(_root(d), _OF_BACKWARD_PASS))


def _root(described: object) -> object:
    """What a part of a sharded result is a part of."""
    while hasattr(described, "base") and not isinstance(described, _OF_BACKWARD_PASS):
        described = described.base
    return described
