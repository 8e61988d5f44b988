"""This rank's block of a whole, and a whole of zeros but for this rank's block. Nothing is sent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives.blocks import blocks_of, with_extent
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.traffic import gathered, scattered
from shardcompile.layout import GroupCut, IntLike


class TakeBlock(NamedTuple):
    """Arguments of `take_block`.

    Attributes:
        input: the whole.
        dim: that is cut.
        block: how many rows this rank has.
        cut: the blocks.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    block: IntLike
    cut: GroupCut
    group_name: str


class PlaceBlock(NamedTuple):
    """Arguments of `place_block`.

    Attributes:
        input: this rank's block.
        dim: that is cut.
        total: what the blocks add up to.
        cut: the blocks.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    total: IntLike
    cut: GroupCut
    group_name: str


def _take(a: TakeBlock) -> Tensor:
    group = compat.process_group(a.group_name)
    blocks = blocks_of(a.input.shape[a.dim], a.dim, a.cut, group.size(), "take_block")
    own = a.input.narrow(a.dim, blocks[group.rank()][0], a.block)
    return own.clone(memory_format=torch.contiguous_format)


def _place(a: PlaceBlock) -> Tensor:
    group = compat.process_group(a.group_name)
    blocks = blocks_of(int(a.total), a.dim, a.cut, group.size(), "place_block")
    out = a.input.new_zeros(with_extent(a.input, a.dim, a.total))
    out.narrow(a.dim, blocks[group.rank()][0], a.input.shape[a.dim]).copy_(a.input)
    return out


def _take_adjoint(a: TakeBlock, shape: torch.Size, grad: Tensor) -> Tensor:
    back = PlaceBlock(grad, a.dim, shape[a.dim], a.cut, a.group_name)
    return PLACE_BLOCK.call(back)  # type: ignore[no-any-return]


def _place_adjoint(a: PlaceBlock, shape: torch.Size, grad: Tensor) -> Tensor:
    back = TakeBlock(grad, a.dim, shape[a.dim], a.cut, a.group_name)
    return TAKE_BLOCK.call(back)  # type: ignore[no-any-return]


TAKE_BLOCK = Descriptor(
    "take_block",
    TakeBlock,
    _take,
    fake=lambda a: a.input.new_empty(with_extent(a.input, a.dim, a.block)),
    adjoint=_take_adjoint,
    members=lambda a, n: [scattered(a.input, a.dim, a.block, a.cut, n)],
    communicates=False,
    as_integers=True,
)

PLACE_BLOCK = Descriptor(
    "place_block",
    PlaceBlock,
    _place,
    fake=lambda a: a.input.new_empty(with_extent(a.input, a.dim, a.total)),
    adjoint=_place_adjoint,
    members=lambda a, n: [gathered(a.input, a.dim, a.total, a.cut, n)],
    communicates=False,
    as_integers=True,
)
