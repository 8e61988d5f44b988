"""Measures the contenders of a work on ranks that are processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import median_times
from benchmarks.peers.suite import WORKS
from benchmarks.peers.works import Trainer, contenders
from shardcompile.collectives.descriptor import own_collectives

TOLERANCE = 1e-3
_OTHERS = ("DTensor", "PhysicsNeMo")
"""Contenders that may refuse a work or be wrong about it."""

_INTERFACES = Path("/proc/net/dev")


def measure(name: str, partitions: Sequence[Sequence[int]], rounds: int, backend: str) -> dict[str, Any]:
    """On one rank: collectives of a step, bytes that all ranks send in it, and median seconds, by contender."""
    made = contenders(WORKS[name], init_device_mesh("cpu", (dist.get_world_size(),)), partitions, backend)
    expected = _gradients(made.pop("whole"))
    for contender, trainer in list(made.items()):
        try:
            got = _gradients(trainer)
            for _ in partitions if contender.endswith(_OTHERS) else ():
                trainer.step()  # of all partitions
        except Exception as error:
            if not contender.endswith(_OTHERS):
                raise
            print(f"{name}: {contender} raises {str(error).splitlines()[0]}")
            del made[contender]
            continue
        if float((got - expected).norm() / expected.norm()) >= TOLERANCE:
            assert contender.endswith(_OTHERS), f"{contender}: other gradients"
            print(f"{name}: {contender} computes other gradients")
            del made[contender]
    counts = {contender: _collectives(trainer) for contender, trainer in made.items()}
    sent = {contender: _bytes(trainer, len(partitions)) for contender, trainer in made.items()}
    times = median_times({contender: trainer.step for contender, trainer in made.items()}, rounds)
    return {"collectives": counts, "bytes": sent, "times": times}


def _gradients(trainer: Trainer) -> torch.Tensor:
    trainer.gradients()
    return trainer.gradient_vector()


def _collectives(trainer: Trainer) -> int:
    trainer.step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.step()
    ops = {str(op).replace(".", "::") for op in own_collectives()}
    return len({id(_outermost(event, ops)) for event in profiled.events() if event.name.startswith("c10d::")})


def _bytes(trainer: Trainer, partitions: int) -> float:
    """Returns the bytes that went through the loopback interface in a step, the mean over all partitions.

    Those of TCP are included; so is whatever else uses the interface. 0 where the system does not tell.
    """
    steps = 4 * partitions
    trainer.step()
    dist.barrier()
    before = _through_loopback()
    for _ in range(steps):
        trainer.step()
    dist.barrier()
    return (_through_loopback() - before) / steps


def _through_loopback() -> int:
    if not _INTERFACES.exists():
        return 0
    lines = (line.split(":") for line in _INTERFACES.read_text().splitlines() if ":" in line)
    return next((int(numbers.split()[0]) for name, numbers in lines if name.strip() == "lo"), 0)


def _outermost(event: Any, ops: Collection[str]) -> Any:
    """Returns the outermost collective that an event of the profiler is a part of, such as one of its messages."""
    found = event
    while event is not None:
        if event.name in ops or event.name.startswith("_c10d_functional::"):
            found = event
        event = event.cpu_parent
    return found
