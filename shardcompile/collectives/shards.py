"""Run-time helpers of collectives on local shards: the ranges of shards, shape checks, and flat result tensors."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.collectives import transport
from shardcompile.collectives.transport import Range
from shardcompile.errors import CollectiveError
from shardcompile.sharding import REMEMBERED, GroupPartition, transfer_dtype_of


class Shards(tuple[Range, ...]):
    """The ranges of all shards, in group order."""

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows in each range."""
        return tuple([b - a for a, b in self])

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The start and end of all ranges, flattened."""
        return tuple(itertools.chain.from_iterable(self))


def shards_of(total: int, dim: int, partition: GroupPartition, ranks: int, what: str) -> Shards:
    """Returns the ranges of all shards along a dim.

    Args:
        total: global size of the dim.
        dim: the dim, for messages.
        partition: the partition over the group.
        ranks: size of the group.
        what: the op, for messages.

    Raises:
        CollectiveError: the shard sizes do not add up to `total`.
    """
    return shards_of_sizes(partition.shards(total, ranks), total, dim, what)


def shards_of_sizes(sizes: tuple[int, ...], total: int, dim: int, what: str) -> Shards:
    """Returns `shards_of` for given shard sizes."""
    shards = _shards_of(sizes)
    end = shards[-1][1]
    if end != total:
        raise CollectiveError(f"{what}: shard sizes {sizes} along dim {dim} add up to {end}, not to {total}")
    return shards


@functools.lru_cache(REMEMBERED)
def _shards_of(sizes: tuple[int, ...]) -> Shards:
    return Shards(transport.running_ends(sizes))


def check_shard(shape: Sequence[int], dim: int, shard: Range, rank: int, what: str) -> None:
    """Checks that a local shard has the size that its layout states.

    Raises:
        CollectiveError: it has another size.
    """
    if shape[dim] != shard[1] - shard[0]:
        raise CollectiveError(
            f"{what}: rank {rank} of the group holds {shape[dim]} rows along dim {dim} (shape {tuple(shape)}), "
            f"its layout says {shard[1] - shard[0]}"
        )


def new_rows(x: Tensor, dim: int, size: Any) -> Tensor:
    """Returns an uninitialised flat tensor for the elements of `x` with another size of `dim`."""
    return x.new_empty([math.prod([size, *(s for d, s in enumerate(x.shape) if d != dim)])])


def dense_copy(x: Tensor) -> Tensor:
    """Returns a contiguous copy, as integers for dtypes without copy kernels."""
    transfer_dtype = transfer_dtype_of(x.dtype)
    if transfer_dtype is x.dtype:
        return x.clone(memory_format=torch.contiguous_format)
    return x.view(transfer_dtype).clone(memory_format=torch.contiguous_format).view(x.dtype)


def as_rows(flat: Tensor, x: Tensor, dim: int, size: int) -> Tensor:
    """Views a flat tensor in the shape of `x` with another size of `dim`, and `dim` moved to the front."""
    return flat.view([size, *(s for d, s in enumerate(x.shape) if d != dim)])


def with_size(x: Tensor, dim: int, size: object) -> list[Any]:
    """Returns the shape of `x` with another size of `dim`."""
    return [size if d == dim else s for d, s in enumerate(x.shape)]


def other_sizes(x: Tensor, *dims: int) -> tuple[int, ...]:
    """Returns the sizes of all dims but `dims`."""
    return tuple([n for d, n in enumerate(x.shape) if d not in dims])
