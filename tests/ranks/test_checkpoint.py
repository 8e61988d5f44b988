"""Checkpoints: what shards have saved is loaded by any other world, mesh, placement and sharded, and by plain tensors."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor as distribute_dtensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.testing import LocalRanks, rank, world_size

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn]


def values(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=numbers) * 8).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.reshape(-1).tolist() == b.reshape(-1).tolist()


def random_partition(size: int, parts: int, choose: random.Random) -> list[int]:
    at = sorted(choose.randint(0, size) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *at], [*at, size], strict=True)]


def random_mesh(world: int, choose: random.Random) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2) if world == 4 and choose.random() < 0.5 else (world,))


def laid_out(full: Tensor, mesh: DeviceMesh, choose: random.Random) -> Tensor:
    """A tensor in a layout that is drawn, the same on every rank: shards of any size, chunks, copies, DTensor, plain."""
    kind = choose.choice(["shards", "shards", "shards", "dtensor", "plain"])
    placements = [choose.choice([*map(Shard, range(full.ndim)), Replicate()]) for _ in range(mesh.ndim)]
    if kind == "plain":
        return full.clone()
    if kind == "dtensor":
        return distribute_dtensor(full, mesh, placements)
    stated, sizes = {}, list(full.shape)
    if len({p.dim for p in placements if isinstance(p, Shard)}) == sum(isinstance(p, Shard) for p in placements):
        for mesh_dim, p in enumerate(placements):
            if isinstance(p, Shard) and choose.random() < 0.8:
                stated[mesh_dim] = random_partition(sizes[p.dim], mesh.size(mesh_dim), choose)
    return sc.distribute_tensor(full, mesh, placements, sharding_shapes=stated)


def drawn(number: int, ranks: int, side: str) -> tuple[Tensor, Tensor]:
    """The full values of a draw, and them in a layout for a number of ranks."""
    choose = random.Random(number)
    shape = [choose.choice([0, 1, 2, 3, 7, 8]) for _ in range(choose.randint(1, 3))]
    full = values(shape, choose.choice(DTYPES), number)
    choose = random.Random(f"{number} {side}")
    return full, laid_out(full, random_mesh(ranks, choose), choose)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def save_draws(mesh: DeviceMesh, folder: str, numbers: range) -> None:
    torch.distributed.checkpoint.save(
        {str(n): drawn(n, mesh.size(), "saved")[1] for n in numbers}, checkpoint_id=folder
    )


def load_draws(mesh: DeviceMesh, folder: str, numbers: range) -> list[int]:
    """The draws that are not what has been saved."""
    targets = {}
    for n in numbers:
        target = drawn(n, mesh.size(), "loaded")[1]
        target.zero_() if not isinstance(target, sc.ShardTensor) else target._local_tensor.zero_()
        targets[str(n)] = target
    torch.distributed.checkpoint.load(targets, checkpoint_id=folder)
    return [n for n in numbers if not same_bits(whole(targets[str(n)]), drawn(n, mesh.size(), "loaded")[0])]


def check_draws(folder: Path, numbers: range, pools: dict[int, LocalRanks]) -> None:
    for saving, saver in pools.items():
        for loading, loader in pools.items():
            here = str(folder / f"{saving}-{loading}")
            part = numbers[(4 * saving + loading) % 16 :: 16]
            saver(save_draws, here, part)
            assert loader(load_draws, here, part) == [[]] * loading


def test_what_any_ranks_save_any_others_load(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        worlds = {n: stack.enter_context(LocalRanks(n, processes=False)) for n in (1, 2, 3, 4)}
        check_draws(tmp_path, range(160), worlds)


@pytest.mark.nightly
def test_a_thousand_random_checkpoints(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        worlds = {n: stack.enter_context(LocalRanks(n, processes=False)) for n in (1, 2, 3, 4)}
        check_draws(tmp_path, range(1000, 2000), worlds)


def test_an_empty_shard_does_not_hide_the_one_behind_it(tmp_path: Path) -> None:
    """Both start at the same row. torch keeps one of two parts that start alike."""

    def save(mesh: DeviceMesh, folder: str) -> None:
        x = torch.arange(6.0).reshape(3, 2)
        partitions = {"first": [0, 3, 0], "middle": [2, 0, 1], "none": [0, 0, 0]}
        parts = {
            k: sc.distribute_tensor(x[: sum(c)], mesh, [Shard(0)], sharding_shapes={0: c})
            for k, c in partitions.items()
        }
        dcp.save(parts, checkpoint_id=folder)

    def load(_: DeviceMesh, folder: str) -> list[Tensor]:
        parts = {"first": torch.zeros(3, 2), "middle": torch.zeros(3, 2), "none": torch.zeros(0, 2)}
        dcp.load(parts, checkpoint_id=folder)
        return list(parts.values())

    with LocalRanks(3, processes=False) as ranks:
        ranks(save, str(tmp_path))
        for first, middle, none in ranks(load, str(tmp_path)):
            assert torch.equal(first, torch.arange(6.0).reshape(3, 2)) and torch.equal(middle, first)
            assert none.shape == (0, 2)


@pytest.mark.ranks(3)
def test_a_checkpoint_holds_each_element_once(tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh("cpu", (3,))
    full = torch.randn(1000, 100)
    x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: [700, 0, 300]})
    dcp.save({"x": x, "y": x.redistribute(placements=[Replicate()])}, checkpoint_id=folder[0])
    written = sum(path.stat().st_size for path in Path(folder[0]).glob("*.distcp"))
    assert 2 * 4 * full.numel() <= written < 2 * 4 * full.numel() + 10_000


@pytest.mark.ranks(2)
def test_a_pending_sum_is_refused(tmp_path: Path) -> None:
    x = sc.ShardTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(CheckpointException, match="pending reduction, which cannot be saved"):
        dcp.save({"x": x}, checkpoint_id=str(tmp_path))


class Net(nn.Module):
    """Weights sharded of any size, and a plain one."""

    def __init__(self, mesh: DeviceMesh, sizes: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = torch.randn(7, 5, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
        self.up = nn.Parameter(sc.distribute_tensor(up, mesh, [Shard(0)], sharding_shapes={0: sizes}))
        self.down = nn.Parameter(sc.distribute_tensor(down, mesh, [Shard(1)], sharding_shapes={0: sizes[::-1]}))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x @ self.up.mT) @ self.down.mT + self.bias).square().mean()


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()


def full_values(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [s for p in net.parameters() for s in optimizer.state[p].values()]
    return [whole(t.detach()) for t in (*net.parameters(), *states)]


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


Build = Callable[[DeviceMesh, list[int]], nn.Module]


def begin(mesh: DeviceMesh, folder: str, build: Build) -> None:
    """Train three steps, and save."""
    net = build(mesh, [4, 0, 3])
    optimizer = adamw(net)
    trained(net, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def resume(mesh: DeviceMesh, folder: str, build: Build) -> list[Tensor]:
    """Load, and train three more steps."""
    net = build(mesh, [1, 6])
    optimizer = adamw(net)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    trained(net, optimizer, range(3, 6))
    return full_values(net, optimizer)


def without_a_stop(mesh: DeviceMesh, build: Build) -> list[Tensor]:
    """Train six steps."""
    net = build(mesh, [1, 6])
    optimizer = adamw(net)
    trained(net, optimizer, range(6))
    return full_values(net, optimizer)


def same_after_resuming(folder: Path, build: Build, whole: Build, processes: bool) -> None:
    """Save on 3 ranks and resume on 2; compare with a run of `whole` that is not interrupted."""
    with LocalRanks(3, processes=processes) as three, LocalRanks(2, processes=processes) as two:
        three(begin, str(folder), build)
        for found, expected in zip(two(resume, str(folder), build), two(without_a_stop, whole), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_training_resumes_on_other_ranks_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    same_after_resuming(tmp_path, Net, Net, processes=False)


class Mixed(nn.Module):
    """Weights sharded, beside plain ones that FSDP2 shards."""

    def __init__(self, mesh: DeviceMesh, sizes: list[int]) -> None:
        super().__init__()
        self.net = Net(mesh, sizes)
        torch.manual_seed(1)
        self.head = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.head(x))


def sharded_by_fsdp(mesh: DeviceMesh, sizes: list[int]) -> nn.Module:
    model = Mixed(mesh, sizes)
    own = {p for p in model.parameters() if isinstance(p, sc.ShardTensor)}
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=own)
    return model


def test_training_under_fsdp_resumes_on_other_ranks(tmp_path: Path) -> None:
    same_after_resuming(tmp_path, sharded_by_fsdp, Mixed, processes=True)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("from_rank_0", [False, True])
def test_full_state_dicts(cpu_offload: bool, from_rank_0: bool) -> None:
    mesh = init_device_mesh("cpu", (3,))
    net = Net(mesh, [4, 0, 3])
    optimizer = adamw(net)
    trained(net, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    states = get_model_state_dict(net, options=options), get_optimizer_state_dict(net, optimizer, options=options)
    up = whole(net.up.detach())
    if cpu_offload and rank() != 0:
        assert states[0] == {}
    else:
        assert all(type(t) is Tensor for t in states[0].values())
        assert torch.equal(states[0]["up"], up)
        moments = [s for s in states[1]["state"].values() if isinstance(s, dict)]
        assert all(not isinstance(t, sc.ShardTensor) for s in moments for t in s.values())
        assert {tuple(s["exp_avg"].shape) for s in moments} == {(7, 5), (3, 7), (3,)}
    if cpu_offload and not from_rank_0:
        return  # torch: each rank then has to have the full values
    expected = full_values(net, optimizer)
    other = Net(mesh, [0, 2, 5])
    another = adamw(other)
    back = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    states = copy.deepcopy(states)  # plain tensors among them are those of `net` and its optimizer
    set_model_state_dict(other, states[0], options=back)
    set_optimizer_state_dict(other, another, states[1], options=back)
    assert isinstance(other.up, sc.ShardTensor) and other.up.sharding.sizes(0) == (0, 2, 5)
    for found, wanted in zip(full_values(other, another), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    trained(other, another, range(2, 3)), trained(net, optimizer, range(2, 3))
    for found, wanted in zip(full_values(other, another), full_values(net, optimizer), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
def test_saving_behind_the_back_of_training(tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    x = sc.distribute_tensor(torch.arange(7.0), init_device_mesh("cpu", (2,)), [Shard(0)], sharding_shapes={0: [6, 1]})
    future = dcp.async_save({"x": x}, checkpoint_id=folder[0])
    x.add_(100)
    future.result()
    found = {"x": torch.zeros(7)}
    dcp.load(found, checkpoint_id=folder[0])
    assert torch.equal(found["x"], torch.arange(7.0))


@pytest.mark.ranks(2)
def test_the_shard_of_another_rank_is_refused(tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh("cpu", (2,))
    x = sc.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    torch.save({"x": x, "copies": x.redistribute(placements=[Replicate()])}, f"{folder[0]}/{rank()}.pt")
    dist.barrier()
    assert torch.equal(torch.load(f"{folder[0]}/{rank()}.pt")["x"].to_local(), x.to_local())
    with pytest.raises(
        Exception, match=f"the local shard of .* on rank {1 - rank()}, and it is loaded on rank {rank()}"
    ):
        torch.load(f"{folder[0]}/{1 - rank()}.pt", weights_only=False)
    with pytest.raises(Exception, match="on rank 0, and it is loaded" if rank() else "on rank 1, and it is loaded"):
        everyone: list[Any] = [None] * world_size()
        dist.all_gather_object(everyone, x)
    assert copy.deepcopy(x).sharding == x.sharding
