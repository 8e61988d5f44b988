"""Measures the link of a process group, for the cost model."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile.collectives.gathers import ALL_GATHER_V, AllGatherV
from shardcompile.errors import CollectiveError
from shardcompile.layout import CHUNK_KEY, GroupCut
from shardcompile.passes.cost.links import Link

SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23)
"""Bytes of the gathered and broadcast tensors."""

REPEATS = 10
"""The fastest of so many runs counts, after one that warms up: other work on the machine only ever adds."""


class Sample(NamedTuple):
    """Bytes that a rank moves on average, and the seconds that the slowest rank took."""

    wire_bytes: float
    seconds: float


def measure_link(group: ProcessGroup | None = None, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> Link:
    """Latency and bandwidth of a group, measured; every rank of the group has to call it and gets the same numbers.

    All-gathers of the library, of equal blocks, and broadcasts are timed from start to end of the wait. Of each size
    the slowest rank counts, so that all ranks fit a line to the same points. From one group size one cannot tell the
    launch from the growth with the group: the latency is divided equally over the launch and each doubling.

    Args:
        group: of two ranks or more; the default process group if left out.
        sizes: bytes of the tensors to move, at least two.
        repeats: runs of each size.

    Raises:
        CollectiveError: the group has one rank only.
    """
    group = dist.group.WORLD if group is None else group
    if group is None or group.size() < 2:
        raise CollectiveError("to calibrate a link takes a process group of at least two ranks")
    samples = _samples(group, sizes, repeats)
    latency, per_byte = fit(samples)
    share = latency / (1 + math.log2(group.size()))
    backend = group.name()
    medium = "shared" if backend == "gloo" else "ports"
    return Link(f"{backend}, {group.size()} ranks, measured", share, share, 1 / per_byte, medium)  # type: ignore[arg-type]


def fit(samples: Sequence[Sample]) -> tuple[float, float]:
    """Latency in seconds and seconds per byte that fit the samples best, both positive.

    Least squares of relative errors: of each sample its distance from the line, over the geometric mean of what was
    measured and what the line says, so that twice too much weighs as half too little. Where noise would make one of the
    two negative, it is a hundredth of the least that a sample allows.
    """
    least_latency = min(s.seconds for s in samples) / 100
    least_per_byte = min(s.seconds / s.wire_bytes for s in samples) / 100
    weights = [1 / s.seconds**2 for s in samples]
    for _ in range(10):
        latency, per_byte = _weighted_line(samples, weights)
        latency, per_byte = max(latency, least_latency), max(per_byte, least_per_byte)
        weights = [1 / (s.seconds * (latency + per_byte * s.wire_bytes)) for s in samples]
    return latency, per_byte


def _weighted_line(samples: Sequence[Sample], weights: Sequence[float]) -> tuple[float, float]:
    """Where a line begins and how it rises, by the normal equations."""
    rows = list(zip(weights, samples, strict=True))
    sw, sx = sum(weights), sum(w * s.wire_bytes for w, s in rows)
    sy, sxx = sum(w * s.seconds for w, s in rows), sum(w * s.wire_bytes**2 for w, s in rows)
    sxy = sum(w * s.wire_bytes * s.seconds for w, s in rows)
    slope = (sw * sxy - sx * sy) / (sw * sxx - sx**2)
    return (sy - slope * sx) / sw, slope


def save(link: Link, path: Path | str) -> None:
    """Write a link as JSON."""
    Path(path).write_text(json.dumps(dataclasses.asdict(link), indent=2) + "\n")


def load(path: Path | str) -> Link:
    """Read what `save` wrote. All ranks have to read the same file."""
    return Link(**json.loads(Path(path).read_text()))


def _samples(group: ProcessGroup, sizes: Sequence[int], repeats: int) -> list[Sample]:
    device = torch.device("cuda", torch.cuda.current_device()) if group.name() == "nccl" else torch.device("cpu")
    n = group.size()
    samples = []
    for nbytes in sizes:
        block = max(nbytes // (4 * n), 1)
        for collective, length in ((_gather, block), (_broadcast, n * block)):
            x = torch.zeros(length, device=device)
            seconds = _slowest_rank(functools.partial(collective, x, group), group, device, repeats)
            whole = 4 * n * block
            pipelined = collective is _broadcast and group.name() != "gloo"
            samples.append(Sample(whole if pipelined else (n - 1) / n * whole, seconds))
    return samples


def _gather(x: Tensor, group: ProcessGroup) -> None:
    n, block = group.size(), x.shape[0]
    ALL_GATHER_V.start(AllGatherV(x, 0, n * block, GroupCut([block] * n, CHUNK_KEY, []), group.group_name)).wait()


def _broadcast(x: Tensor, group: ProcessGroup) -> None:
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.broadcast(x, 0, group.group_name))


def _slowest_rank(run: Callable[[], None], group: ProcessGroup, device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(1 + repeats):
        dist.barrier(group)
        _finish(device)
        start = time.perf_counter()
        run()
        _finish(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(min(times[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
