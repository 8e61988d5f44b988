"""Strategies: what a rule returns, the legal ways to run an op along one mesh dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile.sharding import IntLike, Layout, Partition

OnPartition = Callable[[Partition], Partition | None]
"""Maps the partition of the inputs to the partition of an output; returns None if it cannot be expressed."""


@dataclass(frozen=True, eq=False)
class Strategy:
    """One legal way to run an op along one mesh dim.

    All sharded inputs have the same partition. Sharded outputs have it, too, unless `on_partition` maps it to
    another one.

    Attributes:
        inputs: required placement of each tensor input, in the order of the arguments.
        outputs: placement of each tensor output; a list of tensors counts as one output.
        on_partition: the partition of sharded outputs as a function of that of the inputs.
        other_partition: another partition to which the inputs may be resharded, as a function of the partition of an
            input.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    on_partition: OnPartition | None = None
    other_partition: OnPartition | None = None


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument as a rule sees it: global shape, dtype and layout."""

    layout: Layout

    @property
    def shape(self) -> tuple[IntLike, ...]:
        """Global shape."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.layout.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.layout.dtype


@dataclass(frozen=True)
class OpCall:
    """A call of an op, with `TensorArg` in place of tensors.

    Attributes:
        op: the overload.
        args: positional arguments; lists of tensors stay lists.
        kwargs: keyword arguments.
        tensors: all tensor arguments in order, those inside lists and keyword arguments included.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[TensorArg, ...] = ()

    def arg(self, index: int, name: str, default: object = None) -> Any:
        """Returns an argument that may be given by position, by name, or not at all."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)


REPLICATE = Replicate()


def replicate_all(inputs: int, outputs: int) -> Strategy:
    """Returns the strategy that is always legal: replicated inputs, replicated outputs."""
    return Strategy((REPLICATE,) * inputs, (REPLICATE,) * outputs)


def shard(dim: int | None) -> Placement:
    """Returns `Shard(dim)`, or `Replicate()` for None."""
    return REPLICATE if dim is None else Shard(dim)


def along(
    inputs: Sequence[int | None],
    outputs: Sequence[int | str | None],
    on_partition: OnPartition | None = None,
    other_partition: OnPartition | None = None,
) -> Strategy:
    """Returns the strategy that shards an axis which the tensors share.

    Args:
        inputs: for each input the dim that runs along the axis, or None if it has no such dim.
        outputs: for each output the same, or the pending reduction (as in `Partial`) if the axis is reduced.
        on_partition: as in `Strategy`.
        other_partition: as in `Strategy`.
    """
    return Strategy(
        tuple(shard(d) for d in inputs),
        tuple(Partial(o) if isinstance(o, str) else shard(o) for o in outputs),
        on_partition,
        other_partition,
    )


def partial(inputs: Sequence[str | None], outputs: Sequence[str | None]) -> Strategy:
    """Returns the strategy that propagates a pending reduction; None stands for replicated tensors."""
    return Strategy(
        tuple(Partial(p) if p else REPLICATE for p in inputs), tuple(Partial(p) if p else REPLICATE for p in outputs)
    )
