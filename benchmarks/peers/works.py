"""What the works of this benchmark have in common: a model, its input, and contenders that train it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardcompile import ShardTensor
from shardcompile.collectives import all_reduce

Forward = Callable[[nn.Module, Tensor], Any]
"""Computes the loss of a model for this rank's part of the input, or for a sharded or a whole input."""


@dataclass(frozen=True)
class Work:
    """A training step: forward, backward, AdamW.

    Attributes:
        model: makes the model; equal on all ranks.
        shape: of the input.
        dim: the dim of the input that is sharded.
        loss: the loss for a plain, a sharded or a DTensor input.
        by_hand: the same for this rank's shard, given the group and the sizes of all shards: the whole loss, whose
            gradients are this rank's terms, but for parameters named in `complete`.
        partitions: sizes of the shards for two ranks, by label.
        complete: parts of names of parameters whose gradients are complete on every rank by hand.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dim: int
    loss: Forward
    by_hand: Callable[[ProcessGroup, Sequence[int]], Forward]
    partitions: Mapping[str, Sequence[int]]
    complete: Sequence[str] = ()


class Trainer:
    """A contender: a model with its optimizer.

    Args:
        model: the model.
        given: the input of `forward`.
        forward: computes the loss.
        backend: of torch.compile; None for eager mode.
        finish: what is done with the gradients before the step of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Tensor,
        forward: Forward,
        backend: str | None,
        finish: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        self.model, self._given, self._finish = model, given, finish
        loss = lambda x: forward(model, x)  # noqa: E731
        self._loss = loss if backend is None else torch.compile(loss, fullgraph=True, backend=backend)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def gradients(self) -> None:
        """Computes the gradients of the parameters."""
        self._optimizer.zero_grad()
        self._loss(self._given).backward()
        self._finish(self.model)

    def step(self) -> None:
        """Takes a training step."""
        self.gradients()
        self._optimizer.step()

    def gradient_vector(self) -> Tensor:
        """Returns all gradients, one after the other."""
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in (p.grad for p in self.model.parameters())]
        return torch.cat([g.flatten() for g in full if g is not None])


def contenders(work: Work, mesh: DeviceMesh, sizes: Sequence[int], backend: str) -> dict[str, Trainer]:
    """Makes the contenders of a work, by name; the first is one process with the whole input, for its values."""
    torch.manual_seed(1)
    whole = torch.randn(work.shape)
    shard = whole.split(list(sizes), work.dim)[mesh.get_local_rank()].contiguous()
    group = mesh.get_group()
    by_hand = work.by_hand(group, sizes)
    sharded = ShardTensor.from_local(shard.clone(), mesh, [Shard(work.dim)], sharding_shapes={0: list(sizes)})

    def model() -> nn.Module:
        torch.manual_seed(0)
        return work.model()

    def sum_gradients(model: nn.Module) -> None:
        named = [p for n, p in model.named_parameters() if not any(part in n for part in work.complete)]
        grads = [p.grad for p in named if p.grad is not None]
        total = all_reduce(torch.cat([g.flatten() for g in grads]), group)
        assert isinstance(total, Tensor), "it was awaited"
        for grad, part in zip(grads, total.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    made = {
        "whole": Trainer(model(), whole, work.loss, None),
        "eager": Trainer(model(), sharded, work.loss, None),
        "compiled": Trainer(model(), sharded, work.loss, backend),
        "eager by hand": Trainer(model(), shard, by_hand, None, sum_gradients),
        "compiled by hand": Trainer(model(), shard, by_hand, "inductor", sum_gradients),
    }
    if len(set(sizes)) == 1:
        made["eager DTensor"] = Trainer(
            _replicated(model(), mesh), DTensor.from_local(shard, mesh, [Shard(work.dim)]), work.loss, None, _reduced
        )
    return made


def _replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))
    return model


def _reduced(model: nn.Module) -> None:
    for p in model.parameters():
        if isinstance(p.grad, DTensor):
            p.grad = p.grad.redistribute(placements=[Replicate()])
