"""The training steps of the demo: on full tensors in one process, and on sharded tensors over several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from examples.poisson.model import PointTransformer, relative_l2
from examples.poisson.poisson import Array, Sample, make_sample, partition, random_weights
from shardcompile import ShardTensor

LEARNING_RATE = 5e-4

Compiler = Literal["shardcompile", "inductor", "aot_eager", "eager"]
"""Backends of torch.compile. `shardcompile` is Inductor with the passes of this library."""

# ------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Batch:
    """The sample of one training step and its partition. The points of rank 0 come first, then those of rank 1, ...

    Attributes:
        sample: the sample, with its points in the original order.
        order: the index in the sample of each point of the batch, int64 [n].
        sizes: the number of points of each rank.
        features: [n, F].
        target: [n].
    """

    sample: Sample
    order: Array
    sizes: list[int]
    features: Tensor
    target: Tensor

    def shard(self, rank: int) -> tuple[Tensor, Tensor]:
        """Returns copies of the features and the target of one rank's points."""
        start = sum(self.sizes[:rank])
        rows = slice(start, start + self.sizes[rank])
        return self.features[rows].clone(), self.target[rows].clone()


def make_batch(step: int, ranks: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> Batch:
    """Makes the batch of one step. Each step has another sample and another partition, the same on every rank."""
    sample = make_sample(seed * 1_000_000 + step)
    order, sizes = partition(sample.points, random_weights(step, ranks, seed))
    rows = torch.from_numpy(order)
    features, target = (torch.from_numpy(a)[rows].to(device, dtype) for a in (sample.features, sample.target))
    return Batch(sample, order, sizes, features, target)


# ------------------------------------------------------------------------------------------------ steps

Step = Callable[[Batch], Tensor]
"""Computes the loss of a batch, a plain scalar, and stores the gradients in the parameters."""


def make_net(seed: int, dtype: torch.dtype, device: str = "cpu") -> PointTransformer:
    """Makes the model. Equal seeds give equal parameters."""
    torch.manual_seed(seed)
    return PointTransformer().to(device, dtype)


def whole_step(net: nn.Module) -> Step:
    """Makes the step of an ordinary training script: one process, all points."""

    def step(batch: Batch) -> Tensor:
        net.zero_grad()
        loss = relative_l2(net(batch.features), batch.target)
        loss.backward()
        return loss.detach()

    return step


def sharded_step(net: nn.Module, mesh: DeviceMesh, compiler: Compiler | None) -> Step:
    """Makes the step on points that are sharded over a mesh.

    Args:
        net: an ordinary module with plain parameters, the same on every rank.
        mesh: the mesh over all ranks.
        compiler: the backend of torch.compile; None for eager mode.
    """

    def loss_of(features: Tensor, target: Tensor) -> Tensor:
        return relative_l2(net(features), target)

    loss_fn = loss_of if compiler is None else torch.compile(loss_of, fullgraph=True, backend=compiler)

    def step(batch: Batch) -> Tensor:
        features, target = sharded(batch, mesh)
        net.zero_grad()
        loss = loss_fn(features, target)
        loss.backward()
        return loss.detach().full_tensor()  # type: ignore[attr-defined]

    return step


def sharded(batch: Batch, mesh: DeviceMesh) -> tuple[ShardTensor, ShardTensor]:
    """Makes the sharded features and target of a batch from the local shard of each rank."""
    features, target = batch.shard(mesh.get_local_rank())
    return _shard(features, batch.sizes, mesh), _shard(target, batch.sizes, mesh)


def _shard(shard: Tensor, sizes: list[int], mesh: DeviceMesh) -> ShardTensor:
    return ShardTensor.from_local(shard, mesh, [Shard(0)], sharding_shapes={0: sizes})


# --------------------------------------------------------------------------------------------- training


class Training:
    """A model with its optimizer and its losses so far.

    Attributes:
        net: the model.
        losses: the loss of each step.
    """

    def __init__(self, net: nn.Module, step: Step) -> None:
        self.net = net
        self.losses: list[float] = []
        self._step = step
        # Adam divides a gradient by its magnitude, so with the default eps of 1e-8 the rounding errors of gradients
        # that are almost zero become full steps, and two correct runs in float32 differ a hundred times more.
        self._optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE, eps=1e-6)

    def take_step(self, batch: Batch) -> float:
        """Trains on one batch, and returns the loss. The gradients stay until the next step."""
        self.losses.append(self._step(batch).item())
        self._optimizer.step()
        return self.losses[-1]


def gradient_vector(net: nn.Module) -> Tensor:
    """Returns a copy of all gradients, flattened and concatenated."""
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def parameter_vector(net: nn.Module) -> Tensor:
    """Returns a copy of all parameters, flattened and concatenated."""
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Returns the norm of a - b over the norm of b."""
    return float((a - b).norm() / b.norm())
