"""The training step of the demo written by hand: plain local shards, and a collective for each sum over points.

This is the code that sharded tensors make unnecessary, and the baseline of their measurements. It takes every shortcut
that a person might: one collective for the two sums of a layer, one for the two sums of the loss, and one bucket for
all gradients of parameters. There is no collective for rank-invariant values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from examples.poisson.model import PointTransformer, SliceAttention
from examples.poisson.training import Batch, Compiler, Step
from shardcompile.collectives import all_reduce


def handwritten_step(net: PointTransformer, group: ProcessGroup, compiler: Compiler | None) -> Step:
    """Makes the hand-written step, with the loss and the gradients of `training.sharded_step`.

    Args:
        net: the model, the same on every rank.
        group: the ranks that hold the points.
        compiler: the backend of torch.compile; None for eager mode.
    """

    def loss_of_shard(features: Tensor, target: Tensor) -> Tensor:
        error = (predict(net, features, group) - target).square().sum()
        sums = _Sum.apply(torch.stack([error, target.square().sum()]), group)
        return torch.sqrt(sums[0] / sums[1])

    loss_fn = loss_of_shard if compiler is None else torch.compile(loss_of_shard, fullgraph=True, backend=compiler)

    def step(batch: Batch) -> Tensor:
        features, target = batch.shard(group.rank())
        for shard in (features, target):
            torch._dynamo.maybe_mark_dynamic(shard, 0)
        net.zero_grad()
        loss = loss_fn(features, target)
        loss.backward()
        complete_gradients(net, group)
        return loss.detach()

    return step


def predict(net: PointTransformer, features: Tensor, group: ProcessGroup) -> Tensor:
    """Computes `net(features)` for the points of this rank, which attend to those of all ranks. [n, F] -> [n]."""
    x = net.embed(features)
    for block in net.blocks:
        x = x + _attention(block.attention, block.attention_norm(x), group)  # type: ignore[arg-type, operator]
        x = x + block.mlp(block.mlp_norm(x))  # type: ignore[operator]
    return net.head(net.norm(x)).squeeze(-1)


def _attention(layer: SliceAttention, x: Tensor, group: ProcessGroup) -> Tensor:
    """Computes `layer(x)` with the slice means over all ranks. [n, C] -> [n, C]."""
    weights = layer.split_heads(layer.assign(x)).softmax(-1)  # [H, n, S]
    values = layer.split_heads(layer.value(x))  # [H, n, D]
    totals = torch.cat([weights.transpose(1, 2) @ values, weights.sum(1).unsqueeze(-1)], dim=-1)  # [H, S, D + 1]
    totals = _Sum.apply(totals, group)
    tokens = layer.attend(totals[..., :-1] / (totals[..., -1:] + 1e-6))
    points = weights @ _Replicate.apply(tokens, group)  # [H, n, D]
    return layer.out(points.transpose(0, 1).flatten(1))


def complete_gradients(net: PointTransformer, group: ProcessGroup) -> None:
    """All-reduces the gradients of the parameters, in one collective."""
    # Between `_Sum` and `_Replicate` every rank computes with the same tokens, so those gradients are complete.
    parameters = [p for name, p in net.named_parameters() if "query_key_value" not in name]
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = _all_reduce(torch.cat([g.flatten() for g in gradients]), group)
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class _Sum(torch.autograd.Function):
    """All-reduce whose result every rank uses in full: the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Replicate(torch.autograd.Function):
    """Identity of a replicated value that each rank uses for its own points: the gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_reduce(grad, ctx.group), None


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    total = all_reduce(x.contiguous(), group)
    assert isinstance(total, Tensor), "it was awaited"
    return total
