"""Traces that learn a size late. Private names of torch 2.11 to 2.15.

AOTAutograd traces the forward pass twice. The first trace counts the results. The second records them, together with
the backward pass if there is one. Each size of a sharded result that is a symbol is a result, too.

The second trace may find that a symbol is a number. It learns this from the backward pass: the halves of a `glu` add up
to its input. Or it learns this from the tracer, which notes the strides of each result, and so asks whether there are
two elements: if guards say that a size is at most 5, and `x[3:]` has two elements, the size is 5.

Then the second trace returns fewer results than the first trace counted. The partitioner takes gradients for results of
the forward pass ("Node ... was invalid, but is output"). Without a backward pass, a result is taken for a size. DTensor
has the same fault. The `ShapeEnv` keeps what was learnt, so the next pair of traces agrees.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

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
from torch._inductor import config as _config  # 2.11 - 2.15
from torch.fx import GraphModule

from shardcompile.compat.partitioner import Partition, Partitioner, partition
from shardcompile.compat.patch import replace

if TYPE_CHECKING:
    from torch._functorch._aot_autograd.schemas import AOTGraphCapture, AOTState  # 2.11 - 2.15

_OF_BACKWARD_PASS = (GradAOTOutput, BackwardTokenAOTOutput, PhiloxUpdatedBackwardOffsetAOTOutput)
MOST_TRACES = 4
"""The most pairs of traces. Each further pair means that another symbol is a number; no known program needs three."""

_T = TypeVar("_T")


class _LearntLate(Exception):
    """The two traces disagree on the results of the forward pass."""


def retry_traces(aot: Callable[..., _T]) -> Callable[..., _T]:
    """``aot_module_simplified``, which is called again if its two traces disagree.

    Args:
        aot: torch's function.
    """

    @functools.wraps(aot)
    def traced(mod: object, args: object, *rest: object, **kwargs: object) -> _T:
        parted = _partition_of_shards(cast(Partition, kwargs.get("partition_fn") or default_partition))
        for _ in range(MOST_TRACES - 1):
            with contextlib.ExitStack() as meanwhile, contextlib.suppress(_LearntLate):
                for stage in ("aot_stage2_autograd", "aot_stage2_inference"):
                    replace(meanwhile, graph_compile, stage, _check_parts)  # 2.11 - 2.15
                return aot(mod, args, *rest, **{**kwargs, "partition_fn": _check(parted)})
        return aot(mod, args, *rest, **{**kwargs, "partition_fn": parted})

    return traced


def _partition_of_shards(inner: Partition) -> Partition:
    """A backend's partitioner as `partitioner.partition` has it. Inductor's calls that by its setting."""
    function = inner.func if isinstance(inner, functools.partial) else inner
    if function.__module__.startswith("torch._inductor.") and isinstance(_config.custom_partitioner_fn, Partitioner):
        return inner
    return functools.partial(partition, inner)


def _check(partition: Callable[..., object]) -> Callable[..., object]:
    def checked(joint: GraphModule, inputs: Sequence[object], **kwargs: object) -> object:
        if _forward_results(joint) not in (None, kwargs.get("num_fwd_outputs")):
            raise _LearntLate
        return partition(joint, inputs, **kwargs)

    return checked


def _check_parts(stage: Callable[..., object]) -> Callable[..., object]:
    """Compare the parts of sharded results in the two traces, in order. Equal numbers of parts do not suffice.

    The parts are inner tensors and the sizes that are symbols. If there is no backward pass, nothing else compares
    them.
    """

    @functools.wraps(stage)
    def checked(state: AOTState, captured: AOTGraphCapture, *args: object, **kwargs: object) -> object:
        described = captured.graph_module.graph.output_node().meta.get("desc")
        metas = state.fw_metadata.subclass_fw_graph_out_meta  # 2.11 - 2.15
        if described is not None and metas is not None:
            recorded = [part for d in described if not isinstance(_root(d), _OF_BACKWARD_PASS) for part in _part(d)]
            if recorded != [part for meta in metas for part in _counted(meta)]:
                raise _LearntLate
        return stage(state, captured, *args, **kwargs)

    return checked


def _part(described: object) -> list[object]:
    """The part of a sharded result that a graph result is, in a list; empty if the graph result is no such part."""
    if isinstance(described, SubclassGetAttrAOTOutput):
        return [described.attr]
    if isinstance(described, (SubclassSizeAOTOutput, SubclassStrideAOTOutput)):
        return [(type(described), described.idx)]
    return []


def _counted(meta: object) -> Iterator[object]:
    """The parts of a result as the first trace counted them; a plain tensor has none."""
    for name, inner in getattr(meta, "attrs", {}).items():
        if hasattr(inner, "attrs"):
            yield from _counted(inner)
            continue
        yield name
        yield from _symbols(SubclassSizeAOTOutput, getattr(inner, "size_symbol_placeholders", ()))  # 2.15
        yield from _symbols(SubclassStrideAOTOutput, getattr(inner, "stride_symbol_placeholders", ()))  # 2.15
    yield from _symbols(SubclassSizeAOTOutput, map(_is_symbol, getattr(meta, "outer_size", ())))
    yield from _symbols(SubclassStrideAOTOutput, map(_is_symbol, getattr(meta, "outer_stride", ())))


def _symbols(kind: type, are_symbols: Iterable[bool]) -> Iterator[object]:
    return ((kind, dim) for dim, is_symbol in enumerate(are_symbols) if is_symbol)


def _is_symbol(size: object) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.is_nested_int()


def _forward_results(joint: GraphModule) -> int | None:
    """The number of results of a joint graph that belong to the forward pass; None if the graph does not say.

    The others are gradients. A gradient that nobody wants has no description.
    """
    described = joint.graph.output_node().meta.get("desc")
    if described is None:
        return None
    return sum(1 for d in described if d is not None and not isinstance(_root(d), _OF_BACKWARD_PASS))


def _root(described: object) -> object:
    """The result that a part of a sharded result belongs to."""
    while hasattr(described, "base") and not isinstance(described, _OF_BACKWARD_PASS):
        described = described.base
    return described
