"""Sorting along a cut dim: rows go where the order says, and the sorted rows are cut as those were."""

from __future__ import annotations

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import sort_rows
from shardcompile.layout import Layout, contiguous_stride
from shardcompile.ops import state
from shardcompile.ops.view.rows import moved, reduced, wrap
from shardcompile.sharded import Sharded

aten = torch.ops.aten


def sort(x: Sharded, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """``aten.sort`` of a tensor of one dim that is cut by one mesh dim."""
    if not isinstance(x, Sharded) or x.ndim != 1 or x.dtype.is_complex:
        return NotImplemented
    x = reduced(x)
    layout = x._spec.layout
    cut = layout.cuts[0]
    if cut is None or len(cut.mesh_dims) > 1 or cut.runs > 1:
        return NotImplemented
    with compat.unrecorded_symbols(x._local_tensor):
        rows, numbers, found = sort_rows(x._local_tensor, cut, layout.mesh, descending)
        there = Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, [found])
        parts = [_at_home(x, part, there, layout) for part in (rows, numbers)]
    return parts[0], parts[1]


def _at_home(x: Sharded, part: Tensor, there: Layout, home: Layout) -> Tensor:
    """A sorted column in the blocks of what was sorted."""
    stride = contiguous_stride(home.shape)
    column = wrap(x, part, there.with_dtype(part.dtype), stride)
    wanted = home.with_dtype(part.dtype)
    return wrap(x, moved(column, wanted), wanted, stride)


def stable_sort(
    x: Sharded, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """``aten.sort.stable``: every order of rows here is stable."""
    return sort(x, dim, descending)


state(aten.sort.default, sharded=sort)
state(aten.sort.stable, sharded=stable_sort)
