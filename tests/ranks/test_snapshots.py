"""Golden snapshots and budgets: what has to turn them red does, with a text that names it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.inspect import Report, explain
from shardcompile.testing import rank
from shardcompile.testing.snapshot import assert_graph, snapshot_of
from tests.support.tiers import often

SIZES = [700, 0, 324]


class Net(nn.Module):
    """Gathers what it attends to, which hides behind two products."""

    def __init__(self, gathers: int = 1, late: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.gathers, self.late = gathers, late
        self.key, self.first, self.second = (nn.Linear(64, 64, dtype=dtype) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.first(x)))
        keys = self.key(x + hidden if self.late else x)
        for _ in range(self.gathers):
            keys = keys.redistribute(placements=[Replicate()]) + 1
            keys = keys.redistribute(placements=[Shard(0)]) if self.gathers > 1 else keys
        return torch.softmax(hidden @ keys.mT, 1) @ keys if self.gathers == 1 else hidden + keys[:, :1]


def shard(mesh: Any, rank_: int) -> sc.ShardTensor:
    return sc.ShardTensor.from_local(torch.zeros(SIZES[rank_], 64), mesh, [Shard(0)], {0: SIZES})


def traced(make: Callable[[], nn.Module] = Net, **options: Any) -> Report:
    def build(mesh: Any) -> tuple[nn.Module, tuple[sc.ShardTensor]]:
        net = make()
        return net, (shard(mesh, mesh.get_rank()).to(next(net.parameters()).dtype),)

    return explain(build, world_size=3, device="cuda", backward=False, **options)


EXPECTED = """
    1 graph, 1 collective, 262144 B
    0 Net.forward inference
      all_gather_v float32 262144 B over 0-2; S(0)[?] -> R; behind 2 mm
"""


def test_a_snapshot_that_fits() -> None:
    report = assert_graph(
        traced(),
        expected=EXPECTED,
        max_bytes=262144,
        max_collectives=1,
        max_graphs=1,
        max_exposed=1.0,
        no_gather_of=["aten.sort", "layers.7"],
    )
    assert "\n".join(f"    {line}" for line in snapshot_of(report).splitlines()) == EXPECTED.strip("\n")


def failure(report: Report, **arguments: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_graph(report, **arguments)
    return str(caught.value)


def test_an_extra_gather_is_named() -> None:
    text = failure(traced(lambda: Net(gathers=2)), expected=EXPECTED)
    assert "the communication is not what the snapshot says" in text
    assert "+ 1 graph, 4 collectives" in text or "+ 1 graph, " in text
    assert "test_snapshots.py" in text and "redistribute(placements=[Replicate()])" in text


def test_a_doubled_byte_count_is_named() -> None:
    text = failure(traced(lambda: Net(dtype=torch.float64)), expected=EXPECTED)
    assert "-   all_gather_v float32 262144 B" in text and "+   all_gather_v float64 524288 B" in text


def test_a_lost_overlap_is_named() -> None:
    text = failure(traced(lambda: Net(late=True)), expected=EXPECTED)
    assert "-   all_gather_v float32 262144 B over 0-2; S(0)[?] -> R; behind 2 mm" in text
    assert "+   all_gather_v float32 262144 B over 0-2; S(0)[?] -> R   <- " in text


def test_budgets_name_what_is_over() -> None:
    report = traced()
    for budget in (
        {"max_bytes": 262143},
        {"max_collectives": 0},
        {"max_exposed": 0.0},
        {"no_gather_of": ["redistribute("]},
    ):
        text = failure(report, **budget)
        assert "all_gather_v" in text and "test_snapshots.py" in text
    assert "over max_graphs=0: 0 Net.forward inference" in failure(report, max_graphs=0)
    assert "there is no snapshot" in failure(report, snapshot="no-such-file")


@pytest.mark.ranks(3, timeout=300)
def test_a_new_graph_is_named() -> None:
    x = shard(init_device_mesh("cpu", (3,)), rank())

    def step(x: Tensor) -> Tensor:
        y = x.sum()
        torch._dynamo.graph_break()
        return y * 2

    with pytest.raises(AssertionError, match="2 graphs, over max_graphs=1") as caught:
        assert_graph(step, x, max_graphs=1, backend="aot_eager")
    assert "graph_break" in str(caught.value)


@pytest.mark.ranks(3, timeout=300)
def test_a_collective_on_one_rank_only_is_found_before_it_hangs() -> None:
    x = shard(init_device_mesh("cpu", (3,)), rank())
    with pytest.raises(Exception, match="different collectives"):
        assert_graph(lambda x: x.softmax(0) if rank() else x.softmax(0).sum(1).softmax(0), x)


TESTS = '''
import pytest, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
import shardcompile as sc
from shardcompile.testing import rank
from shardcompile.testing.snapshot import assert_graph

def points():
    return sc.ShardTensor.from_local(torch.ones(5 - 2 * rank(), 4), init_device_mesh("cpu", (2,)), [Shard(0)])

@pytest.mark.ranks(2, processes=PROCESSES)
def test_file():
    assert_graph(lambda x: x.softmax(0), points(), snapshot="softmax-2", backend="aot_eager")

@pytest.mark.ranks(2, processes=PROCESSES)
def test_inline():
    assert_graph(lambda x: x.softmax(0), points(), expected="""
    """, backend="aot_eager")
    assert_graph(
        lambda x: x * 2, points(), expected="out of date", backend="aot_eager",
    )
'''


@pytest.mark.parametrize("processes", often([False, True], 0))
def test_one_flag_accepts_what_is_found(processes: bool, tmp_path: Path) -> None:
    path = tmp_path / "test_mine.py"
    path.write_text(TESTS.replace("PROCESSES", str(processes)))

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        # Blocked under its installed name and loaded by its module: the plugin need not be installed.
        plugin = ["-p", "no:shardcompile", "-p", "shardcompile.testing.plugin", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, *flags, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    accepted = run("--update-snapshots")
    assert accepted.returncode == 0, accepted.stdout
    assert (tmp_path / "snapshots" / "softmax-2.txt").read_text().startswith("1 graph, 2 collectives, 32 B\n")
    assert 'expected="""\n' in path.read_text() and "out of date" not in path.read_text()
    compile(path.read_text(), path, "exec")
    if processes:  # at night
        again = run()
        assert again.returncode == 0 and "2 passed" in again.stdout, again.stdout + path.read_text()
