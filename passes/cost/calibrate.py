"""Calibrates the cost model: measures a device and the link of a process group."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile.collectives import wait
from shardcompile.collectives.gathers import ALL_GATHER_V, AllGatherV
from shardcompile.collectives.reductions import ALL_REDUCE
from shardcompile.collectives.transport import transport_of
from shardcompile.errors import CollectiveError
from shardcompile.machines import Device, Link
from shardcompile.sharding import CHUNK_KEY, GroupPartition

SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23)
"""Bytes of the tensors that are gathered, broadcast and reduced."""

REPEATS, ROUNDS = 5, 5
"""Runs of each measurement in a round, after one warm-up run, and number of rounds.

The fastest run counts: other work on the machine only ever adds time. It comes in bursts of seconds, so that
consecutive runs may all be slow.
"""

_MATRIX_SIZE, _ELEMENTS, _KEPT_SUMS = 512, 1 << 22, 6
"""Size of the square matrices that are multiplied; elements of the tensors that are added, which are too large for
caches; how many sums are kept alive at a time.
"""

_CACHED_ELEMENTS = 1 << 17
"""Elements of a tensor that stays in a cache, of which a function is computed."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""The dtypes of the measured matrix products."""

_MASKED_ELEMENTS = 1 << 20
"""Elements of the tensors along with which masks are stored or read."""

_LAYERS, _KERNELS_PER_LAYER = (2, 12), 5
"""Layers of two compiled functions, which differ in the number of kernels; and kernels of a layer."""


class Sample(NamedTuple):
    """The bytes that a rank moves on average, and the seconds of the slowest rank."""

    wire_bytes: float
    seconds: float


