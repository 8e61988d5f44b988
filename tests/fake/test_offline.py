"""Offline tracing: the graphs of ranks that do not exist, for a GPU that is not there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.placement_types import Shard
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardcompile as sc
from shardcompile.compat import saved_for_backward
from shardcompile.inspect.offline import OfflineError, absent_cuda, offline_world, trace_offline, trace_step
from shardcompile.passes import Pipeline
from shardcompile.passes.graph.collective import collectives
from tests.support.tiers import needs_compiler, often

CHANNELS = 16
DEVICES = ["cpu", pytest.param("cuda", marks=needs_compiler)]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (x + self.out(torch.softmax(q @ k.T, -1) @ v)).square().mean()


class TwoHeads(Attention):
    """By torch's fused op. With rows on all ranks the heads are put on different ranks, as far as there are some."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(0, 1).unsqueeze(0) for t in self.qkv(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v)
        return (x + self.out(heads.squeeze(0).transpose(0, 1).flatten(1))).square().mean()


def on_rows(net: type[nn.Module], sizes: Callable[[int], Sequence[int]]) -> Any:
    """A `build` for a module on rows that are sharded into shards of `sizes(world_size)`."""

    def build(mesh: DeviceMesh) -> Any:
        partition = list(sizes(mesh.size()))
        local = torch.randn(partition[mesh.get_local_rank()], CHANNELS)
        return net(), (sc.ShardTensor.from_local(local, mesh, [Shard(0)], {0: partition}),)

    return build


def uneven(world_size: int) -> list[int]:
    return [(37 * r) % 64 + 33 for r in range(world_size)]


def devices_of(graph: Graph) -> set[str]:
    values = [n.meta.get("val") for n in graph.nodes]
    return {str(v.device) for v in values if isinstance(v, Tensor)}


