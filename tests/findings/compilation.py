"""C: compilation."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from tests.findings.line import line, numbers, partition, same


class Counted:
    """A compiled function, and how many graphs this rank has compiled of it."""

    def __init__(self, function: Callable[..., Any], fullgraph: bool = True, **how: Any) -> None:
        self.counter = CompileCounterWithBackend("aot_eager")
        self.run = torch.compile(function, fullgraph=fullgraph, backend=self.counter, **how)

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def check(self, graphs: int | None) -> None:
        """All ranks have compiled as many graphs, and so many of them."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.counter.frame_count)
        assert len(set(found)) == 1, f"ranks have compiled {found} graphs"
        assert graphs is None or found[0] == graphs, f"{found[0]} graphs, {graphs} are needed"


PARTITIONS = ([5, 2], [1, 6], [0, 7], [4, 0], [1, 1], [6, 3])


def served(mesh: DeviceMesh, function: Callable[..., Any], enter: Callable[[Any], Any], dim: int = 0) -> Counted:
    """Call a compiled function with what is made eagerly of tensors of many partitions, and compare values and gradients."""
    run = Counted(function)
    for sizes in PARTITIONS:
        shape = (sum(sizes), 4) if dim == 0 else (4, sum(sizes))
        full = numbers(*shape, seed=sum(sizes)).requires_grad_()
        x = partition(full.detach(), mesh, sizes, dim).requires_grad_()
        out, expected = run(enter(x)), function(enter(full))
        same(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        same(x.grad, full.grad)
    return run


ENTRIES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "turned": (0, lambda x: x.t()),
    "every other row": (0, lambda x: x[::2]),
    "rows of what is sharded along rows": (0, lambda x: x[1:]),
    "columns of what is sharded along rows": (0, lambda x: x[:, 1:]),
    "rows of what is sharded along columns": (1, lambda x: x[1:]),
    "columns of what is sharded along columns": (1, lambda x: x[:, 1:]),
    "every other column of what is sharded along columns": (1, lambda x: x[:, ::2]),
}
for _name, (_dim, _enter) in ENTRIES.items():

    @line("C1", f"one graph on every rank, input: {_name}", processes=True)
    def _(mesh: DeviceMesh, dim: int = _dim, enter: Callable[[Any], Any] = _enter) -> None:
        served(mesh, lambda x: x.sin().softmax(dim) * 2, enter, dim).check(1)


@line("C1", "one graph on every rank, shards in Fortran order and with gaps", processes=True)
def _(mesh: DeviceMesh) -> None:
    run = Counted(lambda x: x.sin() @ torch.ones(4, 2, dtype=x.dtype))
    for number, sizes in enumerate(PARTITIONS):
        full = numbers(sum(sizes), 4)
        shard = full.split(sizes)[mesh.get_local_rank()]
        shard = shard.t().contiguous().t() if number % 2 else torch.stack([shard, shard], 2)[:, :, 0]
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes})
        same(run(x), full.sin() @ torch.ones(4, 2, dtype=full.dtype))
    run.check(1)


@line("C2", "two inputs whose partitions are equal at first and other ones later: inputs that never meet")
def _(mesh: DeviceMesh) -> None:
    run = Counted(lambda x, y: x.softmax(0).sum(0) + y.cos().mean(0))
    for a, b in (([5, 2], [5, 2]), ([5, 2], [1, 6]), ([0, 7], [4, 4]), ([1, 1], [1, 1])):
        x, y = numbers(sum(a), 3), numbers(sum(b), 3, seed=1)
        same(run(partition(x, mesh, a), partition(y, mesh, b)), x.softmax(0).sum(0) + y.cos().mean(0))
    run.check(1)


@line(
    "C2",
    "two inputs whose partitions are equal at first and other ones later: inputs that meet (equal or not: 2 graphs)",
)
def _(mesh: DeviceMesh) -> None:
    run = Counted(lambda x, y: x * y)
    for a, b in (([5, 2], [5, 2]), ([5, 2], [1, 6]), ([0, 7], [4, 3]), ([1, 1], [1, 1])):
        x, y = numbers(sum(a), 3), numbers(sum(b), 3, seed=1)
        same(run(partition(x, mesh, a), partition(y, mesh, b)), x * y)
    run.check(2)