def measure_link(group: ProcessGroup | None = None, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> Link:
    """Measures latency and bandwidth of a group; every rank of the group has to call it and gets the same numbers.

    All-gathers of the library with equal shards, broadcasts and all-reduces are timed from their start to the end of
    their wait. For each size the slowest rank counts, so that all ranks fit a line to the same points. A single group
    size cannot separate the launch from the growth with the group size: the latency is divided equally over the launch
    and each doubling.

    Args:
        group: of two ranks or more; the default process group if left out.
        sizes: bytes of the tensors to move, at least two.
        repeats: runs of each size in a round; there are `ROUNDS`.

    Raises:
        CollectiveError: the group has only one rank.
    """
    group = dist.group.WORLD if group is None else group
    if group is None or group.size() < 2:
        raise CollectiveError("to calibrate a link takes a process group of at least two ranks")
    samples = _samples(group, sizes, repeats)
    latency, per_byte = fit(samples)
    share = latency / (1 + math.log2(group.size()))
    name = f"{group.name()}, {group.size()} ranks, measured"
    if not transport_of(group).uses_cpu:
        return Link(name, share, share, 1 / per_byte)
    host, busy = min(_host_seconds(group, repeats), latency), _busy_share(group, repeats)
    return Link(name, share, share, 1 / per_byte, "shared", host, busy)


def measure_device(group: ProcessGroup | None = None, repeats: int = REPEATS) -> Device:
    """Measures the CPU device of the ranks, while all of them compute, and their link, see `measure_link`.

    Every rank of the group has to call it and gets the same numbers, those of the slowest rank. Six small functions are
    compiled for it, which takes some seconds: the time of a kernel and of a call of a graph are those of Inductor's
    code, Python between kernels included.

    Args:
        group: of two ranks or more, on CPUs; the default process group if left out.
        repeats: runs of each measurement in a round; there are `ROUNDS`.

    Raises:
        CollectiveError: the group has only one rank, or its tensors are not on CPUs.
    """
    link = measure_link(group, repeats=repeats)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if transport_of(group).device != "cpu":
        raise CollectiveError("GPUs are not measured; use a device of shardcompile.machines")
    runs = _products() | _memory_traffic() | _layers_of_small_kernels() | _masked()
    took = _fastest(runs, group, torch.device("cpu"), repeats)
    flops = {dtype: 2 * _MATRIX_SIZE**3 / took[dtype] for dtype in _DTYPES}
    adding = took["sums"] / _KEPT_SUMS
    element = max(took["exp"] - took["neg"], 0.0) / _CACHED_ELEMENTS
    few, many = _LAYERS
    kernel = max(took[many] - took[few], took[many] / 100) / (_KERNELS_PER_LAYER * (many - few))
    call = max(took[few] - few * _KERNELS_PER_LAYER * kernel, 0.0) / 2
    stored, read = took["mask stored"] - took["none stored"], took["mask read"] - took["numbers read"]
    mask = max(stored + read, 0.0) / _MASKED_ELEMENTS / 2
    name = f"a core of {group.size()}, measured"
    memory = 3 * torch.float32.itemsize * _ELEMENTS / adding  # two tensors are read, one is written
    return Device(name, "cpu", flops, memory, 1.0, kernel, link, link, element, call, mask)


def fit(samples: Sequence[Sample]) -> tuple[float, float]:
    """Returns the latency in seconds and the seconds per byte that fit the samples best, both positive.

    It is a least squares fit of relative errors. The error of a sample is its distance from the line, divided by the
    geometric mean of the sample and the line, so that twice too much weighs as much as half too little. Where noise
    would make one of the two negative, it is a hundredth of the least that a sample allows.
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
    """Returns the intercept and the slope of a weighted least squares line, by the normal equations."""
    rows = list(zip(weights, samples, strict=True))
    sw, sx = sum(weights), sum(w * s.wire_bytes for w, s in rows)
    sy, sxx = sum(w * s.seconds for w, s in rows), sum(w * s.wire_bytes**2 for w, s in rows)
    sxy = sum(w * s.wire_bytes * s.seconds for w, s in rows)
    slope = (sw * sxy - sx * sy) / (sw * sxx - sx**2)
    return (sy - slope * sx) / sw, slope


def save(measured: Link | Device, path: Path | str) -> None:
    """Writes a link or a device as JSON."""
    fields = dataclasses.asdict(measured)
    if isinstance(measured, Device):
        fields["flops"] = {str(dtype).removeprefix("torch."): rate for dtype, rate in measured.flops.items()}
    Path(path).write_text(json.dumps(fields, indent=2) + "\n")


def load(path: Path | str) -> Link:
    """Reads a link that `save` wrote. All ranks have to read the same file."""
    return Link(**json.loads(Path(path).read_text()))


def load_device(path: Path | str) -> Device:
    """Reads a device that `save` wrote. All ranks have to read the same file."""
    fields = json.loads(Path(path).read_text())
    fields["flops"] = {getattr(torch, name): rate for name, rate in fields["flops"].items()}
    return Device(**(fields | {side: Link(**fields[side]) for side in ("intra", "inter")}))


def _samples(group: ProcessGroup, sizes: Sequence[int], repeats: int) -> list[Sample]:
    transport, n = transport_of(group), group.size()
    device = torch.device(transport.device)
    runs: dict[Hashable, Callable[[], object]] = {}
    wire_bytes: dict[Hashable, float] = {}
    broadcast_share = (n - 1) / n if transport.uses_cpu else 1  # GPUs pipeline a broadcast
    for nbytes in sizes:
        shard = max(nbytes // (4 * n), 1)
        for collective, length, share in (
            (_gather, shard, (n - 1) / n),
            (_broadcast, n * shard, broadcast_share),
            (_reduce, n * shard, 2 * (n - 1) / n),
        ):
            key = collective, nbytes
            runs[key] = functools.partial(collective, torch.zeros(length, device=device), group)
            wire_bytes[key] = share * 4 * n * shard
    took = _fastest(runs, group, device, repeats)
    return [Sample(wire_bytes[key], seconds) for key, seconds in took.items()]


def _gather(x: Tensor, group: ProcessGroup) -> None:
    n, shard = group.size(), x.shape[0]
    ALL_GATHER_V.start(AllGatherV(x, 0, n * shard, GroupPartition([shard] * n, CHUNK_KEY, []), group.group_name)).wait()


def _broadcast(x: Tensor, group: ProcessGroup) -> None:
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.broadcast(x, 0, group.group_name))


def _reduce(x: Tensor, group: ProcessGroup) -> None:
    wait(ALL_REDUCE.target(x, "sum", group.group_name))


def _host_seconds(group: ProcessGroup, repeats: int) -> float:
    """Returns the seconds that the start of a collective of few bytes takes on the host."""
    x, spent = torch.zeros(1), []
    for _ in range(1 + ROUNDS * repeats):
        dist.barrier(group)
        start = time.perf_counter()
        started = ALL_REDUCE.target(x, "sum", group.group_name)
        spent.append(time.perf_counter() - start)
        wait(started)
    return _max_over_ranks(min(spent[1:]), group, x.device)


def _busy_share(group: ProcessGroup, repeats: int) -> float:
    """Returns the share of a transfer that concurrent compute loses: 0 with full overlap, 1 with none."""
    x, a = torch.zeros(SIZES[-1] // 4), torch.ones(_MATRIX_SIZE, _MATRIX_SIZE)
    moves, product = functools.partial(_reduce, x, group), functools.partial(torch.mm, a, a)
    alone = _fastest({"moving": moves, "product": product}, group, x.device, repeats)
    products = max(round(alone["moving"] / alone["product"]), 1)

    def computes() -> None:
        for _ in range(products):
            torch.mm(a, a)

    def both() -> None:
        started = ALL_REDUCE.target(x, "sum", group.group_name)
        computes()
        wait(started)

    took = _fastest({"moving": moves, "computing": computes, "both": both}, group, x.device, repeats)
    moving, computing = took["moving"], took["computing"]
    return min(max((took["both"] - max(moving, computing)) / min(moving, computing), 0.0), 1.0)


_Runs = dict[Hashable, Callable[[], object]]


def _products() -> _Runs:
    """Returns products of square matrices, by dtype."""
    squares = {dtype: torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype) for dtype in _DTYPES}
    return {dtype: functools.partial(torch.mm, a, a) for dtype, a in squares.items()}


def _memory_traffic() -> _Runs:
    """Returns sums into new memory, and a transcendental function with its memory-only counterpart."""
    few, out = torch.ones(_CACHED_ELEMENTS), torch.empty(_CACHED_ELEMENTS)
    runs: _Runs = {name: functools.partial(f, few, out=out) for name, f in (("exp", torch.exp), ("neg", torch.neg))}
    return runs | {"sums": functools.partial(_sums, torch.ones(_ELEMENTS))}


def _sums(x: Tensor) -> None:
    """Adds tensors and keeps the sums, as a forward pass keeps activations: new memory costs page faults."""
    kept = [x]
    for _ in range(_KEPT_SUMS):
        kept.append(kept[-1] + x)


def _layers(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def _masked() -> _Runs:
    """Returns Inductor's code that stores a mask, or reads one, each with its counterpart without the mask."""
    few = torch.ones(_MASKED_ELEMENTS)
    calls: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
        "mask stored": (lambda a: (a.relu(), a <= 0), (few,)),
        "none stored": (lambda a: (a.relu(),), (few,)),
        "mask read": (lambda a, m: torch.where(m, 0.0, a), (few, few > 1)),
        "numbers read": (lambda a, b: torch.where(b > 0, 0.0, a), (few, few)),
    }
    return {name: functools.partial(torch.compile(f, fullgraph=True), *x) for name, (f, x) in calls.items()}


