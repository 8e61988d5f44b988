"""E: the ecosystem."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from tests.findings.line import line, numbers, partition, same


@line("E1", "`opt_einsum.contract`, as neuraloperator calls it", needs="opt_einsum")
def _(mesh: DeviceMesh) -> None:
    import opt_einsum

    x, w = numbers(7, 4, 3), numbers(4, 5, 3, seed=1)
    same(opt_einsum.contract("bix,iox->box", partition(x, mesh, [5, 2]), w), torch.einsum("bix,iox->box", x, w))
    same(opt_einsum.contract("iox,bix->box", w, partition(x, mesh, [5, 2])), torch.einsum("bix,iox->box", x, w))


@line("E2", "handlers as PhysicsNeMo registers them: of an op `(*args, **kwargs)`, of a name `namespace.op.default`")
def _(mesh: DeviceMesh) -> None:
    x = partition(numbers(7, 4), mesh, [5, 2])
    before = dict(sc.ShardTensor.__dict__)
    assert "register_dispatch_handler" in before
    from shardcompile.dispatch import Handlers

    called: list[str] = []

    def of_op(x: Any, **kwargs: Any) -> Any:
        called.append("op")
        return x

    def of_name(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        called.append("name")
        return args[0]

    saved = dict(Handlers.ops), dict(Handlers.names)
    try:
        sc.ShardTensor.register_dispatch_handler(torch.ops.aten.erfinv.default, of_op)
        sc.ShardTensor.register_named_function_handler("aten.erfc.default", of_name)
        torch.ops.aten.erfinv.default(x)
        torch.ops.aten.erfc.default(x)
    finally:
        for kept, now in zip(saved, (Handlers.ops, Handlers.names), strict=True):
            now.clear()
            now.update(kept)
    assert called == ["op", "name"], called


@line("E2", "`ShardTensor.patches_enabled()`")
def _(mesh: DeviceMesh) -> None:
    assert sc.ShardTensor.patches_enabled() is True


@line("E3", "`local_map` with keyword arguments")
def _(mesh: DeviceMesh) -> None:
    full = numbers(7, 4)
    run = sc.local_map(lambda x, scale: x * scale, [Shard(0)], ([Shard(0)],), mesh)
    same(run(partition(full, mesh, [5, 2]), scale=3), full * 3)


@line("E3", "factories with `layout=`")
def _(mesh: DeviceMesh) -> None:
    x = sc.zeros(7, 4, device_mesh=mesh, placements=[Shard(0)], layout=torch.strided)
    same(x, torch.zeros(7, 4))


@line("E3", "`offsets()` inside a compiled function", r"offsets\(\) of .* inside a compiled function")
def _(mesh: DeviceMesh) -> None:
    torch.compile(lambda x: x * x.offsets(0), backend="aot_eager")(partition(numbers(7, 4), mesh, [5, 2]))


@line("E3", "`.sharding` inside a compiled function, of an input")
def _(mesh: DeviceMesh) -> None:
    full = numbers(7, 4)
    run = torch.compile(lambda x: x * x.sharding.sizes(0)[0], fullgraph=True, backend="aot_eager")
    same(run(partition(full, mesh, [5, 2])), full * 5)


@line("E3", "`.placements`, `.device_mesh`, `.shape` inside a compiled function, of what is made there")
def _(mesh: DeviceMesh) -> None:
    full = numbers(7, 4)

    def run(x: Any) -> Any:
        y = x.sin()
        if isinstance(y, sc.ShardTensor):
            assert y.placements == (Shard(0),) and y.device_mesh.size() == 2
        return y * y.shape[0]

    same(torch.compile(run, fullgraph=True, backend="aot_eager")(partition(full, mesh, [5, 2])), full.sin() * 7)


@line(
    "E3",
    "`.sharding` inside a compiled function, of what is made there",
    "SourcelessBuilder.create does not know how to wrap",  # Dynamo's words; see docs/limits.md
)
def _(mesh: DeviceMesh) -> None:
    torch.compile(lambda x: x * x.sin().sharding.sizes(0)[0], fullgraph=True, backend="aot_eager")(
        partition(numbers(7, 4), mesh, [5, 2])
    )


@line("E3", "DebugMode shows a redistribution by its name", known="docs/limits.md")
def _(mesh: DeviceMesh) -> None:
    from torch.utils._debug_mode import DebugMode

    x = partition(numbers(7, 4), mesh, [5, 2])
    with DebugMode(record_torchfunction=False) as mode:
        x.redistribute(placements=[Replicate()])
    assert "redistribute" in mode.debug_string(), mode.debug_string()


@line("E3", "logging as an artifact of TORCH_LOGS")
def _(mesh: DeviceMesh) -> None:
    asked = "import logging, shardcompile; print(logging.getLogger('shardcompile').getEffectiveLevel())"
    done = subprocess.run(
        [sys.executable, "-c", asked], env=os.environ | {"TORCH_LOGS": "+shardcompile"}, capture_output=True, text=True
    )
    assert done.stdout.split()[-1:] == ["10"], done


@line("E3", "`from_dtensor` of `_StridedShard`", "its shards are in another order than that of the mesh dims", ranks=4)
def _(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Linear(4, 8)
    parallelize_module(model, mesh["model"], ColwiseParallel())
    fully_shard(model, mesh=mesh["data"])
    sc.ShardTensor.from_dtensor(model.weight)


@line("E4", '`f"{loss:.3f}"` of a 0-dim sharded tensor')
def _(mesh: DeviceMesh) -> None:
    full = numbers(7, 4)
    assert f"{partition(full, mesh, [5, 2]).mean():.3f}" == f"{full.mean():.3f}"


@line("E4", "TensorBoard's `add_scalar(loss)`", needs="tensorboard", processes=True)
def _(mesh: DeviceMesh) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        writer.add_scalar("loss", partition(numbers(7, 4), mesh, [5, 2]).mean(), 1)


@line("E4", "`from_dlpack`", "has no memory of its own that others could read")
def _(mesh: DeviceMesh) -> None:
    torch.utils.dlpack.from_dlpack(partition(numbers(7, 4), mesh, [5, 2]))


@line("E4", "`share_memory_()`", "has no memory of its own that others could read")
def _(mesh: DeviceMesh) -> None:
    partition(numbers(7, 4), mesh, [5, 2]).share_memory_()


@line("E4", "`p.data = sharded` on a plain p", "cannot become a sharded one in place")
def _(mesh: DeviceMesh) -> None:
    p = nn.Parameter(numbers(7, 4))
    p.data = partition(numbers(7, 4), mesh, [5, 2])
    p.sum()


@line(
    "E4",
    "Accelerate's `gather(loss)`",
    "it would send each rank's local shard as if",
    needs="accelerate",
    processes=True,
)
def _(mesh: DeviceMesh) -> None:
    from accelerate import Accelerator

    rank = str(mesh.get_local_rank())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"})
    Accelerator(cpu=True).gather(partition(numbers(7, 4), mesh, [5, 2]).mean())


_SIZES: dict[str, Any] = {
    "2.5": [2.5, 4.5],
    "NaN": [float("nan"), 7],
    "a tensor of floats": torch.tensor([5.0, 2.0]),
    '"12"': ["12", 2],
    "2**62": [2**62, 2**62],
}
for _name, _value in _SIZES.items():

    @line("E5", f"{_name} as a size", "size|number|bytes|int64|shape")
    def _(mesh: DeviceMesh, value: Any = _value) -> None:
        sc.ShardTensor.from_local(numbers(5, 4), mesh, [Shard(0)], {0: value})


_SHARDS: dict[str, Any] = {
    "sparse": lambda mesh: numbers(5, 4).to_sparse(),
    "meta": lambda mesh: numbers(5, 4).to("meta"),
    "DTensor": lambda mesh: DTensor.from_local(numbers(5, 4), mesh, [Replicate()]),
    "ShardTensor": lambda mesh: partition(numbers(7, 4), mesh, [5, 2]),
}
for _name, _make in _SHARDS.items():

    @line("E5", f"a {_name} shard", "shard")
    def _(mesh: DeviceMesh, make: Any = _make) -> None:
        sc.ShardTensor.from_local(make(mesh), mesh, [Shard(0)], {0: [5, 5]})


@line("E5", "a rank outside of the mesh", "rank 1 is not (part of it|among the ranks)")
def _(mesh: DeviceMesh) -> None:
    alone = DeviceMesh("cpu", [0])
    if mesh.get_local_rank() == 0:
        raise sc.ShardError("rank 1 is not part of it")  # this rank's share of the line
    sc.ShardTensor.from_local(numbers(5, 4), alone, [Shard(0)], {0: [5]})


for _dtype in (torch.int16, torch.uint16, torch.uint32):

    @line("E5", f"Partial of {_dtype}")
    def _(mesh: DeviceMesh, dtype: torch.dtype = _dtype) -> None:
        x = sc.ShardTensor.from_local(torch.tensor([3, 4]).to(dtype), mesh, [Partial()])
        same(x.full_tensor().long(), torch.tensor([6, 8]))


@line("E6", "a build for `explain(device='cuda')` that says `model.to(mesh.device_type)`")
def _(mesh: DeviceMesh) -> None:
    if mesh.get_local_rank() > 0:
        return
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    assert "all_gather" in done.stdout or "all_reduce" in done.stdout, done.stdout


OFFLINE = """
import torch, shardcompile as sc
from torch import nn
from torch.distributed.tensor.placement_types import Shard

def build(mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(mesh.device_type)
    return model, (sc.randn(8, 4, device_mesh=mesh, placements=[Shard(0)]),)
print(sc.explain(build, world_size=8, device="cuda"))
"""
