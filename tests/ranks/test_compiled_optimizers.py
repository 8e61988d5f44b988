"""Optimizers whose step is compiled, on parameters sharded, and parameters that meet inputs in a compiled function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.errors import UnsupportedOpError
from shardcompile.testing import rank, world_size
from tests.support.tiers import often

PARTITIONS = [[5, 3, 0], [4, 0, 4], [8, 0, 0]]
TIGHT = {"rtol": 1e-10, "atol": 1e-10}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
}


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),))


def sharded(full: Tensor, sizes: list[int], mesh: DeviceMesh) -> sc.ShardTensor:
    return sc.ShardTensor.from_local(full.split(sizes)[rank()].clone(), mesh, [Shard(0)], {0: sizes})


def parameters(mesh: DeviceMesh) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Sharded parameters, each with a partition of its own, and the same ones replicated."""
    torch.manual_seed(0)
    full = [torch.randn(8, 3, dtype=torch.float64) for _ in PARTITIONS]
    return [nn.Parameter(sharded(f, s, mesh)) for f, s in zip(full, PARTITIONS, strict=True)], [
        *map(nn.Parameter, full)
    ]


def compiled(function: Callable[..., Any], **how: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    """A compiled function, and how many graphs it has. Each rank, and the whole, has a function of its own."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, **how), counter


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize("name", often(list(OPTIMIZERS), 1))
def test_compiled_steps_equal_those_of_one_process(name: str) -> None:
    mine, whole = parameters(mesh_1d())
    steps = [compiled(OPTIMIZERS[name](p).step) for p in (mine, whole)]
    graphs = []
    for _ in range(4):
        for p, q, sizes in zip(mine, whole, PARTITIONS, strict=True):
            q.grad = torch.randn_like(q)
            p.grad = sharded(q.grad, sizes, mesh_1d())
        for step, _counter in steps:
            step()
        for p, q in zip(mine, whole, strict=True):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), **TIGHT)
        graphs.append([counter.frame_count for _, counter in steps])
    assert all(of_shards == of_whole for of_shards, of_whole in graphs), graphs
    assert graphs[1:] == graphs[1:2] * 3, "compiled again after the second step"


@pytest.mark.ranks(3, timeout=300, processes=False)
def test_a_parameter_meets_inputs_that_are_partition_as_it_is_and_otherwise() -> None:
    mesh = mesh_1d()
    (p, *_), (q, *_) = parameters(mesh)

    def product(p: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            p.add_(x)
            torch._foreach_mul_([p], [x])
        return (p * x).sin() * p

    run, counter = compiled(product, fullgraph=True)
    for sizes in (PARTITIONS[0], [0, 8, 0], PARTITIONS[0], [1, 1, 6], [0, 0, 8]):
        x = torch.randn_like(q).detach()
        out, expected = run(p, sharded(x, sizes, mesh)), product(q, x)
        torch.testing.assert_close(out.full_tensor(), expected, **TIGHT)
        p.grad = q.grad = None
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, **TIGHT)
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), **TIGHT)
    assert counter.frame_count == 2  # one for the parameter's partition, one for all others


def with_parameters_in_shards(net: nn.Sequential, mesh: DeviceMesh) -> None:
    for layer in net:
        for name, p in list(layer.named_parameters(recurse=False)):
            partition = {0: [p.shape[0] - 1, 0, 1]}
            setattr(
                layer, name, nn.Parameter(sc.distribute_tensor(p.detach(), mesh, [Shard(0)], sharding_shapes=partition))
            )


@pytest.mark.ranks(3, timeout=300, processes=False)
@pytest.mark.parametrize(("name", "sharded_in_rows"), often([("SGD", False), ("AdamW", True), ("AdamW", False)], 0))
def test_whole_steps_with_graph_breaks(name: str, sharded_in_rows: bool) -> None:
    torch.manual_seed(0)
    mesh = mesh_1d()
    whole = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    mine = copy.deepcopy(whole)
    if sharded_in_rows:
        with_parameters_in_shards(mine, mesh)

    def step_of(net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        optimizer = OPTIMIZERS[name](net.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    steps = [compiled(step_of(net)) for net in (mine, whole)]
    graphs = []
    for sizes in ([5, 0, 2], [1, 3, 3], [0, 1, 6], [4, 4, 4], [9, 0, 1]):
        full = [torch.randn(sum(sizes), columns, dtype=torch.float64) for columns in (3, 2)]
        loss = steps[0][0](*(sharded(x, sizes, mesh) for x in full))
        torch.testing.assert_close(loss.full_tensor(), steps[1][0](*full), **TIGHT)
        for p, q in zip(mine.parameters(), whole.parameters(), strict=True):
            ours = p.detach().full_tensor() if sharded_in_rows else p.detach()  # type: ignore[attr-defined]
            torch.testing.assert_close(ours, q.detach(), **TIGHT)
        graphs.append(steps[0][1].frame_count)
    assert graphs[0] > 0 and graphs[1:] == graphs[1:2] * 4, "compiled again after the second step"


def step_of(params: list[nn.Parameter]) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(params, lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = sum(((p * x).sin() + p.sum(0, keepdim=True)).square().mean() for p in params)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.ranks(2, timeout=300)  # compiled autograd is one for a process
def test_compiled_autograd_is_refused() -> None:
    mesh = mesh_1d()
    p = nn.Parameter(sharded(torch.randn(4, 3), [3, 1], mesh))
    with torch._dynamo.config.patch(compiled_autograd=True):
        run, _ = compiled(step_of([p]))
        with pytest.raises(UnsupportedOpError, match="compiled autograd"):
            run(sharded(torch.randn(4, 3), [3, 1], mesh))
