"""Decompositions of ops around matrix products: added biases, the trace, and comparisons."""

from __future__ import annotations

import torch
from torch import Tensor

from shardcompile.ops import state

aten = torch.ops.aten


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _add(aten.mm.default(a, b), bias, beta, alpha)


def _add(product: Tensor, bias: Tensor, beta: float, alpha: float) -> Tensor:
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # by definition a NaN in the bias is ignored then
        return product
    return product + (bias if beta == 1 else bias * beta)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _add(aten.bmm.default(a, b), bias, beta, alpha)


def _addbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _add(aten.sum.dim_IntList(aten.bmm.default(a, b), [0]), bias, beta, alpha)


def _trace(x: Tensor) -> Tensor:
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return aten.sum.default(torch.where(rows.unsqueeze(-1) == columns, x, 0))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all().item())


def _allclose(a: Tensor, b: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    return bool(aten.isclose.default(a, b, rtol, atol, equal_nan).all().item())


state(aten.addmm.default, sharded=_addmm)
state(aten.baddbmm.default, sharded=_baddbmm)
state(aten.addbmm.default, sharded=_addbmm)
state(aten.trace.default, sharded=_trace)
state(aten.equal.default, sharded=_equal)
state(aten.allclose.default, sharded=_allclose)