def _steps(mesh: DeviceMesh, sharded_in_rows: bool, optimizer: Callable[..., Any], fullgraph: bool = False) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    mine = copy.deepcopy(whole)
    if sharded_in_rows:
        for layer in (mine[0], mine[2]):
            for name, p in list(layer.named_parameters(recurse=False)):
                setattr(layer, name, nn.Parameter(partition(p.detach(), mesh, [p.shape[0] - 1, 1])))

    def step_of(net: nn.Module) -> Callable[..., Any]:
        opt = optimizer(net.parameters())

        def step(x: Any) -> Any:
            opt.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return step

    run, expected, graphs = Counted(step_of(mine), fullgraph=fullgraph), step_of(whole), []
    for sizes in PARTITIONS[:4]:
        full = numbers(sum(sizes), 3)
        same(run(partition(full, mesh, sizes)), expected(full))
        for p, q in zip(mine.parameters(), whole.parameters(), strict=True):
            same(p.detach(), q.detach())
        graphs.append(run.counter.frame_count)
    assert graphs[1:] == graphs[1:2] * 3, graphs
    run.check(None)


for _shards in (False, True):

    @line(
        "C3", f"a compiled step with `backward` and `opt.step` inside, parameters {'in shards' if _shards else 'plain'}"
    )
    def _(mesh: DeviceMesh, sharded_in_rows: bool = _shards) -> None:
        _steps(mesh, sharded_in_rows, torch.optim.AdamW)


@line("C3", "compiled autograd", "compiled autograd .*it would compile the backward pass", processes=True)
def _(mesh: DeviceMesh) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        _steps(mesh, False, torch.optim.AdamW)


for _optimizer in ("SGD", "AdamW"):

    @line("C4", f"`torch.compile({_optimizer}.step)` on parameters sharded [5, 3], [4, 4], [8, 0]")
    def _(mesh: DeviceMesh, optimizer: str = _optimizer) -> None:
        sizes = ([5, 3], [4, 4], [8, 0])
        whole = [nn.Parameter(numbers(8, 3, seed=i)) for i in range(3)]  # compiled as well: factors have other dtypes
        mine = [nn.Parameter(partition(p.detach(), mesh, s)) for p, s in zip(whole, sizes, strict=True)]
        ours, theirs = (getattr(torch.optim, optimizer)(p, lr=0.1) for p in (mine, whole))
        step, whole_step = (Counted(of.step, fullgraph=False) for of in (ours, theirs))
        for number in range(4):
            for p, q, s in zip(mine, whole, sizes, strict=True):
                q.grad = numbers(8, 3, seed=number)
                p.grad = partition(q.grad, mesh, s)
            step()
            whole_step()
            for p, q in zip(mine, whole, strict=True):
                same(p.detach(), q.detach())
        step.check(None)


@line("C5", '`torch.compile(model, backend="shardcompile", mode="max-autotune-no-cudagraphs")`')
def _(mesh: DeviceMesh) -> None:
    model, full = nn.Linear(4, 3).double(), numbers(7, 4)
    run = torch.compile(model, backend="shardcompile", mode="max-autotune-no-cudagraphs", fullgraph=True)
    for p in model.parameters():
        p.data.copy_(numbers(*p.shape))
    same(run(partition(full, mesh, [5, 2])), model(full))


