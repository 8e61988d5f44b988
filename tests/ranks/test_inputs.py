"""What constructors are given as a tensor: whatever it is, and on whichever rank, every rank raises the same error."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor as distribute_dtensor
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile import LayoutError, ShardTensor
from shardcompile.testing import mesh, rank, world_size

GOOD = (7, 3)

INPUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "got None"),
    "a list": (lambda: [1.0, 2.0], "got no tensor .*as_tensor"),
    "a DTensor": (lambda: distribute_dtensor(torch.ones(GOOD), mesh(), [Shard(0)]), "got a DTensor .*from_dtensor"),
    "a ShardTensor": (lambda: sc.ones(GOOD, device_mesh=mesh()), "got a ShardTensor .*redistribute.*to_local"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), "got a nested .*values"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
        "got a nested .*values",
    ),
    "coo": (lambda: torch.ones(GOOD).to_sparse(), "got a sparse tensor .*to_dense"),
    "csr": (lambda: torch.ones(GOOD).to_sparse_csr(), "got a sparse tensor .*to_dense"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(GOOD), 1.0, 0, torch.qint8),
        "got a quantized .*dequantize",
    ),
    "17 dims": (lambda: torch.ones([1] * 17), "got a tensor of more than 16 dims"),
}
"""What no constructor takes: how it is made, and the words of the error."""

ODD: dict[str, tuple[Callable[[], Any], str]] = {
    **INPUTS,
    "meta": (lambda: torch.ones(GOOD, device="meta"), "another device than|meta"),
    "another dtype": (lambda: torch.ones(GOOD, dtype=torch.float64), "another dtype|float64"),
    "another number of dims": (lambda: torch.ones(7), "another number of dims|different tensors"),
}
"""What is refused where it is not what the other ranks pass."""


class _Holder(nn.Module):
    """A module with one parameter, which may be anything."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _distribute_module(value: Any) -> Any:
    def partition(_: str, module: Any, of: Any) -> None:
        module.value = sc.distribute_tensor(module.value, of, [Shard(0)])

    return sc.distribute_module(_Holder(value), mesh(), partition)


EXCHANGING: dict[str, Callable[[Any], Any]] = {
    "distribute_tensor": lambda x: sc.distribute_tensor(x, mesh(), [Shard(0)]),
    "distribute_tensor from another rank": lambda x: sc.distribute_tensor(x, mesh(), [Shard(0)], src_data_rank=1),
    "distribute_module": _distribute_module,
    "from_local": lambda x: ShardTensor.from_local(x, mesh(), [Shard(0)]),
    "from_local, checked": lambda x: ShardTensor.from_local(
        x, mesh(), [Shard(0)], {0: [7] * world_size()}, run_check=True
    ),
    "from_local in chunks, checked": lambda x: ShardTensor.from_local(
        x, mesh(), [Shard(0)], "chunk", global_shape=(7 * world_size(), 3), run_check=True
    ),
}
"""Constructors that communicate, whatever they are given."""

SILENT: dict[str, Callable[[Any], Any]] = {
    "distribute_tensor": lambda x: sc.distribute_tensor(x, mesh(), [Shard(0)], src_data_rank=None),
    "from_local, sizes stated": lambda x: ShardTensor.from_local(x, mesh(), [Shard(0)], {0: [7] * world_size()}),
    "from_local in chunks": lambda x: ShardTensor.from_local(
        x, mesh(), [Shard(0)], "chunk", global_shape=(7 * world_size(), 3)
    ),
}
"""Constructors that promise not to communicate."""


def _told(call: Callable[[], object]) -> str:
    try:
        call()
    except LayoutError as error:
        return str(error)
    return ""


def _refused_alike(case: object, call: Callable[[], object], words: str) -> None:
    """The call raises the same on all ranks, and they are in step afterwards."""
    found: list[Any] = [None] * world_size()
    dist.all_gather_object(found, _told(call))
    assert len(set(found)) == 1, (case, found)
    with pytest.raises(LayoutError, match=words):
        raise LayoutError(found[0])


def _is_taken(constructor: str, name: str) -> bool:
    """Whether every rank may pass this: `distribute_tensor` gives a ShardTensor another layout."""
    return name == "a ShardTensor" and constructor.startswith("distribute")


