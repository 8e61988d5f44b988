"""Runs a function on sharded inputs and on full ones, forward and backward, and compares."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import shardcompile as sc
from shardcompile import ShardTensor
from shardcompile.errors import DivergenceError
from shardcompile.testing import once
from shardcompile.testing.arrange import CHUNK, InputLayout, lay_out, seed_of, sizes_in_style
from shardcompile.testing.compare import Tolerances
from shardcompile.testing.rendezvous import RendezvousError
from shardcompile.testing.scheduler import RanksWaitError
from shardcompile.testing.trial import Outcome, Trial, differences
from shardcompile.testing.watch import ServiceWatch

_T = TypeVar("_T")


@dataclass(frozen=True)
class Input:
    """An argument of a case.

    Attributes:
        shape: global shape.
        kind: what it is filled with, see `fill`.
        high: upper bound of an index.
        sharded: whether it is laid out in every way; a plain tensor otherwise.
        grad: whether it wants a gradient.
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    high: int = 0
    sharded: bool = True
    grad: bool = True
    dtype: torch.dtype = torch.float64

    @property
    def can_be_term(self) -> bool:
        """Whether it can be a pending sum. Of the floats of one byte there are no sums."""
        return (self.dtype.is_floating_point or self.dtype.is_complex) and self.dtype.itemsize > 1


def F(*shape: int, kind: str = "normal", dtype: torch.dtype = torch.float64) -> Input:
    """A sharded tensor of numbers that wants a gradient."""
    return Input(shape, kind, dtype=dtype)


def P(*shape: int, kind: str = "normal") -> Input:
    """A plain parameter: it must get a plain, complete gradient."""
    return Input(shape, kind, sharded=False)


def I(high: int, *shape: int, low_is_negative: bool = False, sharded: bool = True) -> Input:  # noqa: E743
    """An index tensor with values in [0, high), or in [-high, high)."""
    kind = "signed index" if low_is_negative else "index"
    return Input(shape, kind, high, sharded, grad=False, dtype=torch.int64)


def B(*shape: int, sharded: bool = True) -> Input:
    """A tensor of bools."""
    return Input(shape, "bool", sharded=sharded, grad=False, dtype=torch.bool)


@dataclass(frozen=True)
class Case:
    """A function of tensors, and its arguments.

    Attributes:
        name: for messages, unique.
        run: the function.
        inputs: its arguments.
        refuses: part of the text of the `ShardError` that it may raise in place of a value.
        tolerance: relative and absolute, in place of that of the dtype.
    """

    name: str
    run: Callable[..., Any]
    inputs: tuple[Input, ...]
    refuses: str | None = None
    tolerance: float | None = None


def case(name: str, run: Callable[..., Any], *inputs: Input, **options: Any) -> Case:
    """A `Case`."""
    return Case(name, run, inputs, **options)


# Full values


