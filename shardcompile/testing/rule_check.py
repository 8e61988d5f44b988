"""`check_rule`: compares an op in every layout of its inputs with the op on plain tensors."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile import compat
from shardcompile.compat.testing import tree_flatten, tree_unflatten
from shardcompile.inspect.text import columns
from shardcompile.testing.agreement import CheckFailed, Failure, RanksFailedError, agree_on_use, together, usage_error
from shardcompile.testing.arguments import digest
from shardcompile.testing.arrange import (
    CHUNK,
    InputLayout,
    describe,
    lay_out,
    seed_of,
    sizes_in_style,
    with_bits_to_spare,
)
from shardcompile.testing.compare import Tolerances, tolerances
from shardcompile.testing.current import default_mesh
from shardcompile.testing.trial import Outcome, Trial, differences
from shardcompile.testing.watch import SERVICES, ServiceWatch

_STYLES = (1, CHUNK, 2)
"""The styles of the partitions for every combination of placements; see `uneven_sizes`."""

_SHOWN = 20
"""The most failing runs that an error lists."""


@dataclass(frozen=True)
class RuleRun:
    """A run of an op on sharded inputs.

    Attributes:
        sample: the index of the sample.
        placements: the placements of its tensors, as a short text.
        layouts: the placements with shard sizes.
        service: how the op was served in the forward pass, see `ServiceWatch.how`.
        problem: the failure; empty if the run is right.
    """

    sample: int
    placements: str
    layouts: str
    service: str
    problem: str


@dataclass(frozen=True)
class RuleReport:
    """The runs of `check_rule`. ``print(report)`` shows a table.

    Attributes:
        op: the name of the op.
        world_size: the number of ranks.
        runs: all runs.
        left_out: the number of runs that the limit left out.
    """

    op: str
    world_size: int
    runs: tuple[RuleRun, ...]
    left_out: int

    @property
    def served(self) -> dict[str, int]:
        """The number of runs that were ``local``, ``reduced``, ``exchanged`` and ``gathered``."""
        counts = Counter(run.service for run in self.runs)
        return {service: counts[service] for service in SERVICES}

    @property
    def wrong(self) -> tuple[RuleRun, ...]:
        """The runs whose results differ from those of the op on plain tensors."""
        return tuple(run for run in self.runs if run.problem)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("inputs", "runs", *SERVICES)]
        for placements in dict.fromkeys(run.placements for run in self.runs):
            runs = [run for run in self.runs if run.placements == placements]
            counts = Counter(run.service for run in runs)
            rows.append((placements, str(len(runs)), *(str(counts[s]) for s in SERVICES)))
        total = f"{self.op}: {len(self.runs)} runs on {self.world_size} ranks, {len(self.wrong)} wrong"
        return "\n".join([total + (f", {self.left_out} left out" if self.left_out else ""), *columns(rows, left=(0,))])


def check_rule(
    op: Callable[..., object],
    samples: Iterable[tuple[Sequence[object], Mapping[str, object]]],
    *,
    mesh: DeviceMesh | None = None,
    backward: bool = True,
    limit: int = 200,
    rtol: float | None = None,
    atol: float | None = None,
) -> RuleReport:
    """Compares an op in every layout of its inputs with the op on plain tensors. Call this on every rank.

        @pytest.mark.ranks(3)
        def test_the_rule():
            x, w = torch.randn(7, 4).double(), torch.randn(4, 5).double()
            report = check_rule(torch.ops.mine.project.default, [((x, w), {}), ((x, w), {"scale": 2.0})])
            assert report.served["gathered"] == 0  # the rule covers every layout

    This is for authors of a rule (`register_sharding`), a handler, or a custom op. It gives each tensor in a sample,
    also in lists, several placements: ``Replicate()``, ``Shard(d)`` for each of its dims and, for floating-point and
    complex dtypes, ``Partial("sum")``. It tries all combinations along one mesh dim. Combinations with a sharded tensor
    run with several partitions. On three ranks their shard sizes are 1, n - 1 and 0; torch.chunk's; 0, 1 and n - 1.
    If several tensors are sharded, a further run gives each tensor a different partition.

    It compares the results and the gradients of all floating-point inputs, within the tolerance of
    `torch.testing.assert_close`; use float64. An error counts as wrong, and so does a result whose local shard does not
    match its layout.

    Args:
        op: an overload, or any function of tensors.
        samples: pairs of positional and named arguments with full tensors, the same on every rank. Values are rounded
            slightly (float64 to multiples of 2**-30), so that terms of a pending sum add up to them exactly.
        mesh: a mesh of one dim over all ranks; by default of GPUs if the process group has NCCL.
        backward: whether to run and compare the backward pass.
        limit: the most runs of a sample. If there are more, combinations with equal placements come first, then others
            from a fixed seed; all with the first partition, then all with the second, and so on.
        rtol: a relative tolerance in place of the dtype's.
        atol: an absolute tolerance in place of the dtype's.

    Returns:
        All runs, and how the op was served in each.

    Raises:
        AssertionError: on every rank, if a run is wrong. It names the op, the wrong layouts, and the first difference.
        ValueError: on every rank: samples differ between ranks or have no tensors, or the op fails on plain tensors.
    """
    mesh = default_mesh() if mesh is None else mesh
    name = str(op) if isinstance(op, compat.OpOverload) else getattr(op, "__name__", str(op))
    cases = [_Case(f"{name}, sample {n}", op, *sample, mesh, backward) for n, sample in enumerate(samples)]
    agree_on_use(name, lambda: _check_usage(cases, mesh), lambda _: _digests(cases))
    allowed = tolerances(rtol, atol)
    runs: list[RuleRun] = []
    left_out = 0
    for number, case in enumerate(cases):
        expected = together(f"{case.name}, on plain tensors", case.plain, error=usage_error)
        layouts, more = _input_layouts(case.tensors, limit, seed_of(case.name))
        left_out += more
        runs += [_run_in_layouts(number, case, each, expected, allowed) for each in layouts]
    report = RuleReport(name, mesh.size(), tuple(runs), left_out)
    if report.wrong:
        raise AssertionError(_complaint(report))
    return report


class _Case:
    """A sample of an op, as a function of its tensors.

    Attributes:
        name: a name for messages.
        tensors: the full values of its tensors.
    """

    def __init__(
        self,
        name: str,
        op: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        mesh: DeviceMesh,
        backward: bool,
    ) -> None:
        self.name = name
        self._op, self._mesh, self._backward = op, mesh, backward
        self._leaves, self._structure = tree_flatten((tuple(args), dict(kwargs)))
        self._tensor_indices = [i for i, x in enumerate(self._leaves) if isinstance(x, Tensor)]
        full = [self._leaves[i].detach().to(mesh.device_type) for i in self._tensor_indices]
        self.tensors = [with_bits_to_spare(x) for x in full]

    def _run(self, *tensors: Tensor) -> object:
        leaves = list(self._leaves)
        for index, x in zip(self._tensor_indices, tensors, strict=True):
            leaves[index] = x
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self._op(*args, **kwargs)

    def _leaf(self, x: Tensor) -> Tensor:
        return x.requires_grad_(self._backward and (x.is_floating_point() or x.is_complex()))

    def plain(self) -> Outcome:
        """Runs the op on plain tensors."""
        trial = Trial.forward(self._run, [self._leaf(x.clone()) for x in self.tensors])
        return self.backward(trial).outcome()

    def sharded(self, layouts: Sequence[InputLayout], watch: ServiceWatch) -> Trial:
        """Runs the forward pass of the op on tensors in these layouts.

        Raises:
            CheckFailed: a local shard does not match its layout.
        """
        laid_out = []
        for n, (x, layout) in enumerate(zip(self.tensors, layouts, strict=True)):
            sizes = sizes_in_style(x.shape, self._mesh, layout.placements, layout.style)
            laid_out.append(self._leaf(lay_out(x, self._mesh, layout.placements, sizes, seed_of(self.name, n))))
        with watch:
            trial = Trial.forward(self._run, laid_out)
        if trial.problems:
            raise CheckFailed([Failure("the result is malformed", p) for p in trial.problems])
        return trial

    def backward(self, trial: Trial) -> Trial:
        """Runs the backward pass, if it is to be compared."""
        return trial.backward(self.name) if self._backward else trial

    def describe(self, layouts: Sequence[InputLayout]) -> str:
        """Describes the placements and shard sizes of all tensors."""
        return "; ".join(_with_sizes(x, w, self._mesh) for x, w in zip(self.tensors, layouts, strict=True))


def _with_sizes(x: Tensor, layout: InputLayout, mesh: DeviceMesh) -> str:
    (placement,) = layout.placements
    sizes = sizes_in_style(x.shape, mesh, layout.placements, layout.style).get(0)
    return describe([placement]) + ("" if sizes is None else f"[{','.join(map(str, sizes))}]")


def _check_usage(cases: Sequence[_Case], mesh: DeviceMesh) -> None:
    if mesh.ndim != 1 or mesh.size() != dist.get_world_size():
        raise ValueError(f"check_rule takes a mesh of one dim over all {dist.get_world_size()} ranks, not {mesh}")
    if not cases:
        raise ValueError("there are no samples: pass at least one pair of arguments and keyword arguments")
    for case in cases:
        if not case.tensors:
            raise ValueError(f"{case.name}: no argument is a tensor")


def _digests(cases: Sequence[_Case]) -> str:
    return "\n".join(digest(f"{c.name}, tensor {n}", x) for c in cases for n, x in enumerate(c.tensors))


def _run_in_layouts(
    number: int, case: _Case, layouts: Sequence[InputLayout], expected: Outcome, allowed: Tolerances
) -> RuleRun:
    description = case.describe(layouts)
    stage = f"{case.name}, inputs {description}"
    numels = [x.numel() for x, w in zip(case.tensors, layouts, strict=True) if isinstance(w.placements[0], Shard)]
    watch = ServiceWatch(min(numels, default=0))
    try:
        trial = together(stage, lambda: case.sharded(layouts, watch), lambda t: t.layouts)
        together(stage, lambda: case.backward(trial), lambda t: t.gradient_layouts)
        together(stage, lambda: _compare(trial, expected, allowed))
        problem = ""
    except RanksFailedError as error:
        if not error.in_step:
            raise
        problem = str(error)
    return RuleRun(number, "; ".join(describe(w.placements) for w in layouts), description, watch.how(), problem)


def _compare(trial: Trial, expected: Outcome, allowed: Tolerances) -> None:
    if found := differences(trial.outcome(), expected, allowed):
        raise CheckFailed([Failure(f"{what} is wrong", text) for what, text in found])


def _complaint(report: RuleReport) -> str:
    wrong = report.wrong
    lines = [f"{report.op} is wrong in {len(wrong)} of {len(report.runs)} runs on {report.world_size} ranks", ""]
    lines.append(wrong[0].problem)
    if wrong[1:]:
        lines += ["", "The others:", *(f"  {run.problem.partition(chr(10))[0]}" for run in wrong[1:_SHOWN])]
    if wrong[_SHOWN:]:
        lines.append(f"  and {len(wrong) - _SHOWN} more")
    return "\n".join(lines)


def _placements_of(x: Tensor) -> list[Placement]:
    """Returns the placements to try for a tensor. One-byte floats get no pending sum, since torch cannot add them."""
    summable = (x.is_floating_point() or x.is_complex()) and x.dtype.itemsize > 1
    sharded: list[Placement] = [Shard(d) for d in range(x.ndim)]
    return [*sharded, Replicate(), *([Partial("sum")] if summable else [])]


def _input_layouts(tensors: Sequence[Tensor], limit: int, seed: int) -> tuple[list[tuple[InputLayout, ...]], int]:
    """Returns the layouts to try, and the number of layouts left out."""
    options = [_placements_of(x) for x in tensors]
    combinations = _combinations(options, limit, seed)
    layouts = [tuple(InputLayout((p,), style) for p in each) for style in _STYLES for each in combinations]
    layouts = [each for each in layouts if each[0].style == _STYLES[0] or _num_sharded(each)]
    for each in combinations:
        different = tuple(InputLayout((p,), n + 1) for n, p in enumerate(each))
        if _num_sharded(different) > 1:
            layouts.append(different)
    return layouts[:limit], _count(options) - min(limit, len(layouts))


def _num_sharded(layouts: Sequence[InputLayout]) -> int:
    return sum(isinstance(w.placements[0], Shard) for w in layouts)


def _combinations(options: Sequence[Sequence[Placement]], limit: int, seed: int) -> list[tuple[Placement, ...]]:
    """Returns combinations of placements: uniform ones first, then all others, or as many as the limit allows."""
    distinct = dict.fromkeys(itertools.chain.from_iterable(options))
    uniform = [tuple(p if p in own else Replicate() for own in options) for p in distinct]
    total = math.prod(map(len, options))
    indices = range(total) if total <= limit else random.Random(seed).sample(range(total), limit)
    return list(dict.fromkeys([*uniform, *(_combination(i, options) for i in indices)]))


def _combination(index: int, options: Sequence[Sequence[Placement]]) -> tuple[Placement, ...]:
    """Returns the combination with this index. The placement of the first tensor varies fastest."""
    chosen = []
    for own in options:
        index, remainder = divmod(index, len(own))
        chosen.append(own[remainder])
    return tuple(chosen)


def _count(options: Sequence[Sequence[Placement]]) -> int:
    """Returns the number of runs without a limit.

    A combination has one run if no tensor is sharded, else one for each style. If several tensors are sharded, it has a
    further run with different partitions.
    """
    total = math.prod(map(len, options))
    num_unsharded = [sum(not isinstance(p, Shard) for p in own) for own in options]
    none = math.prod(num_unsharded)
    one = sum((len(own) - n) * (none // n) for own, n in zip(options, num_unsharded, strict=True))
    return none + len(_STYLES) * one + (len(_STYLES) + 1) * (total - none - one)
