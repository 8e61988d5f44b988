"""A fuzzer: random programs on sharded tensors, forward, backward and twice, against plain PyTorch on full tensors.

    python -m tools.fuzz --programs 10000 --seed 0
    python -m tools.fuzz --programs 500 --compiled aot_eager
    python -m tools.fuzz --programs 50 --compiled shardcompile
    python -m tools.fuzz --programs 500 --half --shortest 2 --longest 7
    FUZZ_DEVICE=cuda python -m tools.fuzz --programs 1000

Every program is a number: lines of Python (`fuzz_lines`), inputs with layouts, a mesh. It ends right, or refused in words
on every rank, or as a finding, which is shrunk to a few lines that can be run:

    from tools.fuzz import Input, Program
    Program((3,), [Input("a0", (3, 2), "S(0)", {0: [3, 0, 0]}, grad=True)], ["v0 = a0.cumsum(0)"]).check()

Compiled programs are called again with other partitions of the same sizes, and with other sizes where plain PyTorch knows
them, and one graph has to serve all partitions.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import random
import re
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcompile import ShardTensor, errors
from shardcompile.compat.testing import graphs_compiled
from shardcompile.sharding import Partition
from shardcompile.testing import LocalRanks, once
from shardcompile.testing.arrange import lay_out, seed_of, with_bits_to_spare
from shardcompile.testing.compare import difference
from shardcompile.testing.rendezvous import RendezvousError
from shardcompile.testing.scheduler import RanksWaitError
from shardcompile.testing.trial import describe_value, largest_share, shard_problems
from tests.support.view_writes import stored
from tools.fuzz_lines import (
    CALLS,
    DEVICE,
    Draw,
    draw_line,
    holds,
    names_in,
    placements_of,
    results_of,
    run_line,
    sizes_for,
)

RIGHT, REFUSED, ESTIMATED = "right", "refused", "right, layouts chosen by an estimate"
FINE = RIGHT, REFUSED, ESTIMATED
HALF, NEAR_IN_HALF = "bfloat16", 0.1
_RAISED_BY_PLAIN = (RuntimeError, IndexError, ValueError, TypeError, NameError)

# Programs


@dataclass(frozen=True)
class Input:
    """An input of a program.

    Attributes:
        name: as lines have it.
        shape: global.
        layout: placements in short, such as ``"S(0) P(sum)"``, or ``"plain"``.
        sizes: of shards, by mesh dim, as ``sharding_shapes`` takes them.
        dtype: of the elements.
        grad: whether it wants a gradient.
        seed: from which its values follow.
        ways: in which ranks store their shards, see `view_writes.stored`; the first rank takes the first.
        inferred: whether sizes are inferred from shards instead of stated.
    """

    name: str
    shape: tuple[int, ...]
    layout: str = "plain"
    sizes: dict[int, list[int]] = field(default_factory=dict)
    dtype: str = "float64"
    grad: bool = False
    seed: int = 0
    ways: tuple[str, ...] = ("rows",)
    inferred: bool = False

    def full(self) -> Tensor:
        """The plain value, a leaf."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            return torch.randint(-9, 10, self.shape, generator=generator).to(DEVICE)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        return with_bits_to_spare(values).requires_grad_(self.grad)

    def on(self, mesh: DeviceMesh, full: Tensor) -> Tensor:
        """The value as a leaf on a mesh; plain ones are copied."""
        full = full.detach()
        if self.layout == "plain":
            return full.clone().requires_grad_(self.grad)
        shard = lay_out(full, mesh, placements_of(self.layout), self.sizes, self.seed)._local_tensor
        if shard.ndim:
            shard = stored(shard, self.ways[mesh.get_rank() % len(self.ways)])
        sizes: Any = "infer" if self.inferred else self.sizes
        x = ShardTensor.from_local(shard, mesh, placements_of(self.layout), sizes, global_shape=self.shape)
        return x.detach().requires_grad_(self.grad)


@dataclass(frozen=True)
class Expected:
    """What plain PyTorch gives.

    Attributes:
        values: by name, detached.
        strides: by name.
        wants: names of values that want a gradient, of those that the backward pass starts from.
        first: gradients of the inputs, by name.
        second: gradients of a weighted sum of these; None where torch knows none.
        refused: whether plain PyTorch refuses the last line.
    """

    values: dict[str, Tensor]
    strides: dict[str, tuple[int, ...]]
    goals: list[str]
    first: dict[str, Tensor | None]
    second: dict[str, Tensor | None] | None
    refused: bool


class Unfit(Exception):
    """Plain PyTorch does not know the program, or rounding decides what it gives."""