@pytest.mark.ranks(3)
def test_on_all_ranks_or_on_one_the_same_error() -> None:
    for (constructor, make), (name, (given, words)) in itertools.product(EXCHANGING.items(), INPUTS.items()):
        if not _is_taken(constructor, name):
            _refused_alike((constructor, name), lambda make=make, given=given: make(given()), words)
    for (constructor, make), (name, (given, words)), odd in itertools.product(
        EXCHANGING.items(), ODD.items(), range(world_size())
    ):
        x = given()  # on every rank: to make a DTensor communicates
        x = x if rank() == odd else torch.ones(GOOD)
        _refused_alike((constructor, name, odd), lambda make=make, x=x: make(x), words)


@pytest.mark.ranks(3)
def test_from_the_source_of_scatter_tensor() -> None:
    for source, (name, (given, words)) in itertools.product(range(world_size()), INPUTS.items()):
        x = given()

        def scatter(x: Any = x, source: int = source) -> object:
            return sc.scatter_tensor(x if rank() == source else None, source, mesh(), [Shard(0)])

        _refused_alike((name, source), scatter, f"{words.split()[0]}.*from the source at mesh coordinate .{source},")
    for name, (given, _) in ODD.items():  # what others pass is ignored
        x = given()
        y = sc.scatter_tensor(torch.ones(GOOD) if rank() == 1 else x, 1, mesh(), [Shard(0)])
        assert torch.equal(y.full_tensor(), torch.ones(GOOD)), name


@pytest.mark.ranks(3, processes=False)
def test_without_communication_the_rank_that_is_given_it_raises() -> None:
    for (constructor, make), (name, (given, words)) in itertools.product(SILENT.items(), INPUTS.items()):
        if _is_taken(constructor, name) or name == "17 dims":
            continue  # as nothing is exchanged, any number of dims will do
        x = given()
        told = _told(lambda make=make, x=x: make(x if rank() == 1 else torch.ones(GOOD)))
        if rank() != 1:
            assert not told, (constructor, name)
            continue
        with pytest.raises(LayoutError, match=words):
            raise LayoutError(told)


@pytest.mark.ranks(3)
def test_other_arguments_on_one_rank() -> None:
    """A tensor that wants a gradient on one rank only would leave the others out of its backward pass."""
    full, odd = torch.ones(GOOD), rank() == 2
    for name, call in {
        "gradient": lambda: sc.distribute_tensor(full.clone().requires_grad_(odd), mesh(), [Shard(0)]),
        "a source outside": lambda: sc.scatter_tensor(full, 9 if odd else 0, mesh(), [Shard(0)]),
        "no shape": lambda: sc.scatter_tensor(full, 0, mesh(), [Shard(0)], 7 if odd else (7, 3)),  # type: ignore[arg-type]
        "source": lambda: sc.distribute_tensor(full, mesh(), [Shard(0)], src_data_rank=int(odd)),
        "layout": lambda: sc.distribute_tensor(
            sc.ones(GOOD, device_mesh=mesh(), placements=[Shard(int(odd))]), mesh(), [Shard(0)]
        ),
    }.items():
        found: list[Any] = [None] * world_size()
        dist.all_gather_object(found, _told(call))
        assert all("mesh coordinate (2,) has other arguments than (0,)" in f for f in found), (name, found)


@pytest.mark.ranks(3, processes=False)
def test_factories_take_the_device_of_the_mesh_and_meta() -> None:
    for name in ("zeros", "ones", "empty", "rand", "randn"):
        make = getattr(sc, name)
        for device in ("meta", torch.device("meta"), "cpu", torch.device("cpu"), None):
            x = make(GOOD, device=device, device_mesh=mesh(), placements=[Shard(0)], sharding_shapes={0: [4, 0, 3]})
            wanted = "cpu" if device is None else torch.device(device).type
            assert x.device.type == wanted and x.to_local().shape == ([4, 0, 3][rank()], 3)
            assert x.sharding.sizes(0) == (4, 0, 3)
        with torch.device("meta"):
            assert make(GOOD, device_mesh=mesh()).is_meta
            assert not make(GOOD, device_mesh=mesh(), device="cpu").is_meta
        with pytest.raises(LayoutError, match=r"device='cuda' on a mesh of 'cpu'.*pass 'cpu', or 'meta'"):
            make(GOOD, device="cuda", device_mesh=mesh())
    x = sc.full(GOOD, 2.5, device="meta", device_mesh=mesh(), placements=[Shard(0)])
    assert x.is_meta and x.dtype is torch.float32
    assert torch.equal(sc.full(GOOD, 2, device="cpu", device_mesh=mesh()).full_tensor(), torch.full(GOOD, 2))
