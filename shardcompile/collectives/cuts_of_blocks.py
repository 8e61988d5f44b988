"""The cut of which every rank holds a block, found out or stated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives.blocks import check_block
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.pending import wait
from shardcompile.collectives.traffic import GroupBlocks, Member, even_gather, is_number
from shardcompile.errors import CollectiveError
from shardcompile.layout import Cut, IntLike, digest_of


class GatherCut(NamedTuple):
    """Arguments of `gather_cut`.

    Attributes:
        input: this rank's block.
        dim: that is cut.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    group_name: str


class StateCut(NamedTuple):
    """Arguments of `state_cut`.

    Attributes:
        input: this rank's block.
        dim: that is cut.
        sizes: of all blocks.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    sizes: list[IntLike]
    group_name: str


def symbolic_cut(x: Tensor, dim: int, sizes: Sequence[IntLike] | None, group_name: str) -> tuple[IntLike, IntLike]:
    """Global extent and key of the cut of which `x` is this rank's block, as symbols that are known at run time.

    Args:
        x: the block.
        dim: the dim that is cut.
        sizes: of all blocks; None to ask the other ranks.
        group_name: the ranks.
    """
    x = x.detach()
    if sizes is None:
        both = wait(GATHER_CUT.packet(x, dim, group_name))
    else:
        both = STATE_CUT.packet(x, dim, sizes, group_name)
    extent, key = both.unbind()
    total = compat.keep_symbol(extent.item())
    torch._check(total >= x.shape[dim])
    return total, compat.keep_symbol(key.item())


def _gather(a: GatherCut) -> Tensor:
    """Global extent and key: [2], int64, on the CPU."""
    group, x, dim = compat.process_group(a.group_name), a.input, a.dim
    rest = [x.ndim, *(s for d, s in enumerate(x.shape) if d != dim)]
    mine = torch.tensor([x.shape[dim], digest_of(repr((str(x.dtype), dim, rest)))], device=x.device)
    started = torch.ops._c10d_functional.all_gather_into_tensor(mine, group.size(), a.group_name)
    rows = wait(started).view(group.size(), 2).tolist()
    other = next((i for i, r in enumerate(rows) if r[1] != rows[0][1]), None)
    if other is not None:
        raise CollectiveError(
            f"the blocks do not belong together: dtype or extents other than that of dim {dim} are not the same on "
            f"ranks 0 and {other} of the group; here {x.dtype}, {tuple(x.shape)}"
        )
    return _extent_and_key([r[0] for r in rows])


def _state(a: StateCut) -> Tensor:
    """Global extent and key: [2], int64, on the CPU."""
    group, sizes = compat.process_group(a.group_name), [int(n) for n in a.sizes]
    if len(sizes) != group.size():
        raise CollectiveError(f"sharding_shapes has {len(sizes)} sizes for a mesh dim of {group.size()} ranks: {sizes}")
    check_block(a.input.shape, a.dim, (0, sizes[group.rank()]), group.rank(), "from_local")
    return _extent_and_key(sizes)


def _extent_and_key(sizes: list[int]) -> Tensor:
    """On the CPU, where they are read: on a GPU the host would have to wait for it."""
    cut = Cut.of_sizes([0], [len(sizes)], sizes)
    return torch.tensor([cut.extent, cut.key], device="cpu")


def _fake(a: GatherCut | StateCut) -> Tensor:
    return a.input.new_empty([2], dtype=torch.int64, device="cpu")


GATHER_CUT = Descriptor(
    "gather_cut",
    GatherCut,
    _gather,
    fake=_fake,
    members=lambda a, n: [Member(GroupBlocks(None, is_number(a.input.shape[a.dim])), None, 16)],
    traffic=even_gather,
    of_one_rank=True,
    told=True,
    moves_rows=False,
)

STATE_CUT = Descriptor(
    "state_cut",
    StateCut,
    _state,
    fake=_fake,
    communicates=False,
)
