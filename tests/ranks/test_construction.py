"""Making sharded tensors: from shards, from one rank, from factories, from files; and what is refused."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as distribute_dtensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import shardcompile as sc
from shardcompile import LayoutError, ShardTensor, compat
from shardcompile.collectives import transport
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import once, rank, world_size
from tests.support.tiers import often

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SIZES = {2: [3, 5], 3: [4, 0, 2], 4: [1, 0, 4, 2]}


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),), mesh_dim_names=("d",))


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def same_on_all_ranks(value: object) -> None:
    found: list[object] = [None] * world_size()
    dist.all_gather_object(found, value)
    assert all(f == found[0] for f in found), found


def refused_alike(match: str, call: Callable[[], object], error: type[Exception] = LayoutError) -> None:
    """The call raises on every rank, and the ranks are in step afterwards."""
    with pytest.raises(error, match=match):
        call()
    same_on_all_ranks("in step")


ALL = slice(None)
CASES_2D: list[tuple[tuple[Placement, ...], dict[int, list[int]], list[tuple[slice, slice]]]] = [
    ((S0, S1), {0: [5, 2], 1: [0, 5]}, [(r, c) for r in (slice(0, 5), slice(5, 7)) for c in (slice(0, 0), ALL)]),
    ((S1, S0), {0: [1, 4], 1: [3, 4]}, [(r, c) for c in (slice(0, 1), slice(1, 5)) for r in (slice(3), slice(3, 7))]),
    ((R, S0), {1: [0, 7]}, [(slice(0, 0), ALL), (slice(0, 7), ALL)] * 2),
    ((S1, R), {0: [2, 3]}, [(ALL, slice(0, 2))] * 2 + [(ALL, slice(2, 5))] * 2),
    ((R, R), {}, [(ALL, ALL)] * 4),
    ((S0, S0), {1: [2, 0, 1, 4]}, [(slice(a, b), ALL) for a, b in ((0, 2), (2, 2), (2, 3), (3, 7))]),
]
"""Placements, sizes as `sharding_shapes`, and each rank's local shard of a 7 x 5 tensor on a 2 x 2 mesh."""


# from_local


@pytest.mark.ranks(2, 3, 4)
def test_from_local_on_one_mesh_dim():
    mesh, sizes = mesh_1d(), SIZES[world_size()]
    for dim in (0, 1, -1):
        shape = [2, 3, 2]
        shape[dim] = sum(sizes)
        full = values(*shape)
        shard = full.split(sizes, dim)[rank()]
        shapes = [tuple(b.shape) for b in full.split(sizes, dim)]
        for stated in ("infer", {0: sizes}, {0: shapes}, {0: tuple(map(torch.Size, shapes))}):
            for run_check in (False, True):
                x = ShardTensor.from_local(shard, mesh, [Shard(dim)], stated, run_check=run_check)
                assert x.shape == full.shape and x.stride() == full.stride() and x.dtype == full.dtype
                assert x.placements == (Shard(dim % 3),) and x.device_mesh is mesh and x.device.type == "cpu"
                assert x.sharding.sizes(dim % 3) == tuple(sizes)
                assert torch.equal(x.to_local(), shard)
                assert torch.equal(x.full_tensor(), full)
                offset = sum(sizes[: rank()])
                assert x.offsets() == tuple(offset if d == dim % 3 else 0 for d in range(3))
                assert x.offsets(0) == offset
                same_on_all_ranks(x.sharding.describe())


@pytest.mark.ranks(2, 3, 4, processes=False)
def test_from_local_in_chunks():
    mesh = mesh_1d()
    for size in (0, 1, 5, 8):
        full = values(size, 2)
        chunks = [*full.chunk(world_size()), *[full[:0]] * world_size()]
        for options in ({}, {"run_check": True}):
            x = ShardTensor.from_local(chunks[rank()], mesh, [S0], "chunk", global_shape=full.shape, **options)
            assert torch.equal(x.full_tensor(), full)


@pytest.mark.ranks(4, processes=False)
def test_from_local_on_two_mesh_dims():
    mesh, full = mesh_2d(), values(7, 5)
    for placements, sizes, slices in CASES_2D:
        shard = full[slices[rank()]]
        for stated, run_check in itertools.product(("infer", sizes), (False, True)):
            x = ShardTensor.from_local(shard, mesh, placements, stated, global_shape=(7, 5), run_check=run_check)
            assert x.placements == placements
            assert torch.equal(x.to_local(), shard) and torch.equal(x.full_tensor(), full)
            for dim, s in enumerate(slices[rank()]):
                assert x.offsets()[dim] == (s.start or 0)
    x = ShardTensor.from_local(full[slices[rank()]], mesh, (S0, S0), {0: [2, 0, 1, 4]})  # either mesh dim may be named
    assert x.sharding.sizes(0) == (2, 0, 1, 4)
    assert x.offsets(0) == x.offsets(1) == x.offsets()[0]


@pytest.mark.ranks(2, processes=False)
def test_from_local_of_terms_and_of_replicas():
    mesh = mesh_1d()
    term = torch.full((2, 3), float(rank() + 1))
    assert torch.equal(ShardTensor.from_local(term, mesh, [P]).full_tensor(), torch.full((2, 3), 3.0))
    assert torch.equal(ShardTensor.from_local(term, mesh, [Partial("max")]).full_tensor(), torch.full((2, 3), 2.0))
    same = ShardTensor.from_local(torch.ones(2), mesh)
    assert same.placements == (R,) and same.shape == (2,) and same.offsets(0) == 0


@pytest.mark.ranks(2, processes=False)
def test_the_current_mesh_is_the_default():
    with mesh_1d() as mesh:
        x = ShardTensor.from_local(torch.ones(rank(), 2), placements=[S0])
        assert x.device_mesh == mesh and x.shape == (1, 2)
        assert sc.zeros(4, placements=[S0]).device_mesh == mesh
        assert sc.distribute_tensor(torch.ones(3), placements=[S0]).device_mesh == mesh
        assert sc.distribute_tensor(torch.ones(3)).placements == (R,)
    with pytest.raises(RuntimeError, match="No device mesh is currently active"):
        ShardTensor.from_local(torch.ones(2))


