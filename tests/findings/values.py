"""A: data lost, values wrong, writes lost."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from tests.findings.line import line, numbers, partition, same, scenes


def _folder(mesh: DeviceMesh) -> Path:
    """One for all ranks."""
    made: list[Any] = [tempfile.mkdtemp() if mesh.get_local_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


@line(
    "A1",
    "a checkpoint of a partition [700, 300], loaded into another partition, a plain tensor, a DTensor",
    processes=True,
)
def _(mesh: DeviceMesh) -> None:
    full, folder = numbers(1000, 3), _folder(mesh)
    dcp.save({"x": partition(full, mesh, [700, 300])}, checkpoint_id=folder)
    empty = torch.zeros_like(full)
    targets: list[Any] = [
        partition(empty, mesh, [700, 300]),
        partition(empty, mesh, [1, 999]),
        empty,
        sc.distribute_tensor(empty, mesh, [Shard(1)]),
        DTensor.from_local(torch.zeros(500, 3, dtype=full.dtype), mesh, [Shard(0)]),
    ]
    for target in targets:
        dcp.load({"x": target}, checkpoint_id=folder)
        same(target.full_tensor() if isinstance(target, DTensor) else target, full, rtol=0, atol=0)


@line("A1", "a checkpoint of an even partition [4, 4], 24 elements", processes=True)
def _(mesh: DeviceMesh) -> None:
    full, folder = numbers(8, 3), _folder(mesh)
    dcp.save({"x": partition(full, mesh, [4, 4])}, checkpoint_id=folder)
    target = partition(torch.zeros_like(full), mesh, [4, 4])
    dcp.load({"x": target}, checkpoint_id=folder)
    same(target, full, rtol=0, atol=0)


@line("A1", "`get_model_state_dict(full_state_dict=True)` of parameters sharded")
def _(mesh: DeviceMesh) -> None:
    model, weight = nn.Linear(3, 4, bias=False), numbers(4, 3, dtype=torch.float32)
    model.weight = nn.Parameter(partition(weight, mesh, [3, 1]))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert type(state["weight"]) is torch.Tensor
    same(state["weight"], weight)


_STYLES = {
    "Colwise, Rowwise": lambda: {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "SequenceParallel": lambda: {"1": SequenceParallel(sequence_dim=0, use_local_output=True)},
}


def _parallel(mesh: DeviceMesh, style: str, over: DeviceMesh, sharded_over: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8) if style == "SequenceParallel" else nn.Tanh(), nn.Linear(8, 4)
    )
    full = numbers(8, 4, dtype=torch.float32)
    expected = model(full).square().mean()
    x = sc.distribute_tensor(full, sharded_over, [Shard(0)], sharding_shapes={0: [6, 2]})
    if style == "SequenceParallel":  # DTensor takes it that all ranks have as many rows
        plan: Any = {
            "0": ColwiseParallel(output_layouts=Shard(0)),
            **_STYLES[style](),
            "2": RowwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
    else:
        plan = _STYLES[style]()
    same(parallelize_module(model, over, plan)(x).square().mean(), expected)


for _style in _STYLES:

    @line(
        "A2", f"`parallelize_module` ({_style}) over the mesh dim that shards the input", "hold different shards of it"
    )
    def _(mesh: DeviceMesh, style: str = _style) -> None:
        _parallel(mesh, style, mesh, mesh)

    @line("A2", f"`parallelize_module` ({_style}) over another mesh dim", ranks=4)
    def _(mesh: DeviceMesh, style: str = _style) -> None:
        _parallel(mesh, style, mesh["model"], mesh["data"])


@line("A3", "a shard that is transposed: what is written to `view(-1)` and `reshape(-1)`, sharded and replicated")
def _(mesh: DeviceMesh) -> None:
    for placement in (Shard(0), Replicate()):
        for flat in ("view", "reshape"):
            shard = torch.arange(4.0).reshape(2, 2).t()
            sizes = {0: [2, 2]} if placement == Shard(0) else "infer"
            x = sc.ShardTensor.from_local(shard, mesh, [placement], sizes)
            assert x.is_contiguous()
            getattr(x, flat)(-1).zero_()
            same(x, torch.zeros(x.shape))


@line("A4", "`x[:, 1:].as_strided([2, 2], [3, 1])` of a replicated x, eager and compiled")
def _(mesh: DeviceMesh) -> None:
    full = torch.arange(6.0).reshape(2, 3)
    x = sc.distribute_tensor(full, mesh, [Replicate()])

    def taken(x: Any) -> Any:
        return x[:, 1:].as_strided([2, 2], [3, 1])

    same(taken(x), taken(full))
    same(torch.compile(taken, fullgraph=True, backend="aot_eager")(x), taken(full))


@line("A5", "gradient of `logcumsumexp` along the sharded dim in float32: as near to float64 as plain PyTorch's")
def _(mesh: DeviceMesh) -> None:
    for seed in range(20):
        exact = (numbers(9, 3, seed=seed) * 5).requires_grad_()
        weight = numbers(9, 3, seed=seed + 100)
        (exact.logcumsumexp(0) * weight).sum().backward()
        plain = exact.detach().float().requires_grad_()
        (plain.logcumsumexp(0) * weight.float()).sum().backward()
        x = partition(exact.detach().float(), mesh, [8, 1]).requires_grad_()
        (x.logcumsumexp(0) * weight.float()).sum().backward()
        off = [(g.double() - exact.grad).abs().max().item() for g in (x.grad.full_tensor(), plain.grad)]
        assert off[0] <= 3 * off[1] + 1e-6, off


scenes(
    "A6",
    other_shape_of_a_sum="another global shape stated on one rank, summed",
    other_shape="another global shape stated on one rank, gathered",
)


@line("A7", "`torch.load` of another rank's file", r"rank", processes=True)
def _(mesh: DeviceMesh) -> None:
    folder, rank = _folder(mesh), mesh.get_local_rank()
    torch.save(partition(numbers(4, 3), mesh, [2, 2]), folder / f"{rank}.pt")
    dist.barrier()
    torch.load(folder / f"{1 - rank}.pt", weights_only=False)


scenes("A8", two_threads="two threads' collectives of one group")


@line("A8", "four threads that do local ops for the first time", processes=True)
def _(mesh: DeviceMesh) -> None:
    full = numbers(7, 4)
    x = partition(full, mesh, [5, 2])
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            for i in range(20):
                out = ((x + number) * i).sin().reshape(7, 2, 2).transpose(1, 2).neg()
                expected = ((full + number) * i).sin().reshape(7, 2, 2).transpose(1, 2).neg()
                same(out.to_local(), expected.split([5, 2])[mesh.get_local_rank()])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong, wrong
