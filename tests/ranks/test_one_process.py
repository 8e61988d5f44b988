"""All ranks in one process: the same values, collectives and errors as on processes, and what only threads can do."""

from __future__ import annotations

import io
import pdb
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends import common
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile import config
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import LocalRanks, mesh, once, rank, world_size
from shardcompile.testing.scheduler import RanksWaitError
from tests.support.programs import program, records, records_on_square
from tests.support.tiers import often

PARTITIONS = [[5, 0, 2], [1, 1, 7], [0, 9, 0], [3, 3, 1]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(3, processes=False) as threads:
        yield threads


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalRanks]:
    with LocalRanks(3) as pool:
        yield pool


# The same as on processes


def same_records(one: LocalRanks, other: LocalRanks, run: Any, seeds: list[int]) -> None:
    """Compare every step of programs on every rank: layouts, bytes of shards and gradients, collectives, errors."""
    found, expected = one(run, seeds, timeout=600), other(run, seeds, timeout=600)
    for here, there in zip(found, expected, strict=True):
        for seed, got, want in zip(seeds, here, there, strict=True):
            assert got == want, str(program(seed))


@pytest.mark.rank_processes
def test_programs_give_the_same_bit_for_bit(ranks: LocalRanks, processes: LocalRanks) -> None:
    same_records(ranks, processes, records, list(range(40)))


@pytest.mark.nightly
@pytest.mark.rank_processes
@pytest.mark.parametrize(("run", "size"), [(records, 2), (records, 3), (records_on_square, 4)])
def test_two_hundred_programs_give_the_same_bit_for_bit(run: Any, size: int) -> None:
    with LocalRanks(size) as processes:
        same_records(LocalRanks(size, processes=False), processes, run, list(range(200)))


def reductions(mesh: DeviceMesh) -> list[Any]:
    """Sums of random numbers, whose last bits tell the order of additions; and what gloo refuses."""
    told: list[Any] = []
    for count in (1, 5, 13, 1000, 100_003):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
                torch.manual_seed(rank() * 77 + count)
                x = torch.randn(count).to(dtype)
                dist.all_reduce(x, op)
                told.append(x)
    x = torch.tensor([1.0, float("nan"), 3.0]) * (rank() + 1)
    dist.all_reduce(x, dist.ReduceOp.MIN)
    told.append(x)
    for dtype in (torch.int16, torch.bool):
        try:
            x = torch.ones(3).to(dtype)
            dist.all_reduce(x)
            told.append(x)
        except RuntimeError as error:
            told.append(str(error))
    return told


def collectives(mesh: DeviceMesh) -> list[Any]:
    """Every collective of `torch.distributed`, and messages."""
    n, me = world_size(), rank()
    mine = torch.arange(4.0) + 10 * me
    gathered, one = [torch.empty(4) for _ in range(n)], torch.empty(4 * n)
    dist.all_gather(gathered, mine)
    dist.all_gather_into_tensor(one, mine)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * n) * (me + 1))
    first = mine.clone()
    dist.broadcast(first, 1)
    to_one = mine.clone()
    dist.reduce(to_one, 2)
    scattered = torch.empty(2)
    dist.scatter(scattered, [torch.full([2], float(r)) for r in range(n)] if me == 0 else None)
    collected = [torch.empty(4) for _ in range(n)] if me == 1 else None
    dist.gather(mine, collected, 1)
    sizes = [r + 1 for r in range(n)]
    exchanged = torch.empty(n * (me + 1))
    dist.all_to_all_single(exchanged, torch.arange(float(sum(sizes))) + 100 * me, [me + 1] * n, sizes)
    received = torch.empty(3)
    works = [dist.isend(torch.full([3], float(me)), (me + 1) % n), dist.irecv(received, (me - 1) % n)]
    for work in works:
        work.wait()
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    dist.barrier()
    pairs = dist.new_group([0, 2])
    if me != 1:
        dist.all_reduce(mine, group=pairs)
    kept = to_one if me == 2 else None
    return [gathered, one, part, first, kept, scattered, collected, exchanged, received, objects, mine]


