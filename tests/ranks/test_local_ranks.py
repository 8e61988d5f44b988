"""`LocalRanks`: functions that no process could import run on ranks."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcompile.testing import LocalRanks, pool
from tests.support.sources import ROOT

pytestmark = pytest.mark.rank_processes  # its ranks are processes

CELL = """
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Shard
import shardcompile as sc

class Half(nn.Module):
    def forward(self, x):
        return x / divisor

divisor = 2

def total(mesh, rows):
    x = sc.ShardTensor.from_local(torch.ones(mesh.get_rank() + rows, 2), mesh, [Shard(0)])
    return torch.ops.aten.sum.default(Half()(x)).full_tensor()

def where(mesh):
    with sc.capture(stages=[]) as report:
        torch.compile(lambda x: x.sum(0), backend="aot_eager")(sc.ones(3, device_mesh=mesh, placements=[Shard(0)]))
        return report.compilations[0].place

def fails_on_one(mesh):
    if mesh.get_rank() == 1:
        raise ValueError("out of points")
    mesh.get_rank()
"""


@pytest.fixture(scope="module")
def cell() -> dict[str, Any]:
    linecache.cache["cell 1"] = (len(CELL), None, CELL.splitlines(keepends=True), "cell 1")
    namespace = {"__name__": "__main__"}
    exec(compile(CELL, "cell 1", "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


def test_functions_and_classes_of_a_cell(ranks: LocalRanks, cell: dict[str, Any]) -> None:
    results = ranks(cell["total"], 4)
    assert all(type(r) is torch.Tensor for r in results)
    assert [r.item() for r in results] == [9.0, 9.0]


def _modules(mesh: Any) -> list[str]:
    """The files of a helper, a tool and this module, as a rank imports them."""
    names = "tests.support.op_check", "tools.fuzz_lines", "tests.ranks.test_local_ranks"
    return [str(importlib.import_module(name).__file__) for name in names]


def test_ranks_import_the_modules_of_the_tests(ranks: LocalRanks) -> None:
    assert ranks(_modules) == [_modules(None)] * 2


@pytest.mark.ranks(2)
def test_ranks_of_the_plugin_import_the_modules_of_the_tests() -> None:
    assert _modules(None) == [
        str(ROOT / "tests" / "support" / "op_check.py"),
        str(ROOT / "tools" / "fuzz_lines.py"),
        str(ROOT / "tests" / "ranks" / "test_local_ranks.py"),
    ]


def test_each_call_starts_from_the_same_seed(ranks: LocalRanks) -> None:
    def draw(mesh: Any) -> float:
        return torch.rand(1).item()

    assert len({*ranks(draw), *ranks(draw)}) == 1


def test_a_report_names_the_line_of_the_cell(ranks: LocalRanks, cell: dict[str, Any]) -> None:
    assert ranks(cell["where"])[0].startswith("cell 1:")


def test_prints_arrive_in_the_order_of_ranks(ranks: LocalRanks, capsys: pytest.CaptureFixture[str]) -> None:
    def speak(mesh: Any) -> None:
        print("a warning", file=sys.stderr)
        print("here", mesh.get_rank())

    ranks(speak)
    assert capsys.readouterr().out == "--- rank 0\nhere 0\n--- rank 1\nhere 1\n"


def test_an_error_names_rank_and_line_and_the_ranks_go_on(ranks: LocalRanks, cell: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed: ValueError: out of points") as raised:
        ranks(cell["fails_on_one"])
    assert 'raise ValueError("out of points")' in str(raised.value)  # its source is in no file
    assert ranks(lambda mesh: mesh.size()) == [2, 2]


def test_a_result_that_does_not_pickle(ranks: LocalRanks) -> None:
    with pytest.raises(RuntimeError, match="rank 0 of 2 failed"):
        ranks(lambda mesh: lambda: 0)


def test_new_ranks_start_after_a_death_and_after_a_lone_collective(
    ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SYNCHRONISE_SECONDS", 3.0)

    def die(mesh: Any) -> None:
        if mesh.get_rank() == 0:
            os._exit(3)

    def alone(mesh: Any) -> None:
        if mesh.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)

    with pytest.raises(RuntimeError, match="rank 0 of 2 died: exit code 3"):
        ranks(die)
    assert ranks(lambda mesh: mesh.get_rank()) == [0, 1]
    with pytest.raises(RuntimeError, match="a collective that others did not join"):
        ranks(alone)
    assert ranks(lambda mesh: mesh.get_rank()) == [0, 1]
