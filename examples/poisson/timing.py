"""Times several variants of a step against one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from examples.poisson.training import Batch, Step


def median_times(steps: Mapping[str, Step], batches: Sequence[Batch], rounds: int) -> dict[str, float]:
    """Returns the median time of each step in milliseconds, forward and backward, on this rank.

    The steps alternate, batch by batch, so that other load on the machine affects all of them equally. All ranks start
    each step together. Call every step on every batch once before, so that nothing compiles during the measurement.

    Args:
        steps: the steps by name.
        batches: each step runs on all batches in every round.
        rounds: the number of rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for batch in batches:
            for name, step in steps.items():
                times[name].append(_time(step, batch))
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def _time(step: Step, batch: Batch) -> float:
    dist.barrier()
    start = time.perf_counter()
    step(batch).item()
    if batch.features.is_cuda:
        torch.cuda.synchronize()  # the loss is complete before the gradients are
    return time.perf_counter() - start