@pytest.mark.rank_processes
@pytest.mark.parametrize("function", [reductions, collectives])
def test_collectives_of_torch_give_the_same(ranks: LocalRanks, processes: LocalRanks, function: Any) -> None:
    for here, there in zip(ranks(function), processes(function), strict=True):
        for got, want in zip(here, there, strict=True):
            if isinstance(want, Tensor):
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            else:
                assert str(got) == str(want)


# Compiled functions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)).double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x).softmax(0) ** 2).sum()


@pytest.mark.ranks(3, processes=False, timeout=300)
@pytest.mark.parametrize("backend", often(["aot_eager", "inductor"], 1))
def test_one_graph_serves_all_ranks_and_partitions(backend: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    counter = once(lambda: CompileCounterWithBackend(backend))
    net, reference = Net(), Net()
    step = torch.compile(net, fullgraph=True, backend=counter)
    for sizes in PARTITIONS:
        full = torch.randn(sum(sizes), 3, dtype=torch.float64)
        net.zero_grad(), reference.zero_grad()
        loss = step(sc.ShardTensor.from_local(full.split(sizes)[rank()].clone(), mesh, [Shard(0)], {0: sizes}))
        expected = reference(full)
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert counter.frame_count == 1


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("ask", ["rank", "mesh", "coordinate"])
def test_a_graph_that_depends_on_the_rank_serves_that_rank_alone(ask: str) -> None:
    mesh = init_device_mesh("cpu", (3,))

    def own_rows(x: Tensor) -> Tensor:
        here = {"rank": dist.get_rank, "mesh": mesh.get_local_rank, "coordinate": lambda: mesh.get_coordinate()[0]}[ask]
        return x * 2 + here()

    before = once(graphs_compiled)
    compiled = torch.compile(own_rows, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [2.0 + rank()] * 2
        dist.barrier()
    assert graphs_compiled() - before == 1  # each rank has one, as it would in a process of its own


def patched() -> list[Any]:
    """What `capture` exchanges while it watches."""
    return [OutputGraph.call_user_compiler, common.aot_module_simplified, GraphLowering.save_output_code]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("backend", often(["aot_eager", "shardcompile"], 1))
def test_a_report_is_of_what_its_rank_compiles(backend: str, tmp_path: Path) -> None:
    """Captures of several ranks are open at once, and end in any order."""
    before = once(patched)
    mesh, sizes = init_device_mesh("cpu", (3,)), [3, 0, 4]
    x = sc.ShardTensor.from_local(torch.ones(sizes[rank()], 2), mesh, [Shard(0)], {0: sizes})
    if rank() == 2:
        report = sc.explain(lambda x: x.sum(0) * 2, x, backend=backend)
    with sc.capture() as outer, sc.capture(stages=[]) as inner:
        torch.compile(lambda x: x.softmax(0) * rank(), fullgraph=True, backend=backend)(x)  # each rank for itself
        dist.barrier()
        if rank() != 2:
            report = sc.explain(lambda x: x.sum(0) * 2, x, backend=backend)
    counts = [len(outer.graphs), len(inner.graphs), len(report.graphs)]
    everyone: list[Any] = [None] * 3
    dist.all_gather_object(everyone, counts)
    assert everyone == [[2, 2, 1], [2, 2, 1], [1, 1, 1]]
    assert patched() == before
    with pytest.raises(ValueError, match="ranks that are processes"), sc.capture(sources=tmp_path):
        pass


@pytest.mark.ranks(4, mesh=(2, 2), processes=False)
def test_a_graph_of_two_mesh_dims_uses_the_groups_of_each_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    counter = once(lambda: CompileCounterWithBackend("aot_eager"))
    compiled = torch.compile(lambda x: (x.softmax(0) @ x.t()).sum(1), fullgraph=True, backend=counter)
    for sizes in ({0: [7, 0], 1: [1, 4]}, {0: [2, 5], 1: [5, 0]}):
        full = torch.randn(7, 5, dtype=torch.float64)
        x = sc.distribute_tensor(full, mesh, [Shard(0), Shard(1)], sharding_shapes=sizes)
        torch.testing.assert_close(compiled(x).full_tensor(), (full.softmax(0) @ full.t()).sum(1))
    assert counter.frame_count == 1


def waits_while_compiling(mesh: DeviceMesh) -> None:
    @torch._dynamo.assume_constant_result
    def number() -> int:
        x = torch.ones(1)
        dist.all_reduce(x)
        return int(x.item())

    torch.compile(lambda x: x + number(), backend="eager")(torch.ones(2))


def test_a_wait_while_compiling_is_refused(ranks: LocalRanks) -> None:
    with pytest.raises(Exception, match="would wait while it compiles a function: for all_reduce sum of float32"):
        ranks(waits_while_compiling)


# What goes wrong


def total(mesh: DeviceMesh) -> float:
    x = sc.ShardTensor.from_local(torch.ones(rank() + 1, 2), mesh, [Shard(0)])
    return float(x.sum().full_tensor())


def test_a_deadlock_is_named_at_once(ranks: LocalRanks) -> None:
    def stuck(mesh: DeviceMesh) -> None:
        if rank() == 1:
            dist.recv(torch.empty(2, dtype=torch.int64), src=2)
        dist.all_reduce(torch.ones(4))

    start = time.monotonic()
    with pytest.raises(RanksWaitError) as raised:
        ranks(stuck)
    assert time.monotonic() - start < 5
    assert str(raised.value).splitlines() == [
        "no rank can go on:",
        "  rank 0 waits for all_reduce sum of float32[4], number 0 of the group of ranks 0, 1, 2; missing: 1",
        "  rank 1 waits for rank 2 to receive of int64[2] from it (tag 0)",
        "  rank 2 waits for all_reduce sum of float32[4], number 0 of the group of ranks 0, 1, 2; missing: 1",
    ]
    assert ranks(total) == [12.0] * 3


def test_a_rank_that_raises_is_named_and_the_others_do_not_wait(ranks: LocalRanks) -> None:
    def fails(mesh: DeviceMesh) -> None:
        if rank() == 2:
            raise ValueError("out of points")
        dist.barrier()

    with pytest.raises(ValueError, match="out of points") as raised:
        ranks(fails)
    assert raised.traceback[-1].name == "fails"
    assert raised.value.__notes__[0].splitlines()[0] == "on rank 2 of 3 in one process"
    assert ranks(total) == [12.0] * 3


def test_other_collectives_and_sizes_are_named(ranks: LocalRanks) -> None:
    def other_call(mesh: DeviceMesh) -> None:
        dist.barrier() if rank() == 1 else dist.all_reduce(torch.ones(4))

    def other_size(mesh: DeviceMesh) -> None:
        if rank() == 0:
            dist.send(torch.ones(3), 1)
        if rank() == 1:
            dist.recv(torch.ones(2), 0)

    with pytest.raises(RuntimeError, match=r"number 0 .*: rank 0 to all_reduce sum of float32\[4\], rank 1 to barrier"):
        ranks(other_call)
    with pytest.raises(RuntimeError, match=r"rank 0 sends 12 bytes .* to rank 1, which expects 8"):
        ranks(other_size)
    assert ranks(total) == [12.0] * 3


def test_a_rank_that_runs_too_long_is_given_up(ranks: LocalRanks) -> None:
    def sleeps(mesh: DeviceMesh) -> None:
        if rank() == 1:
            time.sleep(3)

    with pytest.raises(RuntimeError, match="the time is over") as raised:
        ranks(sleeps, timeout=0.5)
    assert "time.sleep(3)" in str(raised.value)
    assert ranks(total) == [12.0] * 3


def test_a_debugger_stops_one_rank_and_the_clock(ranks: LocalRanks) -> None:
    class SlowHands(io.StringIO):
        def readline(self, *args: Any) -> str:
            time.sleep(0.5)
            return super().readline(*args)

    def debugged(mesh: DeviceMesh) -> str:
        dist.barrier()
        told = io.StringIO()
        if rank() == 1:
            pdb.Pdb(stdin=SlowHands("p 'rows', rank() + 40\nc\n"), stdout=told, nosigint=True).set_trace()
        dist.barrier()
        return told.getvalue()

    told = ranks(debugged, timeout=0.6)
    assert "('rows', 41)" in told[1] and not told[0]


# What a rank has to itself, and what ranks share


@pytest.mark.rank_processes
def test_settings_and_random_numbers_are_a_ranks_own(ranks: LocalRanks, processes: LocalRanks) -> None:
    def draw(mesh: DeviceMesh) -> tuple[float, str, torch.dtype, float]:
        if rank() == 0:
            torch.rand(5)
            config.fallback = "error"
            torch.set_default_dtype(torch.float64)
        dist.barrier()
        found = torch.rand(1).item(), config.fallback, torch.get_default_dtype()
        dist.barrier()
        torch.set_default_dtype(torch.float32)
        config.fallback = "replicate"
        return (*found, torch.rand(1).item())

    numbers, state = torch.get_rng_state(), (config.fallback, torch.get_default_dtype())
    assert ranks(draw) == processes(draw)
    assert torch.equal(numbers, torch.get_rng_state())
    assert state == (config.fallback, torch.get_default_dtype())


def test_ranks_have_the_compilers_settings_of_the_caller(ranks: LocalRanks) -> None:
    def settings(mesh: DeviceMesh) -> tuple[object, ...]:
        limit = torch._dynamo.config.recompile_limit
        return limit, torch._dynamo.config.error_on_recompile, torch._functorch.config.donated_buffer, emulated()

    def emulated() -> object:
        return torch._inductor.config.emulate_precision_casts

    def graphs_of_two_sizes(mesh: DeviceMesh) -> None:
        step = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True, dynamic=False)
        for rows in (3, 4):
            step(torch.ones(rows))

    limit, count = torch._dynamo.config.recompile_limit, len(ranks(lambda _: None))
    before = ranks(settings)
    assert before == [(count * limit, False, True, False)] * count
    with (
        torch._dynamo.config.patch(error_on_recompile=True, recompile_limit=3),
        torch._functorch.config.patch(donated_buffer=False),
        torch._inductor.config.patch(emulate_precision_casts=True),
    ):
        assert ranks(settings) == [(count * 3, True, False, True)] * count
        with pytest.raises(torch._dynamo.exc.RecompileError):
            ranks(graphs_of_two_sizes)
    ranks(graphs_of_two_sizes)
    assert ranks(settings) == before


def test_once_acts_on_one_rank_and_shares_what_it_raises(ranks: LocalRanks) -> None:
    def shared(mesh: DeviceMesh, calls: list[int]) -> tuple[int, str]:
        value = once(lambda: calls.append(rank()) or len(calls))  # type: ignore[func-returns-value]
        try:
            once(lambda: [][0])
        except IndexError as error:
            return value, str(error)
        raise AssertionError("the error is shared")

    calls: list[int] = []
    assert ranks(shared, calls) == [(1, "list index out of range")] * 3
    assert calls == [0]


def test_other_process_groups_of_this_process_come_back(ranks: LocalRanks) -> None:
    assert not dist.is_initialized()
    assert ranks(total) == [12.0] * 3
    assert not dist.is_initialized()


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("where", [[]], ids=["list"])
def test_arguments_are_a_ranks_own(where: list[int]) -> None:
    where.append(rank())
    dist.barrier()
    assert where == [rank()]


@pytest.mark.ranks(2, processes=False)
def test_all_ranks_may_skip() -> None:
    pytest.skip("as on processes")


@pytest.mark.ranks(2, processes=False)
def test_a_mode_that_ranks_have_left_compiles_nothing_anew() -> None:
    """Ranks leave a mode in another order than they enter it, and torch keeps for a process whether it is in one."""
    function = once(lambda: torch.compile(lambda x: x.sin(), fullgraph=True, backend="aot_eager"))
    x = sc.ShardTensor.from_local(torch.arange(6.0).reshape(2, 3) + rank(), mesh(), [Shard(0)])
    with CommDebugMode() as mode:
        x.topk(1, 0)
    assert sum(mode.get_comm_counts().values()) == 2
    before = once(graphs_compiled)
    function(x)
    dist.barrier()
    assert graphs_compiled() == before + 1


@pytest.mark.ranks(2, processes=False)
def test_comm_debug_mode_counts_what_its_own_rank_does() -> None:
    model = once(lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1)))
    x = sc.ShardTensor.from_local(torch.ones(2 + rank(), 3), mesh(), [Shard(0)])
    with CommDebugMode() as mode:
        loss = model(x).sum()
    assert mode.get_total_counts() == 0
    with CommDebugMode() as mode:
        loss.full_tensor()
    assert mode.get_total_counts() == 1
    model(x)
