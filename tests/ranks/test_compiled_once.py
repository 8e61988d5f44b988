"""One rank compiles a graph, and the others load its code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

import shardcompile as sc
from shardcompile.dispatch.handlers import Handlers
from shardcompile.testing import rank, world_size

SIZES = [4, 0, 3]


@contextmanager
def counted() -> Iterator[list[str]]:
    """Lists the graphs that Inductor compiles on this rank."""
    from torch._inductor import compile_fx

    found: list[str] = []
    compile_graph = compile_fx.fx_codegen_and_compile

    def counting(*args: Any, **named: Any) -> Any:
        found.append("graph")
        return compile_graph(*args, **named)

    compile_fx.fx_codegen_and_compile = counting
    try:
        yield found
    finally:
        compile_fx.fx_codegen_and_compile = compile_graph


def everywhere(number: int) -> list[int]:
    found = [0] * world_size()
    dist.all_gather_object(found, number)
    return found


def sharded(x: Tensor, sizes: list[int], placements: tuple[Placement, ...] = (Shard(0),)) -> Tensor:
    mesh = init_device_mesh("cpu", (world_size(),))
    return sc.distribute_tensor(x, mesh, placements, sharding_shapes={0: sizes})


def step(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight).softmax(0) * x.sum(0)).square().sum()


def tripled(x: Tensor, weight: Tensor) -> Tensor:
    return 3 * step(x, weight)


def doubled(x: Tensor, weight: Tensor) -> Tensor:
    return 2 * step(x, weight)


def check(backend: str, folder: Path | str, weight: Tensor, step: Callable[..., Tensor] = step) -> int:
    """Compiles with an empty cache, compares with plain PyTorch, and returns how many graphs this rank compiled."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch.compiler.reset()
    torch.manual_seed(1)
    full = torch.randn(sum(SIZES), 5)
    plain = weight.full_tensor() if isinstance(weight, sc.ShardTensor) else weight
    plain = plain.detach().requires_grad_()
    expected = step(full, plain)
    expected.backward()
    with counted() as graphs:
        loss = torch.compile(step, fullgraph=True, backend=backend)(sharded(full, SIZES), weight)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    grad = weight.grad
    torch.testing.assert_close(grad.full_tensor() if isinstance(grad, sc.ShardTensor) else grad, plain.grad)
    return len(graphs)


def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(5, 5, requires_grad=True)


def common_folder(tmp_path: Path) -> str:
    folders: list[str] = [""] * world_size()
    dist.all_gather_object(folders, str(tmp_path))
    return folders[0]


@pytest.mark.ranks(3, timeout=200)
@pytest.mark.parametrize("backend", ["shardcompile", "inductor"])
def test_one_rank_compiles_and_all_are_right(backend: str, tmp_path: Path) -> None:
    assert sorted(everywhere(check(backend, common_folder(tmp_path), weight()))) == [0, 0, 2]


@pytest.mark.ranks(3, timeout=200)
def test_hosts_without_a_common_file_system_get_the_code_over_the_store(tmp_path: Path) -> None:
    folder = Path(common_folder(tmp_path)) / str(rank())
    assert sorted(everywhere(check("shardcompile", folder, weight(), tripled))) == [0, 0, 2]


@pytest.mark.ranks(3, timeout=200)
def test_code_that_was_published_serves_again(tmp_path: Path) -> None:
    """Such as where the cache was deleted meanwhile."""
    folder = Path(common_folder(tmp_path))
    assert sum(everywhere(check("shardcompile", folder / "before", weight(), doubled))) == 2
    assert sum(everywhere(check("shardcompile", folder / "after", weight(), doubled))) == 0


@pytest.mark.ranks(3, timeout=200)
def test_all_compile_where_that_is_set(tmp_path: Path) -> None:
    with sc.config.patch(compile_on="all"):
        assert everywhere(check("shardcompile", Path(common_folder(tmp_path)) / str(rank()), weight())) == [2, 2, 2]


def sharded_weight() -> Tensor:
    return sharded(weight().detach(), [2, 2, 1]).requires_grad_()


