"""What collectives on local shards share at run time: where shards are, and memory for what arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.collectives import transport
from shardcompile.collectives.transport import Range
from shardcompile.errors import CollectiveError
from shardcompile.sharding import GroupPartition, carrier_of


def shards_of(total: int, dim: int, partition: GroupPartition, ranks: int, what: str) -> list[Range]:
    """Ranges of all shards along a dim.

    Args:
        total: its size.
        dim: for messages.
        sharded: of the group.
        ranks: in the group.
        what: the op, for messages.

    Raises:
        CollectiveError: the shards do not add up to the size.
    """
    sizes = partition.shards(total, ranks)
    if sum(sizes) != total:
        raise CollectiveError(f"{what}: shard sizes {sizes} along dim {dim} add up to {sum(sizes)}, not to {total}")
    return transport.running_ends(sizes)


def check_shard(shape: Sequence[int], dim: int, shard: Range, rank: int, what: str) -> None:
    """Refuse a shard that is not what its layout says.

    Raises:
        CollectiveError: it has another size.
    """
    if shape[dim] != shard[1] - shard[0]:
        raise CollectiveError(
            f"{what}: rank {rank} of the group holds {shape[dim]} rows along dim {dim} (shape {tuple(shape)}), "
            f"its layout says {shard[1] - shard[0]}"
        )


def new_rows(x: Tensor, dim: int, size: Any) -> Tensor:
    """An uninitialised flat tensor for `x` with another size of `dim`."""
    return x.new_empty([math.prod([size, *(s for d, s in enumerate(x.shape) if d != dim)])])


def dense_copy(x: Tensor) -> Tensor:
    """A contiguous copy, also of elements that torch copies as integers only."""
    carrier = carrier_of(x.dtype)
    if carrier is x.dtype:
        return x.clone(memory_format=torch.contiguous_format)
    return x.view(carrier).clone(memory_format=torch.contiguous_format).view(x.dtype)


def as_rows(flat: Tensor, x: Tensor, dim: int, size: int) -> Tensor:
    """A flat tensor as rows along `dim` of one that is otherwise like `x`, rows first."""
    return flat.view([size, *(s for d, s in enumerate(x.shape) if d != dim)])


def with_size(x: Tensor, dim: int, size: object) -> list[Any]:
    """A shape with another size of `dim`."""
    return [size if d == dim else s for d, s in enumerate(x.shape)]


def other_sizes(x: Tensor, *dims: int) -> tuple[int, ...]:
    """The sizes of all dims but those that change."""
    return tuple([n for d, n in enumerate(x.shape) if d not in dims])


def sizes_of(ranges: Sequence[Range]) -> tuple[int, ...]:
    """How many rows are in each range."""
    return tuple([b - a for a, b in ranges])


def ends_of(ranges: Sequence[Range]) -> tuple[int, ...]:
    """Where each range begins and ends."""
    return tuple([n for r in ranges for n in r])