@pytest.mark.ranks(2, processes=False)
def test_dtypes_and_memory():
    mesh = mesh_1d()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        shard = torch.arange(2 * (rank() + 1)).to(dtype).view(2, -1)
        for local in (shard, shard.t().contiguous().t()):
            x = ShardTensor.from_local(local, mesh, [S1], run_check=True)
            assert x.dtype is dtype and x.stride() == (3, 1) and x.is_contiguous()
            assert torch.equal(x.to_local(), local)
    shard = torch.zeros(2)
    x = ShardTensor.from_local(shard, mesh, [S0])
    x.add_(1)
    assert torch.equal(shard, torch.ones(2))  # no copy, as with torch.from_numpy and DTensor


@pytest.mark.ranks(3, processes=False)
def test_from_local_is_differentiable():
    mesh, sizes = mesh_1d(), SIZES[3]
    full, w = values(6, 2), values(6, 2)
    for stated in ("infer", {0: sizes}):
        shard = full.split(sizes)[rank()].clone().requires_grad_()
        x = ShardTensor.from_local(shard * 1, mesh, [S0], stated)
        assert not x.is_leaf and x.requires_grad
        (gradient,) = torch.autograd.grad((x * x * ShardTensor.from_local(w, mesh)).sum(), shard, create_graph=True)
        torch.testing.assert_close(gradient, (2 * full * w).split(sizes)[rank()])
        (twice,) = torch.autograd.grad(gradient.sum(), shard)
        torch.testing.assert_close(twice, (2 * w).split(sizes)[rank()])
    shard = full.clone().requires_grad_()
    ShardTensor.from_local(shard, mesh).sum().backward()
    assert torch.equal(shard.grad, torch.ones_like(full))  # replicated: every rank has the whole gradient


# Autograd on the tensor itself


def leaf(*, requires_grad: bool = True) -> ShardTensor:
    sizes = SIZES[world_size()]
    shard = torch.arange(float(sum(sizes))).split(sizes)[rank()]
    return ShardTensor.from_local(shard.clone(), mesh_1d(), [S0], {0: sizes}).requires_grad_(requires_grad)


@pytest.mark.ranks(2, processes=False)
def test_leaves_and_gradients():
    x = leaf()
    full = x.detach().full_tensor()
    assert x.is_leaf and x.requires_grad and x.grad is None and x.grad_fn is None
    y = x * 2
    assert not y.is_leaf and y.requires_grad and y.grad_fn is not None
    y.retain_grad()
    (y * y).sum().backward()
    assert isinstance(x.grad, ShardTensor) and torch.equal(x.grad.full_tensor(), 8 * full)
    assert torch.equal(y.grad.full_tensor(), 4 * full) and y.retains_grad
    (x * 1).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 8 * full + 1)  # accumulates
    x.grad.zero_()
    assert x.grad.full_tensor().count_nonzero() == 0
    x.grad = None
    assert x.grad is None
    assert not x.requires_grad_(False).requires_grad


@pytest.mark.ranks(2, processes=False)
def test_detach_and_data():
    x = leaf()
    full = x.detach().full_tensor()
    d = x.detach()
    assert isinstance(d, ShardTensor) and not d.requires_grad and d.is_leaf and d.sharding is x.sharding
    d.add_(1)  # the same memory
    assert torch.equal(x.detach().full_tensor(), full + 1)
    x.data.sub_(1)
    assert torch.equal(x.detach().full_tensor(), full)
    other = leaf(requires_grad=False).redistribute(sharding_shapes={0: [8, 0]}) * 3
    x.data = other
    assert x.requires_grad and x.sharding is other.sharding
    assert torch.equal(x.detach().full_tensor(), full * 3)
    with pytest.raises(sc.UnsupportedOpError, match="needs two sharded tensors"):
        x.data = full
    with torch.no_grad():
        assert not (x * 2).requires_grad
        x.mul_(2)
    assert torch.equal(x.detach().full_tensor(), full * 6)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.mul_(2)


@pytest.mark.ranks(2, processes=False)
def test_hooks():
    x, seen = leaf(), []
    full = x.detach().full_tensor()
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.full_tensor()))
    handle = x.register_hook(lambda g: g * 3)
    y = x * full
    y.register_hook(lambda g: seen.append(g.full_tensor()))
    y.sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], torch.ones(8)) and torch.equal(seen[1], 3 * full)
    handle.remove()
    x.grad = None
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((8,), 2.0))


@pytest.mark.ranks(2, processes=False)
def test_backward_with_a_gradient():
    x = leaf()
    weight = torch.arange(8.0)
    (x * 2).backward(ShardTensor.from_local(weight, x.device_mesh))  # in another layout than the tensor
    assert torch.equal(x.grad.full_tensor(), 2 * weight)
    with pytest.raises(RuntimeError, match="can be implicitly created only for scalar"):
        (x * 2).backward()


@pytest.mark.ranks(2, processes=False)
def test_parameters():
    x = leaf(requires_grad=False)
    p = nn.Parameter(x)
    assert isinstance(p, nn.Parameter) and isinstance(p, ShardTensor) and p.requires_grad and p.is_leaf
    module = nn.Module()
    module.weight = p
    assert dict(module.named_parameters()).keys() == {"weight"}
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    (p * p).sum().backward()
    full = x.full_tensor()
    torch.optim.SGD(module.parameters(), lr=0.25).step()
    assert torch.equal(p.detach().full_tensor(), full / 2)
    module.double()
    assert module.weight.dtype is torch.float64 and isinstance(module.weight, ShardTensor)


# From one rank


