"""Each way from a sharded tensor to memory is right or refused in words, and no process dies of it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import mesh
from tests.support.memory_ways import AS_PLAIN, RAISES, REFUSED, RIGHT
from tests.support.sources import ROOT


@functools.cache
def _outcomes() -> dict[str, str]:
    command = [sys.executable, "-m", "tests.support.memory_ways"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    told: dict[str, str] = json.loads(run.stdout)
    return told


def _outcome(table: str, name: str) -> str:
    told = _outcomes()[f"{table}: {name}"]
    if told.startswith("absent"):
        pytest.skip(told)
    return told


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name: str) -> None:
    told = _outcome("REFUSED", name)
    assert told.startswith("UnsupportedOpError: "), told
    assert "f32[7, 3] 0: S(0)[5,2]" in told or "f32[2, 3]" in told or "f32[3, 6]" in told, told
    assert "x.to_local()" in told and "x.full_tensor()" in told, told


@pytest.mark.parametrize("name", AS_PLAIN)
def test_refused_as_for_plain_tensors(name: str) -> None:
    with pytest.raises(Exception, match=r".") as plain:
        AS_PLAIN[name](torch.arange(21.0).view(7, 3))
    words = str(plain.value).replace("'Tensor'", "'ShardTensor'")
    assert _outcome("AS_PLAIN", name) == f"{type(plain.value).__name__}: {words}"


@pytest.mark.parametrize("name", RAISES)
def test_raises_where_the_address_is_taken_without_asking(name: str) -> None:
    assert _outcome("RAISES", name).startswith("RuntimeError: Cannot access data pointer")


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    assert _outcome("RIGHT", name) == "the tensor"


@pytest.mark.ranks(3, processes=False)
def test_torch_itself_may_ask_whether_there_is_memory() -> None:
    """It tells wrappers by the address 0, and views of one another by their storages."""
    full = torch.arange(21.0).view(7, 3)
    x = sc.distribute_tensor(full, mesh(), [Shard(0)], sharding_shapes={0: [5, 0, 2]})
    staged = StateDictStager(pin_memory=False, share_memory=False).stage({"x": x})["x"]
    assert type(staged) is sc.ShardTensor and torch.equal(staged.full_tensor(), full)


@pytest.mark.ranks(1, processes=False)
def test_torch_compares_saved_tensors_by_their_addresses() -> None:
    full = torch.arange(21.0).view(7, 3)
    y = sc.distribute_tensor(full, mesh(), [Shard(0)]).requires_grad_()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        z = y.sin()
        loss = (z * z).sum()
        z.mul_(2)
        loss.backward()
    expected = full.clone().requires_grad_()
    expected.sin().square().sum().backward()
    assert y.grad is not None and expected.grad is not None
    torch.testing.assert_close(y.grad.full_tensor(), expected.grad)


@pytest.mark.ranks(3, processes=False)
def test_kernels_that_read_memory_below_dispatch_are_told_in_words() -> None:
    """The sizes of the steps of a packed sequence, of an op that is called by its own name."""
    sizes = sc.distribute_tensor(torch.tensor([2, 1]), mesh(), [Shard(0)])
    layer, x = nn.GRU(3, 4), sc.distribute_tensor(torch.ones(3, 3), mesh(), [Shard(0)])
    state: Tensor = torch.zeros(1, 2, 4)
    weights = list(layer.parameters())
    with torch.no_grad(), pytest.raises(sc.UnsupportedOpError, match=r"reads the memory of its arguments.*i64\[2\]"):
        torch.ops.aten.gru.data(x, sizes, state, weights, True, 1, 0.0, False, False)
