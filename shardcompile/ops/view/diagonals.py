"""Triangular and diagonal ops: which elements they keep follows from row and column indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardcompile.ops import NotServed, state
from shardcompile.ops.record import Run
from shardcompile.ops.support.global_meta import global_meta

aten = torch.ops.aten


def _triangle(keeps: Callable[[Tensor, int], Tensor]) -> Run:
    """Makes `tril` or `triu` of sharded matrices: a mask of row and column indices says which elements to keep."""

    def decomposed(x: Tensor, diagonal: int = 0) -> Tensor | NotServed:
        if x.ndim < 2:
            return NotServed("the input has fewer than 2 dims")
        rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
        zero = torch.zeros((), dtype=x.dtype, device=x.device)  # a Python scalar would promote bools to ints
        return torch.where(keeps(torch.arange(x.shape[-1], device=x.device) - rows, diagonal), x, zero)

    return decomposed


def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Masks the diagonal by row and column indices; element k of `src` is in row ``k - min(offset, 0)``."""
    global_meta(aten.diagonal_scatter.default, (x, src, offset, dim1, dim2), {})
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    count = src.shape[-1]
    if isinstance(count, int) and count == 0:
        return x.clone()
    rows, columns = (torch.arange(x.shape[d], device=x.device) for d in (dim1, dim2))
    indices = (rows + min(offset, 0)).clamp(min=0, max=count - 1)
    values = aten.index_select.default(src, src.ndim - 1, indices)
    values = values.movedim(-1, dim1 - (dim2 < dim1)).unsqueeze(dim2)
    broadcast = [i.reshape([-1 if e == d else 1 for e in range(x.ndim)]) for d, i in ((dim1, rows), (dim2, columns))]
    return torch.where(broadcast[1] - broadcast[0] == offset, values, x)


state(aten.tril.default, sharded=_triangle(torch.le))
state(aten.triu.default, sharded=_triangle(torch.ge))
state(aten.diagonal_scatter.default, sharded=_diagonal_scatter)