@dataclass(frozen=True)
class Program:
    """Inputs and lines.

    Attributes:
        mesh: sizes of the mesh.
        inputs: in order.
        lines: in order.
        refused: whether plain PyTorch refuses the last line.
    """

    mesh: tuple[int, ...]
    inputs: Sequence[Input]
    lines: Sequence[str]
    refused: bool = False

    @property
    def ranks(self) -> int:
        """Size of the world."""
        return math.prod(self.mesh)

    def __str__(self) -> str:
        return "\n".join(["from tools.fuzz import Input, Program", "Program(", f"    {self.mesh},", "    [",
                          *(f"        {_short(i)}," for i in self.inputs), "    ],", "    [",
                          *(f"        {line!r}," for line in self.lines), "    ],",
                          *(["    refused=True,"] if self.refused else []), ").check()"])  # fmt: skip

    def check(self, backend: str | None = None) -> None:
        """Run it, and raise if it is a finding.

        Args:
            backend: of the compiler; None for eager mode.
        """
        with LocalRanks(self.ranks, processes=False, device=DEVICE) as ranks:
            found = judge(ranks, self, backend)
        print(found)
        if found.kind not in FINE:
            raise AssertionError(found)

    # Plain

    def expect(self, compiled: bool = False, wide: bool = False) -> Expected:
        """Run it on plain tensors.

        Args:
            compiled: the backward pass starts from all results of the function, as the compiler's does.
            wide: compute in double precision instead of half.

        Raises:
            Unfit: there is nothing to compare with.
        """
        leaves = {i.name: i.full() for i in self.inputs}
        copied = _widened if wide else torch.clone
        copies = {n: copied(x.detach()).requires_grad_(x.requires_grad) for n, x in leaves.items()}
        values: dict[str, Any] = dict(copies)
        refused = False
        for n, line in enumerate(self.lines):
            if not _holds(line, values):
                raise Unfit(line)
            try:
                run_line(line, values)
            except _RAISED_BY_PLAIN as error:
                # Nobody needs that refused: it has one meaning.
                known = any(told in str(error) for told in ("single memory location", "storage_offset"))
                if n < len(self.lines) - 1 or not self.refused or known:
                    raise Unfit(line) from error
                refused = True
        if refused is not self.refused:
            raise Unfit("plain PyTorch does not refuse it")
        told = {n: x.detach().clone() for n, x in values.items()}
        strides = {n: x.stride() for n, x in values.items()}
        goals = self.goals(values)
        if compiled:
            goals = [n for n in self.results if values[n].requires_grad]
        first: dict[str, Tensor | None] = {}
        second: dict[str, Tensor | None] | None = None
        if compiled:  # what was computed from an input before it was written to has no gradient of the written one
            copies = {n: x for n, x in copies.items() if x.is_leaf}
        if goals and not refused:
            try:
                first = gradients(copies, {g: values[g] for g in goals}, True)
            except RuntimeError as error:
                if compiled:
                    raise Unfit("no backward pass") from error
                return Expected(told, strides, [], {}, None, refused)
            if not self.in_half:
                with contextlib.suppress(RuntimeError):
                    second = twice(copies, first)
            first = {n: None if x is None else x.detach() for n, x in first.items()}
            if not all(map(_tame, itertools.chain(first.values(), (second or {}).values()))):
                return Expected(told, strides, [], {}, None, refused)
        return Expected(told, strides, goals, first, second, refused)

    def strides_by_fake_kernels(self) -> dict[str, tuple[int, ...]]:
        """Strides by name as torch's own fake kernels state them; of what they can compute."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            values: dict[str, Any] = {i.name: mode.from_tensor(i.full().detach()) for i in self.inputs}
            for line in self.lines:
                try:
                    run_line(line, values)
                except Exception:
                    break
            return {n: x.stride() for n, x in values.items()}

    @property
    def in_half(self) -> bool:
        """Whether it computes in half precision."""
        return any(i.dtype == HALF for i in self.inputs)

    def goals(self, values: dict[str, Tensor]) -> list[str]:
        """Names of values from which the backward pass starts: the last ones that want a gradient."""
        names = [n for n, x in values.items() if n[0] == "v" and x.requires_grad]
        return names[-2:]

    @property
    def results(self) -> list[str]:
        """Names that the compiled function returns: those that no later line uses, and the last ones."""
        named = [n for line in self.lines for n in results_of(line)]
        used = {n for line in self.lines for n in names_in(line) - set(results_of(line))}
        return [n for n in named if n not in used or n in named[-2:]]

    def function(self) -> Callable[..., Any]:
        """The lines as a function of the inputs that returns the values by name."""
        names = ", ".join(f"{n!r}: {n}" for n in self.results)
        body = "\n".join(f"    {line}" for line in [*self.lines, f"return {{{names}}}"])
        scope: dict[str, Any] = dict(CALLS)
        exec(compile(f"def program({', '.join(i.name for i in self.inputs)}):\n{body}", "<program>", "exec"), scope)
        return scope["program"]  # type: ignore[no-any-return]


def _widened(x: Tensor) -> Tensor:
    return x.double() if x.dtype is torch.bfloat16 else x.clone()


def _check_stable(program: Program, compiled: bool) -> None:
    """Raise `Unfit` if half precision gives plain PyTorch something else than double precision does."""
    near, narrow, wide = _nearness(program) / 4, program.expect(compiled), program.expect(compiled, wide=True)
    pairs = [(x, wide.values[n]) for n, x in narrow.values.items()]
    pairs += [(x, wide.first.get(n)) for n, x in narrow.first.items()]  # type: ignore[misc]
    for x, y in pairs:
        if x is None or y is None:
            continue
        far = _far(near, y)
        if x.shape != y.shape or not torch.isclose(x.double(), y.double(), rtol=near, atol=far, equal_nan=True).all():
            raise Unfit("rounding decides what it gives")


def _holds(line: str, values: dict[str, Any]) -> bool:
    """Whether the condition of a line holds; not where plain PyTorch refuses the condition, which ranks do not ask."""
    try:
        return holds(line, values)
    except _RAISED_BY_PLAIN:
        return False


def _short(given: Input) -> str:
    default = {f.name: f.default for f in dataclasses.fields(Input)}
    words = [
        f"{f.name}={v!r}"
        for f in dataclasses.fields(Input)[2:]
        if (v := getattr(given, f.name)) not in (default[f.name], {})
    ]
    return f"Input({given.name!r}, {given.shape}{''.join(', ' + w for w in words)})"


def _tame(x: Tensor | None) -> bool:
    return x is None or not x.is_floating_point() or bool((x.abs() < 1e5).all())


def _weighted(values: dict[str, Tensor]) -> Tensor:
    """A weighted sum of the elements of values, plain or sharded alike. The weights follow from the names."""
    total: Any = 0
    for name, x in values.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weights = torch.randn(tuple(x.shape), generator=generator, dtype=torch.float64).to(x.device, x.dtype)
        total = total + (x * weights).sum().double()
    return total  # type: ignore[no-any-return]


def gradients(leaves: dict[str, Tensor], values: dict[str, Tensor], again: bool) -> dict[str, Tensor | None]:
    """Of the leaves, from a weighted sum of values."""
    wanting = {n: x for n, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(_weighted(values), list(wanting.values()), create_graph=again, allow_unused=True)
    return dict(zip(wanting, found, strict=True))


def twice(leaves: dict[str, Tensor], first: dict[str, Tensor | None]) -> dict[str, Tensor | None] | None:
    """Of the leaves, from a weighted sum of their gradients; None if these are constant."""
    given = {n: x for n, x in first.items() if x is not None and x.requires_grad}
    return gradients(leaves, given, False) if given else None


# A run on a rank


@dataclass(frozen=True)
class End:
    """How a run ended on a rank.

    Attributes:
        kind: in a word.
        stage: the line, or what was done.
        text: what is wrong, or the error.
        trace: of the error.
    """

    kind: str
    stage: str = ""
    text: str = ""
    trace: str = field(default="", compare=False)


class _Wrong(Exception):
    pass


def _compare(name: str, got: Any, want: Tensor | None, near: float) -> None:
    if got is None or want is None:
        if got is not want:
            raise _Wrong(f"{name}: expected {describe_value(want)}, got {describe_value(got)}")
        return
    if problems := shard_problems(got):
        raise _Wrong(f"{name}: {problems[0]}")
    if tuple(got.shape) != tuple(want.shape):
        raise _Wrong(f"{name}: shape {tuple(got.shape)}, plain {tuple(want.shape)}")
    got = got.detach()  # a view whose base was written to need not have a gradient
    full = got.full_tensor() if isinstance(got, ShardTensor) else got
    if text := difference(full, want, lambda _: (near, _far(near, want))):
        raise _Wrong(f"{name}: {text}\n{describe_value(got)}")


def _far(near: float, want: Tensor) -> float:
    """How far from zero a value may be that should be zero: in half precision a share of the largest element."""
    return near * max(1.0, float(want.double().abs().max())) if near >= NEAR_IN_HALF / 4 and want.numel() else near


def _compare_value(name: str, got: Any, expected: Expected, near: float, compiled: bool = False) -> None:
    """As `_compare`; also how it is stored. Of a gradient, but for those in ``.grad``, torch does not say how it is."""
    want, strides = expected.values[name], expected.strides[name]
    _compare(name, got, want, near)
    told = [n > 1 and a != b for n, a, b in zip(want.shape, got.stride(), strides, strict=True)]
    if compiled and not isinstance(got, ShardTensor):
        return  # the compiler stores plain results as it likes
    if want.numel() > 1 and any(told):
        raise _Wrong(f"{name}: strides {got.stride()}, plain {strides}\n{describe_value(got)}")


def _end(stage: str, error: BaseException) -> End:
    text = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, _Wrong):
        return End("wrong", stage, str(error))
    if isinstance(error, (RanksWaitError, RendezvousError)):
        return End("waits", stage, text, trace)
    if "add up to" in text or "its layout says" in text or "compiled different collectives" in text:
        return End("internal", stage, text, trace)  # ranks disagree, and an error says so in time
    by_name = any(f"{name}{then}" in text for name in _REFUSALS for then in "(:")  # compilers put it into their own
    if isinstance(error, errors.ShardError) or by_name or any(told in text for told in _REFUSED_BY_TORCH):
        return End(REFUSED, stage, text, trace)
    return End("internal", stage, text, trace)


_REFUSED_BY_TORCH = (
    "You should replace the inplace operation by an out-of-place one",
    "attempting to a compile a graph with two graph outputs\nthat alias one another",
    "As a workaround, you can either remove the mutation from the model code",
)
"""In autograd's words (see `compat.forbid_writes_with_gradients`), and in AOTAutograd's: results may share no memory where
any input is a tensor subclass; nothing is written through a view of what `as_strided` gave."""
_REFUSALS = [e.__name__ for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.ShardError)]
_RAISED_BY_USERS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


def run_on_rank(mesh: DeviceMesh, program: Program, expected: Expected) -> End:
    """Run a program in eager mode, line by line, and compare everything."""
    stage = "inputs"
    try:
        if len(program.mesh) > 1:
            mesh = init_device_mesh(DEVICE, program.mesh)
        leaves = {i.name: i.on(mesh, i.full()) for i in program.inputs}
        values: dict[str, Any] = dict(leaves)
        for n, line in enumerate(program.lines):
            stage = line
            if expected.refused and n == len(program.lines) - 1:
                return _refuses(line, values)
            known = set(values)
            run_line(line, values)
            _check_balance(line, values, known)
        stage = "values"
        near = _nearness(program)
        for name in expected.values:
            _compare_value(name, values[name], expected, near)
        _compare_gradients(leaves, {g: values[g] for g in expected.goals}, expected, near)
    except Exception as error:
        return _end(stage, error)
    return End(RIGHT)


_KEEPS_ROWS = re.compile(
    r"\[|narrow|split|chunk|select|mask|diff|unfold|diagonal|take|index|nonzero|unique|tril|triu|unbind|conv|pool|"
    r"trapezoid|redistribute|scatter|gather|pad|trapz|as_strided"
)
"""Lines whose result has rows where those of an input are: slices, masks, windows, lookups."""


def _check_balance(line: str, values: dict[str, Any], known: set[str]) -> None:
    """The largest shard of a new result is at most 1.5 times as large, against an even division, as those before it."""
    if _KEEPS_ROWS.search(line):
        return
    sharded = [x for name in known if isinstance(x := values[name], ShardTensor)]
    before = max((x.sharding.imbalance for x in sharded), default=1.0)
    for name in set(values) - known:
        if largest_share(values[name]) > 1.5 * before:
            raise _Wrong(f"{name}: rows pile up, {describe_value(values[name])}")


def _refuses(line: str, values: dict[str, Any]) -> End:
    try:
        run_line(line, values)
    except _RAISED_BY_USERS as error:
        if isinstance(error, (RanksWaitError, RendezvousError)):
            return _end(line, error)
        return End(REFUSED, "as plain PyTorch does")
    except Exception as error:
        return _end(line, error)
    return End("accepted", line, "plain PyTorch refuses this line")


def _compare_gradients(
    leaves: dict[str, Tensor], goals: dict[str, Tensor], expected: Expected, near: float, compiled: bool = False
) -> None:
    """Compare gradients, and those of gradients. Of an input that it writes to a compiled function may give zeros where
    eager mode gives none, also on plain tensors."""
    if not goals:
        return
    try:
        leaves = {n: leaves[n] for n in expected.first}
        first = gradients(leaves, goals, expected.second is not None)
        for name, want in expected.first.items():
            if isinstance(first[name], ShardTensor) and not isinstance(leaves[name], ShardTensor):
                raise _Wrong(f"gradient of {name}: sharded, of a plain tensor")
            if compiled and want is None and first[name] is not None:
                want = torch.zeros_like(leaves[name].detach(), memory_format=torch.contiguous_format)
                want = want.full_tensor() if isinstance(want, ShardTensor) else want
            _compare(f"gradient of {name}", first[name], want, near)
        if expected.second is None:
            return
        second = twice(leaves, first)
        for name, want in expected.second.items():
            got = None if second is None else second[name]
            if got is None or want is None:  # zeros and nothing are the same
                got = torch.zeros((), device=DEVICE) if got is None else got
                got = got.full_tensor() if isinstance(got, ShardTensor) else got
                if bool((got.abs() > near).any()) or (want is not None and bool((want.abs() > near).any())):
                    raise _Wrong(f"second gradient of {name}: expected {want}, got {got}")
                continue
            _compare(f"second gradient of {name}", got, want, near)
    except Exception as error:
        error.add_note("in the backward pass")
        raise


def _nearness(program: Program) -> float:
    if program.in_half:
        return NEAR_IN_HALF
    narrow = any("float32" in i.dtype for i in program.inputs) or any(".float()" in line for line in program.lines)
    return 2e-3 if narrow else 1e-7


# Compiled


def run_compiled_on_rank(
    mesh: DeviceMesh, programs: Sequence[Program], expected: Sequence[Expected], backend: str
) -> End:
    """Compile a program, and call it with the inputs of several that have the same lines."""
    stage = "inputs"
    try:
        if len(programs[0].mesh) > 1:
            mesh = init_device_mesh(DEVICE, programs[0].mesh)
        function = once(programs[0].function)
        run = torch.compile(function, fullgraph=True, backend=backend)
        counts, other = [], None
        before = once(graphs_compiled)
        for number, (program, want) in enumerate(zip(programs, expected, strict=True)):
            stage = f"call {number}"
            dist.barrier()  # ranks share the function: a rank that is ahead would have it compiled for the next sizes
            leaves = {i.name: i.on(mesh, i.full()) for i in program.inputs}
            values = run(*leaves.values())
            near = _nearness(program)
            other = _other_layouts(program, function, mesh, values) if number == 0 else other
            if other is not None and not _can_be_other(program.lines, other):
                return End("layouts", stage, other)
            for name, got in {**values, **leaves}.items():
                _compare_value(name, got, want, near, compiled=True)
            want = dataclasses.replace(want, second=None)
            _compare_gradients(leaves, {g: values[g] for g in want.goals}, want, near, compiled=True)
            counts.append(once(graphs_compiled) - before)
        # The first change of sizes may compile once more, and so may that of sizes.
        if counts[1] != counts[2] or counts[2] > 2 or counts[-1] > counts[min(3, len(counts) - 1)] or counts[-1] > 3:
            return End("graphs", f"after {len(counts)} calls", str(counts))
    except Exception as error:
        return _end(stage, error)
    return End(ESTIMATED if other else RIGHT, "", other or str(counts[-1]))


_DATA_DEPENDENT = re.compile(r"nonzero|argwhere|masked_select|unique|torch\.where\([^,]*\)|\[.*>")
"""Sizes that data decides: a trace estimates them where it chooses among strategies, and eager code knows them."""
_DIVIDED = re.compile(r"view\(|view_as_complex|reshape|flatten")
"""Views: a trace gathers where only eager code knows that the size of a dim can be divided."""
_OTHERWISE_DECOMPOSED = re.compile(r"dropout\(\w+, 1\.0\)")
"""What torch makes of other ops in a trace than in eager code: a product with zeros is `native_dropout` there."""


def _can_be_other(lines: Sequence[str], other: str) -> bool:
    """Whether a trace does not know what eager code knows when it chooses the layout of a result.

    Args:
        lines: the program.
        other: what `_other_layouts` returned.
    """
    name, _, layouts = other.partition(": ")
    eager, _, compiled = layouts.partition(", compiled ")
    gathered = compiled.count("S(") < eager.count("S(")
    kinds = [_DATA_DEPENDENT, _OTHERWISE_DECOMPOSED, *([_DIVIDED] if gathered else [])]
    wanted = {name}
    for line in reversed(lines):
        code = line.partition("  # if ")[0]
        results, _, expression = code.partition(" = ")
        if wanted & names_in(results):
            if any(kind.search(expression) for kind in kinds):
                return True
            wanted |= names_in(expression)
    return False


def _other_layouts(
    program: Program, function: Callable[..., Any], mesh: DeviceMesh, compiled: dict[str, Any]
) -> str | None:
    """The first result whose layout eager code does not give."""
    eager = function(*(i.on(mesh, i.full()) for i in program.inputs))
    for name, got in compiled.items():
        texts = [
            x.sharding.describe_placements() if isinstance(x, ShardTensor) else "plain" for x in (eager[name], got)
        ]
        if texts[0] != texts[1]:
            return f"{name}: eager {texts[0]}, compiled {texts[1]}"
    return None


# Judgement


@dataclass(frozen=True)
class Found:
    """What a program gave on all ranks together.

    Attributes:
        kind: right, refused, or what is wrong with it.
        stage: the line, or what was done.
        text: for people.
        trace: of an error.
    """

    kind: str
    stage: str = ""
    text: str = ""
    trace: str = field(default="", repr=False)

    @property
    def same(self) -> tuple[str, str]:
        """What stays while a finding is shrunk."""
        return self.kind, "" if self.kind == "wrong" else self.text.partition(":")[0][:40]


def judge(ranks: LocalRanks, program: Program, backend: str | None = None) -> Found:
    """Run a program on all ranks.

    Raises:
        Unfit: there is nothing to compare with.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = [program] if backend is None else [program, *others(program)]
        wanted = [p.expect(backend is not None) for p in programs]
        found = _judge(ranks, programs, wanted, backend)
    if backend is not None and found.kind in ("internal", "wrong"):
        call = _call(found)
        if found.kind == "internal" and not _compiles_plain(programs[call], wanted[call], backend):
            return Found(REFUSED, "plain PyTorch does not compile it", found.text)
        if found.kind == "internal" and not all(_compiles_copies(d, backend) for d in _dtypes_in(program.lines)):
            return Found(REFUSED, "plain PyTorch does not compile copies of the dtype", found.text)
        if found.kind == "wrong" and not _is_right_compiled_plain(programs[call], wanted[call], backend):
            return Found(REFUSED, "plain PyTorch compiles it to something else", found.text)
    return found


