"""Blocks in the reverse order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.blocks import as_rows, new_rows, other_extents
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.traffic import GroupBlocks, Member, Traffic, is_number, nbytes_of
from shardcompile.layout import IntLike


class MirrorBlocks(NamedTuple):
    """Arguments of `mirror_blocks`.

    Attributes:
        input: this rank's block.
        dim: that is cut.
        block: how many rows this rank gets.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    block: IntLike
    group_name: str


def _run(a: MirrorBlocks) -> Tensor:
    """The block of the rank that is as far from the last one as this rank is from the first."""
    group, x, block = compat.process_group(a.group_name), a.input, int(a.block)
    peer = group.size() - 1 - group.rank()
    out = new_rows(x, a.dim, block)
    rows, target = transport.rows_first(x, a.dim), as_rows(out, x, a.dim, block)
    # Also by the rank in the middle: ranks count their calls.
    call = MIRROR_BLOCKS.enter(group, x.dtype, a.dim, other_extents(x, a.dim))
    if peer == group.rank():
        target.copy_(rows)
    else:
        transport.complete(out, call, transport.exchange(call, [(peer, rows)], [(peer, target)]))
    return out


def _adjoint(a: MirrorBlocks, shape: torch.Size, grad: Tensor) -> Tensor:
    return MIRROR_BLOCKS.start(a._replace(input=grad, block=shape[a.dim])).wait()


def _members(a: MirrorBlocks, n: int | None) -> list[Member]:
    put, get = (GroupBlocks(None, is_number(extent)) for extent in (a.input.shape[a.dim], a.block))
    return [Member(put, get, nbytes_of(a.input))]


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    payload = sum(m.nbytes for m in members)
    return Traffic(payload, n * payload)


MIRROR_BLOCKS = Descriptor(
    "mirror_blocks",
    MirrorBlocks,
    _run,
    extents=lambda a: {a.dim: a.block},
    adjoint=_adjoint,
    inverse=lambda a, back: a._replace(input=back.input, block=back.block),
    members=_members,
    traffic=_traffic,
    states=("dim", "other extents"),
    of_one_rank=True,
)