def fill(spec: Input, generator: torch.Generator) -> Tensor:
    """A full value. Numbers are multiples of 1/64, so that a sum of terms is exact and keeps its ties."""
    shape = spec.shape
    if spec.kind == "index":
        return torch.randint(0, spec.high, shape, generator=generator)
    if spec.kind == "signed index":
        return torch.randint(-spec.high, spec.high, shape, generator=generator)
    if spec.kind == "permutation":
        return torch.randperm(spec.high, generator=generator)
    if spec.kind == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if spec.kind == "int":
        return torch.randint(-4, 5, shape, generator=generator).to(spec.dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = {
        "normal": lambda: x,
        "positive": lambda: x.abs() + 0.5,
        "unit": lambda: torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1,
        "ties": lambda: x.sign() * 2,
        "nan": lambda: torch.where(x > 1.2, float("nan"), x),
        "zeros": lambda: torch.where(x > 0, 0.0, x),
        "inf": lambda: torch.where(x > 0.3, -float("inf"), x),
        "regular": lambda: x + 4 * torch.eye(shape[-1], dtype=torch.float64) if len(shape) > 1 else x,
    }[spec.kind]()
    if spec.dtype.is_complex:
        x = torch.complex(x, torch.randn(shape, generator=generator, dtype=torch.float64))
        return x.to(spec.dtype)
    return ((x * 64).round() / 64 + 0.0).to(spec.dtype)  # no -0.0, which a sum of terms would not keep


# Layouts


def single_placements(spec: Input) -> list[tuple[Placement, ...]]:
    ways: list[tuple[Placement, ...]] = [(Shard(d),) for d in range(len(spec.shape))]
    ways.append((Replicate(),))
    if spec.can_be_term:
        ways.append((Partial("sum"),))
    return ways


def _double(spec: Input) -> list[tuple[Placement, ...]]:
    last = len(spec.shape) - 1
    ways: list[tuple[Placement, ...]] = []
    if last >= 1:
        ways.append((Shard(0), Shard(1)))
    if last >= 0:
        ways += [(Shard(0), Shard(0)), (Replicate(), Shard(0))]
    if last >= 0 and spec.can_be_term:
        ways.append((Partial("sum"), Shard(0)))
    return ways or [(Partial("sum") if spec.can_be_term else Replicate(), Replicate())]


def _drawn(options: Sequence[Sequence[_T]], count: int, generator: random.Random) -> list[tuple[_T, ...]]:
    """That many combinations of one option each, or all, none twice; ten inputs have too many to list them."""
    total = math.prod(map(len, options))
    combinations = []
    for number in generator.sample(range(total), min(count, total)):
        chosen = []
        for option in options:
            number, at = divmod(number, len(option))
            chosen.append(option[at])
        combinations.append(tuple(chosen))
    return combinations


def input_layouts_of(case: Case, mesh_ndim: int, limit: int) -> list[tuple[InputLayout | None, ...]]:
    """Layouts of all inputs: alike in all of them, a sample of the rest, one in chunks; None for a plain input."""
    one = single_placements if mesh_ndim == 1 else _double
    options = [one(i) if i.sharded else [None] for i in case.inputs]
    longest = max(options, key=len)
    aligned = []
    for n, wanted in enumerate(longest):
        if wanted is not None:
            choice = [None if o == [None] else (wanted if wanted in o else o[n % len(o)]) for o in options]
            aligned.append(tuple(None if c is None else InputLayout(c, n) for c in choice))
    drawn = _drawn(options, limit + len(aligned), random.Random(seed_of(case.name, mesh_ndim)))
    mixed = [
        tuple(None if c is None else InputLayout(c, n + i) for i, c in enumerate(choice))
        for n, choice in enumerate(drawn)
    ]
    seen = {tuple(None if w is None else w.placements for w in ways) for ways in aligned}
    several = sum(i.sharded for i in case.inputs) > 1
    extra = [ways for ways in mixed if several or tuple(w and w.placements for w in ways) not in seen]
    ways = [*aligned, *extra][: max(limit, len(aligned))] if several else [*aligned, *extra][:limit]
    return [*ways, *_in_chunks(case, aligned)] if limit > 1 else ways


def _in_chunks(
    case: Case, aligned: Sequence[tuple[InputLayout | None, ...]]
) -> Iterator[tuple[InputLayout | None, ...]]:
    """For every third case one of its layouts, sharded of which no sizes are stated."""
    seed, partition = seed_of(case.name), [ways for ways in aligned if any(w and _is_sharded(w) for w in ways)]
    if partition and seed % 3 == 0:
        yield tuple(w and InputLayout(w.placements, CHUNK) for w in partition[seed // 3 % len(partition)])


def _is_sharded(way: InputLayout) -> bool:
    return any(isinstance(p, Shard) for p in way.placements)


# Running and comparing


SERVED: list[tuple[str, str, str, int]] = []
"""For every run on sharded inputs: case, layouts, how it was served, bytes that this rank put in."""


def run_plain(case: Case, full: Sequence[Tensor]) -> Outcome:
    """The oracle: plain PyTorch on full tensors."""
    inputs = [x.detach().clone().requires_grad_(i.grad) for i, x in zip(case.inputs, full, strict=True)]
    return Trial.forward(case.run, inputs).backward(case.name).outcome()


def run_plain_or_error(case: Case, full: Sequence[Tensor]) -> Outcome | Exception:
    """As `run_plain`, with what it raises in place of what it gives."""
    try:
        return run_plain(case, full)
    except Exception as error:
        return error


def run_sharded(
    case: Case,
    full: Sequence[Tensor],
    mesh: DeviceMesh,
    ways: Sequence[InputLayout | None],
    function: Callable[..., Any] | None = None,
) -> Outcome:
    """The same on sharded inputs."""
    eager = function in (None, case.run)
    inputs: list[Tensor] = []
    for n, (spec, x, way) in enumerate(zip(case.inputs, full, ways, strict=True)):
        given = x.detach().clone() if way is None else laid_out(x, mesh, way, seed_of(case.name, n))
        inputs.append(given.requires_grad_(spec.grad))
    partition = [
        x.numel() for x, w in zip(full, ways, strict=True) if w and any(isinstance(p, Shard) for p in w.placements)
    ]
    watch = ServiceWatch(min(partition, default=0))
    with watch if eager else nullcontext():  # compiled code may hold what a mode cannot see
        trial = Trial.forward(function or case.run, inputs)
    SERVED.append((case.name, " ".join("plain" if w is None else str(w) for w in ways), watch.how(), watch.nbytes))
    return trial.backward(case.name).outcome()


def laid_out(x: Tensor, mesh: DeviceMesh, way: InputLayout, seed: int) -> ShardTensor:
    sizes = "chunk" if way.style % 4 == CHUNK else sizes_in_style(x.shape, mesh, way.placements, way.style)
    return lay_out(x, mesh, way.placements, sizes, seed)


_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}


def _allowed(tolerance: float | None) -> Tolerances:
    def by_dtype(dtype: torch.dtype) -> tuple[float, float]:
        limit = tolerance if tolerance is not None else _TOLERANCES.get(dtype, 0.0)
        return limit, limit

    return by_dtype


def check(
    case: Case,
    mesh: DeviceMesh,
    limit: int = 12,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    part: tuple[int, int] = (0, 1),
) -> list[str]:
    """All that is wrong with a case, over its layouts.

    Args:
        case: the case.
        mesh: of one or two dims.
        limit: how many layouts are tried where several inputs are sharded.
        wrap: what is done to the function on sharded inputs, e.g. compiling it.
        part: (k, n): of the layouts the k-th of n shares, k from 0. Which ones these are differs from case to case, so
            that a share of all cases has layouts of all kinds.
    """
    case = copy.deepcopy(case)  # modules are written to while they are called; ranks may be in one process
    generator = torch.Generator().manual_seed(seed_of(case.name))
    return check_values(case, [fill(i, generator) for i in case.inputs], mesh, limit, wrap, part)


def check_values(
    case: Case,
    full: Sequence[Tensor],
    mesh: DeviceMesh,
    limit: int = 12,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    part: tuple[int, int] = (0, 1),
) -> list[str]:
    """As `check`, for given full values."""
    want = once(lambda: run_plain_or_error(case, full))
    failures = []
    layouts = input_layouts_of(case, mesh.ndim, limit)
    first = seed_of(case.name) % len(layouts)
    for ways in [*layouts[first:], *layouts[:first]][part[0] :: part[1]]:
        label = f"{case.name} {' '.join('plain' if w is None else str(w) for w in ways)}"
        function = case.run if wrap is None else wrap(case.run)
        found = _check_one(case, full, mesh, ways, function, want, wrap)
        failures += [f"{label}: {text}" for text in found]
    return failures


def _works_on_plain(
    case: Case, full: Sequence[Tensor], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> bool:
    """Whether what is done to the function can be done to it on plain tensors: not every one can be one graph."""
    inputs = [x.detach().clone().requires_grad_(i.grad) for i, x in zip(case.inputs, full, strict=True)]
    for x in inputs:
        for dim, size in enumerate(x.shape):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(x, dim)  # as sharded dims are
    try:
        Trial.forward(wrap(case.run), inputs).backward(case.name)
    except Exception:
        return False
    return True


def _check_one(
    case: Case,
    full: Sequence[Tensor],
    mesh: DeviceMesh,
    ways: Sequence[InputLayout | None],
    function: Callable[..., Any],
    want: Outcome | Exception,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
) -> list[str]:
    try:
        got = run_sharded(case, full, mesh, ways, function)
    except Exception as error:
        if isinstance(want, Exception):
            orderly = isinstance(error, (*_ORDERLY, type(want))) and not isinstance(error, _APART)
            return [] if orderly else [f"{type(error).__name__}: {error} (plain PyTorch: {want})"]
        refusal = isinstance(error, sc.ShardError)
        if refusal and case.refuses is not None and case.refuses in str(error):
            return []
        if wrap is not None and not _works_on_plain(case, full, wrap):
            return []
        if RAISE:
            raise
        return [f"{type(error).__name__}: {error}"]
    if isinstance(want, Exception):
        return [f"gives a value; plain PyTorch raises {type(want).__name__}: {want}"]
    return [f"{what}: {text}" for what, text in differences(got, want, _allowed(case.tolerance))]


# What torch, or its fake tensors, raise on purpose; not AttributeError, AssertionError or ZeroDivisionError.
_ORDERLY = (RuntimeError, ValueError, IndexError, TypeError)
_APART = (RanksWaitError, RendezvousError, DivergenceError)  # one rank has raised, and the others have gone on
RAISE = False


def agree(failures: list[str]) -> list[str]:
    """Failures of all ranks, on all ranks alike."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failures)
    return [f"rank {rank}: {text}" for rank, found in enumerate(everyone) for text in found]