class Traffic:
    """Counts the bytes that this rank receives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.received = 0
        self._exchange, self._broadcast = transport.exchange, dist.broadcast
        monkeypatch.setattr(transport, "exchange", self._count)
        monkeypatch.setattr(dist, "broadcast", self._count_broadcast)

    def _count(self, group: Any, sends: Any, receives: Sequence[tuple[int, Tensor]]) -> Any:
        self.received += sum(t.nbytes for _, t in receives)
        return self._exchange(group, sends, receives)

    def _count_broadcast(self, tensor: Tensor, *args: Any, group_src: int, group: Any) -> Any:
        self.received += tensor.nbytes if group.rank() != group_src else 0
        return self._broadcast(tensor, *args, group_src=group_src, group=group)


@pytest.mark.ranks(2, 3)
def test_scatter_on_one_mesh_dim(monkeypatch: pytest.MonkeyPatch):
    mesh, sizes = mesh_1d(), SIZES[world_size()]
    full = values(sum(sizes), 5)
    traffic = Traffic(monkeypatch)
    for source in range(world_size()):
        held = full if rank() == source else None
        for placements, stated in (([S0], None), ([S0], {0: sizes}), ([S1], None), ([R], None), (None, None)):
            traffic.received = 0
            x = sc.scatter_tensor(held, source, mesh, placements or [R], sharding_shapes=stated)
            assert traffic.received == (0 if rank() == source else x.to_local().nbytes)
            assert torch.equal(x.full_tensor(), full) and x.is_leaf and not x.requires_grad
            if stated:
                assert x.sharding.sizes(0) == tuple(sizes)
    held = full.clone().requires_grad_() if rank() == 1 else None
    x = sc.scatter_tensor(held, 1, mesh, [S0], full.shape, full.dtype, requires_grad=True)
    assert x.is_leaf and x.requires_grad
    for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.complex64):
        held = full.to(dtype).t() if rank() == 0 else None
        assert torch.equal(sc.scatter_tensor(held, 0, mesh, [S1]).full_tensor(), full.to(dtype).t())
    conjugated = torch.complex(full, full).conj()
    x = sc.scatter_tensor(conjugated if rank() == 0 else None, 0, mesh, [R])
    assert torch.equal(x.full_tensor(), conjugated)


@pytest.mark.ranks(4)
def test_scatter_on_two_mesh_dims(monkeypatch: pytest.MonkeyPatch):
    mesh, full = mesh_2d(), values(7, 5)
    traffic = Traffic(monkeypatch)
    for source in (0, 3):
        for placements, sizes, slices in CASES_2D:
            traffic.received = 0
            held = full if rank() == source else None
            x = sc.scatter_tensor(held, source, mesh, placements, sharding_shapes=sizes)
            assert traffic.received == (0 if rank() == source else x.to_local().nbytes)
            assert torch.equal(x.to_local(), full[slices[rank()]])
            assert torch.equal(x.full_tensor(), full)
            x = sc.scatter_tensor(held, source, mesh, placements)
            assert torch.equal(x.full_tensor(), full)


@pytest.mark.ranks(4, processes=False)
def test_scatter_within_part_of_the_ranks():
    half = mesh_2d()["b"]  # rank 0 and 1, rank 2 and 3
    source = rank() // 2 * 2 + 1
    full = values(5, 2) + source
    x = sc.scatter_tensor(full if rank() == source else None, source, half, [S0], sharding_shapes={0: [4, 1]})
    assert torch.equal(x.full_tensor(), full) and x.to_local().shape[0] == [4, 1][rank() % 2]


@pytest.mark.ranks(2, processes=False)
def test_distribute_tensor(monkeypatch: pytest.MonkeyPatch):
    mesh, full = mesh_1d(), values(7, 2)
    mine = full if rank() == 0 else torch.zeros_like(full)
    traffic = Traffic(monkeypatch)
    x = sc.distribute_tensor(mine, mesh, [S0], sharding_shapes={0: [2, 5]})
    assert torch.equal(x.full_tensor(), full) and x.sharding.sizes(0) == (2, 5)
    traffic.received = 0
    x = sc.distribute_tensor(full, mesh, [S0], src_data_rank=None, sharding_shapes={0: [6, 1]})
    assert traffic.received == 0
    assert torch.equal(x.to_local(), full.split([6, 1])[rank()])
    x.zero_()
    assert full.count_nonzero()  # a copy
    x = sc.distribute_tensor(full.clone().requires_grad_(), mesh, [S1])
    assert x.is_leaf and x.requires_grad
    again = sc.distribute_tensor(x.detach(), mesh, [S0])
    assert torch.equal(again.full_tensor(), full) and again.placements == (S0,)
    p = sc.distribute_tensor(nn.Parameter(full.clone()), mesh, [S0])
    assert p.requires_grad and p.is_leaf
    with pytest.raises(LayoutError, match="leaves of the autograd graph; from_local"):
        sc.distribute_tensor(full.clone().requires_grad_() * 2, mesh, [S0])


@pytest.mark.ranks(2, processes=False)
def test_distribute_module():
    mesh, model = mesh_1d(), nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    reference, names = copy.deepcopy(model), []

    def sharded_rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        names.append(name)
        if name == "0":
            for key, p in list(module.named_parameters()):
                partition = sc.distribute_tensor(p, mesh, [S0], sharding_shapes={0: [4, 1]})
                module.register_parameter(key, nn.Parameter(partition))

    out = sc.distribute_module(
        model,
        mesh,
        sharded_rows,
        input_fn=lambda module, inputs, mesh: (ShardTensor.from_local(inputs[0], mesh),),
        output_fn=lambda module, outputs, mesh: outputs.full_tensor(),
    )
    assert out is model and names == ["", "0", "1", "2"]
    x = values(6, 3)
    torch.testing.assert_close(model(x), reference(x))
    assert type(model(x)) is Tensor
    model(x).sum().backward()
    reference(x).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, ShardTensor) else ours.grad
        torch.testing.assert_close(gradient, theirs.grad)
    assert isinstance(model[0].weight, ShardTensor) and type(model[2].weight) is nn.Parameter


# Factories


@pytest.mark.ranks(2, processes=False)
def test_factories():
    mesh = mesh_1d()
    kwargs: dict[str, Any] = {"device_mesh": mesh, "placements": [S0], "sharding_shapes": {0: [1, 4]}}
    for x, plain in (
        (sc.zeros(5, 2, **kwargs), torch.zeros(5, 2)),
        (sc.zeros((5, 2), **kwargs), torch.zeros(5, 2)),
        (sc.zeros([5, 2], dtype=torch.int64, **kwargs), torch.zeros(5, 2, dtype=torch.int64)),
        (sc.ones(torch.Size((5, 2)), dtype=torch.bool, **kwargs), torch.ones(5, 2, dtype=torch.bool)),
        (sc.ones(5, **kwargs), torch.ones(5)),
        (sc.full((5, 2), 7, **kwargs), torch.full((5, 2), 7)),
        (sc.full((5,), 7.5, **kwargs), torch.full((5,), 7.5)),
        (sc.full((5,), True, **kwargs), torch.full((5,), True)),
        (sc.full((5,), 2, dtype=torch.float16, **kwargs), torch.full((5,), 2, dtype=torch.float16)),
    ):
        assert x.dtype is plain.dtype and x.shape == plain.shape and x.stride() == plain.stride()
        assert x.to_local().shape[0] == [1, 4][rank()]
        assert torch.equal(x.full_tensor(), plain) and x.is_leaf and not x.requires_grad
    for make in (sc.empty, sc.rand, sc.randn, sc.zeros, sc.ones):
        x = make(5, 3, requires_grad=True, dtype=torch.float64, **kwargs)
        assert x.requires_grad and x.is_leaf and x.dtype is torch.float64 and x.to_local().shape == ([1, 4][rank()], 3)
    assert sc.full((5,), 1.0, requires_grad=True, **kwargs).requires_grad
    assert torch.equal(sc.ones(5, layout=torch.strided, **kwargs).full_tensor(), torch.ones(5))  # as DTensor's have it
    for make in (sc.zeros, functools.partial(sc.full, fill_value=1)):
        with pytest.raises(sc.UnsupportedOpError, match=r"layout=torch.sparse_coo; shards are dense"):
            make((5, 2), layout=torch.sparse_coo, **kwargs)
    assert sc.zeros(4, 3, device_mesh=mesh).placements == (R,)
    assert torch.equal(sc.ones(device_mesh=mesh).full_tensor(), torch.ones(()))
    for n in (0, 1):
        assert sc.zeros(n, 3, device_mesh=mesh, placements=[S0]).full_tensor().shape == (n, 3)


@pytest.mark.parametrize("backend", often(["aot_eager", "inductor"], 1))
@pytest.mark.ranks(3, processes=False)
def test_factories_inside_a_compiled_function(backend: str):
    mesh = mesh_1d()

    def of_its_shape(x: Any) -> Any:
        weights = sc.full(x.shape, 2.5, dtype=x.dtype, placements=[S0]) + sc.zeros(*x.shape, dtype=x.dtype)
        stated = sc.ones(7, 4, device_mesh=mesh, placements=[S1], sharding_shapes={0: [0, 3, 1]})
        return x * weights + sc.rand(x.shape, device_mesh=x.device_mesh, placements=[S0]) * 0, stated.sin()

    before = once(graphs_compiled)
    run = torch.compile(of_its_shape, fullgraph=True, backend=backend)
    for sizes in ([4, 0, 3], [0, 1, 6], [3, 3, 1], [2, 7, 0], [1, 8, 2]):
        x = once(lambda sizes=sizes: values(sum(sizes), 2)).split(sizes)[rank()].clone()
        x = ShardTensor.from_local(x, mesh, [S0], {0: sizes}).requires_grad_()
        with mesh:
            out, stated = run(x)
        assert out.placements == (S0,) and stated.sharding.sizes(1) == (0, 3, 1)
        torch.testing.assert_close(out.full_tensor(), x.full_tensor() * 2.5)
        torch.testing.assert_close(stated.full_tensor(), torch.ones(7, 4).sin())
        out.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.full((sum(sizes), 2), 2.5, dtype=x.dtype))
    # Another size may compile once more, and so may [3, 3, 1]: that is torch.chunk's, as are the factories' results.
    assert once(graphs_compiled) - before <= 3


def _ones_like_rows(x: Any, rows: int, **kwargs: Any) -> Any:
    return sc.ones(rows, 3, dtype=x.dtype, device_mesh=x.device_mesh, placements=[S0], **kwargs)


OF_KNOWN_SIZES: dict[str, Callable[..., Tensor]] = {
    "added": lambda x, p, n: _ones_like_rows(x, n) + x,
    "a parameter": lambda x, p, n: (_ones_like_rows(x, n) * p).T @ (_ones_like_rows(x, n) * x),
    "joined": lambda x, p, n: torch.cat([_ones_like_rows(x, n), x], 1).softmax(0),
    "flattened": lambda x, p, n: _ones_like_rows(x, n).view(-1) * x.flatten() + p.flatten(),
    "stated": lambda x, p, n: _ones_like_rows(x, n, sharding_shapes={0: (n - 2, 0, 2)}) * x,
}


def _check_factories_of_known_sizes(name: str, dim_sizes: Sequence[int]) -> None:
    function, mesh = OF_KNOWN_SIZES[name], mesh_1d()
    for n in dim_sizes:  # 7: torch.chunk gives [3, 3, 1]; 6: all alike
        once(torch.compiler.reset)  # a size that has changed would be a symbol
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        full, parameter = once(lambda n=n: values(n, 3)), once(lambda n=n: values(n, 3))
        p = nn.Parameter(sc.distribute_tensor(parameter, mesh, [S0]))
        for sizes in ([n - 2, 0, 2], None, [1, n - 2, 1]):
            found = []
            for run in (function, compiled):
                p.grad = None
                x = sc.distribute_tensor(full, mesh, [S0], sharding_shapes=sizes and {0: sizes}).requires_grad_()
                out = run(x, p, n)
                out.sin().sum().backward()
                gradients = [g.full_tensor() for g in (x.grad, p.grad) if g is not None]
                found.append((out.sharding.describe(), [out.full_tensor(), *gradients]))
            assert found[0][0] == found[1][0]
            torch.testing.assert_close(found[1][1], found[0][1])


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("name", list(OF_KNOWN_SIZES))
def test_factories_of_known_sizes_meet_inputs_inside_a_compiled_function(name: str):
    _check_factories_of_known_sizes(name, [7, 6])


@pytest.mark.ranks(3)  # processes: a known size of a shard names the rank
def test_factories_of_known_sizes_on_ranks_that_are_processes():
    _check_factories_of_known_sizes("a parameter", [7])


@pytest.mark.ranks(2, processes=False)
def test_random_factories_draw_the_same_inside_a_compiled_function():
    kwargs: dict[str, Any] = {"device_mesh": mesh_1d(), "placements": [S0], "sharding_shapes": {0: [1, 4]}}
    draw = lambda: (sc.rand(5, 2, **kwargs), sc.randn(5, 2, **kwargs))  # noqa: E731
    drawn = []
    for function in (draw, torch.compile(draw, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        drawn.append([x.full_tensor() for x in function()])
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    assert drawn[0][0].unique().numel() == 10


@pytest.mark.ranks(2, processes=False)
def test_random_factories():
    mesh = mesh_1d()
    x = sc.rand(300, 2, device_mesh=mesh, placements=[S0], sharding_shapes={0: [100, 200]}).full_tensor()
    assert x.min() >= 0 and x.max() < 1 and 0.4 < x.mean() < 0.6
    assert not torch.equal(x[:100], x[100:200])  # shards are independent
    z = sc.randn(1000, device_mesh=mesh, placements=[S0]).full_tensor()
    assert z.mean().abs() < 0.2 and 0.8 < z.std() < 1.2
    same_on_all_ranks(sc.randn(5, device_mesh=mesh).to_local().tolist())
    torch.manual_seed(5)
    first = sc.rand(8, device_mesh=mesh, placements=[S0]).full_tensor()
    torch.manual_seed(5)
    assert torch.equal(sc.rand(8, device_mesh=mesh, placements=[S0]).full_tensor(), first)


@pytest.mark.ranks(3, processes=False)
def test_factories_of_torch_write_into_sharded_tensors():
    sizes = SIZES[3]
    numbers = ShardTensor.from_local(torch.full((sizes[rank()],), -1), mesh_1d(), [S0], {0: sizes})
    total = sum(sizes)
    for write, expected in (
        (lambda x: torch.arange(total, out=x), torch.arange(total)),
        (lambda x: torch.arange(2, 2 + total, out=x), torch.arange(2, 2 + total)),
        (lambda x: torch.full((total,), 3, out=x), torch.full((total,), 3)),
        (lambda x: torch.ones(total, out=x), torch.ones(total, dtype=torch.int64)),
        (lambda x: torch.ops.aten.zeros_like.out(x, out=x), torch.zeros(total, dtype=torch.int64)),
        (lambda x: torch.randperm(total, out=x).sort()[0], torch.arange(total)),
    ):
        assert torch.equal(write(numbers).full_tensor(), expected)
        assert numbers.sharding.describe_placements() == "S(0)[4,0,2]"


# Text


@pytest.mark.ranks(4, processes=False)
def test_repr_is_one_line():
    mesh = mesh_2d()
    sizes = SIZES[4]
    x = ShardTensor.from_local(torch.zeros(sizes[rank()], 2), mesh, [S0, S0])
    shard = f"({sizes[rank()]}, 2)"
    assert repr(x) == str(x) == f"ShardTensor(f32[7, 2] a: S(0), b: S(0)[1,0,4,2], shard {shard})"
    y = ShardTensor.from_local(torch.ones(2, dtype=torch.int64), mesh, [P, R])
    assert repr(y) == "ShardTensor(i64[2] a: P(sum), b: R, shard (2,))"
    assert repr(x.requires_grad_()).endswith(f"shard {shard}, requires_grad=True)")
    assert "grad_fn=<MulBackward0>" in repr(x * 2)
    assert f"{x}" == repr(x)
    scalar = ShardTensor.from_local(torch.tensor(1.5), mesh)
    assert f"{scalar.item():.1f}" == "1.5"


@pytest.mark.ranks(2, processes=False)
def test_visualize_sharding():
    x = ShardTensor.from_local(torch.zeros([3, 0][rank()], 2), mesh_1d(), [S0])
    text = "f32[3, 2] d: S(0)[3,0]\n  (0,)  [0:3, 0:2]  (3, 2)\n  (1,)  [3:3, 0:2]  (0, 2)"
    assert sc.visualize_sharding(x) == sc.visualize_sharding(x.sharding) == text


# Copies and files


def check_copy(y: Any, x: ShardTensor) -> None:
    assert type(y) is ShardTensor and y.sharding == x.sharding and y.stride() == x.stride()
    assert y.requires_grad == x.requires_grad and y.is_leaf
    assert y.device_mesh == x.device_mesh
    assert torch.equal(y.detach().to_local(), x.detach().to_local())
    assert torch.equal((y.detach() + x.detach()).full_tensor(), 2 * x.detach().full_tensor())


def samples(mesh: DeviceMesh) -> list[ShardTensor]:
    sizes = SIZES[4]
    dynamic = ShardTensor.from_local(torch.randn(sizes[rank()], 2), mesh, [S0, S0])
    outer = dynamic.redistribute(placements=[S0, R])
    return [
        dynamic,
        dynamic.detach().requires_grad_(),
        outer,
        dynamic.t(),
        ShardTensor.from_local(torch.ones(2, 2), mesh, [R, S1]),
        sc.ones(5, 3, device_mesh=mesh, placements=[S0, S1], dtype=torch.bfloat16),
    ]


@pytest.mark.ranks(4, processes=False)
def test_copies():
    for x in samples(mesh_2d()):
        check_copy(pickle.loads(pickle.dumps(x)), x)
        y = copy.deepcopy(x)
        check_copy(y, x)
        with torch.no_grad():
            y.zero_()
        assert not y.detach().full_tensor().any() and x.detach().full_tensor().any()
        p = nn.Parameter(x.detach())
        for copied in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
            assert isinstance(copied, nn.Parameter)
            check_copy(copied, p)
    a, b = copy.deepcopy([x, x])
    assert a is b  # the memo is honoured
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x.float().requires_grad_() * 2)


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load_of_this_ranks_part(tmp_path: Path, weights_only: bool):
    mesh = mesh_2d()
    xs = samples(mesh)
    path = tmp_path / f"{rank()}.pt"
    torch.save({"tensors": xs, "parameter": nn.Parameter(xs[0].detach()), "step": 3}, path)
    assert path.stat().st_size < 40_000
    loaded = torch.load(path, weights_only=weights_only)
    assert loaded["step"] == 3 and isinstance(loaded["parameter"], nn.Parameter)
    for x, y in zip(xs, loaded["tensors"], strict=True):
        check_copy(y, x)
    module = nn.Linear(2, 7).float()
    module.weight = nn.Parameter(xs[0].detach())
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    with torch.no_grad():
        module.weight.zero_()
    module.load_state_dict(torch.load(buffer, weights_only=weights_only))
    check_copy(module.weight.detach(), xs[0])


# DTensor


@pytest.mark.ranks(2, processes=False)
def test_dtensors_are_taken_as_operands():
    mesh, full = mesh_1d(), values(7, 3)
    x = ShardTensor.from_local(full.split([6, 1])[rank()].clone(), mesh, [S0]).requires_grad_()
    for placement in (S0, S1, R):
        d = distribute_dtensor(full, mesh, [placement]).requires_grad_()
        for y in (x * d, d * x, torch.mul(x, other=d)):
            assert type(y) is ShardTensor
            assert torch.equal(y.full_tensor(), full * full)
            x.grad = d.grad = None
            y.sum().backward()
            assert torch.equal(x.grad.full_tensor(), full)
            assert isinstance(d.grad, DTensor) and torch.equal(d.grad.full_tensor(), full)
        assert torch.equal(torch.cat([x, d]).full_tensor(), torch.cat([full, full]))
        with torch.no_grad():
            assert torch.equal((x + d).full_tensor(), full + full)
            assert torch.equal(x.detach().clone().add_(d).full_tensor(), full + full)
    compiled = torch.compile(lambda a, b: a * b, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, d).full_tensor(), full * full)
    term = DTensor.from_local(full / 2, mesh, [P], run_check=False)
    assert torch.equal((x.detach() + term).full_tensor(), 2 * full)


@pytest.mark.ranks(4, processes=False)
def test_dtensors_of_another_mesh_are_refused():
    one, two = mesh_1d(), mesh_2d()
    x = ShardTensor.from_local(torch.ones(2), one, [S0])
    d = distribute_dtensor(torch.ones(8), two, [S0, R])
    refused_alike("tensors on two meshes", lambda: x + d)
    refused_alike("tensors on two meshes", lambda: d + x)
    nested = DTensor.from_local(torch.ones(2), two, [S0, S0], run_check=False)
    assert nested.shape == (8,)
    assert torch.equal((ShardTensor.from_local(torch.ones(8), two) + nested).full_tensor(), torch.full((8,), 2.0))


# Bad input: every rank gets an error, and nothing hangs


@pytest.mark.ranks(2, 3, processes=False)
def test_shards_that_do_not_belong_together():
    mesh = mesh_1d()
    odd = rank() == 1
    for options in ({}, {"run_check": True}):
        refused_alike(
            r"do not fit together: dim 1 has size 2 at mesh coordinate \(0,\) and 3 at \(1,\)",
            lambda o=options: ShardTensor.from_local(torch.ones(4, 3 if odd else 2), mesh, [S0], **o),
        )
        refused_alike(
            r"mesh coordinate \(1,\) has another dtype than \(0,\) \(torch.float64 against torch.float32\)",
            lambda o=options: ShardTensor.from_local(
                torch.ones(4, dtype=torch.float64 if odd else torch.float32), mesh, [S0], **o
            ),
        )
        refused_alike(
            r"mesh coordinate \(1,\) has another number of dims than \(0,\) \(1 against 2\)",
            lambda o=options: ShardTensor.from_local(torch.ones([4] if odd else [4, 2]), mesh, [S1], **o),
        )
        refused_alike(
            r"do not fit together: dim 0 has size 4 at mesh coordinate \(0,\) and 5",
            lambda o=options: ShardTensor.from_local(torch.ones(5 if odd else 4), mesh, [R], **o),
        )


@pytest.mark.ranks(4, processes=False)
def test_shards_that_do_not_fit_on_two_mesh_dims():
    mesh = mesh_2d()
    rows = [2, 3, 2, 3]  # sharded by mesh dim b, and so the same for all of mesh dim a
    ShardTensor.from_local(torch.ones(rows[rank()], 2), mesh, [R, S0])
    refused_alike(
        r"dim 0 has size 2 at mesh coordinate \(0, 0\) and 9 at \(1, 0\); it is sharded by mesh dims \[1\] only",
        lambda: ShardTensor.from_local(torch.ones([2, 3, 9, 3][rank()], 2), mesh, [R, S0]),
    )
    refused_alike(
        r"dim 0 has size 2 at mesh coordinate \(0, 0\) and 3 at \(0, 1\); it is sharded by mesh dims \[0\] only",
        lambda: ShardTensor.from_local(torch.ones(rows[rank()], 2), mesh, [S0, S1]),
    )


@pytest.mark.ranks(2, processes=False)
def test_sizes_that_do_not_match():
    mesh = mesh_1d()
    shard = torch.ones(3 + rank(), 2)

    def build(shapes: Any, placements: Sequence[Placement] = (S0,), **options: Any) -> Callable[[], object]:
        return lambda: ShardTensor.from_local(shard, mesh, placements, shapes, **options)

    wrong = r"this rank's local shard has shape \(\d, 2\), but f32\[9, 2\] d: S\(0\)\[4,5\] gives it \(\d, 2\)"
    refused_alike(wrong, build({0: [4, 5]}))
    refused_alike("does not fit|but f32", build({0: [3, 5]}, run_check=True))  # rank 1 alone is wrong
    refused_alike("needs 2 shard sizes, got 3", build({0: [3, 4, 0]}))
    refused_alike("must not be negative", build({0: [-3, 4]}))
    refused_alike("has no entry for mesh dim 0, which shards tensor dim 0", build({}))
    refused_alike("names mesh dim 1, which shards nothing", build({0: [3, 4], 1: [3, 4]}))
    refused_alike("names mesh dim 0, which shards nothing", build({0: [3, 4]}, [R]))
    refused_alike(r"global_shape is \(8, 2\), but the shards add up to \(7, 2\)", build("infer", global_shape=(8, 2)))
    refused_alike(r"global_shape is \(8, 2\), but the shards", build({0: [3, 4]}, global_shape=(8, 2)))
    refused_alike('"chunk" needs global_shape', build("chunk"))
    refused_alike(r"has shape \(\d, 2\), but f32\[12, 2\]", build("chunk", global_shape=(12, 2)))
    refused_alike("global_shape .12,. for a shard of 2 dims", build("chunk", global_shape=(12,)))
    refused_alike('must be "infer", "chunk" or a mapping', build("even"))
    refused_alike('must be "infer", "chunk" or a mapping', build([3, 4]))


@pytest.mark.ranks(2, processes=False)
def test_placements_that_do_not_fit():
    mesh, full = mesh_1d(), torch.ones(4, 2)
    for placements, match in (
        ([S0, S0], "mesh of 1 dims needs as many placements, got 2"),
        ([], "mesh of 1 dims needs as many placements, got 0"),
        ([Shard(2)], r"\(2\) is out of range for a tensor of 2 dims"),
        ([Shard(-3)], r"\(-3\) is out of range for a tensor of 2 dims"),
        ([Partial("median")], "the reduction must be one of sum, avg, product, max, min"),
        (["rows"], "placement 'rows' is not supported"),
    ):
        makers: list[Callable[..., object]] = [
            lambda p: ShardTensor.from_local(full, mesh, p),
            lambda p: ShardTensor.from_local(full, mesh, p, {0: [4, 4]}, run_check=True),
            lambda p: sc.scatter_tensor(full if rank() == 0 else None, 0, mesh, p),
            lambda p: sc.distribute_tensor(full, mesh, p),
            lambda p: sc.distribute_tensor(full, mesh, p, src_data_rank=None),
            lambda p: sc.zeros(4, 2, device_mesh=mesh, placements=p),
        ]
        for make in makers:
            refused_alike(match, lambda make=make, placements=placements: make(placements))


@pytest.mark.ranks(2, processes=False)
def test_partial_is_no_target():
    mesh, full = mesh_1d(), torch.ones(4, 2)
    for make in (
        lambda: sc.scatter_tensor(full if rank() == 0 else None, 0, mesh, [P]),
        lambda: sc.distribute_tensor(full, mesh, [P]),
        lambda: sc.ones(4, 2, device_mesh=mesh, placements=[P]),
        lambda: sc.randn(4, 2, device_mesh=mesh, placements=[P]),
    ):
        refused_alike("Partial cannot be a target", make)


@pytest.mark.ranks(2, processes=False)
def test_sizes_of_scatter_and_factories():
    mesh, full = mesh_1d(), torch.ones(4, 2)
    makers: list[Callable[[Mapping[int, Any]], object]] = [
        lambda s: sc.scatter_tensor(full if rank() == 0 else None, 0, mesh, [S0], sharding_shapes=s),
        lambda s: sc.distribute_tensor(full, mesh, [S0], sharding_shapes=s),
        lambda s: sc.empty(4, 2, device_mesh=mesh, placements=[S0], sharding_shapes=s),
    ]
    for make in makers:
        refused_alike(r"\[3, 2\] for mesh dim 0 add up to 5, but tensor dim 0 has", lambda m=make: m({0: [3, 2]}))
        refused_alike("needs 2 shard sizes, got 1", lambda m=make: m({0: [4]}))
        refused_alike("names mesh dim 1, which shards nothing", lambda m=make: m({1: [2, 2]}))


@pytest.mark.ranks(4, processes=False)
def test_meshes_that_differ():
    one, two = mesh_1d(), mesh_2d()
    x, y = ShardTensor.from_local(torch.ones(2), one, [S0]), ShardTensor.from_local(torch.ones(4), two, [R, S0])
    refused_alike("tensors on two meshes", lambda: x + y)
    refused_alike("tensors on two meshes", lambda: torch.cat([y, x]))
    again = ShardTensor.from_local(torch.ones(2), mesh_1d(), [S0])
    assert torch.equal((x + again).full_tensor(), torch.full((8,), 2.0))  # equal meshes are one


@pytest.mark.ranks(2, 3, processes=False)
def test_ranks_that_disagree():
    mesh = mesh_1d()
    odd = rank() == world_size() - 1
    n = world_size()
    shard = torch.ones(4, 4)
    found = r"has other placements or sizes than \(0,\)"
    refused_alike(found, lambda: ShardTensor.from_local(shard, mesh, [S1 if odd else S0]))
    refused_alike(found, lambda: ShardTensor.from_local(shard, mesh, [Shard(5) if odd else S0]))
    refused_alike(found, lambda: ShardTensor.from_local(shard, mesh, [S0, S0] if odd else [S0]))
    for shapes in (("infer", {0: [4] * n}), ({0: [4] * n}, {0: [4] * (n - 1) + [5]}), ("infer", "chunk")):
        refused_alike(
            found,
            lambda s=shapes: ShardTensor.from_local(shard, mesh, [S0], s[odd], run_check=True),
        )
    shapes = [(4 * n, 4), (4 * n, 5)]
    refused_alike(
        found,
        lambda: ShardTensor.from_local(shard, mesh, [S0], "chunk", global_shape=shapes[odd], run_check=True),
    )
    refused_alike(
        "has other arguments than",
        lambda: sc.scatter_tensor(shard if rank() == 0 else None, 0, mesh, [S1 if odd else S0]),
    )
    refused_alike("has other arguments than", lambda: sc.distribute_tensor(shard, mesh, [R if odd else S0]))
    refused_alike(
        "the ranks hold different tensors", lambda: sc.distribute_tensor(torch.ones(5 if odd else 4), mesh, [S0])
    )


@pytest.mark.ranks(4, processes=False)
def test_replicas_that_differ():
    mesh = mesh_2d()
    shard = torch.arange(4.0) + (rank() >= 2)
    ShardTensor.from_local(shard, mesh, [R, S0])  # not looked at, unless asked for
    for placements in ([R, S0], [R, R], [R, P]):
        refused_alike(
            r"replicated values differ between mesh coordinates \(0, 0\) and \(1, 0\)",
            lambda p=placements: ShardTensor.from_local(shard, mesh, p, run_check=True),
        )
    ShardTensor.from_local(shard, mesh, [S0, R], run_check=True)
    ShardTensor.from_local(shard, mesh, [P, R], run_check=True)


@pytest.mark.ranks(2, processes=False)
def test_sources_that_hold_nothing():
    mesh, full = mesh_1d(), torch.ones(4, 2)
    mine = full if rank() == 0 else None
    refused_alike(r"got None from the source at mesh coordinate \(1,\)", lambda: sc.scatter_tensor(mine, 1, mesh, [S0]))
    refused_alike("the source is not in the mesh", lambda: sc.scatter_tensor(mine, 2, mesh, [S0]))
    refused_alike(
        r"rank 0 holds shape \(4, 2\), not the stated \(4, 3\)", lambda: sc.scatter_tensor(mine, 0, mesh, [S0], (4, 3))
    )
    refused_alike(
        "rank 0 holds torch.float32, not the stated torch.int64",
        lambda: sc.scatter_tensor(mine, 0, mesh, [S0], dtype=torch.int64),
    )


def test_a_mesh_is_not_replaced_by_an_equal_one_whose_groups_are_gone() -> None:
    program = """
