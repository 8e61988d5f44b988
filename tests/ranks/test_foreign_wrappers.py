"""Wrappers and tracers of torch refuse sharded tensors that they would misinterpret, or are right with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import shardcompile as sc
from shardcompile.testing import LocalRanks, once, rank


def _sharded(mesh: DeviceMesh) -> Any:
    full, sizes = torch.arange(15.0).reshape(5, 3), [4, 1]
    shard = full.split(sizes)[rank()].clone()
    return sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes}).requires_grad_()


def _module(x: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(x.detach()))
    return module


def _assign_data(x: Any) -> None:
    torch.nn.Parameter(torch.ones(5, 3)).data = x


REFUSED: dict[str, tuple[str, Callable[[DeviceMesh, Any], object]]] = {
    "make_fx": ("make_fx", lambda mesh, x: make_fx(torch.sin)(x)),
    "torch.jit.trace": ("torch.jit.trace", lambda mesh, x: torch.jit.trace(torch.sin, (x,), check_trace=False)),
    "torch.export": ("constants of the graph", lambda mesh, x: torch.export.export(nn.Linear(3, 2), (x.detach(),))),
    "DTensor.from_local": ("a DTensor over", lambda mesh, x: DTensor.from_local(x, mesh, [Replicate()])),
    "distribute_tensor": ("broadcast", lambda mesh, x: distribute_tensor(x, mesh, [Replicate()])),
    "distribute_tensor of what ranks have": (
        "a DTensor over",
        lambda mesh, x: distribute_tensor(x.detach(), mesh, [Replicate()], src_data_rank=None),
    ),
    "distribute_tensor in rows of what ranks have": (
        "a DTensor over",
        lambda mesh, x: distribute_tensor(x.detach(), mesh, [Shard(0)], src_data_rank=None),
    ),
    "fully_shard": ("fully_shard", lambda mesh, x: fully_shard(_module(x), mesh=mesh)),
    "DistributedDataParallel": (
        "broadcast",
        lambda mesh, x: DistributedDataParallel(_module(x), process_group=mesh.get_group()),
    ),
    "data of a plain tensor": ("plain.data = sharded", lambda mesh, x: _assign_data(x)),
}


def _try(mesh: DeviceMesh, act: Callable[[DeviceMesh, Any], object], words: str) -> None:
    with pytest.raises(Exception, match=words) as caught:
        act(mesh, _sharded(mesh))
    assert isinstance(caught.value, sc.ShardError)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name: str) -> None:
    words, act = REFUSED[name]
    with LocalRanks(2, processes=False) as ranks:
        ranks(_try, act, words)


def _try_flattening(mesh: DeviceMesh) -> None:
    with pytest.raises(RuntimeError):
        FullyShardedDataParallel(_module(_sharded(mesh)), mesh.get_group(), device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.to_dlpack(_sharded(mesh))
    with pytest.raises(RuntimeError):
        torch.sparse_coo_tensor(_sharded(mesh).T[:2].long(), torch.ones(5))


@pytest.mark.ranks(2, processes=False)
def test_an_export_that_is_refused_leaves_no_setting_behind() -> None:
    x = sc.ones(7, 3, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
    with pytest.raises(Exception, match="constants of the graph"):
        torch.export.export(nn.Linear(3, 2), (x,))
    once(torch.compiler.reset)
    assert torch._inductor.config.shape_padding
    assert not torch.fx.experimental._config.backed_size_oblivious


def test_torch_itself_refuses() -> None:
    with LocalRanks(2, processes=False) as ranks:
        ranks(_try_flattening)


def _without_first_broadcast(mesh: DeviceMesh) -> None:
    module = _module(_sharded(mesh))
    wrapped = DistributedDataParallel(module, process_group=mesh.get_group(), init_sync=False)
    module.forward = lambda: module.weight.square().sum()  # type: ignore[method-assign, operator, union-attr]
    wrapped().backward()
    (weight,) = module.parameters()
    torch.testing.assert_close(weight.grad.full_tensor(), 2 * torch.arange(15.0).reshape(5, 3))  # type: ignore[union-attr]


def test_gradients_that_ddp_averages() -> None:
    """It averages full gradients that are the same on all ranks, on processes: threads have no futures."""
    with LocalRanks(2) as ranks:
        ranks(_without_first_broadcast)
