"""Runs example calls on in-process ranks, to observe how dispatch serves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcompile.compat import OpOverload
from shardcompile.dispatch import path_of
from shardcompile.errors import ShardError
from shardcompile.operators.examples import Example
from shardcompile.sharded import Sharded
from shardcompile.tensor import ShardTensor
from shardcompile.testing.arrange import lay_out, uneven_sizes
from shardcompile.testing.one_process import RankThreads, raise_worst, standing_mesh
from shardcompile.testing.watch import ServiceWatch

WORLD = 3


@dataclass(frozen=True)
class Outcome:
    """How dispatch served a call.

    Attributes:
        partition: which tensors were sharded, and along which dim, such as ``self along dim 0``.
        how: one of `shardcompile.testing.watch.SERVICES`, or ``refused``.
        path: the path of dispatch, see `shardcompile.dispatch.path_of`.
        result: the placement of the first result.
        error: the error that refused the call.
    """

    partition: str
    how: str
    path: str = ""
    result: str = ""
    error: str = ""


class Ranks:
    """In-process ranks that run calls and observe their communication."""

    def __init__(self) -> None:
        self._threads = RankThreads(WORLD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.close()

    def outcomes_of(self, op: OpOverload, example: Example) -> list[Outcome]:
        """Runs a call in several layouts: each tensor sharded along each dim, the others replicated or sharded alike.

        Args:
            op: the overload.
            example: the call.
        """
        layouts = list(_layouts(example))
        ends = self._threads.run(lambda _: [_observe(op, example, partition, dims) for partition, dims in layouts])
        raise_worst(ends)
        found: list[Outcome] = ends[0].result
        return found


def _layouts(example: Example) -> Iterator[tuple[str, list[int | None]]]:
    """Yields the layouts of a call: a description, and the sharded dim of each tensor; None for a replicated one."""
    tensors = example.tensors
    for i, (name, x) in enumerate(tensors):
        for dim in range(x.ndim):
            yield f"{name} along dim {dim}", [dim if j == i else None for j in range(len(tensors))]
    shapes = {x.shape for _, x in tensors}
    if len(tensors) > 1 and len(shapes) == 1:
        for dim in range(tensors[0][1].ndim):
            yield f"all along dim {dim}", [dim] * len(tensors)


def _observe(op: OpOverload, example: Example, partition: str, dims: Sequence[int | None]) -> Outcome:
    mesh = standing_mesh()
    laid_out: list[Tensor] = []
    for (_, x), dim in zip(example.tensors, dims, strict=True):
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim)]
        sizes = {} if dim is None else {0: uneven_sizes(x.shape[dim], WORLD, 0)}
        laid_out.append(lay_out(x.clone(), mesh, placements, sizes, 0))
    args = example.with_tensors(laid_out)
    numel = min((x.numel() for (_, x), dim in zip(example.tensors, dims, strict=True) if dim is not None), default=1)
    with torch.no_grad():
        try:
            path = path_of(ShardTensor, op, args, {})
            with ServiceWatch(numel) as watch:
                out = op(*args)
        except (ShardError, RuntimeError, ValueError, NotImplementedError, IndexError) as error:
            return Outcome(partition, "refused", error=f"{type(error).__name__}: {error}")
    return Outcome(partition, watch.how(), path, _describe(out))


def _describe(out: object) -> str:
    first = out[0] if isinstance(out, (list, tuple)) and out else out
    if not isinstance(first, Sharded):
        return "plain"
    (placement,) = first._spec.layout.placements
    if isinstance(placement, Shard):
        return f"sharded along dim {placement.dim}"
    return "replicated" if isinstance(placement, Replicate) else "a pending sum"