import torch.distributed as dist, shardcompile as sc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
for _ in range(2):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    x = sc.zeros(6, 5, device_mesh=mesh, placements=[Shard(0), Shard(1)])
    assert x.device_mesh is mesh
    assert x.redistribute(placements=[Replicate(), Replicate()]).device_mesh is mesh
    dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.ranks(3, processes=False)
def test_the_gradient_of_a_leaf_has_its_layout() -> None:
    mesh = init_device_mesh("cpu", (3,))
    full_a, full_b = torch.randn(7, 4), torch.randn(4, 5)
    a = sc.distribute_tensor(full_a, mesh, [Shard(0)]).requires_grad_()
    b = nn.Parameter(sc.distribute_tensor(full_b, mesh, [Shard(1)], sharding_shapes={0: [4, 0, 1]}))
    c = copy.deepcopy(b)
    ((a @ b).sin().sum() + (a @ c).sum()).backward()
    full_a.requires_grad_(), full_b.requires_grad_()
    (full_a @ full_b).sin().sum().backward()
    for leaf in (a, b, c):
        assert leaf.grad is not None
        assert leaf.grad.sharding is leaf.sharding
    torch.testing.assert_close(b.grad.full_tensor(), full_b.grad)


@pytest.mark.ranks(4)
def test_process_groups_are_freed_when_they_are_destroyed() -> None:
    """What is kept by mesh, such as layouts and plans, must not keep threads and sockets of groups that are gone."""

    def use_a_mesh() -> list[weakref.ref[object]]:
        mesh = mesh_2d()
        x = sc.distribute_tensor(values(7, 4), mesh, [S0, S1])
        (x[1:] * 2).sum().full_tensor()
        return [weakref.ref(mesh.get_group(d)) for d in (0, 1)]

    groups = use_a_mesh()
    for group in groups:
        dist.destroy_process_group(group())
    compat.start_epoch()
    gc.collect()
    assert [g() for g in groups] == [None, None]


