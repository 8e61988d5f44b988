"""Traces that learn a size late. Private names of torch 2.11 to 2.15.

AOTAutograd traces the forward pass twice: once to count what it returns, then to record it, together with the backward
pass if there is one. Sizes of a sharded result that are symbols are results of their own. The second trace may find
that a symbol is a number. The backward pass tells it so: the halves of a `glu` have to add up to its input. So does the
tracer: it notes how each result lies in memory, for which it asks whether there are two elements. Where guards have
told that an extent is at most 5, and `x[3:]` has two elements, it is 5.

Then the second trace returns fewer results than were counted. The partitioner takes gradients for results of the
forward pass ("Node ... was invalid, but is output"). Without a backward pass the next result is taken for a size.
DTensor has the same fault. What was learnt holds from then on, so that another pair of traces agrees.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd import graph_compile  # 2.11 - 2.15
from torch._functorch._aot_autograd.descriptors import (  # 2.11 - 2.15
    BackwardTokenAOTOutput,
    GradAOTOutput,
    PhiloxUpdatedBackwardOffsetAOTOutput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTOutput,
    SubclassStrideAOTOutput,
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
    """Compare the parts of sharded results in the two traces, in order: an equal number of them does not suffice.

    They are inner tensors and the sizes that are symbols. Where there is no backward pass nothing else compares them.
    """

    @functools.wraps(stage)
    def checked(state: Any, captured: Any, *args: object, **kwargs: object) -> object:
        described = captured.graph_module.graph.output_node().meta.get("desc")
        metas = state.fw_metadata.subclass_fw_graph_out_meta  # 2.11 - 2.15
        if described is not None and metas is not None:
            recorded = [part for d in described if not isinstance(_root(d), _OF_BACKWARD_PASS) for part in _part(d)]
            if recorded != [part for meta in metas for part in _counted(meta)]:
                raise _LearntLate
        return stage(state, captured, *args, **kwargs)

    return checked


def _part(described: object) -> list[object]:
    """Which part of a sharded result a result of the graph is; empty if it is none."""
    if isinstance(described, SubclassGetAttrAOTOutput):
        return [described.attr]
    if isinstance(described, (SubclassSizeAOTOutput, SubclassStrideAOTOutput)):
        return [(type(described), described.idx)]
    return []


def _counted(meta: Any) -> Iterator[object]:
    """The parts of a result as they were counted; of a plain tensor none."""
    for name, inner in getattr(meta, "attrs", {}).items():
        if hasattr(inner, "attrs"):
            yield from _counted(inner)
            continue
        yield name
        yield from _symbols(SubclassSizeAOTOutput, getattr(inner, "size_symbol_placeholders", ()))  # 2.15
        yield from _symbols(SubclassStrideAOTOutput, getattr(inner, "stride_symbol_placeholders", ()))  # 2.15
    if hasattr(meta, "attrs"):
        yield from _symbols(SubclassSizeAOTOutput, map(_is_symbol, meta.outer_size))
        yield from _symbols(SubclassStrideAOTOutput, map(_is_symbol, meta.outer_stride))


def _symbols(kind: type, are_symbols: Iterable[bool]) -> Iterator[object]:
    return ((kind, dim) for dim, is_symbol in enumerate(are_symbols) if is_symbol)


def _is_symbol(size: object) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.is_nested_int()


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
