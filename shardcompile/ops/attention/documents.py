"""Attention within packed documents: sequences are concatenated along the rows, and each attends to itself only.

The ops loop over documents at run time, so that one graph serves any number of documents. Attention within a document
is computed by torch's fused kernels, see `shardcompile.ops.attention.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardcompile.collectives import documents_of
from shardcompile.compat.own_ops import LIBRARY, define_op
from shardcompile.ops.attention.kernels import attend, attend_backward
from shardcompile.ops.support.precision import wide_dtype

_REST = "Tensor ends, SymInt total, SymInt first_query, SymInt first_key, bool causal, float scale"


def _document_slices(
    ends: Tensor, total: int, first_query: int, queries: int, first_key: int, keys: int, causal: bool
) -> Iterator[tuple[slice, slice, int]]:
    """Yields, for each document with rows in the local query, these rows, its rows of the keys, and the shift."""
    for start, end in documents_of(ends, total):
        a, b = max(start, first_query), min(end, first_query + queries)
        c, d = start, b if causal else end
        if a < b:
            assert first_key <= c and d <= first_key + keys, "the keys of a document have been fetched"
            yield slice(a - first_query, b - first_query), slice(c - first_key, d - first_key), a - c


def _heads_first(x: Tensor, rows: slice) -> Tensor:
    """Returns rows of [n, heads, features] in the layout of the kernels: [1, heads, rows, features]."""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    total: int,
    first_query: int,
    first_key: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _fake_attend(query, key, value)
    for r, c, shift in _document_slices(ends, total, first_query, query.shape[0], first_key, key.shape[0], causal):
        part, part_lse = attend(
            _heads_first(query, r), _heads_first(key, c), _heads_first(value, c), None, causal, shift, scale
        )
        out[r] = part[0].transpose(0, 1)
        lse[:, r] = part_lse[0]
    return out, lse


def _attend_documents_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    total: int,
    first_query: int,
    first_key: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    for r, c, shift in _document_slices(ends, total, first_query, query.shape[0], first_key, key.shape[0], causal):
        q, k, v, o, g = (_heads_first(x, s) for x, s in ((query, r), (key, c), (value, c), (out, r), (grad, r)))
        part_grads = attend_backward(g, q, k, v, o, lse[None, :, r], None, causal, shift, scale)
        for full, part, rows in zip(grads, part_grads, (r, c, c), strict=True):
            full[rows] = part[0].transpose(0, 1)
    return grads  # type: ignore[return-value]


def _fake_attend(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows, heads, _features = query.shape
    out = query.new_empty([rows, heads, value.shape[-1]])
    return out, query.new_empty([heads, rows], dtype=wide_dtype(query.dtype))


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ends, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, ends)


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[object, ...]:
    *tensors, ends = ctx.saved_tensors
    grads = _attend_backward(grad, *tensors, ends, *ctx.rest)
    return (*grads, None, *[None] * len(ctx.rest))


_attend_backward = define_op(
    "attend_documents_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor denominator, "
    f"{_REST}) -> (Tensor, Tensor, Tensor)",
    _attend_documents_backward,
    _fake_backward,
)
attend_documents = define_op(
    f"attend_documents(Tensor query, Tensor key, Tensor value, {_REST}) -> (Tensor, Tensor)",
    _attend_documents,
    _fake_attend,
)
"""Attention within packed documents. Differentiable.

Takes rows of the query [n, heads, features]; rows of keys [m, heads, features] and values (which may have fewer heads);
the boundaries of the documents (``cu_seqlens``); the total number of rows; the global indices of the first row of the
query and of the first row of the keys; whether attention is causal; and the scale of the scores.

Returns the result [n, heads, features] and the logsumexp of the scores [heads, n].
"""

torch.library.register_autograd("shardcompile::attend_documents", _backward, setup_context=_setup_context, lib=LIBRARY)
