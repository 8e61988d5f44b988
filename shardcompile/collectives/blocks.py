"""What collectives on blocks share at run time: where blocks are, and memory for what arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.collectives import transport
from shardcompile.collectives.transport import Range
from shardcompile.errors import CollectiveError
from shardcompile.layout import GroupCut, carrier_of


def blocks_of(total: int, dim: int, cut: GroupCut, ranks: int, what: str) -> list[Range]:
    """Ranges of all blocks along a dim.

    Args:
        total: its extent.
        dim: for messages.
        cut: of the group.
        ranks: in the group.
        what: the op, for messages.

    Raises:
        CollectiveError: the blocks do not add up to the extent.
    """
    sizes = cut.blocks(total, ranks)
    if sum(sizes) != total:
        raise CollectiveError(f"{what}: block sizes {sizes} along dim {dim} add up to {sum(sizes)}, not to {total}")
    return transport.running_ends(sizes)


def check_block(shape: Sequence[int], dim: int, block: Range, rank: int, what: str) -> None:
    """Refuse a block that is not what its layout says.

    Raises:
        CollectiveError: it has another extent.
    """
    if shape[dim] != block[1] - block[0]:
        raise CollectiveError(
            f"{what}: rank {rank} of the group holds {shape[dim]} rows along dim {dim} (shape {tuple(shape)}), "
            f"its layout says {block[1] - block[0]}"
        )


def new_rows(x: Tensor, dim: int, extent: Any) -> Tensor:
    """An uninitialised flat tensor for `x` with another extent of `dim`."""
    return x.new_empty([math.prod([extent, *(s for d, s in enumerate(x.shape) if d != dim)])])


def dense_copy(x: Tensor) -> Tensor:
    """A contiguous copy, also of elements that torch copies as integers only."""
    carrier = carrier_of(x.dtype)
    if carrier is x.dtype:
        return x.clone(memory_format=torch.contiguous_format)
    return x.view(carrier).clone(memory_format=torch.contiguous_format).view(x.dtype)


def as_rows(flat: Tensor, x: Tensor, dim: int, extent: int) -> Tensor:
    """A flat tensor as rows along `dim` of one that is otherwise like `x`, rows first."""
    return flat.view([extent, *(s for d, s in enumerate(x.shape) if d != dim)])


def with_extent(x: Tensor, dim: int, extent: object) -> list[Any]:
    """A shape with another extent of `dim`."""
    return [extent if d == dim else s for d, s in enumerate(x.shape)]


def other_extents(x: Tensor, *dims: int) -> tuple[int, ...]:
    """The extents of all dims but those that change."""
    return tuple([n for d, n in enumerate(x.shape) if d not in dims])


def sizes_of(ranges: Sequence[Range]) -> tuple[int, ...]:
    """How many rows are in each range."""
    return tuple([b - a for a, b in ranges])


def ends_of(ranges: Sequence[Range]) -> tuple[int, ...]:
    """Where each range begins and ends."""
    return tuple([n for r in ranges for n in r])
