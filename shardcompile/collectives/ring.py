"""Blocks that travel a number of ranks on: each rank of a group gets the block of the one `by` places before it.

A rank holds its own block and one other at a time, where a gather holds all. So that no step begins before there is
room for what it brings, it can be told `after` which tensor it starts; a graph then has an edge that every compiler
keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.derived_cuts import block_size, derive
from shardcompile.collectives.ops import Pending, blocks_of, check_block
from shardcompile.layout import Cut, IntLike
from shardcompile.watch import enter

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_ARGUMENTS = (
    "Tensor input, int dim, SymInt total, SymInt block, int by, bool around, SymInt[] sizes, SymInt key, int[] nest, "
    "Tensor? after, str group_name"
)
for _name in ("fetch_block", "return_block"):
    _LIBRARY.define(
        f"{_name}({_ARGUMENTS}) -> Tensor",
        tags=[torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout],
    )

_ops = torch.ops.shardcompile
STEPS = (_ops.fetch_block, _ops.return_block)
"""The ops of this module. All of them communicate."""


class Ring:
    """The ranks along a mesh dim, of which each has a block of rows.

    Args:
        cut: of the rows, over one mesh dim.
        mesh: the mesh.
        around: whether the first ranks get blocks of the last ones; otherwise they get empty blocks.

    Attributes:
        ranks: how many there are.
    """

    def __init__(self, cut: Cut, mesh: DeviceMesh, *, around: bool) -> None:
        (mesh_dim,) = cut.mesh_dims
        self.ranks = mesh.shape[mesh_dim]
        self._cut, self._mesh, self._around = cut, mesh, around
        held = cut.group_ref(compat.coordinate(mesh) or ())
        self._arguments = (held.sizes, held.key, held.nest)
        self._group_name = compat.group_name_of(mesh, mesh_dim)

    def block(self, by: int) -> tuple[IntLike, IntLike]:
        """How many rows the block has that a rank gets, and which row of the whole dim is its first."""
        if by == 0:
            first = derive("located", [self._cut], [], self._cut.extent, self._mesh)[1]
            return block_size(self._cut, self._mesh), first
        shifted, first = derive("shifted", [self._cut], [by, int(self._around)], self._cut.extent, self._mesh)
        size = block_size(shifted, self._mesh)
        compat.suggest_hint(size, -(-compat.size_hint(self._cut.extent) // self.ranks))
        return size, first

    def fetch(self, rows: Tensor, by: int, after: Tensor | None = None) -> Pending:
        """Start to get the block of the rank `by` places before this one.

        Args:
            rows: this rank's block: [n, ...].
            by: 1 to ``ranks - 1``.
            after: what has to be there before it starts.
        """
        size, _ = self.block(by)
        return self._step(_ops.fetch_block, rows, size, by, after)

    def give_back(self, rows: Tensor, by: int, after: Tensor | None = None) -> Pending:
        """The adjoint of `fetch`: rows for a block that came go to the rank that it came from.

        A rank whose block nobody got receives zeros.
        """
        return self._step(_ops.return_block, rows, self.block(0)[0], by, after)

    def _step(self, op: Any, rows: Tensor, size: IntLike, by: int, after: Tensor | None) -> Pending:
        flat = op(rows, 0, self._cut.extent, size, by, self._around, *self._arguments, after, self._group_name)
        return Pending.of(flat, rows.shape, 0, size)


def _step(
    x: Tensor,
    dim: int,
    total: int,
    block: int,
    by: int,
    around: bool,
    sizes: list[int],
    key: int,
    nest: list[int],
    after: Tensor | None,
    group_name: str,
    *,
    back: bool,
) -> Tensor:
    group = compat.process_group(group_name)
    me, n = group.rank(), group.size()
    what = "return_block" if back else "fetch_block"
    held = blocks_of(total, dim, (sizes, key, nest), n, what)

    def other(distance: int) -> int | None:
        rank = me + distance
        return rank % n if around or 0 <= rank < n else None

    before, behind = other(-by), other(by)
    fetched = (0, 0) if before is None else held[before]
    check_block(x.shape, dim, fetched if back else held[me], me, what)
    source, target = (behind, before) if back else (before, behind)
    rows = transport.rows_first(x, dim)
    size = block * math.prod(rows.shape[1:])
    out = x.new_zeros([size]) if source is None else x.new_empty([size])
    details = ("by", "in blocks of", "other extents")
    call = enter(group, what, x.dtype, details, by, tuple([b - a for a, b in held]), tuple(rows.shape[1:]))
    sends = [] if target is None else [(target, rows)]
    receives = [] if source is None else [(source, out)]
    transport.complete(out, call, transport.exchange(call, sends, receives))
    return out


def _fake(x: Tensor, dim: int, total: Any, block: Any, *_: Any) -> Tensor:
    return x.new_empty([math.prod([block, *(n for d, n in enumerate(x.shape) if d != dim)])])


_IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "fetch_block": lambda *args: _step(*args, back=False),
    "return_block": lambda *args: _step(*args, back=True),
}
for _name, _real in _IMPLEMENTATIONS.items():
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    _traced = compat.lowered_when_traced(getattr(_ops, _name).default, _fake)
    torch.library.register_fake(f"shardcompile::{_name}", _traced, lib=_LIBRARY)
compat.count_as_collective(STEPS)