class AFNO(nn.Module):
    """A Fourier shard over an image: modes are mixed by small matrices and shrunk, as PhysicsNeMo's AFNO does."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(numbers(2, 2, 3, 3, seed=s) * 0.3) for s in range(4)])

    def forward(self, x: Any) -> Any:
        _, height, width, channels = x.shape
        modes = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        modes = modes.reshape(*modes.shape[:3], 2, channels // 2)
        kept = height // 2 + 1
        low = modes[:, :, :kept]
        real = torch.relu(
            torch.einsum("bhwgc,gcd->bhwgd", low.real, self.w[0][0])
            - torch.einsum("bhwgc,gcd->bhwgd", low.imag, self.w[0][1])
        )
        imag = torch.relu(torch.einsum("bhwgc,gcd->bhwgd", low.imag, self.w[1][0]) + low.real.sum(-1, keepdim=True))
        mixed = torch.view_as_complex(nn.functional.softshrink(torch.stack([real, imag], -1), 0.01))
        out = torch.cat([mixed, torch.zeros_like(modes[:, :, kept:])], 2).reshape(*modes.shape[:3], channels)
        return torch.fft.irfft2(out, s=(height, width), dim=(1, 2), norm="ortho") + x


@line("C6", "a Fourier shard of an image that is sharded along its height")
def _(mesh: DeviceMesh) -> None:
    model = AFNO()
    run = Counted(model)
    for sizes in ([5, 3], [1, 7], [0, 8], [6, 4]):
        full = numbers(2, sum(sizes), 6, 6).requires_grad_()
        x = partition(full.detach(), mesh, sizes, 1).requires_grad_()
        out, expected = run(x), model(full)
        same(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        same(x.grad, full.grad)
    run.check(None)


@line("C6", "`x[1:].cummax(0)`, compiled")
def _(mesh: DeviceMesh) -> None:
    run = Counted(lambda x: x[1:].cummax(0).values)
    for sizes in PARTITIONS:
        full = numbers(sum(sizes), 3)
        same(run(partition(full, mesh, sizes)), full[1:].cummax(0).values)
    run.check(None)


@line("C6", "on 2 x 2 ranks `x[None, :-1].permute([2, 1, 0])`, shards {0: [0, 2], 1: [3, 3]}, compiled", ranks=4)
def _(mesh: DeviceMesh) -> None:
    run = Counted(lambda x: x[None, :-1].permute([2, 1, 0]))
    for rows, columns in (([0, 2], [3, 3]), ([1, 3], [0, 4]), ([2, 2], [1, 3])):
        full = numbers(sum(rows), sum(columns))
        x = sc.distribute_tensor(full, mesh, [Shard(0), Shard(1)], sharding_shapes={0: rows, 1: columns})
        same(run(x), full[None, :-1].permute([2, 1, 0]))
    run.check(None)


@line("C6", "`torch.minimum(x.view(-1, 1, 2), y.reshape(2, 1, 1))`, compiled")
def _(mesh: DeviceMesh) -> None:
    run = Counted(lambda x, y: torch.minimum(x.view(-1, 1, 2), y.reshape(2, 1, 1)))
    for sizes in ([0, 2], [1, 1], [2, 0]):
        x, y = numbers(1, 2), numbers(2, seed=1)
        same(
            run(partition(x, mesh, sizes, 1), partition(y, mesh, sizes)),
            torch.minimum(x.view(-1, 1, 2), y.reshape(2, 1, 1)),
        )
    run.check(None)


@line("C8", "one function in five worlds after one another, sharded inputs, a limit of 2", processes=True)
def _(mesh: DeviceMesh) -> None:
    _in_other_worlds("""
def f(x): return x.softmax(0).square().sum().full_tensor()
make = lambda shard, mesh: sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: [4]})
call = lambda run, shard, mesh: run(make(shard, mesh))
""")


@line("C8", "one function in five worlds after one another, sharded tensors inside graphs only", processes=True)
def _(mesh: DeviceMesh) -> None:
    _in_other_worlds("""
def f(shard, mesh): return sc.ShardTensor.from_local(shard, mesh, [Shard(0)]).softmax(0).square().sum().full_tensor()
call = lambda run, shard, mesh: run(shard, mesh)
""")


@line("C8", "the same, with the mesh from outside of the function", processes=True)
def _(mesh: DeviceMesh) -> None:
    _in_other_worlds("""
def f(shard): return sc.ShardTensor.from_local(shard, holder.mesh, [Shard(0)]).softmax(0).square().sum().full_tensor()
class holder: mesh = None
def call(run, shard, mesh):
    holder.mesh = mesh
    return run(shard)
""")


@line("C8", "the same, with the current mesh", processes=True)
def _(mesh: DeviceMesh) -> None:
    _in_other_worlds("""
def f(shard): return sc.ShardTensor.from_local(shard, placements=[Shard(0)]).softmax(0).square().sum().full_tensor()
def call(run, shard, mesh):
    with mesh:
        return run(shard)
""")


WORLDS = """
import torch, torch.distributed as dist
import shardcompile as sc
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
PROGRAM
counter = CompileCounterWithBackend("aot_eager")
run = torch.compile(f, fullgraph=True, backend=counter)
with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
    for world in range(5):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        for _ in range(world):
            dist.new_group([0])
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("rows", "others"))["rows"]
        for _ in range(2):
            shard = torch.randn(4, 3)
            torch.testing.assert_close(call(run, shard, mesh), shard.softmax(0).square().sum())
        dist.destroy_process_group()
assert counter.frame_count == 5, counter.frame_count
"""


def _in_other_worlds(program: str) -> None:
    if dist.get_rank() == 0:
        done = subprocess.run(
            [sys.executable, "-c", WORLDS.replace("PROGRAM", program)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-300:] + done.stderr[:2000]


def _caches(mesh: DeviceMesh, shapes: Sequence[list[int]]) -> list[dict[str, int]]:
    """What the compiler's caches did in processes that are started one after another, each with another partition."""
    found: list[dict[str, int]] = []
    if dist.get_rank() > 0:
        return found
    with tempfile.TemporaryDirectory() as folder:
        for sizes in shapes:
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
            program = CACHED.replace("SIZES", repr(sizes))
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
            assert done.returncode == 0, done.stderr[-1500:]
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


