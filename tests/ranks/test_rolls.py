"""`torch.roll` along a sharded dim: one exchange for each sharded dim, of the rows that another rank gets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import once, rank
from tests.support.sent import Sent, run_both
from tests.support.tiers import often

PARTITIONS = ([3, 4, 0], [0, 6, 4], [7, 0, 0], [1, 2, 3], [0, 0, 0], [1, 0, 0], [4, 4, 4])
"""A shard without rows, one with all, one of a single row; a dim of none and of one; even shards."""


def _compare(
    function: Callable[[Tensor], Tensor], run: Callable[[Tensor], Tensor], full: Tensor, dim: int, sizes: list[int]
) -> list[str]:
    """The names of collectives, after comparing values and gradients with those of the whole tensor."""
    names, out, expected, gradient, wanted = run_both(function, run, full, dim, sizes)
    assert torch.equal(out.full_tensor(), expected)
    assert torch.equal(gradient.full_tensor(), wanted)
    assert gradient.sharding.sizes(dim) == tuple(sizes)
    return names


@pytest.mark.ranks(3, timeout=120, processes=False)
@pytest.mark.parametrize("dim", [0, 1])
def test_every_shift_is_one_exchange(dim: int) -> None:
    for sizes in PARTITIONS:
        shape = [2, 3]
        shape[dim] = sum(sizes)
        full = torch.randn(shape, dtype=torch.float64)
        for shift in range(-sum(sizes) - 1, sum(sizes) + 3):
            roll = lambda x, shift=shift: x.roll(shift, dim)  # noqa: E731
            assert _compare(roll, roll, full, dim, sizes) == ["fetch_around"], (sizes, shift)


COMPILED: dict[str, Callable[[Tensor], Tensor]] = {
    "a stencil around": lambda x: (x.roll(1, 0) - 2 * x + x.roll(-1, 0)).sin(),
    "there and back": lambda x: (x.roll(3, 0) * 2).roll(-3, 0),
    "both dims": lambda x: x.roll((2, 1), (0, 1)) * 2,
    "one dim twice": lambda x: x.roll((2, -1), (0, 0)) * 2,
    "all elements": lambda x: x.roll(3) * 2,
    "by a part of the rows": lambda x: x.roll(x.shape[0] // 2, 0).sin(),
}


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", often(list(COMPILED), len(COMPILED) - 1))
def test_one_graph_for_every_partition(name: str, backend: str) -> None:
    function = COMPILED[name]
    once(torch._dynamo.reset)
    before = once(graphs_compiled)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for sizes in ([3, 4, 1], [0, 6, 4], [7, 0, 0], [1, 2, 3]):
        full = torch.randn(sum(sizes), 4, dtype=torch.float64)
        mesh = init_device_mesh("cpu", (3,))
        shard = full.split(sizes)[rank()].clone()
        x = sc.ShardTensor.from_local(shard, mesh, [Shard(0)], {0: sizes}).requires_grad_()
        plain = full.clone().requires_grad_()
        out, expected = compiled(x), function(plain)
        torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
    assert graphs_compiled() - before == 1


@pytest.mark.ranks(3, processes=False)
def test_all_elements_one_after_the_other() -> None:
    full = torch.randn(7, 3, dtype=torch.float64)
    for shift in (-22, -4, 0, 3, 20):
        roll = lambda x, shift=shift: x.roll(shift)  # noqa: E731
        assert _compare(roll, roll, full, 0, [3, 4, 0]) == ["fetch_around"]


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize(
    ("placements", "sizes"),
    [
        ([Shard(0), Shard(1)], {0: [6, 1], 1: [0, 5]}),
        ([Replicate(), Shard(0)], {1: [2, 5]}),
        ([Shard(0), Shard(0)], {1: [3, 0, 3, 1]}),
    ],
)
def test_two_mesh_dims(placements: list[Placement], sizes: dict[int, list[int]]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.randn(7, 5, dtype=torch.float64)
    for shifts in ((2, 1), (-3, 6), (7, 0)):
        plain = full.clone().requires_grad_()
        x = sc.distribute_tensor(full, mesh, placements, sharding_shapes=sizes).detach().requires_grad_()
        out, expected = x.roll(shifts, (0, 1)), plain.roll(shifts, (0, 1))
        assert torch.equal(out.full_tensor(), expected)
        weight = torch.arange(35.0, dtype=torch.float64).view(7, 5)
        (out * weight).sum().backward(), (expected * weight).sum().backward()
        assert torch.equal(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4, processes=False)
@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_terms_of_a_reduction_are_rolled_before_it(reduction: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(rank() // 2)
    whole = torch.randn(7, 2, dtype=torch.float64)
    shard = whole.split([5, 2])[rank() % 2].clone()
    x = sc.ShardTensor.from_local(shard, mesh, [Partial(reduction), Shard(0)], {1: [5, 2]})
    with Sent() as watch:
        out = x.roll(3, 0)
    assert out.placements == x.placements and watch.names == ["fetch_around"]
    assert torch.equal(out.full_tensor(), x.full_tensor().roll(3, 0))


@pytest.mark.ranks(3, processes=False)
def test_numbers_of_any_dtype_and_views_of_them() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64):
        full = torch.arange(14).view(7, 2).to(dtype)
        x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: [1, 6, 0]})
        assert torch.equal(x.roll(5, 0).full_tensor(), full.roll(5, 0))
    assert torch.equal(x.conj().roll(5, 0).full_tensor(), full.conj().roll(5, 0))
    assert torch.equal(x.T.roll(5, 1).full_tensor(), full.T.roll(5, 1))


@pytest.mark.ranks(3, processes=False)
def test_shifts_without_dims_are_torchs_error() -> None:
    mesh = init_device_mesh("cpu", (3,))
    full = torch.randn(7, 2)
    x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: [1, 6, 0]})
    for shifts, dims in (((1, 2), (0,)), ((1,), (2,)), ((), ())):
        with pytest.raises((RuntimeError, IndexError)) as plain:
            full.roll(shifts, dims)
        with pytest.raises(type(plain.value)):
            x.roll(shifts, dims)
