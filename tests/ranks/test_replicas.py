"""Whether ranks hold the same plain parameters, and how they come to."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardcompile as sc
from shardcompile.errors import LayoutError
from shardcompile.testing import rank, world_size


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 0), nn.Linear(4, 1, dtype=torch.complex64))
    made[1].running_mean.uniform_()
    return made


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),))


@torch.no_grad()
def write(x: torch.Tensor, value: float) -> None:
    x.view(-1)[0] = value


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "0.weight": lambda m: write(m[0].weight, 7),
    "0.bias": lambda m: write(m[0].bias, m[0].bias[0].item() * (1 + 2**-23)),
    "1.running_mean": lambda m: write(m[1].running_mean, 7),
    "1.num_batches_tracked": lambda m: write(m[1].num_batches_tracked, 1),
    "3.weight": lambda m: write(m[3].weight, 7),
}


@pytest.mark.ranks(3, processes=False)
def test_equal_weights_pass_and_another_seed_does_not() -> None:
    sc.check_replicated(model(), line())
    sc.check_replicated(nn.ReLU(), line())
    with pytest.raises(LayoutError, match=r"0\.weight, 0\.bias.*ranks \[1, 2\] differ from rank 0"):
        sc.check_replicated(model(seed=rank()), line())
    sc.check_replicated(model(), line())  # nothing of the check is left


@pytest.mark.ranks(3)
def test_processes_are_told_alike() -> None:
    with pytest.raises(LayoutError, match=r"ranks \[2\] differ from rank 0"):
        sc.check_replicated(model(seed=rank() // 2), line())


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("where", [0, 2])
def test_one_bit_on_one_rank_is_found(name: str, where: int) -> None:
    changed = model()
    if rank() == where:
        CHANGES[name](changed)
    others = [1, 2] if where == 0 else [2]
    with pytest.raises(LayoutError, match=rf"ranks: {name}, 1 of 11; ranks {re.escape(str(others))} differ"):
        sc.check_replicated(changed, line())


@pytest.mark.ranks(3, processes=False)
def test_signs_of_zero_are_bits_and_nan_equals_itself() -> None:
    changed = model()
    write(changed[0].weight, float("nan"))
    sc.check_replicated(changed, line())
    write(changed[0].weight, -0.0 if rank() == 1 else 0.0)
    with pytest.raises(LayoutError, match=r"ranks \[1\]"):
        sc.check_replicated(changed, line())


@pytest.mark.ranks(3, processes=False)
def test_other_modules_are_told_by_name() -> None:
    longer = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)) if rank() == 1 else nn.Sequential(nn.Linear(3, 4))
    wider = nn.Linear(3, 4 + (rank() == 2))
    for made, wrong in ((longer, 1), (wider, 2), (nn.Linear(3, 4).to([torch.float32, torch.float64][rank() % 2]), 1)):
        for call in (sc.check_replicated, sc.sync_module_over_mesh):
            with pytest.raises(LayoutError, match=rf"name, shape or dtype.*ranks \[{wrong}\] differ from rank 0"):
                call(made, line())


@pytest.mark.ranks(4, processes=False)
def test_all_ranks_of_two_dims_are_compared() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    sc.check_replicated(model(), mesh)
    by_row = model(seed=mesh.get_coordinate()[0])  # equal along one dim only
    sc.check_replicated(by_row, mesh["domain"])
    with pytest.raises(LayoutError, match=r"ranks \[2, 3\] differ from rank 0"):
        sc.check_replicated(by_row, mesh)
    with pytest.raises(LayoutError, match=r"ranks \[[23]\] differ from rank [01]"):
        sc.check_replicated(by_row, mesh["data"])
    with mesh, pytest.raises(LayoutError, match=r"ranks \[2, 3\]"):
        sc.check_replicated(by_row)


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("source", [0, 2])
def test_one_rank_gives_its_values_to_all(source: int) -> None:
    synced, wanted = model(seed=rank()), model(seed=source)
    kept = [x.data_ptr() for x in synced.parameters()]
    sc.sync_module_over_mesh(synced, line(), src_mesh_rank=source, verify=True)
    for (name, x), y in zip(synced.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(x, y), name
    assert [x.data_ptr() for x in synced.parameters()] == kept
    assert all(x.requires_grad and x.is_leaf for x in synced.parameters())


@pytest.mark.ranks(3, processes=False)
def test_sharded_parameters_are_left_alone() -> None:
    made = model(seed=rank())
    rows = torch.full([rank()], float(rank()))
    made[0].weight = nn.Parameter(sc.ShardTensor.from_local(rows, line(), [Shard(0)]))
    made[0].bias = nn.Parameter(sc.ShardTensor.from_local(torch.ones(2), line(), [Replicate()]))
    sc.sync_module_over_mesh(made, line(), verify=True)
    assert torch.equal(made[0].weight.to_local(), rows)
    del made[3], made[2], made[1]
    sc.check_replicated(made, line())
    with pytest.raises(LayoutError, match="all parameters are sharded"):
        sc.sync_module_over_mesh(made, line())


@pytest.mark.ranks(3, processes=False)
def test_what_cannot_be_sent_is_refused_on_all_ranks() -> None:
    lazy = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
    meta = model()
    if rank() == 1:
        meta[0] = nn.Linear(3, 4, device="meta")
    for made, names in ((lazy, r"1\.weight, 1\.bias"), (meta, r"0\.weight, 0\.bias")):
        with pytest.raises(LayoutError, match=rf"{names} have no values yet"):
            sc.sync_module_over_mesh(made, line())
    with pytest.raises(ValueError, match="not a position in a mesh of 3"):
        sc.sync_module_over_mesh(model(), line(), src_mesh_rank=3)
    with pytest.raises(ValueError, match="a mesh of one dim"):
        sc.sync_module_over_mesh(model(), init_device_mesh("cpu", (1, 3)))


@pytest.mark.ranks(2, processes=False)
def test_a_check_breaks_a_graph_in_two() -> None:
    mesh = line()
    made = model(), model(seed=rank())

    def step(x: torch.Tensor, which: int) -> torch.Tensor:
        sc.check_replicated(made[which], mesh)
        return x + 1

    compiled = torch.compile(step, backend="aot_eager")
    assert torch.equal(compiled(torch.ones(2), 0), torch.full([2], 2.0))
    with pytest.raises(LayoutError, match="differ between the ranks"):
        compiled(torch.ones(2), 1)


@pytest.mark.ranks(2, processes=False)
def test_no_graph_holds_a_check() -> None:
    mesh, made = line(), model()

    def step(x: torch.Tensor) -> torch.Tensor:
        sc.check_replicated(made, mesh)
        return x + 1

    with pytest.raises(Exception, match="check_replicated"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(torch.ones(2))
