"""Traces of one function that have other results are told apart, also where they have as many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTOutput,
)
from torch.fx import Graph, GraphModule

from shardcompile.compat import late_sizes


def captured(*parts: tuple[int, str]) -> Any:
    """A joint graph with parts of sharded results, a plain result, and a part of a gradient."""
    graph = Graph()
    graph.output(()).meta["desc"] = [
        *(SubclassGetAttrAOTOutput(PlainAOTOutput(n), part) for n, part in parts),
        PlainAOTOutput(len(parts)),
        SubclassGetAttrAOTOutput(GradAOTOutput(PlainAOTInput(0)), "_local_tensor"),
    ]
    return SimpleNamespace(graph_module=GraphModule({}, graph))


def counted(*results: list[str]) -> Any:
    metas = [SimpleNamespace(attrs=dict.fromkeys(parts)) for parts in results]
    return SimpleNamespace(fw_metadata=SimpleNamespace(subclass_fw_graph_out_meta=[*metas, SimpleNamespace()]))


def test_parts_of_results_are_compared_in_order() -> None:
    stage = late_sizes._check_parts(lambda state, graph: "compiled")
    both = ["_local_tensor", "_cut_keys"]
    assert stage(counted(both), captured((0, "_local_tensor"), (0, "_cut_keys"))) == "compiled"
    with pytest.raises(late_sizes._LearntLate):
        stage(counted(both), captured((0, "_local_tensor")))
    with pytest.raises(late_sizes._LearntLate):  # as many in all
        stage(
            counted(both, ["_local_tensor"]),
            captured((0, "_local_tensor"), (1, "_local_tensor"), (1, "_cut_keys")),
        )
