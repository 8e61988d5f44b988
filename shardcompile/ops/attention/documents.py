"""Attention of packed documents: rows of several sequences one after the other. Each row sees its own sequence only.

The ops loop over documents at run time, so that a graph serves any number of them. Each is attended to by torch's fused
kernels, see `shardcompile.ops.attention.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardcompile.collectives import documents_of
from shardcompile.ops.attention.kernels import attend, attend_backward
from shardcompile.ops.support.precision import wide_dtype

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout]
_REST = "Tensor ends, SymInt total, SymInt first_query, SymInt first_key, bool causal, float scale"
_LIBRARY.define(f"attend_documents(Tensor query, Tensor key, Tensor value, {_REST}) -> (Tensor, Tensor)", tags=_TAGS)
_LIBRARY.define(
    "attend_documents_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor denominator, "
    f"{_REST}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_ops = torch.ops.shardcompile


def _pieces(
    ends: Tensor, total: int, first_query: int, queries: int, first_key: int, keys: int, causal: bool
) -> Iterator[tuple[slice, slice, int]]:
    """By document: its rows of the query's shard, the keys that it needs, and the shift of its scores."""
    for start, end in documents_of(ends, total):
        a, b = max(start, first_query), min(end, first_query + queries)
        c, d = start, b if causal else end
        if a < b:
            assert first_key <= c and d <= first_key + keys, "the keys of a document have been fetched"
            yield slice(a - first_query, b - first_query), slice(c - first_key, d - first_key), a - c


def _by_heads(x: Tensor, rows: slice) -> Tensor:
    """Rows [n, heads, features] as the kernels take them."""
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
    out, denominator = _fake_attend(query, key, value)
    for r, c, shift in _pieces(ends, total, first_query, query.shape[0], first_key, key.shape[0], causal):
        part, lse = attend(_by_heads(query, r), _by_heads(key, c), _by_heads(value, c), None, causal, shift, scale)
        out[r] = part[0].transpose(0, 1)
        denominator[:, r] = lse[0]
    return out, denominator


def _attend_documents_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    denominator: Tensor,
    ends: Tensor,
    total: int,
    first_query: int,
    first_key: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    for r, c, shift in _pieces(ends, total, first_query, query.shape[0], first_key, key.shape[0], causal):
        q, k, v, o, g = (_by_heads(x, s) for x, s in ((query, r), (key, c), (value, c), (out, r), (grad, r)))
        found = attend_backward(g, q, k, v, o, denominator[None, :, r], None, causal, shift, scale)
        for whole, part, rows in zip(grads, found, (r, c, c), strict=True):
            whole[rows] = part[0].transpose(0, 1)
    return grads  # type: ignore[return-value]


def _fake_attend(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    rows, heads, _features = query.shape
    out = query.new_empty([rows, heads, value.shape[-1]])
    return out, query.new_empty([heads, rows], dtype=wide_dtype(query.dtype))


def _fake_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ends, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, ends)


def _gradients(ctx: Any, grad: Tensor, _: object) -> tuple[object, ...]:
    *tensors, ends = ctx.saved_tensors
    grads = _ops.attend_documents_backward(grad, *tensors, ends, *ctx.rest)
    return (*grads, None, *[None] * len(ctx.rest))


_LIBRARY.impl("attend_documents", _attend_documents, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_documents_backward", _attend_documents_backward, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::attend_documents", _fake_attend, lib=_LIBRARY)
torch.library.register_fake("shardcompile::attend_documents_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("shardcompile::attend_documents", _gradients, setup_context=_keep, lib=_LIBRARY)

attend_documents = _ops.attend_documents.default
"""Attention within documents. Takes rows of the query [n, heads, features], keys [m, heads, features] and values
(which may have fewer heads); where documents begin and end; the number of all rows; the numbers of the first row of
query and key; whether a row sees only rows in front of it; and a factor of the scores. Gives the result [n, heads,
features] and the logarithm of the softmax's denominator [heads, n]. Differentiable.
"""