NONSENSE: dict[str, tuple[Callable[[DeviceMesh], Any], str]] = {
    "half a row": (lambda mesh: from_ones(mesh, [1.5, 0.5]), "an integer, or the shape of the shard; got 1.5"),
    "NaN": (lambda mesh: from_ones(mesh, [float("nan"), 1]), "got nan"),
    "text": (lambda mesh: from_ones(mesh, "11"), "got '1' for tensor dim 0"),
    "a truth": (lambda mesh: from_ones(mesh, [True, 1]), "got True"),
    "None": (lambda mesh: from_ones(mesh, [None, 1]), "got None"),
    "a shape without the dim": (lambda mesh: from_ones(mesh, [(), ()]), r"got \(\)"),
    "a DTensor": (
        lambda mesh: sc.ShardTensor.from_local(distribute_dtensor(torch.ones(2), mesh, [Shard(0)]), mesh, [Shard(0)]),
        "got a DTensor .*from_dtensor",
    ),
    "a ShardTensor": (
        lambda mesh: sc.ShardTensor.from_local(from_ones(mesh, [1, 1]), mesh, [Shard(0)]),
        "got a ShardTensor .*redistribute",
    ),
    "sparse": (lambda mesh: from_shard(torch.eye(2).to_sparse(), mesh), "got a sparse tensor .*to_dense"),
    "quantized": (
        lambda mesh: from_shard(torch.quantize_per_tensor(torch.ones(1), 1.0, 0, torch.qint8), mesh),
        "got a quantized tensor .*dequantize",
    ),
    "shared memory": (lambda mesh: from_ones(mesh, [1, 1]).share_memory_(), "has no memory of its own"),
    "dlpack": (lambda mesh: torch.from_dlpack(from_ones(mesh, [1, 1])), "has no memory of its own"),
    "numpy": (lambda mesh: from_ones(mesh, [1, 1]).numpy(), "numpy does not support shards"),
}