def _call(found: Found) -> int:
    return int(found.stage.removeprefix("call ")) if found.stage.startswith("call ") else 0


def _judge(ranks: LocalRanks, programs: Sequence[Program], wanted: list[Expected], backend: str | None) -> Found:
    """Of a run. Changes `wanted` where torch's fake kernel and its kernel store a result differently.

    They may where a size is 1, and for results of random ops (2.13). Either is right: the former stores a result so in
    compiled functions.
    """

    def run() -> Found:
        if backend is None:
            return _together(ranks(run_on_rank, programs[0], wanted[0], timeout=60))
        return _together(ranks(run_compiled_on_rank, programs, wanted, backend, timeout=300))

    found = run()
    while told := re.match(r"(\w+): strides ", found.text if found.kind == "wrong" else ""):
        name, call = told[1], _call(found)
        expected, fake = wanted[call], programs[call].strides_by_fake_kernels()
        if fake.get(name, expected.strides[name]) == expected.strides[name]:
            break
        wanted[call] = dataclasses.replace(expected, strides={**expected.strides, name: fake[name]})
        found = run()
    return found


def _run_compiled_plain(program: Program, backend: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inputs and the results of a compiled program on plain tensors."""
    inputs = {i.name: i.full() for i in program.inputs}
    leaves = {n: x.detach().clone().requires_grad_(x.requires_grad) for n, x in inputs.items()}
    torch._dynamo.reset()
    return leaves, torch.compile(program.function(), fullgraph=True, backend=backend)(*leaves.values())


def _compiles_plain(program: Program, expected: Expected, backend: str) -> bool:
    """Whether plain PyTorch compiles it, forward and backward."""
    try:
        leaves, values = _run_compiled_plain(program, backend)
        if expected.goals:
            gradients(leaves, {g: values[g] for g in expected.goals}, again=False)
    except Exception:
        return False
    return True


def _dtypes_in(lines: Sequence[str]) -> set[torch.dtype]:
    named = {getattr(torch, name, None) for name in re.findall(r"torch\.(\w+)", "\n".join(lines))}
    return {d for d in named if isinstance(d, torch.dtype)}


@functools.cache
def _compiles_copies(dtype: torch.dtype, backend: str) -> bool:
    """Whether plain PyTorch compiles a copy of a tensor of a dtype, which every redistribution is made of.

    Inductor's C++ kernels do not know ``float8_e8m0fnu`` (2.13).
    """
    try:
        torch.compile(torch.clone, fullgraph=True, backend=backend)(torch.zeros(3).to(dtype))
    except Exception:
        return False
    return True


def _is_right_compiled_plain(program: Program, expected: Expected, backend: str) -> bool:
    """Whether compiled and eager PyTorch agree on plain tensors.

    They do not where `x.detach()` is written to with what depends on `x`: the compiler forgets the gradient (2.13).
    """
    try:
        leaves, values = _run_compiled_plain(program, backend)
        near = _nearness(program)
        for name, got in {**values, **leaves}.items():
            _compare_value(name, got, expected, near, compiled=True)
        goals = {g: values[g] for g in expected.goals}
        _compare_gradients(leaves, goals, dataclasses.replace(expected, second=None), near, compiled=True)
    except Exception:
        return False
    return True


def _together(ends: Sequence[End]) -> Found:
    kinds = {e.kind for e in ends}
    for kind in ("wrong", "internal", "accepted", "graphs"):
        for rank, end in enumerate(ends):
            if end.kind == kind:
                text = (
                    end.text if len(set(ends)) == 1 else f"{end.text}\n(rank {rank}; others: {[e.kind for e in ends]})"
                )
                return Found(kind, end.stage, text, end.trace)
    first = next((e for e in ends if e.kind != "waits"), ends[0])
    if len(kinds) > 1 or "waits" in kinds:
        said = "\n".join(f"rank {r}: {e.kind} {e.stage} {e.text[:300]}" for r, e in enumerate(ends))
        return Found("waits" if kinds == {"waits"} else "disagree", first.stage, said, first.trace)
    if len({e.stage for e in ends}) > 1:
        return Found("disagree", first.stage, "\n".join(f"rank {r}: {e.stage} {e.text}" for r, e in enumerate(ends)))
    return Found(first.kind, first.stage, first.text, first.trace)


def _is_chunked(sizes: Sequence[int], mesh: Sequence[int]) -> bool:
    parts = mesh if len(sizes) == math.prod(mesh) else (len(sizes),)
    return tuple(sizes) == Partition.chunk(range(len(parts)), parts, sum(sizes)).sizes


def others(program: Program) -> list[Program]:
    """The same lines with other partitions of the same sizes, and with other sizes where plain PyTorch knows them."""
    rng = random.Random(seed_of(program.lines))

    def partition(inputs: Sequence[Input]) -> list[Input]:
        """Inputs that are identically sharded stay so, and others do not: which partitions are the same is part of a program.

        So is which of them are as torch.chunk partitions, since a trace may compare them with such a partition that is no input's.
        """
        made: dict[Any, list[int]] = {}

        def like(old: list[int], draw: Callable[[], list[int]]) -> list[int]:
            def fits(new: list[int]) -> bool:
                same = _is_chunked(new, program.mesh) is _is_chunked(old, program.mesh)
                return same and new != old and new not in made.values()

            any_other = draw()
            instead = old if sum(old) == sum(any_other) else any_other  # a dim of one row has few other partitions
            new = next((new for new in (draw() for _ in range(30)) if fits(new)), instead)
            return made.setdefault((tuple(old), sum(new)), new)

        def one(i: Input) -> Input:
            drawn = functools.partial(sizes_for, rng, program.mesh, i.shape, i.layout.split())
            sizes = {m: like(i.sizes[m], lambda m=m: drawn()[m]) for m in drawn()}  # type: ignore[misc]
            return dataclasses.replace(i, sizes=sizes)

        return [one(i) for i in inputs]

    found = [dataclasses.replace(program, inputs=partition(program.inputs)) for _ in range(2)]
    if any("{" in line for line in program.lines):
        return found  # sizes are stated, for these sizes
    dim_sizes = {e: e + rng.randint(1, 3) for i in program.inputs for e in i.shape if e > 1}
    for _ in range(2):
        wider = [dataclasses.replace(i, shape=tuple(dim_sizes.get(e, e) for e in i.shape)) for i in program.inputs]
        other = dataclasses.replace(program, inputs=partition(wider))
        try:
            other.expect(True)
        except Unfit:
            continue
        found.append(other)
    return found


# Drawing


MESHES = [(2,), (3,), (3,), (4,), (2, 2), (2, 2)]


def draw(seed: int, shortest: int = 10, longest: int = 25, compiled: bool = False, half: bool = False) -> Program:
    """The program of a seed."""
    for attempt in range(100):
        rng = random.Random(seed_of(seed, attempt))
        mesh = rng.choice(MESHES)
        inputs = _draw_inputs(rng, mesh)
        if half:
            inputs = [dataclasses.replace(i, dtype=HALF) if i.dtype.startswith("float") else i for i in inputs]
        d = Draw(rng, {i.name: i.full() for i in inputs}, mesh, not compiled)
        lines: list[str] = []
        refused = False
        while len(lines) < rng.randint(shortest, longest) and not refused:
            new = draw_line(d)
            if new is None:
                break
            if new[1] and (compiled or len(lines) < 3):
                continue
            lines.append(new[0])
            refused = new[1]
        program = Program(mesh, inputs, lines, refused)
        with contextlib.suppress(Unfit):
            program.expect(compiled)
            if half:
                _check_stable(program, compiled)
            return program
    raise AssertionError(f"no program for seed {seed}")


def _draw_inputs(rng: random.Random, mesh: tuple[int, ...]) -> list[Input]:
    def size() -> int:
        return rng.choice([0, 1, 1, *range(2, 8), *range(2, 8)])

    base = tuple(size() for _ in range(rng.choice([1, 2, 2, 3, 3])))
    dtype = "float64" if rng.random() < 0.93 else "float32"

    def other() -> tuple[int, ...]:
        likes = [base, base[rng.randrange(len(base)) :], tuple(1 if rng.random() < 0.4 else e for e in base)]
        factor, anything = (base[-1], rng.randint(1, 5)), tuple(size() for _ in range(rng.randint(0, 3)))
        return rng.choice([*likes, factor, anything])

    shapes = [base, *(other() for _ in range(rng.randint(1, 3)))]
    return [_draw_input(rng, mesh, f"a{n}", shape, dtype) for n, shape in enumerate(shapes)]


def _draw_input(rng: random.Random, mesh: tuple[int, ...], name: str, shape: tuple[int, ...], dtype: str) -> Input:
    seed = rng.randrange(1 << 20)
    if name != "a0" and rng.random() < 0.2:
        return Input(name, shape, dtype=dtype, grad=rng.random() < 0.7, seed=seed)
    if name != "a0" and rng.random() < 0.15:
        dtype = "int64"
    reduction = "P(sum)"

    def word() -> str:
        number = rng.random()
        if number < 0.68 and shape:
            return f"S({rng.randrange(len(shape))})"
        return reduction if number > 0.85 else "R"

    words = [word() for _ in mesh]
    sizes = sizes_for(rng, mesh, shape, words)
    ways = tuple(rng.choice(["rows", "turned", "gaps", "odd"]) for _ in range(4)) if rng.random() < 0.3 else ("rows",)
    wants = dtype != "int64" and rng.random() < 0.65
    return Input(name, shape, " ".join(words), sizes, dtype, wants, seed, ways, rng.random() < 0.2)


# Shrinking


def shrink(ranks: LocalRanks, program: Program, found: Found, backend: str | None, seconds: float = 20.0) -> Program:
    """A smaller program that gives a finding of the same kind."""
    deadline = time.monotonic() + seconds

    def still(candidate: Program) -> bool:
        if time.monotonic() > deadline:
            return False
        try:
            return judge(ranks, candidate, backend).same == found.same
        except Exception:
            return False  # plain PyTorch does not know it

    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for candidate in _smaller(program):
            if still(candidate):
                program, changed = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    lines = list(program.lines)
    for count in (len(lines) // 2, len(lines) // 4):  # the end, then parts, then single lines
        if count and not program.refused:
            yield _used(program, lines[:-count])
    for n in reversed(range(len(lines) - program.refused)):
        gone, kept = set(results_of(lines[n])), lines[:n]
        for line in lines[n + 1 :]:
            if names_in(line) & gone:
                gone |= set(results_of(line))
            else:
                kept.append(line)
        if kept and (not program.refused or kept[-1] == lines[-1]):
            yield _used(program, kept)
    for n, given in enumerate(program.inputs):
        for simpler in _simpler(program, given):
            yield dataclasses.replace(program, inputs=[*program.inputs[:n], simpler, *program.inputs[n + 1 :]])


def _used(program: Program, lines: list[str]) -> Program:
    names = {n for line in lines for n in names_in(line)}
    return dataclasses.replace(program, lines=lines, inputs=[i for i in program.inputs if i.name in names])


def _simpler(program: Program, given: Input) -> Iterator[Input]:
    if given.ways != ("rows",):
        yield dataclasses.replace(given, ways=("rows",))
    if given.inferred:
        yield dataclasses.replace(given, inferred=False)
    if given.grad:
        yield dataclasses.replace(given, grad=False)
    if given.dtype == "float32":
        yield dataclasses.replace(given, dtype="float64")
    if given.seed:
        yield dataclasses.replace(given, seed=0)
    if given.layout == "plain":
        return
    yield dataclasses.replace(given, layout="plain", sizes={}, ways=("rows",), inferred=False)
    words = given.layout.split()
    for m, word in enumerate(words):
        if word != "R":
            other = [*words[:m], "R", *words[m + 1 :]]
            sizes = sizes_for(random.Random(0), program.mesh, given.shape, other)
            kept = {k: s for k, s in given.sizes.items() if k in sizes and len(s) == len(sizes[k])}
            yield dataclasses.replace(given, layout=" ".join(other), sizes={**sizes, **kept})


# By hand


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", metavar="BACKEND")
    parser.add_argument("--half", action="store_true", help="in half precision; shorter programs are stable")
    parser.add_argument("--shortest", type=int, default=10)
    parser.add_argument("--longest", type=int, default=25)
    parser.add_argument("--shrink", type=float, default=15.0, help="seconds for each finding")
    parser.add_argument("--trace", action="store_true", help="print the traceback of a finding")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no new program begins")
    parser.add_argument("--most", type=int, default=1000, help="findings after which it ends")
    given = parser.parse_args()
    tally = search(range(given.seed, given.seed + given.programs), given.compiled, (given.shortest, given.longest),
                   given.shrink, given.trace, given.most, given.seconds, given.half)  # fmt: skip
    return int(any(kind not in FINE for kind in tally))


def search(
    seeds: Sequence[int],
    backend: Any = None,
    lengths: tuple[int, int] = (10, 25),
    seconds: float = 0.0,
    trace: bool = False,
    most: int = 1000,
    budget: float = math.inf,
    half: bool = False,
) -> dict[str, int]:
    """Run the programs of some seeds, and print what is found.

    Args:
        seeds: of the programs.
        backend: of the compiler; None for eager mode.
        lengths: least and most number of lines.
        seconds: for shrinking a finding.
        trace: whether to print the traceback of an error.
        most: findings after which it ends.
        budget: seconds after which no new program begins.
        half: whether to compute in half precision.

    Returns:
        How many programs gave what.
    """
    torch.set_num_threads(1)
    for name in ("shardcompile", "torch"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    tally: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    first_seeds: dict[str, int] = {}
    started, findings = time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        world = functools.cache(lambda n: stack.enter_context(LocalRanks(n, processes=False, device=DEVICE)))
        for seed in seeds:
            if time.monotonic() - started > budget:
                break
            program = draw(seed, *lengths, backend is not None, half)
            found = judge(world(program.ranks), program, backend)
            tally[found.kind] += 1
            if tally.total() % 100 == 0:
                print(f"{tally.total()} programs in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            if found.kind == REFUSED:
                text = found.stage if found.stage.startswith("as plain") else found.text[:110]
                refusals[text] += 1
                first_seeds.setdefault(text, seed)
            if found.kind in FINE:
                continue
            findings += 1
            print(f"--- seed {seed}: {found.kind} at {found.stage}\n{found.text[:1500]}", flush=True)
            if trace:
                print(found.trace)
            if seconds:
                print(shrink(world(program.ranks), program, found, backend, seconds), flush=True)
            if findings >= most:
                break
    print(f"{dict(tally)} in {time.monotonic() - started:.0f} s")
    for text, count in refusals.most_common(12):
        print(f"  refused {count} times, first {first_seeds[text]}: {text}")
    return dict(tally)


if __name__ == "__main__":
    sys.exit(main())
