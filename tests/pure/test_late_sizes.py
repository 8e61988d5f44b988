"""Traces of one function that have other results are told apart, also where they have as many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTOutput,
    SubclassSizeAOTOutput,
    SubclassStrideAOTOutput,
)
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardcompile.compat import late_sizes

BOTH = ["_local_tensor", "_partition_keys"]


def captured(*parts: tuple[int, str | tuple[type, int]]) -> Any:
    """A joint graph with parts of sharded results, a plain result, and a part and a size of a gradient."""

    def described(base: Any, part: str | tuple[type, int]) -> Any:
        return SubclassGetAttrAOTOutput(base, part) if isinstance(part, str) else part[0](base, part[1])

    gradient = GradAOTOutput(PlainAOTInput(0))
    graph = Graph()
    graph.output(()).meta["desc"] = [
        *(described(PlainAOTOutput(n), part) for n, part in parts),
        PlainAOTOutput(len(parts)),
        *(described(gradient, part) for part in ("_local_tensor", (SubclassSizeAOTOutput, 0))),
    ]
    return SimpleNamespace(graph_module=GraphModule({}, graph))


def counted(*results: list[str], size: tuple[Any, ...] = (5, 2), stride: tuple[Any, ...] = (2, 1)) -> Any:
    metas = [
        SimpleNamespace(
            attrs={name: SimpleNamespace() for name in parts},
            outer_size=size,
            outer_stride=stride,
        )
        for parts in results
    ]
    return SimpleNamespace(fw_metadata=SimpleNamespace(subclass_fw_graph_out_meta=[*metas, SimpleNamespace()]))


def stage(state: Any, graph: Any) -> object:
    return late_sizes._check_parts(lambda state, graph: "compiled")(state, graph)


def symbol() -> torch.SymInt:
    return ShapeEnv().create_unbacked_symint()


def test_parts_of_results_are_compared_in_order() -> None:
    assert stage(counted(BOTH), captured((0, "_local_tensor"), (0, "_partition_keys"))) == "compiled"
    with pytest.raises(late_sizes._LearntLate):
        stage(counted(BOTH), captured((0, "_local_tensor")))
    with pytest.raises(late_sizes._LearntLate):  # as many in all
        stage(
            counted(BOTH, ["_local_tensor"]),
            captured((0, "_local_tensor"), (1, "_local_tensor"), (1, "_partition_keys")),
        )


def test_sizes_that_are_symbols_are_compared() -> None:
    state = counted(["_local_tensor"], size=(symbol(), symbol()), stride=(symbol(), 1))
    shard, rows, columns = (0, "_local_tensor"), (0, (SubclassSizeAOTOutput, 0)), (0, (SubclassSizeAOTOutput, 1))
    step = (0, (SubclassStrideAOTOutput, 0))
    assert stage(state, captured(shard, rows, columns, step)) == "compiled"
    for learnt in ([shard, columns, step], [shard, rows], [shard]):
        with pytest.raises(late_sizes._LearntLate):
            stage(state, captured(*learnt))
    with pytest.raises(late_sizes._LearntLate):  # as many in all
        stage(counted(["_local_tensor"], size=(symbol(), 2)), captured(shard, columns))


def test_sizes_of_inner_tensors_are_compared() -> None:
    """Torch 2.15 returns them, too."""
    state = counted(BOTH)
    inner = state.fw_metadata.subclass_fw_graph_out_meta[0].attrs["_local_tensor"]
    inner.size_symbol_placeholders, inner.stride_symbol_placeholders = (True, False), (False, False)
    parts = [(0, "_local_tensor"), (0, (SubclassSizeAOTOutput, 0)), (0, "_partition_keys")]
    assert stage(state, captured(*parts)) == "compiled"
    with pytest.raises(late_sizes._LearntLate):
        stage(state, captured(*parts[::2]))
