"""What every rank of the demo does: train on sharded points, then measure."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcompile.collectives.transport import device_type

from .handwritten import handwritten_step
from .model import PointTransformer
from .poisson import Array
from .timing import median_times
from .traffic import Traffic, traffic_of
from .training import (
    Batch,
    Compiler,
    Step,
    Training,
    gradient_vector,
    make_batch,
    make_net,
    parameter_vector,
    relative_difference,
    sharded,
    sharded_step,
    whole_step,
)

TIMED_BATCHES, TIMED_ROUNDS = 3, 5


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        ranks: number of processes.
        steps: training steps.
        backend: ``gloo`` or ``nccl``.
        compiler: backend of torch.compile.
        seed: of samples, partitions and parameters.
        double: compute in float64, not float32.
        compare: also time eager and hand-written steps.
        out: folder for the report and the picture.
    """

    ranks: int = 2
    steps: int = 60
    backend: str = "gloo"
    compiler: Compiler = "shardcompile"
    seed: int = 0
    double: bool = False
    compare: bool = True
    out: Path = Path("shardcompile-demo")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of data and parameters."""
        return torch.float64 if self.double else torch.float32

    @property
    def device(self) -> str:
        """Type of device that data and parameters are on."""
        return device_type(self.backend)

    def batch(self, step: int) -> Batch:
        """The batch of a step; those from `steps` on are not trained on."""
        return make_batch(step, self.ranks, self.seed, self.dtype, self.device)

    def net(self) -> PointTransformer:
        """The model before training."""
        return make_net(self.seed, self.dtype, self.device)


@dataclass(frozen=True)
class Single:
    """The same training in one process.

    Attributes:
        losses: of each step.
        parameters: at the end, float64 [p].
        gradient_difference: of the sharded training from this one, relative, the largest of all steps.
    """

    losses: list[float]
    parameters: Array
    gradient_difference: float


@dataclass(frozen=True)
class Trained:
    """The outcome of the sharded training on one rank.

    Attributes:
        losses: of each step.
        parameters: at the end, float64 [p].
        graphs: that were compiled on this rank.
        points: number of points of each step's sample.
        single: on rank 0, training in one process.
    """

    losses: list[float]
    parameters: Array
    graphs: int
    points: list[int]
    single: Single | None


@dataclass(frozen=True)
class RankResult:
    """What one rank has found. Mappings are by the way that a step is taken: compiled, eager, handwritten.

    Attributes:
        trained: the training.
        prediction: for the first batch that was not trained on, in the order of the sample's points, [n].
        traffic: of one step.
        times: milliseconds for one step; empty if not compared.
        handwritten_difference: relative difference of the hand-written step's gradients from the sharded one's.
    """

    trained: Trained
    prediction: Array
    traffic: Mapping[str, Traffic]
    handwritten_difference: float
    times: Mapping[str, float]


def run_rank(settings: Settings) -> RankResult:
    """Train, count, compare."""
    mesh = init_device_mesh(settings.device, (settings.ranks,))
    net = settings.net()
    compiled, eager = sharded_step(net, mesh, settings.compiler), sharded_step(net, mesh, None)
    trained = _train(settings, Training(net, compiled))
    prediction = _predict(net, settings.batch(settings.steps), mesh)

    by_hand = handwritten_step(net, mesh.get_group(), settings.compiler if settings.compare else None)
    batches = list(itertools.islice(_full_batches(settings), TIMED_BATCHES))
    _say("compiling the hand-written step" if settings.compare else "taking a hand-written step")
    difference = _gradient_difference(net, batches[0], by_hand, compiled)
    steps = {"compiled": compiled, "eager": eager, "handwritten": by_hand}
    traffic = {name: traffic_of(partial(step, batches[0]), settings.ranks) for name, step in steps.items()}
    return RankResult(trained, prediction, traffic, difference, _times(steps, batches) if settings.compare else {})


def _train(settings: Settings, training: Training) -> Trained:
    """Train; on rank 0 also in one process, alongside."""
    single = _SingleTraining(settings) if dist.get_rank() == 0 else None
    _say(f"compiling with {settings.compiler} at the first step, which takes a while: minutes where ranks share cores")
    points, start = [], time.monotonic()
    for step in range(settings.steps):
        batch = settings.batch(step)
        points.append(sum(batch.sizes))
        loss = training.take_step(batch)
        if single is not None:
            single.take_step(batch, training.net)
        if _is_shown(step, settings.steps):
            clock = f"{time.monotonic() - start:5.1f} s"
            _say(f"step {step + 1:>3}/{settings.steps}  {clock}  loss {loss:.4f}  points per rank {batch.sizes}")
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    parameters = _as_array(parameter_vector(training.net))
    return Trained(training.losses, parameters, graphs, points, single.outcome() if single else None)


class _SingleTraining:
    """Training in one process, held against the sharded training step by step."""

    def __init__(self, settings: Settings) -> None:
        self._net = settings.net()
        self._training = Training(self._net, whole_step(self._net))
        self._difference = 0.0

    def take_step(self, batch: Batch, other: nn.Module) -> None:
        self._training.take_step(batch)
        difference = relative_difference(gradient_vector(other), gradient_vector(self._net))
        self._difference = max(self._difference, difference)

    def outcome(self) -> Single:
        return Single(self._training.losses, _as_array(parameter_vector(self._net)), self._difference)


def _predict(net: nn.Module, batch: Batch, mesh: DeviceMesh) -> Array:
    """The prediction of the sharded model, gathered, in the order of the sample's points. [n]."""
    features, _ = sharded(batch, mesh)
    with torch.no_grad():
        whole = _as_array(net(features).full_tensor())
    prediction = np.empty_like(whole)
    prediction[batch.order] = whole
    return prediction


def _full_batches(settings: Settings) -> Iterator[Batch]:
    """Batches that were not trained on, without those that leave a rank empty.

    The code written by hand would be compiled once more for an empty rank.
    """
    batches = (settings.batch(step) for step in itertools.count(settings.steps))
    return (batch for batch in batches if min(batch.sizes) > 1)


def _gradient_difference(net: nn.Module, batch: Batch, step: Step, reference: Step) -> float:
    step(batch)
    gradients = gradient_vector(net)
    reference(batch)
    return relative_difference(gradients, gradient_vector(net))


def _times(steps: Mapping[str, Step], batches: list[Batch]) -> dict[str, float]:
    _say("timing")
    median_times(steps, batches, rounds=2)  # warm
    return median_times(steps, batches, TIMED_ROUNDS)


def _as_array(x: torch.Tensor) -> Array:
    return x.double().cpu().numpy()


def _is_shown(step: int, steps: int) -> bool:
    return step in (0, steps - 1) or step % max(1, steps // 20) == 0


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
