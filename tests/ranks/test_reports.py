"""Reports of compiled functions: what they hold, on real ranks and for a world that does not exist."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.inspect import Report, capture, explain
from shardcompile.testing import rank, world_size

SIZES = {2: [9, 2], 3: [6, 0, 5]}


def points(columns: int = 4) -> sc.ShardTensor:
    mesh, sizes = init_device_mesh("cpu", (world_size(),)), SIZES[world_size()]
    torch.manual_seed(0)
    whole = torch.randn(sum(sizes), columns)
    return sc.ShardTensor.from_local(whole.split(sizes)[rank()].clone(), mesh, [Shard(0)], {0: sizes})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(torch.relu(self.first(x))), 0)  # over the sharded dim


@pytest.mark.ranks(3, timeout=300, processes=False)
def test_explain_runs_a_module_once_and_leaves_its_gradients_alone() -> None:
    x, net = points(), Net()
    report = explain(net, x)
    assert [p.grad for p in net.parameters()] == [None] * 4
    (compilation,) = report.compilations
    assert compilation.function == "Net.forward" and compilation.place.endswith(
        f":{Net.forward.__code__.co_firstlineno}"
    )
    assert [g.side for g in compilation.graphs] == ["forward", "backward"]
    assert (report.rank, report.world_size, report.device, report.error) == (rank(), world_size(), "cpu", "")
    assert not report.graph_breaks and not report.recompiles
    forward, backward = compilation.graphs
    (softmax,) = forward.traced  # its maximum and its sum
    assert softmax.kind == "all_gather"
    assert softmax.redistribution == "P(max) -> R, P(sum) -> R (merge_reductions)"
    assert {c.ranks for c in report.traced} == {tuple(range(world_size()))}
    assert all("self.last(" in c.source and "test_reports.py" in c.source for c in forward.traced)
    assert all(c.module == "" or c.module.endswith("Net") or "L" in c.module for c in forward.traced)
    assert len(backward.traced) == 5  # each parameter's gradient, and the sum in the softmax
    assert {c.global_bytes for c in backward.traced} == {4 * 32, 4 * 8, 4 * 24, 4 * 3}
    assert sorted(m for c in backward.issued for m in c.members) == list(range(len(backward.traced)))
    bucket = max(backward.issued, key=lambda c: len(c.members))
    assert len(bucket.members) >= 4 and any("of " in backward.traced[m].fate for m in bucket.members)
    assert {"dynamo", "joint", "bytecode"} <= compilation.stages.keys()
    assert "aot" in forward.stages and "bucket_all_reduces" in backward.stages and "def call" in forward.stages["code"]


@pytest.mark.ranks(3, timeout=300)
def test_bytes_are_those_of_the_partition() -> None:
    x = points()
    for _ in range(2):  # of sizes that are fixed in the graph, then of sizes that are not
        report = explain(lambda x: x.redistribute(placements=[Replicate()]).to_local() * 2, x)
        (gather,) = report.traced
        assert (gather.kind, gather.global_bytes) == ("all_gather_v", 11 * 4 * 4)
        assert (gather.least_bytes, gather.most_bytes) == (0, 6 * 4 * 4)
        assert gather.dtypes == ("float32",) and gather.mesh_dim == "0"
        assert gather.redistribution.startswith("S(0)[") and gather.redistribution.endswith("-> R")


@pytest.mark.ranks(2, timeout=300)
def test_capture_sees_recompiles_and_graph_breaks() -> None:
    x = points()

    def step(x: Tensor, factor: int) -> Tensor:
        y = x * factor
        torch._dynamo.graph_break()
        return y.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager")
    with capture() as report:
        for factor in (2, 3, 4):
            compiled(x, factor)
    assert len(report.graph_breaks) == 1 and "graph_break" in report.graph_breaks[0]
    assert len(report.recompiles) >= 1 and any("factor" in text for text in report.recompiles)
    assert len(report.graphs) >= 3 and {g.side for g in report.graphs} == {"inference"}
    text = str(report)
    assert "1 graph break," in text and "compiled again: step" in text and "fullgraph=True" in text


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_rows_that_move_are_counted(backend: str | None) -> None:
    """By the table of the destinations: 7 of 11 rows leave, and 6 arrive at one rank, where the mean is 11 in 3."""
    x, destinations = points().requires_grad_(), torch.tensor([0, 2, 2, 2, 1, 0, 2, 2, 1, 2, 0])
    home = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES[3]))
    where = sc.ShardTensor.from_local(destinations.split(SIZES[3])[rank()], x.device_mesh, [Shard(0)], {0: SIZES[3]})

    def there_and_back(x: Any, where: Any) -> Tensor:
        rows, route = sc.route_rows(x, where)
        return route.combine(rows * 2).sum()

    torch._dynamo.reset()
    run = torch.compile(there_and_back, fullgraph=True, backend=backend) if backend else there_and_back
    with capture() as report:
        run(x, where).backward()
    run(x, where)  # nobody counts
    (moved,) = report.moved
    gone = int((home != destinations).sum())
    assert (moved.calls, moved.rows, moved.moved) == (4, 4 * 11, 4 * gone)  # there, back, and the gradients of both
    assert moved.unevenness == pytest.approx(destinations.bincount().max().item() * 3 / 11)
    assert (moved.ranks, moved.row, moved.row_bytes) == ((0, 1, 2), "f32[4]", 16)
    told = f"4 exchanges over ranks 0-2 of f32[4]: {4 * gone} of 44 rows to another rank, {64 * gone} B; at most 1.64 times the mean"
    assert told in str(report)
    assert Report.from_json(report.to_json()).moved == report.moved


@pytest.mark.ranks(2, timeout=300)
def test_capture_after_the_fact_sees_nothing_and_costs_nothing() -> None:
    x = points()
    step = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager", fullgraph=True)
    step(x)
    with capture() as report:
        step(x)
    assert not report.compilations
    assert "nothing compiled" in str(report)


@pytest.mark.nightly
@pytest.mark.ranks(2, timeout=300)
def test_what_is_compiled_later_still_is_reported() -> None:
    x = points()
    net = Net()
    torch._dynamo.reset()
    with capture() as report:
        loss = torch.compile(net, fullgraph=True, dynamic=True)(x).square().sum()
    loss.backward()  # compiled now, if it has not been with the forward pass
    assert [g.side for g in report.compilations[0].graphs] == ["forward", "backward"]


@pytest.mark.ranks(2, timeout=300)
def test_ops_that_gather_are_named_with_their_cost() -> None:
    x = points()
    report = explain(lambda x: torch.pdist(x).sum(), x, backend="aot_eager", backward=False)
    gathered = [c for c in report.traced if c.gathered_for]
    assert [c.gathered_for for c in gathered] == ["aten._pdist_forward.default"]
    assert "aten._pdist_forward.default runs on full tensors on every rank, 176 B gathered" in str(report)


@pytest.mark.ranks(2, timeout=300)
def test_an_error_ends_the_report_and_is_raised() -> None:
    def step(x: Tensor) -> Tensor:
        return (x * 2).nonexistent()

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException), capture() as report:
        torch.compile(step, fullgraph=True, backend="aot_eager")(points())
    assert report.error and "ended by" in str(report)
    with pytest.raises(ValueError, match="no stage is called jont; there are dynamo"), capture(stages=["jont"]):
        pass


@pytest.mark.ranks(2, timeout=300)
def test_save_and_sources(tmp_path: Path) -> None:
    x, net = points(), Net()
    torch._dynamo.reset()
    with capture(sources=tmp_path / "sources") as report:
        torch.compile(net, fullgraph=True, backend="shardcompile")(x).square().sum().backward()
    here = report.save(tmp_path / "report")
    assert here == tmp_path / "report" / f"rank{rank()}"
    assert Report.from_json((here / "report.json").read_text()) == report
    assert (here / "report.txt").read_text() == f"{report}\n"
    json.loads((here / "timeline.json").read_text())
    graphs = {p.name for p in (here / "graphs").iterdir()}
    assert "0_Net_forward_dynamo.py" in graphs and any(n.endswith("_code.py") for n in graphs)
    sources = [p.name for p in (tmp_path / "sources" / f"rank{rank()}").iterdir()]
    assert any(n.startswith("__transformed_code") for n in sources) or report.notes
    assert any("kernel" in n for n in sources)


def test_depyf_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import depyf

    from shardcompile.inspect.debugger import decompile

    def fail(*_: Any) -> None:
        raise KeyError("JUMP_BACKWARD_NO_INTERRUPT")

    monkeypatch.setattr(depyf, "decompile", fail)
    text = decompile(fail.__code__)
    assert "\n" not in text and "cannot decompile" in text and "JUMP_BACKWARD_NO_INTERRUPT" in text


def build(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    sizes = [100, 0, 1, *[37] * (mesh.size() - 3)]
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
    x = sc.ShardTensor.from_local(torch.zeros(sizes[mesh.get_rank()], 64), mesh, [Shard(0)], {0: sizes})
    return lambda x: torch.softmax(net(x), 0).square().sum(), (x,)


def test_explain_for_a_world_that_does_not_exist() -> None:
    report = explain(build, world_size=64, device="cuda")
    assert (report.world_size, report.device) == (64, "cuda")
    assert {c.ranks for c in report.issued} == {tuple(range(64))}
    backward = report.graphs[1]
    assert backward.steps and len(backward.issued) < len(backward.traced)
    for graph in report.graphs:
        assert graph.bound <= graph.total * (1 + 1e-9)
        assert math.isclose(graph.total, graph.compute + graph.exposed)
        assert sum(c.exposed for c in graph.issued) <= graph.exposed * (1 + 1e-9)
    assert explain(build, world_size=64, device="cuda", off=["bucket_all_reduces"]).diff(report)


def test_layers_with_buffers_may_be_copied() -> None:
    modes = []

    def of_copies(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
        layer = nn.BatchNorm1d(4)
        net = nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))
        buffers = [b for module in (layer, net) for b in module.buffers()]
        modes.extend(vars(b)["fake_mode"] for b in buffers)
        assert all(p.requires_grad and isinstance(p, nn.Parameter) for p in net.parameters())
        return net, (sc.rand(7, 4, device_mesh=mesh, placements=[Shard(0)]),)

    report = sc.explain(of_copies, world_size=3, device="cpu")
    assert report.issued
    assert len(modes) == 12 and all(mode is modes[0] for mode in modes)  # a second one frees what the first one holds


def test_reports_of_two_ranks_differ_in_nothing_that_matters() -> None:
    reports = [explain(build, world_size=5, device="cpu", rank=r) for r in (0, 1, 4)]
    for other in reports[1:]:
        assert not reports[0].diff(other).errors


def test_reports_reckon_with_the_largest_shard() -> None:
    def shards(*sizes: int) -> Any:
        def build(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
            x = sc.ShardTensor.from_local(torch.zeros(sizes[mesh.get_rank()], 64), mesh, [Shard(0)], {0: list(sizes)})
            return nn.Linear(64, 64), (x,)

        return build

    even, uneven, other = (
        explain(shards(*sizes), world_size=2, device="cpu", rank=rank)
        for sizes, rank in (((10_000, 10_000), 0), ((15_000, 5_000), 0), ((15_000, 5_000), 1))
    )
    for graphs in zip(even.graphs, uneven.graphs, other.graphs, strict=True):
        mean, slowest, same = (g.compute for g in graphs)
        assert same == slowest and 1.4 * mean < slowest <= 1.5 * mean  # kernels are launched as often


def test_diff_says_what_changed() -> None:
    report = explain(build, world_size=5, device="cpu")
    assert not report.diff(Report.from_json(report.to_json())) and str(report.diff(report)) == "no difference"
    off = report.diff(explain(build, world_size=5, device="cpu", off=["bucket_all_reduces"]))
    assert any("new: all_reduce float32" in text for text in off.words)
    assert ("collectives") in {row[1] for row in off.table}
    wider = report.diff(explain(build, world_size=7, device="cpu"))
    assert wider.words[0] == "world_size: 5 -> 7" and not wider.errors
    other = explain(lambda mesh: (lambda x: x.sum(), build(mesh)[1]), world_size=5, device="cpu", rank=1)
    assert report.diff(other).errors and "ranks 0 and 1 differ" in str(report.diff(other))


def test_explain_refuses_what_makes_no_sense() -> None:
    with pytest.raises(sc.ShardError, match="need world_size"):
        explain(lambda x: x, torch.ones(2), device="cuda")
    with pytest.raises(sc.ShardError, match="nothing runs"):
        explain(build, torch.ones(2), world_size=4)
