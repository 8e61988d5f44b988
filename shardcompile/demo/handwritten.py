"""The training step of the demo written by hand: plain shards, and a collective wherever points are summed.

This is what the sharded tensors save a person from writing, and what they are measured against. It takes every short
sharded that a person might: one collective for the two sums of a layer, one for the two of the loss, and one bucket
for all gradients of parameters. There is none for what is the same on every rank anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile.collectives import all_reduce

from .model import PointTransformer, SliceAttention
from .training import Batch, Compiler, Step


def handwritten_step(net: PointTransformer, group: ProcessGroup, compiler: Compiler | None) -> Step:
    """The step of `training.sharded_step`, by hand: the same loss and the same gradients.

    Args:
        net: the model, the same on every rank.
        group: the ranks that hold the points.
        compiler: backend of torch.compile; None for eager.
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
    """`net(features)` for this rank's points, which attend to those of all ranks. [n, F] -> [n]."""
    x = net.embed(features)
    for shard in net.shards:
        x = x + _attention(shard.attention, shard.attention_norm(x), group)  # type: ignore[arg-type, operator]
        x = x + shard.mlp(shard.mlp_norm(x))  # type: ignore[operator]
    return net.head(net.norm(x)).squeeze(-1)


def _attention(layer: SliceAttention, x: Tensor, group: ProcessGroup) -> Tensor:
    """`layer(x)` with the slice means over all ranks. [n, C] -> [n, C]."""
    weights = layer.split_heads(layer.assign(x)).softmax(-1)  # [H, n, S]
    values = layer.split_heads(layer.value(x))  # [H, n, D]
    totals = torch.cat([weights.transpose(1, 2) @ values, weights.sum(1).unsqueeze(-1)], dim=-1)  # [H, S, D + 1]
    totals = _Sum.apply(totals, group)
    tokens = layer.attend(totals[..., :-1] / (totals[..., -1:] + 1e-6))
    points = weights @ _Share.apply(tokens, group)  # [H, n, D]
    return layer.out(points.transpose(0, 1).flatten(1))


def complete_gradients(net: PointTransformer, group: ProcessGroup) -> None:
    """Add up the parameters' gradients over all ranks, in one collective."""
    # Between `_Sum` and `_Share` every rank computes with the same tokens: there the gradients are complete.
    parameters = [p for name, p in net.named_parameters() if "query_key_value" not in name]
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = _add_up(torch.cat([g.flatten() for g in gradients]), group)
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class _Sum(torch.autograd.Function):
    """The sum over all ranks, of which every rank then uses all: the gradient passes as it is."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: ProcessGroup) -> Tensor:
        return _add_up(x, group)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Share(torch.autograd.Function):
    """A value, the same on every rank, that each uses for its own points: the gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _add_up(grad, ctx.group), None


def _add_up(x: Tensor, group: ProcessGroup) -> Tensor:
    total = all_reduce(x.contiguous(), group)
    assert isinstance(total, Tensor), "it was awaited"
    return total