def _layers_of_small_kernels() -> _Runs:
    """Returns Inductor's code for graphs that differ in the number of kernels, by the number of layers."""
    runs: _Runs = {}
    for num_layers in _LAYERS:
        weights = [torch.zeros(8, 8, requires_grad=True) for _ in range(num_layers)]
        inputs = torch.zeros(8, 8, requires_grad=True), *weights
        compiled = torch.compile(_layers, fullgraph=True, dynamic=True)

        def step(run: Callable[..., Tensor] = compiled, inputs: Sequence[Tensor] = inputs) -> None:
            torch.autograd.grad(run(*inputs).sum(), inputs)

        runs[num_layers] = step
    return runs


def _fastest(
    runs: Mapping[Hashable, Callable[[], object]], group: ProcessGroup, device: torch.device, repeats: int
) -> dict[Hashable, float]:
    """Returns the seconds of the fastest run of each measurement, in rounds over all of them, on the slowest rank."""
    least = dict.fromkeys(runs, math.inf)
    for _ in range(ROUNDS):
        for key, run in runs.items():
            for repeat in range(1 + repeats):
                dist.barrier(group)
                _synchronize(device)
                start = time.perf_counter()
                run()
                _synchronize(device)
                if repeat:
                    least[key] = min(least[key], time.perf_counter() - start)
    return {key: _max_over_ranks(seconds, group, device) for key, seconds in least.items()}


def _max_over_ranks(seconds: float, group: ProcessGroup, device: torch.device) -> float:
    """Returns the largest value of all ranks."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return float(largest)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
