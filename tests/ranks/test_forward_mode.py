"""Forward-mode derivatives. Torch computes them by its reference implementations, whose ops are those of `prims`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import shardcompile as sc
from shardcompile.testing import world_size
from tests.support.tiers import often

ROWS, WIDTH = 9, 4
PARTITIONS = [[5, 0, 4], [1, 7, 1]]
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda x: x * 2 + 1 - x / 3,
    "activations": lambda x: torch.tanh(x) + nnf.gelu(x) + nnf.silu(x) + nnf.softplus(x) + nnf.elu(x) + x.sigmoid(),
    "powers": lambda x: x.abs().pow(1.5) + x.square().exp().rsqrt() + torch.atan2(x, x + 2),
    "bounded": lambda x: x.clamp(-0.5, 0.5) + nnf.relu(x) + torch.where(x > 0, x, x * 3) + torch.maximum(x, -x),
    "broadcast": lambda x: x * torch.arange(WIDTH, dtype=x.dtype) + x[:, :1] * x,
    "reduced": lambda x: x.std(0) + x.var(0) + x.logsumexp(0) + x.amax(0) + x.prod(0) + x.mean(0),
    "normed": lambda x: nnf.layer_norm(x, (WIDTH,)) + nnf.rms_norm(x, (WIDTH,)) + x / x.norm(dim=-1, keepdim=True),
    "probabilities": lambda x: x.softmax(-1) + x.softmax(0) + x.log_softmax(-1),
    "losses": lambda x: nnf.mse_loss(x, x * 0.5) + nnf.huber_loss(x, x * 0.2) + nnf.cross_entropy(x, classes()),
    "rows": lambda x: torch.cat([x.roll(1, 0), x[2:] * 2, x.cumsum(0)]),
    "products": lambda x: x.t() @ x.sin() + torch.einsum("ni,nj->ij", x, x),
    "fourier": lambda x: torch.fft.rfft(x, dim=0).abs(),
}


def classes() -> Tensor:
    return torch.arange(ROWS) % WIDTH


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, sc.ShardTensor) else x


def drawn() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, t = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw) for _ in range(2))
    return x, t


@pytest.mark.ranks(3, timeout=300)  # torch keeps one level of forward-mode differentiation for all threads
def test_derivatives_along_a_direction_gather_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sc.config, "fallback", "error")
    mesh = init_device_mesh("cpu", (world_size(),))
    x, t = drawn()
    for name, function in FUNCTIONS.items():
        value, wanted = torch.func.jvp(function, (x,), (t,))
        for sizes in PARTITIONS:
            shards = [sc.distribute_tensor(a, mesh, [Shard(0)], sharding_shapes={0: sizes}) for a in (x, t)]
            found, tangent = torch.func.jvp(function, (shards[0],), (shards[1],))
            torch.testing.assert_close(whole(found), value, msg=lambda text: f"{name}: {text}")  # noqa: B023
            torch.testing.assert_close(whole(tangent), wanted, msg=lambda text: f"{name}: {text}")  # noqa: B023


def curvature(points: Any) -> Any:
    """The Laplacian of a small network at each point, [n]. (Torch compiles no products of numbers under a hessian.)"""
    w = torch.linspace(-1, 1, WIDTH * 5, dtype=points.dtype).view(WIDTH, 5)

    def field(p: Tensor) -> Tensor:
        return torch.tanh(p @ w).sum()

    return torch.func.vmap(torch.func.hessian(field))(points).diagonal(dim1=1, dim2=2).sum(-1)


@pytest.mark.ranks(3, timeout=300)
@pytest.mark.parametrize("backend", ["", *often(["aot_eager", "inductor"], 1)])
def test_second_derivatives_at_points_gather_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sc.config, "fallback", "error")
    mesh = init_device_mesh("cpu", (world_size(),))
    run = torch.compile(curvature, fullgraph=True, backend=backend) if backend else curvature
    full = drawn()[0]
    plain = full.clone().requires_grad_()
    curvature(plain).square().sum().backward()
    for sizes in PARTITIONS:
        x = sc.distribute_tensor(full, mesh, [Shard(0)], sharding_shapes={0: sizes}).requires_grad_()
        found = run(x)
        torch.testing.assert_close(whole(found), curvature(full))
        found.square().sum().backward()
        assert plain.grad is not None
        torch.testing.assert_close(whole(x.grad), plain.grad)
