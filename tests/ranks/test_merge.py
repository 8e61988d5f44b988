"""Dependent reductions that become one, in compiled programs: fewer collectives, the values of plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.functional import batch_norm, cross_entropy

import shardcompile as sc
from shardcompile.inspect.offline import trace_offline
from shardcompile.passes import inductor_options
from shardcompile.testing import mesh, once, world_size
from tests.support.after_passes import graph_after_passes
from tests.support.tiers import often

PARTITIONS = {3: ([4, 0, 5], [1, 8, 0], [0, 0, 9]), 2: ([7, 2], [0, 9])}


def pooled(x: Tensor, v: Tensor) -> Tensor:
    """Attention pooling: a mean of rows, weighted by a softmax along them."""
    return x.softmax(0).transpose(0, 1) @ v


def several(x: Tensor, v: Tensor) -> Tensor:
    """What else has a maximum in it."""
    return (x.log_softmax(0).exp() * x.logsumexp(0)).sum(0)


def by_heads(x: Tensor, v: Tensor) -> Tensor:
    """The context of linear attention, with heads in front of the rows."""
    keys, values = (t.unflatten(1, (2, -1)).transpose(0, 1) for t in (x, v))
    return keys.softmax(-2).transpose(-1, -2) @ values


def normalised(x: Tensor, v: Tensor) -> Tensor:
    """Norms of columns by the mean and the variance of the rows."""
    return batch_norm(x, None, None, training=True) @ (v[:4] - v.mean(0)) / v.std(0)


PROGRAMS = [pooled, by_heads, several, normalised]


def inputs(dtype: torch.dtype, infinite: bool) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(5)
    x, v = (torch.randn(9, n, generator=numbers, dtype=torch.float64) for n in (4, 6))
    x = 20 * x
    if infinite:
        x[:4], x[:, 1] = -math.inf, -math.inf
    return x.to(dtype), v.to(dtype)


def reference(program: Callable[..., Tensor], full: Sequence[Tensor]) -> list[Tensor]:
    """The result and the gradients, by plain PyTorch in float64."""
    leaves = [t.double().requires_grad_() for t in full]
    out = program(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)]


def same_as_plain(
    program: Callable[..., Tensor], on: DeviceMesh, full: Sequence[Tensor], how: dict[str, Any], tolerance: float
) -> None:
    """Compare value and gradients over several partitions, of which one graph serves all."""
    expected = once(lambda: reference(program, full))
    compiled = torch.compile(program, fullgraph=True, **how)
    placements = [Shard(0), *[Replicate()] * (on.ndim - 1)]
    for sizes in PARTITIONS[on.size(0)]:
        at = on.get_local_rank(0)
        leaves = [
            sc.ShardTensor.from_local(t.split(sizes)[at].clone(), on, placements, {0: sizes}).requires_grad_()
            for t in full
        ]
        out = compiled(*leaves)
        grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
        assert {t.dtype for t in (out, *grads) if t is not None} == {full[0].dtype}
        for found, wanted in zip([out, *grads], expected, strict=True):
            if wanted is not None:
                whole = found.detach().redistribute(placements=[Replicate()] * on.ndim).to_local().double()
                torch.testing.assert_close(whole, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("program, infinite", often([(p, i) for i in (True, False) for p in PROGRAMS], 1))
@pytest.mark.ranks(3, processes=False, timeout=300)
def test_values_and_gradients(program: Callable[..., Tensor], infinite: bool) -> None:
    on = init_device_mesh("cpu", (world_size(),))
    same_as_plain(program, on, inputs(torch.float64, infinite), {"backend": graph_after_passes([])}, 1e-12)


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.ranks(4, mesh=(2, 2), processes=False, timeout=300)
def test_on_a_mesh_of_two_dims(program: Callable[..., Tensor]) -> None:
    same_as_plain(program, mesh(), inputs(torch.float64, True), {"backend": graph_after_passes([])}, 1e-12)


def between_layers(x: Tensor, v: Tensor) -> Tensor:
    """What is pooled goes into a product of matrices, which refuses two dtypes."""
    return v[:, :4].tanh() @ pooled(x, v)


@pytest.mark.parametrize(
    "program, dtype, tolerance",
    often(
        [
            *((p, torch.bfloat16, 1e-1) for p in (between_layers, by_heads, pooled)),
            *((p, torch.float32, 1e-4) for p in (between_layers, *PROGRAMS)),
        ],
        1,
    ),
)
@pytest.mark.ranks(3, processes=False, timeout=300)
def test_in_single_and_half_precision(program: Callable[..., Tensor], dtype: torch.dtype, tolerance: float) -> None:
    on = init_device_mesh("cpu", (world_size(),))
    same_as_plain(program, on, inputs(dtype, False), {"backend": graph_after_passes([])}, tolerance)


@pytest.mark.parametrize("program", often([by_heads, normalised], 1))
@pytest.mark.ranks(2, timeout=600)
def test_through_inductor(program: Callable[..., Tensor]) -> None:
    on = init_device_mesh("cpu", (world_size(),))
    same_as_plain(program, on, inputs(torch.float64, True), {"options": inductor_options()}, 1e-12)


class LinearAttention(nn.Module):
    """Attention whose keys are a softmax along the rows, as in "Efficient Attention" (Shen et al., 2021)."""

    def __init__(self, channels: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.out = nn.LayerNorm(channels), nn.Linear(channels, channels)
        self.query_key_value = nn.Linear(channels, 3 * channels)

    def forward(self, x: Tensor) -> Tensor:
        split = self.query_key_value(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(1, 2, 0, 3).unbind(0)
        context = k.softmax(-2).transpose(-1, -2) @ v
        return x + self.out((q.softmax(-1) @ context).transpose(0, 1).flatten(1))


def layers(number: int, rows: int = 4099, channels: int = 32) -> Callable[[DeviceMesh], Any]:
    def build(on: DeviceMesh) -> Any:
        net = nn.Sequential(*(LinearAttention(channels) for _ in range(number)))
        return (lambda x: net(x).square().mean()), (sc.rand(rows, channels, device_mesh=on, placements=[Shard(0)]),)

    return build


def test_a_layer_of_linear_attention_has_one_collective_each_way() -> None:
    traced = trace_offline(layers(1), world_size=64, device="cpu")
    assert [c.kind for c in traced.forward_collectives] == ["all_gather"]
    assert [c.kind for c in traced.backward_collectives] == ["all_reduce"] * 2  # the second has the weights' gradients


def counts(fn: Callable[[Tensor], Tensor], dim: int, off: Sequence[str] = ()) -> tuple[int, int]:
    """Collectives of the forward and of the backward pass, for a matrix that is sharded along a dim."""

    def build(on: DeviceMesh) -> Any:
        return fn, (sc.rand(4099, 64, device_mesh=on, placements=[Shard(dim)]).requires_grad_(),)

    traced = trace_offline(build, world_size=8, device="cpu", off=off)
    return len(traced.forward_collectives), len(traced.backward_collectives)


def test_a_norm_along_the_rows_has_one_collective_each_way() -> None:
    def norm(x: Tensor) -> Tensor:
        return ((x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()).pow(3).sum()

    assert counts(norm, 0) == (1, 1)


@pytest.mark.nightly
def test_other_norms_and_losses_along_a_partition() -> None:
    assert counts(lambda x: nn.functional.layer_norm(x, (64,)).square().sum(), 1) == (1, 1)
    assert counts(lambda x: batch_norm(x, None, None, training=True).pow(3).sum(), 0) == (1, 1)
    assert counts(lambda x: cross_entropy(x, torch.arange(4099) % 64), 1) == (2, 1)  # 3 and 1, of all logits, without


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [64, 1024])
def test_three_layers_have_three_on_every_rank(ranks: int) -> None:
    traced = [trace_offline(layers(3), world_size=ranks, device="cpu", rank=r) for r in (0, ranks - 1)]
    assert traced[0].collectives == traced[1].collectives
    assert [c.kind for c in traced[0].forward_collectives] == ["all_gather"] * 3


@pytest.mark.nightly
def test_without_the_pass_a_layer_has_three() -> None:
    off = trace_offline(layers(3), world_size=64, device="cpu", off=["merge_reductions"])
    assert len(off.forward_collectives) == 9
