"""Windows as a dim of their own along a sharded dim: rows that they reach over the edges of shards are fetched, no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

import shardcompile as sc
from shardcompile.compat.testing import graphs_compiled
from shardcompile.testing import once, rank
from tests.support.sent import run_both
from tests.support.tiers import often

PARTITIONS = ([5, 7, 0], [0, 8, 4], [12, 0, 0], [1, 1, 10], [4, 4, 4])
"""A shard without rows, one with all, some of a single row; even shards."""

Function = Callable[[Tensor], Tensor]


def image(rows: int = 12) -> Tensor:
    return torch.randn(2, 3, rows, 8, dtype=torch.float64)


EAGER: dict[str, tuple[Function, list[str]]] = {
    **{
        f"windows of {size}, every {step}": (lambda x, size=size, step=step: x.unfold(2, size, step), ["fetch_ranges"])
        for size, step in ((1, 2), (2, 1), (3, 1), (3, 2), (2, 5), (4, 4), (12, 1), (5, 3))
    },
    "windows of one": (lambda x: x.unfold(2, 1, 1), []),
    "a dim from the end": (lambda x: x.unfold(-2, 3, 1), ["fetch_ranges"]),
    "windows of windows": (lambda x: x.unfold(2, 3, 1).unfold(2, 2, 2), ["fetch_ranges"] * 2),
    "patches": (lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5), ["fetch_ranges"]),
    "moving mean": (lambda x: F.pad(x, (0, 0, 1, 1)).unfold(2, 3, 1).mean(-1) * x, ["fetch_ranges"]),
    "im2col": (lambda x: F.unfold(x, 3, padding=1), ["fetch_ranges"]),
    "im2col of patches": (lambda x: F.unfold(x, (4, 2), stride=(4, 2)), ["fetch_ranges"]),
    "im2col and back": (
        lambda x: F.fold(F.unfold(x, 3, stride=2), (12, 8), 3, stride=2),
        ["fetch_ranges", "return_ranges"],
    ),
    "of one image": (lambda x: F.unfold(x[0], 3, padding=1), ["fetch_ranges"]),
}


def compare(function: Function, run: Function, full: Tensor, dim: int, sizes: list[int]) -> list[str]:
    """The names of collectives, after comparing values and gradients with those of the whole tensor."""
    names, out, expected, gradient, wanted = run_both(function, run, full, dim, sizes)
    assert out.stride() == expected.stride() or not out.is_contiguous()
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient.full_tensor(), wanted, rtol=1e-12, atol=1e-12)
    return names


@pytest.mark.ranks(3, timeout=120, processes=False)
@pytest.mark.parametrize("name", list(EAGER))
def test_rows_over_the_edges_come_in_one_exchange(name: str) -> None:
    function, expected = EAGER[name]
    for sizes in PARTITIONS:
        assert compare(function, function, image(), 2, sizes) == expected, sizes


COMPILED: dict[str, Function] = {
    "moving mean": EAGER["moving mean"][0],
    "patches": lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).square(),
    "every other": lambda x: (x.unfold(2, 3, 2) * torch.arange(3)).sum(-1),
    "im2col": lambda x: F.unfold(x, 3, padding=1).sin(),
    "im2col and back": lambda x: F.fold(F.unfold(x, 3, padding=1).sin(), (x.shape[2], 8), 3, padding=1),
}


@pytest.mark.ranks(3, timeout=200, processes=False)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", often(list(COMPILED), 2))
def test_one_graph_for_every_partition(name: str, backend: str) -> None:
    function = COMPILED[name]
    once(torch._dynamo.reset)
    before = once(graphs_compiled)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for sizes in ([5, 7, 4], [0, 8, 4], [12, 0, 0], [1, 1, 10]):
        compare(function, compiled, image(sum(sizes)), 2, sizes)
    assert graphs_compiled() - before == 1


@pytest.mark.ranks(4, processes=False)
def test_two_mesh_dims() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    partitions = ([Shard(2), Shard(3)], {0: [9, 3], 1: [0, 8]}), ([Replicate(), Shard(2)], {1: [5, 7]})
    partitions = (*partitions, ([Shard(2), Shard(2)], {1: [3, 0, 8, 1]}))
    for placements, sizes in partitions:
        for function in (EAGER["patches"][0], EAGER["im2col"][0], lambda x: x.unfold(3, 3, 1).unfold(2, 2, 1)):
            full = image()
            plain = full.clone().requires_grad_()
            x = sc.distribute_tensor(full, mesh, placements, sharding_shapes=sizes).detach().requires_grad_()
            out, expected = function(x), function(plain)
            torch.testing.assert_close(out.full_tensor(), expected)
            weight = torch.randn_like(expected)
            (out * weight).sum().backward(), (expected * weight).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(4, processes=False)
def test_terms_of_a_sum_have_windows_before_it() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(rank() // 2)
    shard = torch.randn(7, 2, dtype=torch.float64).split([5, 2])[rank() % 2].clone()
    x = sc.ShardTensor.from_local(shard, mesh, [Partial("sum"), Shard(0)], {1: [5, 2]})
    out = x.unfold(0, 3, 1)
    assert out.placements == x.placements
    assert torch.equal(out.full_tensor(), x.full_tensor().unfold(0, 3, 1))


@pytest.mark.ranks(3, processes=False)
def test_windows_follow_what_they_are_of_and_refuse_writes() -> None:
    mesh = init_device_mesh("cpu", (3,))
    full = torch.arange(7.0)
    x = sc.distribute_tensor(full.clone(), mesh, [Shard(0)], sharding_shapes={0: [2, 0, 5]})
    windows = x.unfold(0, 3, 2)
    x.mul_(2)
    assert torch.equal(windows.full_tensor(), (2 * full).unfold(0, 3, 2))
    with pytest.raises(sc.UnsupportedOpError, match="no way back"):
        windows.add_(1)


@pytest.mark.ranks(3, processes=False)
def test_bad_windows_are_torchs_error() -> None:
    mesh = init_device_mesh("cpu", (3,))
    full = torch.randn(7, 2)
    x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: [1, 6, 0]})
    for dim, size, step in ((0, 8, 1), (0, 2, 0), (2, 1, 1), (0, -1, 1)):
        with pytest.raises((RuntimeError, IndexError)) as plain:
            full.unfold(dim, size, step)
        with pytest.raises(type(plain.value)):
            x.unfold(dim, size, step)
    assert torch.equal(x.unfold(0, 0, 1).full_tensor(), full.unfold(0, 0, 1))
