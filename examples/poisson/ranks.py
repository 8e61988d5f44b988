"""The work of every rank of the demo: training on sharded points, then measurements."""

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

from examples.poisson.handwritten import handwritten_step
from examples.poisson.model import PointTransformer
from examples.poisson.poisson import Array
from examples.poisson.timing import median_times
from examples.poisson.traffic import Traffic, traffic_of
from examples.poisson.training import (
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
from shardcompile.collectives.transport import device_type

TIMED_BATCHES, TIMED_ROUNDS = 3, 5


@dataclass(frozen=True)
class Settings:
    """The settings of the demo.

    Attributes:
        ranks: the number of processes.
        steps: the number of training steps.
        backend: ``gloo`` or ``nccl``.
        compiler: the backend of torch.compile.
        seed: the seed of samples, partitions and parameters.
        double: whether to compute in float64, not float32.
        compare: whether to time eager and hand-written steps, too.
        out: the folder for the report and the picture.
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
        """The device type of data and parameters."""
        return device_type(self.backend)

    def batch(self, step: int) -> Batch:
        """Makes the batch of a step. Batches from `steps` on are not used for training."""
        return make_batch(step, self.ranks, self.seed, self.dtype, self.device)

    def net(self) -> PointTransformer:
        """Makes the model before training."""
        return make_net(self.seed, self.dtype, self.device)


@dataclass(frozen=True)
class Single:
    """The outcome of the same training in one process.

    Attributes:
        losses: the loss of each step.
        parameters: the final parameters, float64 [p].
        gradient_difference: the largest relative difference of the gradients of the sharded training, over all steps.
    """

    losses: list[float]
    parameters: Array
    gradient_difference: float


@dataclass(frozen=True)
class Trained:
    """The outcome of the sharded training on one rank.

    Attributes:
        losses: the loss of each step.
        parameters: the final parameters, float64 [p].
        graphs: the number of graphs compiled on this rank.
        points: the number of points in the sample of each step.
        single: on rank 0, the outcome of training in one process.
    """

    losses: list[float]
    parameters: Array
    graphs: int
    points: list[int]
    single: Single | None

    @property
    def in_one_process(self) -> Single:
        """The outcome of training in one process, if this is rank 0."""
        assert self.single is not None, "rank 0 trains in one process too"
        return self.single


@dataclass(frozen=True)
class RankResult:
    """The results of one rank. The keys of mappings are the variants of a step: compiled, eager, handwritten.

    Attributes:
        trained: the outcome of the training.
        prediction: the prediction for the first batch that was not trained on, in the order of its sample, [n].
        traffic: the communication of one step.
        handwritten_difference: the relative difference between the gradients of the hand-written and the sharded step.
        times: the milliseconds of one step; empty if not compared.
    """

    trained: Trained
    prediction: Array
    traffic: Mapping[str, Traffic]
    handwritten_difference: float
    times: Mapping[str, float]


def run_rank(settings: Settings) -> RankResult:
    """Trains, counts collectives, and compares the variants of a step."""
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
    """Trains on sharded points, and on rank 0 also in one process, step by step."""
    single = _SingleTraining(settings) if dist.get_rank() == 0 else None
    _say(f"compiling with {settings.compiler} at the first step, which takes minutes if ranks share cores")
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
    """Training in one process, compared with the sharded training after each step."""

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
    """Returns the gathered prediction of the sharded model, in the order of the sample. [n]."""
    features, _ = sharded(batch, mesh)
    with torch.no_grad():
        gathered = _as_array(net(features).full_tensor())
    prediction = np.empty_like(gathered)
    prediction[batch.order] = gathered
    return prediction


def _full_batches(settings: Settings) -> Iterator[Batch]:
    """Yields batches that were not trained on and have no empty shards.

    The hand-written step would be compiled again for an empty shard.
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
    median_times(steps, batches, rounds=2)  # warm-up
    return median_times(steps, batches, TIMED_ROUNDS)


def _as_array(x: torch.Tensor) -> Array:
    return x.double().cpu().numpy()


def _is_shown(step: int, steps: int) -> bool:
    return step in (0, steps - 1) or step % max(1, steps // 20) == 0


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
