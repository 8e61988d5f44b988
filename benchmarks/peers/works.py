"""What the works of this benchmark have in common: a model, its input, and contenders that train it.

PhysicsNeMo is a contender where it is installed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
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

Forward = Callable[..., Any]
"""Computes the loss, given a model and its inputs: whole, sharded, or this rank's shards."""
Partitions = Callable[[int], Mapping[str, Sequence[Sequence[int]]]]
"""Returns by label, for a number of ranks, the sizes of the shards, of which steps take turns."""


@dataclass(frozen=True)
class Work:
    """A training step: forward, backward, AdamW.

    Attributes:
        model: makes the model; equal on all ranks.
        shape: of the first input, whose values are drawn.
        dim: the dim of that input that is sharded.
        loss: the loss for plain, sharded or DTensor inputs.
        by_hand: the same for this rank's shards, given the group and the sizes of all shards: the whole loss, whose
            gradients are this rank's terms, but for parameters named in `complete`.
        partitions: of the first input.
        complete: parts of names of parameters whose gradients are complete on every rank by hand.
        more: makes further inputs. They are sharded along dim 0, and have a multiple of the rows of the first input.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dim: int
    loss: Forward
    by_hand: Callable[[ProcessGroup, Sequence[int]], Forward]
    partitions: Partitions
    complete: Sequence[str] = ()
    more: Callable[[], Sequence[Tensor]] = tuple


class Trainer:
    """A contender: a model with its optimizer.

    Args:
        model: the model.
        batches: functions that compute the loss, each with its inputs; steps take turns.
        backend: of torch.compile; None for eager mode.
        finish: what is done with the gradients before the step of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[tuple[Forward, Sequence[Tensor]]],
        backend: str | None,
        finish: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        self.model, self._finish = model, finish
        losses: dict[Forward, Forward] = {}
        for forward, _ in batches:
            if forward not in losses:
                loss = functools.partial(forward, model)
                losses[forward] = loss if backend is None else torch.compile(loss, fullgraph=True, backend=backend)
        self._batches = itertools.cycle([(losses[forward], inputs) for forward, inputs in batches])
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def gradients(self) -> None:
        """Computes the gradients of the parameters."""
        self._optimizer.zero_grad()
        loss, inputs = next(self._batches)
        loss(*inputs).backward()
        self._finish(self.model)

    def step(self) -> None:
        """Takes a training step."""
        self.gradients()
        self._optimizer.step()

    def gradient_vector(self) -> Tensor:
        """Returns all gradients, one after the other."""
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in (p.grad for p in self.model.parameters())]
        return torch.cat([g.flatten() for g in full if g is not None])


def contenders(work: Work, mesh: DeviceMesh, partitions: Sequence[Sequence[int]], backend: str) -> dict[str, Trainer]:
    """Makes the contenders of a work, by name; the first is one process with the whole input, for its values."""
    torch.manual_seed(1)
    whole = [torch.randn(work.shape), *work.more()]
    dims = [work.dim, *[0] * (len(whole) - 1)]
    group = mesh.get_group()

    def shards(sizes: Sequence[int]) -> list[Tensor]:
        parts = [x.split(_rows(x, dim, sizes), dim) for x, dim in zip(whole, dims, strict=True)]
        return [part[mesh.get_local_rank()].contiguous() for part in parts]

    by_hand = [(work.by_hand(group, sizes), shards(sizes)) for sizes in partitions]
    sharded = [
        [
            ShardTensor.from_local(shard.clone(), mesh, [Shard(dim)], sharding_shapes={0: _rows(x, dim, sizes)})
            for shard, x, dim in zip(shards(sizes), whole, dims, strict=True)
        ]
        for sizes in partitions
    ]
    ours = [(work.loss, inputs) for inputs in sharded]

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
        "whole": Trainer(model(), [(work.loss, whole)], None),
        "eager": Trainer(model(), ours, None),
        "compiled": Trainer(model(), ours, backend),
        "eager by hand": Trainer(model(), by_hand, None, sum_gradients),
        "compiled by hand": Trainer(model(), by_hand, "inductor", sum_gradients),
    }
    if all(len(set(sizes)) == 1 for sizes in partitions):
        even = [DTensor.from_local(x, mesh, [Shard(dim)]) for x, dim in zip(shards(partitions[0]), dims, strict=True)]
        made["eager DTensor"] = Trainer(_replicated(model(), mesh), [(work.loss, even)], None, _reduced)
    theirs = _physicsnemo()
    if theirs is not None:

        def loss(model: nn.Module, *inputs: Tensor) -> Any:  # with code of its own, for which Dynamo keeps other graphs
            return work.loss(model, *inputs)

        batches = [
            (loss, [_wrapped_by(theirs, x, mesh, dim, sizes) for x, dim in zip(whole, dims, strict=True)])
            for sizes in partitions
        ]
        made["eager PhysicsNeMo"] = Trainer(model(), batches, None)
        if len(partitions) == 1:  # it compiles anew for other partitions, up to Dynamo's limit
            made["compiled PhysicsNeMo"] = Trainer(model(), batches, "inductor")
    return made


def _physicsnemo() -> Any:
    """Returns PhysicsNeMo's package of sharded tensors; None where it is not installed."""
    try:
        package: Any = importlib.import_module("physicsnemo.domain_parallel")
        package.register_custom_ops()
    except ImportError:
        return None
    return package


def _wrapped_by(theirs: Any, x: Tensor, mesh: DeviceMesh, dim: int, sizes: Sequence[int]) -> Tensor:
    """Shards a tensor by PhysicsNeMo."""
    shards = x.split(_rows(x, dim, sizes), dim)
    shapes = {0: [tuple(shard.shape) for shard in shards]}
    local = shards[mesh.get_local_rank()].contiguous()
    return theirs.ShardTensor.from_local(local, mesh, [Shard(dim)], sharding_shapes=shapes)  # type: ignore[no-any-return]


def _rows(x: Tensor, dim: int, sizes: Sequence[int]) -> list[int]:
    """Returns the sizes of the shards of an input whose rows are a multiple of those of the first one."""
    times = x.shape[dim] // sum(sizes)
    return [size * times for size in sizes]


def _replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))
    return model


def _reduced(model: nn.Module) -> None:
    for p in model.parameters():
        if isinstance(p.grad, DTensor):
            p.grad = p.grad.redistribute(placements=[Replicate()])
