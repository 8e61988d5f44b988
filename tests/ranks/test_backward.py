"""Backward passes from sharded tensors: recomputation, hooks and custom functions that call torch functions in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard
from torch.utils.checkpoint import checkpoint

import shardcompile as sc

Function = Callable[[Tensor, Tensor], Tensor]

RECOMPUTED: dict[str, Function] = {
    "linear": nnf.linear,
    "einsum": lambda x, w: torch.einsum("nc,cd->nd", x, w),
    "irfft": lambda x, w: torch.fft.irfft(torch.fft.rfft(x * w[0], dim=0), n=7, dim=0),
    "cumprod": lambda x, w: (x * w[0]).cumprod(0),
    "pad": lambda x, w: nnf.pad((x * w[0]).transpose(0, 1).unsqueeze(0), (1, 1), mode="reflect"),
    "attention": lambda x, w: nnf.scaled_dot_product_attention((x @ w)[None, None], x[None, None], x[None, None]),
    "interpolate": lambda x, w: nnf.interpolate((x @ w).transpose(0, 1).unsqueeze(0), scale_factor=2, mode="linear"),
    "mask": lambda x, w: (x @ w)[x[:, 0] > 0],
    "embedding_bag": lambda x, w: nnf.embedding_bag(x.detach().abs().long().clamp(0, 5), w, mode="sum"),
    "in place": lambda x, w: x.clone().add_(w[0]),
}
"""Of rows [7, 6] and a weight [6, 6]; sharded tensors implement most of them above autograd."""


def by_backward(loss: Tensor, weight: Tensor) -> Tensor | None:
    loss.backward()
    return weight.grad


def by_chosen_inputs(loss: Tensor, weight: Tensor) -> Tensor | None:
    torch.autograd.backward([loss], inputs=[weight])
    return weight.grad


def by_grad(loss: Tensor, weight: Tensor) -> Tensor | None:
    return torch.autograd.grad(loss, weight)[0]


WAYS = {
    "backward": (False, by_backward),
    "re-entrant": (True, by_backward),
    "inputs": (False, by_chosen_inputs),
    "grad": (False, by_grad),
}


def rows() -> Tensor:
    return torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def sharded() -> sc.ShardTensor:
    return sc.distribute_tensor(rows(), init_device_mesh("cpu", (3,)), [Shard(0)], sharding_shapes={0: [4, 0, 3]})


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_in_a_checkpoint(name: str, way: str) -> None:
    use_reentrant, differentiate = WAYS[way]

    def gradient(x: Tensor) -> Tensor | None:
        w = weight()
        out = checkpoint(lambda x: RECOMPUTED[name](x, w), x.requires_grad_(), use_reentrant=use_reentrant)
        return differentiate(out.square().sum(), w)

    got = gradient(sharded())
    assert type(got) is Tensor
    torch.testing.assert_close(got, gradient(rows()))


class Doubled(torch.autograd.Function):
    """Computes a further loss with the same parameter in its backward, as re-entrant implementations do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            nnf.linear(x.detach(), ctx.w).square().sum().backward()
        return 2 * grad, None


@pytest.mark.ranks(3, processes=False)
def test_a_custom_function_that_calls_backward() -> None:
    def gradients(x: Tensor) -> list[Tensor | None]:
        w = weight()
        x.requires_grad_()
        Doubled.apply(x, w).sum().backward()
        return [x.grad, w.grad]

    got, want = gradients(sharded()), gradients(rows())
    assert type(got[1]) is Tensor
    torch.testing.assert_close([got[0].full_tensor(), got[1]], want)  # type: ignore[union-attr]


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("materialize", [False, True])
def test_options_of_grad(materialize: bool) -> None:
    def found(x: Tensor) -> list[Any]:
        w, unused = weight(), torch.zeros_like(x).requires_grad_()
        x.requires_grad_()
        hidden = (x @ w).tanh()
        out = hidden.sum(1)
        inputs = {"x": x, "hidden": hidden, "w": w, "unused": unused}
        ones = torch.ones_like(out)
        got = torch.autograd.grad(
            [out, hidden.sum()], list(inputs.values()), [ones, None], True, True, allow_unused=True,
            materialize_grads=materialize,
        )  # fmt: skip
        (again,) = torch.autograd.grad([g for g in got[:1] if g is not None], w, [torch.ones_like(x)])
        return [*got, again]

    got = [g.full_tensor() if isinstance(g, sc.ShardTensor) else g for g in found(sharded())]
    want = found(rows())
    assert [g is None for g in got] == [w is None for w in want] == [False, False, False, not materialize, False]
    torch.testing.assert_close([g for g in got if g is not None], [w for w in want if w is not None])


@pytest.mark.ranks(3, processes=False)
def test_errors_of_torch() -> None:
    for x in (sharded(), rows()):
        with pytest.raises(RuntimeError, match="does not require grad"):
            x.sum().backward()
        y = x.requires_grad_() * 2
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            y.backward()
        with pytest.raises(RuntimeError, match="Mismatch in shape"):
            y.backward(torch.ones(3, 3, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(y.sum(), torch.zeros_like(x).requires_grad_())


@pytest.mark.ranks(3, processes=False)
@pytest.mark.parametrize("positional", [False, True])
def test_gradients_of_chosen_tensors_that_are_no_leaves(positional: bool) -> None:
    def gradients(x: Tensor) -> list[Any]:
        y = x.requires_grad_() * 2
        loss = y.square().sum()
        if positional:
            Tensor.backward(loss, None, None, False, [y])
        else:
            loss.backward(inputs=[y])
        return [x.grad, y.grad]

    none, got = gradients(sharded())
    assert none is None
    torch.testing.assert_close(got.full_tensor(), gradients(rows())[1])
