"""Embedding and selection by an index tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardcompile.rules.registry import register
from shardcompile.rules.strategy import OpCall, Strategy, TensorArg, along

aten = torch.ops.aten


def _embedding(call: OpCall) -> Iterable[Strategy]:
    indices = call.tensors[1].ndim
    yield from (along([None, d], [d]) for d in range(indices))
    yield along([1, None], [indices])


def _embedding_backward(call: OpCall) -> Iterable[Strategy]:
    grad, indices = call.tensors
    yield from (along([d, d], ["sum"]) for d in range(indices.ndim))
    yield along([grad.ndim - 1, None], [1])


def _index_select(call: OpCall) -> Iterable[Strategy]:
    source, index = call.tensors
    if source.ndim == 0 or index.ndim == 0:
        return
    dim = call.args[1] % source.ndim
    yield from (along([d, None], [d]) for d in range(source.ndim) if d != dim)
    yield along([None, 0], [dim])


def _index(call: OpCall) -> Iterable[Strategy]:
    """``x[..., i, j, ...]`` with neighbouring index tensors of equal rank; any other form is left to the fallback."""
    source = call.tensors[0]
    slots = call.args[1]
    at = [d for d, index in enumerate(slots) if index is not None]
    indices = [slots[d] for d in at]
    if not indices or at != list(range(at[0], at[-1] + 1)) or any(i.dtype is torch.bool for i in indices):
        return
    if len({index.ndim for index in indices}) != 1 or any(_broadcasts(i, indices[0]) for i in indices):
        return
    rank = indices[0].ndim
    for dim in range(source.ndim):
        if dim < at[0] or dim > at[-1]:
            out = dim if dim < at[0] else dim - len(at) + rank
            yield along([dim, *[None] * len(at)], [out])
    yield from (along([None, *[d] * len(at)], [at[0] + d]) for d in range(rank))


def _broadcasts(index: TensorArg, other: TensorArg) -> bool:
    return any(a is not b and a != b for a, b in zip(index.shape, other.shape, strict=True))


register(aten.embedding.default, _embedding)
register(aten.embedding_dense_backward.default, _embedding_backward)
register(aten.index_select.default, _index_select)
register(aten.index.Tensor, _index)