CACHED = """
import json, os, torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import shardcompile as sc
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
sizes = SIZES
x = sc.ShardTensor.from_local(torch.ones(sizes[0], 3), mesh, [Shard(0)], {0: sizes})
w = torch.ones(3, 4, requires_grad=True)
out = torch.compile(lambda x: x @ w, fullgraph=True)(x)
out.backward(torch.ones_like(out))
print(json.dumps({k: v for k, v in counters["aot_autograd"].items() if "cache" in k}))
import sys; sys.stdout.flush(); os._exit(0)
"""


@line("C9", "another partition of the same size after a restart hits the compiler's caches", processes=True)
def _(mesh: DeviceMesh) -> None:
    for warm in _caches(mesh, [[5, 2], [4, 3], [0, 7]])[1:]:
        assert warm.get("autograd_cache_hit") == 1 and "autograd_cache_miss" not in warm, warm


@line("C9", "another size after a restart hits the compiler's caches", processes=True, known="docs/limits.md")
def _(mesh: DeviceMesh) -> None:
    for warm in _caches(mesh, [[5, 2], [6, 3], [8, 8]])[1:]:
        assert warm.get("autograd_cache_hit") == 1 and "autograd_cache_miss" not in warm, warm


def _func(kind: str) -> Callable[[Any], Any]:
    w = numbers(4, 2, seed=3)
    loss = lambda w, x: (x @ w).tanh().square().mean()  # noqa: E731
    return {
        "torch.func.grad of plain parameters": lambda x: torch.func.grad(loss)(w, x),
        "torch.func.hessian of plain parameters": lambda x: torch.func.hessian(loss)(w, x),
    }[kind]


for _kind in ("torch.func.grad of plain parameters", "torch.func.hessian of plain parameters"):

    @line("C7", f"{_kind}, sharded input, eager and compiled", processes=True)
    def _(mesh: DeviceMesh, kind: str = _kind) -> None:
        function, full = _func(kind), numbers(7, 4)
        x = partition(full, mesh, [5, 2])
        same(function(x), function(full))
        same(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(full))


@line("C7", "`nested_compile_region`")
def _(mesh: DeviceMesh) -> None:
    region = torch.compiler.nested_compile_region(lambda x: x.sin() * 2)
    full = numbers(7, 4)
    run = torch.compile(lambda x: region(region(x)), fullgraph=True, backend="aot_eager")
    same(run(partition(full, mesh, [5, 2])), (full.sin() * 2).sin() * 2)


def _higher(name: str) -> Callable[[Any], Any]:
    from torch._higher_order_ops import while_loop
    from torch._higher_order_ops.scan import scan

    made: dict[str, Callable[[Any], Any]] = {
        "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)),
        "while_loop": lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x)),
        "scan": lambda x: scan(lambda c, y: (c + y, c.sin()), torch.zeros(7, dtype=x.dtype), x.t()),
        "torch.export": lambda x: torch.export.export(nn.Linear(4, 2).double(), (x,)),
    }
    return made[name]


for _name in ("cond", "while_loop", "scan"):
    for _compiled in (False, True):

        @line(
            "C7",
            f"`{_name}`, {'compiled' if _compiled else 'eager'}",
            "traces its function on tensors that have no layout",
        )
        def _(mesh: DeviceMesh, name: str = _name, compiled: bool = _compiled) -> None:
            function = _higher(name)
            run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
            run(partition(numbers(7, 4), mesh, [5, 2]))


@line("C7", "`flex_attention`, eager and compiled")
def _(mesh: DeviceMesh) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def flex(x: Any) -> Any:
        q = x[:, None, None].expand(-1, 1, 3, -1).contiguous()
        return flex_attention(q, q, q * 2)

    full = numbers(7, 4)
    for run in (flex, torch.compile(flex, fullgraph=True, backend="aot_eager")):
        same(run(partition(full, mesh, [5, 2])), flex(full))


@line("C7", "`torch.export`", "it would take shards for constants of the graph")
def _(mesh: DeviceMesh) -> None:
    _higher("torch.export")(partition(numbers(7, 4), mesh, [5, 2]))
