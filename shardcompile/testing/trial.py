"""One run of a function on sharded or plain inputs, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardcompile.compat.testing import tree_flatten
from shardcompile.tensor import ShardTensor
from shardcompile.testing.arrange import seed_of
from shardcompile.testing.compare import Tolerances, difference
from shardcompile.testing.watch import CollectiveWatch


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        values: the leaves of the result, as full values.
        structure: the tree structure of the result.
        gradients: the gradients of the inputs, as full values; None for an input without a gradient.
        problems: faults other than wrong values, such as a local shard that does not match its layout.
    """

    values: list[Any]
    structure: Any
    gradients: list[Tensor | None]
    problems: list[str]


@dataclass
class Trial:
    """A run after its forward pass.

    Attributes:
        inputs: the inputs, which are leaves of the autograd graph.
        values: the leaves of the result.
        structure: the tree structure of the result.
    """

    inputs: Sequence[Tensor]
    values: list[Any]
    structure: Any

    @staticmethod
    def forward(run: Callable[..., object], inputs: Sequence[Tensor]) -> Trial:
        """Calls a function with inputs, some of which require gradients."""
        return Trial(inputs, *tree_flatten(run(*inputs)))

    @property
    def layouts(self) -> str:
        """The layouts of the results. They must be rank-invariant before the ranks can gather the results."""
        return "\n".join(map(describe_value, self.values))

    @property
    def problems(self) -> list[str]:
        """The faults of the results other than wrong values."""
        return [p for v in self.values for p in shard_problems(v)]

    def backward(self, name: str) -> Trial:
        """Runs the backward pass.

        Args:
            name: seeds the weights of the results.
        """
        go_backward(self.values, name)
        return self

    @property
    def gradient_layouts(self) -> str:
        """The layouts of the gradients, after `backward`."""
        return "\n".join(describe_value(x.grad) for x in self.inputs)

    def outcome(self) -> Outcome:
        """Gathers all values and gradients."""
        problems = self.problems
        for n, x in enumerate(self.inputs):
            problems += [f"gradient of input {n}: {p}" for p in gradient_problems(x)]
        gradients = [full_value(x.grad) for x in self.inputs]
        return Outcome([detach(full_value(v)) for v in self.values], self.structure, gradients, problems)


def full_value(x: object) -> Any:
    """Returns the full tensor of a sharded tensor, and anything else unchanged."""
    return x.full_tensor() if isinstance(x, ShardTensor) else x


def detach(x: object) -> Any:
    """Detaches a tensor, and returns anything else unchanged."""
    return x.detach() if isinstance(x, Tensor) else x


def describe_value(x: object) -> str:
    """Describes the properties of a result that must be rank-invariant before the ranks can gather it."""
    if isinstance(x, ShardTensor):
        return x.sharding.describe()
    return f"plain {x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def largest_share(x: object) -> float:
    """Returns the size of the largest shard over its size in an even partition, for the most uneven dim."""
    partitions = x.sharding.partitions if isinstance(x, ShardTensor) else []
    sizes = [partition.sizes for partition in partitions if partition is not None and any(partition.sizes)]
    return max((max(n) / math.ceil(sum(n) / len(n)) for n in sizes), default=1.0)


def shard_problems(x: object) -> list[str]:
    """Returns the ways in which a local shard, or what the tensor reports, contradicts its layout; empty if none."""
    if not isinstance(x, ShardTensor):
        return []
    layout, local = x._spec.layout, x._local_tensor
    expected = layout.local_shape(layout.mesh.get_coordinate())
    problems = []
    if tuple(local.shape) != tuple(expected) or local.dtype != layout.dtype:
        problems.append(f"the shard is {local.dtype} {tuple(local.shape)}, its layout {layout.describe()}")
    if isinstance(local, ShardTensor):
        problems.append("the shard is a sharded tensor itself")
    return problems + _contradictions(x)


class _CollectiveNames(CollectiveWatch):
    """Records the names of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def saw(self, name: str, x: object, out: object) -> None:
        self.names.append(name)


def _contradictions(x: ShardTensor) -> list[str]:
    """Returns how `repr`, `sharding`, `placements` and `to_local` contradict one another; empty if they agree."""
    layout, text = x.sharding, repr(x)
    problems = []
    if x.placements != layout.placements or layout.describe() not in text:
        problems.append(f"its sharding is {layout.describe()}, its placements are {x.placements}, its text is {text}")
    if layout.is_partial:
        return problems
    with torch.no_grad(), _CollectiveNames() as watch:
        local = x.to_local()
    if tuple(local.shape) != layout.local_shape(layout.mesh.get_coordinate()):
        problems.append(f"to_local() has shape {tuple(local.shape)}, its sharding is {layout.describe()}")
    if watch.names and "in segments" not in text:
        problems.append(f"to_local() of {text} runs {', '.join(watch.names)}")
    return problems


def gradient_problems(x: Tensor) -> list[str]:
    """Returns the faults of a leaf's gradient other than wrong values."""
    if isinstance(x.grad, ShardTensor) and not isinstance(x, ShardTensor):
        return [f"it is sharded, of a plain tensor: {x.grad.sharding.describe()}"]
    return shard_problems(x.grad)


def go_backward(values: Sequence[object], name: str) -> bool:
    """Runs the backward pass of a weighted sum of all results, or of the result itself if it is one scalar.

    Args:
        values: the leaves of a result.
        name: seeds the weights; the same on every rank.

    Returns:
        Whether any result requires a gradient.
    """
    outputs = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
    if not outputs:
        return False
    if len(outputs) == 1 and outputs[0].ndim == 0 and not outputs[0].is_complex():
        outputs[0].backward()
        return True
    total: Any = 0
    for n, v in enumerate(outputs):
        full = full_value(v)
        full = torch.view_as_real(full.resolve_conj()) if full.is_complex() else full
        generator = torch.Generator().manual_seed(seed_of(name, n))
        weights = torch.randn(full.shape, generator=generator, dtype=torch.float64)
        total = total + (full * weights.to(full.device)).sum()
    total.backward()
    return True


def differences(got: Outcome, want: Outcome, allowed: Tolerances) -> list[tuple[str, str]]:
    """Returns all differences between two outcomes, each as the name of a value and a description.

    Args:
        got: the outcome of the sharded run.
        want: the outcome of the plain run.
        allowed: the tolerances for numbers.
    """
    found = [("the run", p) for p in got.problems]
    if got.structure != want.structure:
        return [*found, ("the result", f"it is {got.structure}, plain PyTorch gives {want.structure}")]
    results = zip(got.values, want.values, strict=True)
    gradients = zip(got.gradients, want.gradients, strict=True)
    named = [(f"result {n}", a, b) for n, (a, b) in enumerate(results)]
    named += [(f"gradient of input {n}", a, b) for n, (a, b) in enumerate(gradients)]
    return found + [(name, text) for name, a, b in named if (text := difference(a, b, allowed)) is not None]
