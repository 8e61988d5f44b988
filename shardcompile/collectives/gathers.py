"""All-gather and reduce-scatter of blocks of any sizes: each the other's adjoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.blocks import as_rows, blocks_of, check_block, new_rows, other_extents, sizes_of
from shardcompile.collectives.descriptor import Descriptor, Joins
from shardcompile.collectives.traffic import blocks_to_all, gathered, scattered, size_with
from shardcompile.errors import CollectiveError
from shardcompile.layout import GroupCut, IntLike


class AllGatherV(NamedTuple):
    """Arguments of `all_gather_v`.

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


class ReduceScatterV(NamedTuple):
    """Arguments of `reduce_scatter_v`.

    Attributes:
        input: a term.
        dim: that is divided.
        block: how many rows this rank gets.
        reduce_op: the reduction.
        cut: the blocks.
        group_name: the ranks.
    """

    input: Tensor
    dim: int
    block: IntLike
    reduce_op: str
    cut: GroupCut
    group_name: str


def _gather(a: AllGatherV) -> Tensor:
    group, x, total = compat.process_group(a.group_name), a.input, int(a.total)
    blocks = blocks_of(total, a.dim, a.cut, group.size(), "all_gather_v")
    check_block(x.shape, a.dim, blocks[group.rank()], group.rank(), "all_gather_v")
    out = new_rows(x, a.dim, total)
    rows = transport.rows_first(x, a.dim)
    held = sizes_of(blocks)
    call = ALL_GATHER_V.enter(group, x.dtype, a.dim, held, other_extents(x, a.dim))
    works = transport.gather_rows(call, rows, held, as_rows(out, x, a.dim, total))
    transport.complete(out, call, works)
    return out


def _scatter(a: ReduceScatterV) -> Tensor:
    x, block = a.input, int(a.block)
    transport.check_reduction(a.reduce_op, x.dtype)
    group = compat.process_group(a.group_name)
    blocks = blocks_of(x.shape[a.dim], a.dim, a.cut, group.size(), "reduce_scatter_v")
    rows = transport.rows_first(x, a.dim)
    out = new_rows(x, a.dim, block)
    held = sizes_of(blocks)
    call = REDUCE_SCATTER_V.enter(group, x.dtype, a.dim, held, other_extents(x, a.dim), of=a.reduce_op)
    target = as_rows(out, x, a.dim, block)
    transport.complete(out, call, *transport.reduce_scatter_rows(call, rows, held, a.reduce_op, target))
    return out


def _gather_adjoint(a: AllGatherV, shape: torch.Size, grad: Tensor) -> Tensor:
    back = ReduceScatterV(grad, a.dim, shape[a.dim], "sum", a.cut, a.group_name)
    return REDUCE_SCATTER_V.start(back).wait()


def _scatter_adjoint(a: ReduceScatterV, shape: torch.Size, grad: Tensor) -> Tensor:
    if a.reduce_op not in ("sum", "avg"):
        raise CollectiveError(f"reduce_scatter_v with {a.reduce_op} has no gradient; only sum and avg have")
    if a.reduce_op == "avg":
        grad = grad / compat.process_group(a.group_name).size()
    return ALL_GATHER_V.start(AllGatherV(grad, a.dim, shape[a.dim], a.cut, a.group_name)).wait()


def _cuts(a: Any) -> list[GroupCut]:
    return [a.cut]


ALL_GATHER_V = Descriptor(
    "all_gather_v",
    AllGatherV,
    _gather,
    extents=lambda a: {a.dim: a.total},
    adjoint=_gather_adjoint,
    members=lambda a, n: [gathered(a.input, a.dim, a.total, a.cut, n)],
    traffic=blocks_to_all,
    whole=lambda a: size_with(a.input, a.dim, a.total),
    source=lambda a: (a.total, a.cut),
    joins=Joins("all_gather_bucket", _cuts, uneven=True),
    states=("dim", "in blocks of", "other extents"),
    told=True,
    as_integers=True,
)

REDUCE_SCATTER_V = Descriptor(
    "reduce_scatter_v",
    ReduceScatterV,
    _scatter,
    extents=lambda a: {a.dim: a.block},
    adjoint=_scatter_adjoint,
    members=lambda a, n: [scattered(a.input, a.dim, a.block, a.cut, n)],
    traffic=blocks_to_all,
    source=lambda a: (a.input.shape[a.dim], a.cut),
    joins=Joins("reduce_scatter_bucket", _cuts, uneven=True),
    states=("dim", "in blocks of", "other extents"),
    moves_rows=False,
)