def from_ones(mesh: DeviceMesh, sizes: Any) -> sc.ShardTensor:
    return sc.ShardTensor.from_local(torch.ones(1), mesh, [Shard(0)], {0: sizes})


def from_shard(shard: Tensor, mesh: DeviceMesh) -> sc.ShardTensor:
    return sc.ShardTensor.from_local(shard, mesh, [Replicate()])


@pytest.mark.ranks(2, processes=False)
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_in_words(name: str) -> None:
    make, words = NONSENSE[name]
    with pytest.raises(sc.ShardError, match=words):
        make(init_device_mesh("cpu", (2,)))


@pytest.mark.ranks(2, processes=False)
def test_sizes_may_be_any_whole_numbers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for sizes in (np.array([1, 1]), torch.tensor([1, 1]), (torch.Size([1]), torch.Size([1])), [[1], [1]]):
        assert from_ones(mesh, sizes).sharding.sizes(0) == (1, 1)


@pytest.mark.ranks(3, processes=False)
def test_a_rank_outside_of_the_mesh_is_told_so() -> None:
    mesh = DeviceMesh("cpu", [0, 2])
    if rank() == 1:
        with pytest.raises(sc.ShardError, match="rank 1 is not among the ranks of"):
            from_ones(mesh, [1, 1])
    else:
        assert from_ones(mesh, [1, 1]).sum().item() == 2


