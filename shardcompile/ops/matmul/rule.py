"""Rules of products of matrices and vectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardcompile.ops.notation import multilinear
from shardcompile.ops.pointwise.rule import is_stretched
from shardcompile.ops.registry import register
from shardcompile.ops.strategy import OpCall, Strategy, TensorArg, along, partial
from shardcompile.sharding import IntLike

aten = torch.ops.aten


def _broadcast_dim(bias: TensorArg, dim: int, sizes: Sequence[IntLike]) -> int | None:
    """Returns the dim of a broadcast bias that runs along output dim `dim`, or None if it has no such dim."""
    own = dim - (len(sizes) - bias.ndim)
    return None if own < 0 or is_stretched(bias.shape[own], sizes[dim]) else own


def _addmm(call: OpCall) -> list[Strategy]:
    """``bias + a @ b``: the bias must be added once, so the contracted axis may not be sharded."""
    bias, a, b = call.tensors
    out = (a.shape[0], b.shape[1])
    return [
        along([_broadcast_dim(bias, 0, out), 0, None], [0]),
        along([_broadcast_dim(bias, 1, out), None, 1], [1]),
    ]


def _baddbmm(call: OpCall) -> list[Strategy]:
    bias, a, b = call.tensors
    out = (a.shape[0], a.shape[1], b.shape[2])
    return [
        along([_broadcast_dim(bias, 0, out), 0, 0], [0]),
        along([_broadcast_dim(bias, 1, out), 1, None], [1]),
        along([_broadcast_dim(bias, 2, out), None, 2], [2]),
    ]


def _differ(a: IntLike, b: IntLike) -> bool:
    return is_stretched(a, b) or is_stretched(b, a)


def _matmul(call: OpCall) -> Iterable[Strategy]:
    """A batched product with any number of batch dims. Torch decomposes the op; `ops.attention` calls it directly."""
    a, b = call.tensors
    rows, inner = a.ndim - 2, a.ndim - 1
    if a.ndim != b.ndim or a.ndim < 2 or any(_differ(a.shape[d], b.shape[d]) for d in range(rows)):
        return
    yield from (along([d, d], [d]) for d in range(rows))
    yield along([rows, None], [rows])
    yield along([None, inner], [inner])
    yield along([inner, rows], ["sum"])
    for op in ("sum", "avg"):
        yield partial([op, None], [op])
        yield partial([None, op], [op])


def _trilinear(call: OpCall) -> Iterable[Strategy]:
    """A product of three tensors, each of which is broadcast along some dims; some dims are summed over."""
    expand, total = [set(dims) for dims in call.args[3:6]], set(call.args[6])
    ndim = call.tensors[0].ndim + len(expand[0])
    for dim in range(ndim):
        dims = [None if dim in absent else dim - sum(d < dim for d in absent) for absent in expand]
        yield along(dims, ["sum" if dim in total else dim - sum(t < dim for t in total)])


register(aten._trilinear.default, _trilinear)
register(aten.matmul.default, _matmul)
register(aten.mm.default, multilinear("m k, k n -> m n"))
register(aten.bmm.default, multilinear("b m k, b k n -> b m n"))
register(aten.mv.default, multilinear("m k, k -> m"))
register(aten.dot.default, multilinear("k, k -> "))
register(aten.vdot.default, multilinear("k, k -> "))
register(aten.addmm.default, _addmm)
register(aten.baddbmm.default, _baddbmm)