def gathering(x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(weight, sc.ShardTensor):
        weight = weight.redistribute(placements=[Replicate()])
    return step(x, weight)


@pytest.mark.ranks(3, timeout=200)
def test_ranks_share_code_whatever_their_shards_of_a_parameter(tmp_path: Path) -> None:
    """A rank has none of a weight, one has one row; the gradients come in shards, too."""
    weight_of = sharded(weight().detach(), [4, 0, 1])
    found = everywhere(check("shardcompile", common_folder(tmp_path), nn.Parameter(weight_of), gathering))
    assert sorted(found) == [0, 0, 2]


def partitioning(x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(x, sc.ShardTensor):
        rows = x.redistribute(placements=[Replicate()])
        x = rows.redistribute(placements=[Shard(0)])[1:] + rows.redistribute(placements=[Shard(0)])[:-1]
    else:
        x = x[1:] + x[:-1]
    return step(x, weight)


@pytest.mark.ranks(3, timeout=200)
def test_ranks_share_code_whatever_their_shards_of_what_the_program_partitions(tmp_path: Path) -> None:
    found = everywhere(check("shardcompile", common_folder(tmp_path), weight(), partitioning))
    assert sorted(found) == [0, 0, 2]


@pytest.mark.ranks(3, timeout=200)
def test_shards_of_known_sizes_at_other_offsets_are_right(tmp_path: Path) -> None:
    """Ranks 0 and 1 have shards of one size, at offsets that differ."""
    check("shardcompile", common_folder(tmp_path), sharded_weight(), gathering)
    check("shardcompile", Path(common_folder(tmp_path)) / "again", sharded_weight())


@pytest.mark.ranks(3, timeout=200)
def test_a_trace_that_reads_the_rank_is_not_shared(tmp_path: Path) -> None:
    """A handler makes the rank a constant of the graph."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = common_folder(tmp_path)
    torch.compiler.reset()
    full = torch.arange(14.0).view(7, 2)

    def handler(x: Any) -> Any:
        return x * (10.0 ** dist.get_rank())

    sc.ShardTensor.register_dispatch_handler(torch.ops.aten.erfinv.default, handler)
    try:
        y = torch.compile(lambda x: torch.erfinv(x) + 1, fullgraph=True, backend="inductor")(sharded(full, SIZES))
    finally:
        del Handlers.ops[torch.ops.aten.erfinv.default]
    start = sum(SIZES[: rank()])
    torch.testing.assert_close(y.to_local(), full[start : start + SIZES[rank()]] * 10.0 ** rank() + 1)


class FailOnce:
    """Has the first rank that compiles fail, once."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, compile_graph: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **named: Any) -> Any:
            if dist.distributed_c10d._get_default_store().add(self.key, 1) == 1:
                raise RuntimeError("out of memory")
            return compile_graph(*args, **named)

        return failing


class Lines(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.ranks(3, timeout=200)
def test_the_others_go_on_if_the_compiling_rank_fails(tmp_path: Path) -> None:
    from torch._inductor.graph import GraphLowering

    folder, run, said = common_folder(tmp_path), GraphLowering.run, Lines()
    GraphLowering.run = FailOnce(f"fail once {folder}")(run)  # type: ignore[method-assign]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compiler.reset()
    x = sharded(torch.randn(sum(SIZES), 5), SIZES)
    logging.getLogger("shardcompile").addHandler(said)
    failed = ""
    try:
        # It communicates nothing: the rank that failed would be missing.
        with sc.config.patch(verify=False):  # it would stop the others
            torch.compile(lambda x: x * 2 + 1, fullgraph=True, backend="shardcompile")(x)
    except Exception as error:
        failed = str(error)
    finally:
        GraphLowering.run = run  # type: ignore[method-assign]
        logging.getLogger("shardcompile").removeHandler(said)
    assert sum(everywhere(bool(failed))) == 1
    assert ("out of memory" in failed) if failed else any("out of memory" in line for line in said.lines)


# ------------------------------------------------------------------- ranks that end or stop while they compile

POINTS = [
    "torch._functorch.aot_autograd.aot_stage1_graph_capture",
    "torch._functorch.aot_autograd.aot_stage2_compile",
    "torch._functorch._aot_autograd.graph_compile._aot_stage2b_bw_compile",
    "torch._inductor.compile_fx._compile_fx_inner",
    "torch._inductor.compile_fx.fx_codegen_and_compile",
    "torch._inductor.graph.GraphLowering.run",
    "torch._inductor.graph.GraphLowering.codegen",
    "torch._inductor.graph.GraphLowering.compile_to_module",
    "torch._inductor.codecache.FxGraphCache._save_graph",
    "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache.save",
]
"""Functions at whose call the leader is stopped."""

PROGRAM = """
import importlib, logging, os, signal, sys, time
import torch, torch.distributed as dist
from torch.distributed import TCPStore
rank, port, point, what, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
store = TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
import torch._inductor.compile_fx, torch._functorch._aot_autograd.autograd_cache
from tests.ranks.test_compiled_once import SIZES, step, sharded, weight
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="SAID %(created)f %(message)s")
names = point.split(".")
n, owner = 1, None
for n in range(len(names) - 1, 0, -1):
    try:
        owner = importlib.import_module(".".join(names[:n]))
        break
    except ImportError:
        pass
for name in names[n:-1]:
    owner = getattr(owner, name)
call = getattr(owner, names[-1]) if point else None

def stopped(*args, **named):
    if store.add("reached", 1) == 1:
        print("STOPPED", time.time(), flush=True)
        if what == "raise":
            raise RuntimeError("no way")
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    return call(*args, **named)

if point:
    setattr(owner, names[-1], stopped)
from shardcompile.passes import backend
compile_with_passes = backend.compile_with_passes

def compiling(*args, **named):
    try:
        result = compile_with_passes(*args, **named)
        print("COMPILED", time.time(), flush=True)
    except BaseException as error:
        print("RAISED", time.time(), repr(error).replace(chr(10), " ")[:500], flush=True)
    os._exit(0)  # no collective is run: a rank is missing

x = sharded(torch.randn(sum(SIZES), 5), SIZES)
dist.barrier()
torch.compile(step, fullgraph=True, backend=compiling)(x, weight())
"""


def run_stopped(point: str, what: str, folder: Path) -> tuple[list[str], float]:
    """Runs three ranks of which the leader is stopped.

    Returns:
        The output of each, and the seconds from then until the last of the others has said so.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SHARDCOMPILE_WATCH": "0", "PYTHONPATH": os.getcwd()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(r), str(store.port), point, what, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for r in range(3)
    ]
    deadline = time.monotonic() + 150
    while sum(r.poll() is None for r in ranks) > (what == "stop") and time.monotonic() < deadline:
        time.sleep(0.1)
    for r in ranks:
        if r.poll() is None:
            r.send_signal(signal.SIGKILL)
    outputs = [r.communicate()[0] for r in ranks]
    said = [float(line.split()[1]) for out in outputs for line in out.splitlines() if line.startswith("SAID")]
    stopped = [float(line.split()[1]) for out in outputs for line in out.splitlines() if line.startswith("STOPPED")]
    return outputs, max(said, default=0.0) - min(stopped, default=0.0)


@pytest.mark.parametrize("what", ["kill", "stop", "raise"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.nightly
def test_the_others_go_on_without_a_leader_that_ends(point: str, what: str, tmp_path: Path) -> None:
    outputs, seconds = run_stopped(point, what, tmp_path)
    others = [out for out in outputs if "STOPPED" not in out]
    (leader,) = (out for out in outputs if "STOPPED" in out)
    assert len(others) == 2 and all("COMPILED" in out for out in others), outputs
    assert "no way" in leader or what != "raise"
    named = "could not make" if what == "raise" else "has not answered"
    assert any(named in out for out in others), outputs
    assert seconds < 10
    # What the leader left in the cache is whole.
    assert all("COMPILED" in out for out in run_stopped("", "", tmp_path)[0])


def grid_step(x: Tensor, weight: Tensor) -> Tensor:
    y = (x @ weight).relu()
    return (y * y.sum(0)).square().sum()


def check_grid(folder: str, part: str | None) -> int:
    """As `check`, on a mesh of two dims, or on one dim of it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.compiler.reset()
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    full, plain = torch.randn(7, 5), torch.randn(5, 5, requires_grad=True)
    expected = grid_step(full, plain)
    expected.backward()
    rows, columns = {0: [5, 2]}, {1: [2, 3]}
    if part is None:
        x = sc.distribute_tensor(full, mesh, [Shard(0), Replicate()], sharding_shapes=rows)
        weight = sc.distribute_tensor(plain.detach(), mesh, [Replicate(), Shard(1)], sharding_shapes=columns)
    else:
        x = sc.distribute_tensor(full, mesh[part], [Replicate()])
        weight = sc.distribute_tensor(plain.detach(), mesh[part], [Shard(1)], sharding_shapes={0: [2, 3]})
    weight.requires_grad_()
    with counted() as graphs:
        loss = torch.compile(grid_step, fullgraph=True, backend="shardcompile")(x, weight)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    assert isinstance(weight.grad, sc.ShardTensor)
    torch.testing.assert_close(weight.grad.full_tensor(), plain.grad)
    return len(graphs)


@pytest.mark.ranks(4, timeout=200)
@pytest.mark.parametrize("part", [None, "columns"])
def test_ranks_of_a_mesh_of_two_dims_share_code(part: str | None, tmp_path: Path) -> None:
    """Though their groups along a dim are different ones, with names of their own."""
    assert sorted(everywhere(check_grid(common_folder(tmp_path), part))) == [0, 0, 0, 2]