@pytest.mark.ranks(2, processes=False)
def test_numbers_are_formatted_and_become_arrays() -> None:
    x = from_ones(init_device_mesh("cpu", (2,)), [1, 1])
    loss = (x * 1.25).requires_grad_().sum()  # a pending sum
    assert f"{loss:.3f}" == "2.500" and f"{float(loss)}" == "2.5"
    assert loss.detach().numpy() == 2.5 and loss.detach().numpy().shape == ()
    with pytest.raises(RuntimeError, match="requires grad"):
        loss.numpy()
    with pytest.raises(TypeError):
        f"{x:.3f}"


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend", ["aot_eager", "shardcompile"])
def test_a_compiled_function_wraps_a_plain_shard_by_stated_sizes(backend: str) -> None:
    """One rank has no rows. The shard is a plain input, whose size is a number in the graph."""
    sizes, mesh = [5, 0, 2], init_device_mesh("cpu", (3,))
    torch.manual_seed(0)
    full, weight = torch.randn(7, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def loss(x: Any, w: Tensor) -> Any:
        y = torch.cat([x @ w, (x @ w).relu()], 0).softmax(0) * x.sum(0)
        return torch.nn.functional.layer_norm(y, [4]).square().sum() + y[1:6].mean()

    def step(shard: Tensor, w: Tensor, stated: list[int]) -> Any:
        return loss(ShardTensor.from_local(shard, mesh, [Shard(0)], {0: stated}), w)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    plain, ours = (weight.clone().requires_grad_() for _ in range(2))
    shard = full.split(sizes)[rank()].clone()
    result, expected = compiled(shard, ours, sizes), loss(full, plain)
    result.backward()
    expected.backward()
    torch.testing.assert_close(result.full_tensor(), expected)
    torch.testing.assert_close(ours.grad, plain.grad)
    with pytest.raises(Exception, match=r"do not match the tensor|its layout says"):  # a list that varies is symbols
        compiled(shard, ours, [sizes[1] + 1, sizes[2] + 1, sizes[0] - 2])