def targets_of(graph: Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


def double(mesh: DeviceMesh) -> Any:
    return (lambda x: (2 * x).sum()), (torch.randn(3, requires_grad=True),)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, the process is then what it was."""
    before = torch.accelerator.current_accelerator()
    yield
    assert not dist.is_initialized()
    assert torch.accelerator.current_accelerator() == before
    assert not torch.fx.experimental._config.backed_size_oblivious
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.empty(1, device="cuda")
        with pytest.raises((RuntimeError, AssertionError)):
            torch.cuda.current_device()
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not torch.autocast("cuda", torch.bfloat16)._enabled


@pytest.mark.parametrize(
    ("net", "device"),
    [
        (MLP, "cpu"),
        pytest.param(MLP, "cuda", marks=needs_compiler),
        *(pytest.param(net, "cuda", marks=[needs_compiler, pytest.mark.nightly]) for net in (Attention, TwoHeads)),
        *(pytest.param(net, "cpu", marks=pytest.mark.nightly) for net in (Attention, TwoHeads)),
    ],
)
def test_a_step_is_traced_for_any_world_size(net: type[nn.Module], device: str) -> None:
    nodes = []
    # What the passes do depends on prices, and how attention is sharded on which sizes the ranks divide evenly.
    for world_size, passes in ((4, None), (256, []), (1024, [])):
        start = time.perf_counter()
        trace = trace_offline(on_rows(net, uneven), world_size=world_size, device=device, passes=passes)
        seconds = time.perf_counter() - start
        assert trace.backward is not None
        nodes.append((len(trace.forward.graph.nodes), len(trace.backward.graph.nodes)))
        print(f"{net.__name__} {device} world {world_size}: {nodes[-1]} nodes, {seconds:.1f} s")
        for graph in (trace.forward.graph, trace.backward.graph):
            graph.lint()
            assert devices_of(graph) == {"cuda:0" if device == "cuda" else "cpu"}
        assert trace.collectives
        assert all(c.ranks == tuple(range(world_size)) for c in trace.collectives)
    assert nodes[1] == nodes[2]


@needs_compiler
@pytest.mark.parametrize("sizes", often([[5, 0, 1, 7], [0, 0, 64, 0]], 1), ids=str)
@pytest.mark.parametrize(
    "net, passes",
    often([(MLP, None), (TwoHeads, None), (Attention, None), (MLP, []), (Attention, []), (TwoHeads, [])], 1),
)
def test_all_ranks_issue_the_same_collectives(net: type[nn.Module], passes: list[Any] | None, sizes: list[int]) -> None:
    build = on_rows(net, lambda _: sizes)
    traces = [trace_offline(build, world_size=4, rank=r, passes=passes) for r in range(4)]
    assert [t.rank for t in traces] == [0, 1, 2, 3]
    assert len({t.forward_collectives for t in traces}) == 1, "\n".join(map(str, traces))
    assert len({t.backward_collectives for t in traces}) == 1, "\n".join(map(str, traces))


def test_ranks_that_do_not_are_told_apart() -> None:
    def build(mesh: DeviceMesh) -> Any:
        net, inputs = on_rows(MLP, uneven)(mesh)
        first = mesh.get_local_rank() == 0
        return (lambda x: net(x) if first else net(x.redistribute(placements=[Shard(1)]))), inputs

    one, other = (trace_offline(build, world_size=4, rank=r, device="cpu") for r in (0, 1))
    assert one.collectives != other.collectives


@pytest.mark.parametrize("device", DEVICES)
def test_the_process_goes_on_as_before(device: str) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: Tensor) -> Tensor:
        return (3 * x).relu().sum()

    def gradient() -> Tensor:
        x = torch.tensor([1.0, -1.0], requires_grad=True)
        loss(x).backward()
        assert x.grad is not None
        return x.grad

    assert gradient().tolist() == [3, 0]
    state = torch.get_rng_state()
    first, second = (trace_offline(on_rows(MLP, uneven), world_size=4, device=device) for _ in range(2))
    assert first.collectives == second.collectives
    assert str(first) == str(second)
    assert torch.equal(torch.get_rng_state(), state)
    assert gradient().tolist() == [3, 0]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    dist.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
def test_a_build_that_fails_leaves_nothing_behind(device: str) -> None:
    def build(mesh: DeviceMesh) -> Any:
        on_rows(MLP, uneven)(mesh)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trace_offline(build, world_size=4, device=device)
    assert trace_offline(double, world_size=4, device=device).collectives == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is compiled")
def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(absent_cuda, "_library", absent_cuda._library.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OfflineError, match=r"no-such-compiler is not there\. Install one .*device='cpu' needs none"):
        trace_offline(double, world_size=2)
    assert trace_offline(double, world_size=2, device="cpu").backward is not None
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    with pytest.raises(OfflineError, match=r"CXX names it.*device='cpu', which needs no library"):
        trace_offline(double, world_size=2)


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is compiled")
def test_what_was_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(absent_cuda, "_library", absent_cuda._library.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trace_offline(double, world_size=2)
    (library,) = (tmp_path / "shardcompile").iterdir()
    written = library.stat().st_mtime_ns
    trace_offline(double, world_size=2)
    assert [p.stat().st_mtime_ns for p in (tmp_path / "shardcompile").iterdir()] == [written]


def test_a_process_group_that_is_there_is_not_replaced() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(OfflineError, match=r"this process has one already \(fake, 2 ranks\)"):
            trace_offline(double, world_size=2, device="cpu")
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rank": 4}, "no rank 4 in a world of 4"),
        ({"mesh_shape": (2, 3)}, r"shape \(2, 3\) has 6 ranks, but world_size is 4"),
        ({"device": "tpu"}, 'device="cuda" or "cpu", not \'tpu\''),
        ({"off": ["no such pass"]}, "no pass is called no such pass"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sc.ShardError, match=message):
        trace_offline(double, **{"world_size": 4, "device": "cpu", **arguments})


def test_shard_sizes_must_be_stated() -> None:
    def build(mesh: DeviceMesh) -> Any:
        return MLP(), (sc.ShardTensor.from_local(torch.randn(3, CHANNELS), mesh, [Shard(0)]),)

    with pytest.raises(OfflineError, match=r"state all shard sizes"):
        trace_offline(build, world_size=4, device="cpu")


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda mesh: ((lambda: 3), ()), "nothing to trace"),
        (lambda mesh: (MLP(), torch.ones(2)), "must return a function and a tuple of its arguments, got MLP and"),
    ],
)
def test_what_cannot_be_traced(build: Any, message: str) -> None:
    with pytest.raises(OfflineError, match=message):
        trace_offline(build, world_size=2, device="cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_inference_has_no_backward(device: str) -> None:
    trace = trace_offline(on_rows(MLP, uneven), world_size=8, device=device, backward=False)
    assert trace.backward is None and trace.backward_collectives == ()
    assert trace.collectives == trace.forward_collectives


@needs_compiler
def test_what_the_forward_pass_saved_is_told_from_inputs_and_gradients() -> None:
    trace = trace_offline(on_rows(MLP, uneven), world_size=4, device="cpu")
    assert trace.backward is not None
    forward, backward = trace.forward.graph, trace.backward.graph
    (out,) = (n for n in forward.nodes if n.op == "output")
    made = {n.name for n in out.all_input_nodes if n.op == "call_function"}
    freed = {n.name for n in saved_for_backward(backward)}
    assert len(freed) > 3 and freed < made
    weights = {n.name for n in backward.find_nodes(op="placeholder")} - freed
    assert {n.partition("_")[0] for n in weights} == {"primals", "tangents"}
    assert not saved_for_backward(forward)


def test_groups_of_a_mesh_and_the_kernel_for_attention() -> None:
    def build(mesh: DeviceMesh) -> Any:
        x = torch.randn(2, 4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        group = mesh.get_group("columns").group_name

        def attend(x: Tensor) -> Tensor:
            start = torch.ops._c10d_functional.all_reduce(F.scaled_dot_product_attention(x, x, x), "sum", group)
            return torch.ops._c10d_functional.wait_tensor(start)

        return attend, (x,)

    trace = trace_offline(build, world_size=64, mesh_shape=(8, 8), mesh_dim_names=("rows", "columns"), rank=13)
    assert "aten._scaled_dot_product_flash_attention.default" in targets_of(trace.forward.graph)
    (reduction,) = trace.forward_collectives
    assert reduction.ranks == tuple(range(8, 16))
    assert reduction.dtypes == (torch.bfloat16,) and reduction.global_bytes == 2 * 2 * 4 * 64 * 64
    assert "all_reduce bfloat16 65536 B, ranks 8-15" in str(trace)


@needs_compiler
def test_autocast_is_on() -> None:
    def build(mesh: DeviceMesh) -> Any:
        def product(x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return x @ x

        return product, (torch.randn(4, 4),)

    graph = trace_offline(build, world_size=2).forward.graph
    (out,) = next(n for n in graph.nodes if n.op == "output").args[0]
    assert out.meta["val"].dtype is torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
def test_modules_are_moved_and_converted_as_people_write_it(device: str) -> None:
    """Parameters that two modules share stay shared, and types are those that were asked for."""
    seen: list[Any] = []

    def build(mesh: DeviceMesh) -> tuple[Callable[..., Any], Sequence[Any]]:
        first, last = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        last.weight = first.weight
        model = nn.Sequential(first, nn.BatchNorm1d(CHANNELS), last).to(mesh.device_type)
        model = model.to(mesh.device_type, torch.bfloat16)
        seen[:] = [last.weight is first.weight, {p.dtype for p in model.parameters()}, model[1].running_mean.dtype]
        x = sc.randn(9, CHANNELS, device_mesh=mesh, placements=[Shard(0)], dtype=torch.bfloat16)
        return lambda x: model[2](model[0](x)).square().mean(), (x,)

    with offline_world(4, device=device) as world:
        trace_step(world, build)
    assert seen == [True, {torch.bfloat16}, torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
def test_truncated_normals_are_not_asked_for_their_values(device: str) -> None:
    """Models of images begin with them, and torch looks at the values to draw some again."""

    def build(mesh: DeviceMesh) -> tuple[Callable[..., Any], Sequence[Any]]:
        model = nn.Linear(CHANNELS, CHANNELS)
        nn.init.trunc_normal_(model.weight, std=0.02)
        x = sc.randn(9, CHANNELS, device_mesh=mesh, placements=[Shard(0)])
        return lambda x: model(x).square().mean().full_tensor(), (x,)

    trace = trace_offline(build, world_size=4, device=device)
    assert [c.kind for c in trace.forward_collectives] == ["all_reduce"]


@pytest.mark.parametrize("device", DEVICES)
def test_dtensors_are_traced(device: str) -> None:
    def build(mesh: DeviceMesh) -> Any:
        x = DTensor.from_local(torch.randn(3, CHANNELS), mesh, [Shard(0)])
        return (lambda x: net(x).full_tensor()), (x,) if (net := distribute_module(MLP(), mesh)) else ()

    trace = trace_offline(build, world_size=4, device=device)
    assert [c.kind for c in trace.forward_collectives] == ["all_reduce"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_dtensors_are_exchanged_as_they_are(device: str, rank: int) -> None:
    """On a GPU by DTensor's own op, on a CPU by a gather of which every rank takes its part."""

    def build(mesh: DeviceMesh) -> Any:
        rows = [2, 2, 1, 0][rank]
        x = DTensor.from_local(torch.randn(rows, 7), mesh, [Shard(0)], shape=(5, 7), stride=(7, 1)).requires_grad_()
        return (lambda x: x.redistribute(placements=[Shard(1)]).to_local() ** 3), (x,)

    trace = trace_offline(build, world_size=4, rank=rank, device=device, foreign=True)
    assert [c.kind for c in trace.collectives] == ["all_to_all_v"] * 2
    assert [c.global_bytes for c in trace.collectives] == [4 * 5 * 7] * 2
    assert trace.backward is not None
    targets = {n.target for g in (trace.forward, trace.backward) for n in g.graph.nodes}
    assert torch.ops._dtensor.shard_dim_alltoall.default not in targets
    assert not targets & {torch.ops.aten.constant_pad_nd.default, torch.ops.aten.slice.Tensor}


@needs_compiler
def test_passes_by_name_and_work_in_the_world() -> None:
    build = on_rows(MLP, uneven)
    bucketed, bare = trace_offline(build, world_size=8), trace_offline(build, world_size=8, passes=[])
    assert len(bucketed.collectives) < len(bare.collectives)
    with offline_world(8) as world:
        assert (world.world_size, world.rank, world.device) == (8, 0, "cuda")
        trace = trace_step(world, build, pipeline=Pipeline([]), inductor=False)
        assert trace.collectives == bare.collectives
        assert trace.backward is not None
        Pipeline()(trace.backward.graph)
        assert len(collectives(trace.backward.graph)) == len(bucketed.backward_collectives)


@pytest.mark.parametrize("inductor", [False, True])
def test_a_pass_that_fails_is_named(inductor: bool) -> None:
    class Broken:
        name = "broken"

        def __call__(self, graph: Graph) -> None:
            raise ValueError("it broke")

    with pytest.raises(sc.ShardError, match="broken") as error:
        trace_offline(double, world_size=2, device="cpu", passes=[Broken()], inductor=inductor)
    assert "it broke" in str(error.value)


def test_weights_are_distributed_as_on_real_ranks() -> None:
    """Without values the copies of all ranks count as the same."""

    def build(mesh: DeviceMesh) -> tuple[Any, tuple[Any, ...]]:
        model = nn.Linear(7, 5)
        for name, p in list(model.named_parameters()):
            setattr(
                model, name, nn.Parameter(sc.distribute_tensor(p, mesh, [Shard(0)], sharding_shapes={0: [3, 0, 2]}))
            )
        return model, (torch.zeros(4, 7),)

    trace = trace_offline(build, world_size=3, device="cpu", passes=[], inductor=False)
    assert trace.forward is not None and trace.backward is not None
