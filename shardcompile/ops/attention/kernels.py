"""Attention of a shard of queries over a shard of keys, by torch's fused kernels.

The ops decide at run time what the kernels cannot be asked while tracing: whether a shard is empty, which kernels
refuse or crash on, and where its rows and columns lie in the whole matrix of scores. A causal mask then divides a shard
of scores into a rectangle in which all counts and a square that is causal by itself; their results are merged by their
denominators (Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023). So no shard of scores is
ever held, nor a mask of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardcompile.ops.support.precision import HALVES, wide_dtype
from shardcompile.sharding import IntLike

aten = torch.ops.aten
_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
# A CUDA graph may hold them: it is made for numbers that come in, sizes and `shift`, and nothing else decides.
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout]
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, SymInt shift, float scale) "
    "-> (Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "attend_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor denominator, "
    "Tensor? mask, bool causal, SymInt shift, float scale) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_LIBRARY.define(
    "attend_more(Tensor out, Tensor denominator, Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
    "SymInt shift, float scale) -> (Tensor, Tensor)",
    tags=_TAGS,
)
Shape = Sequence[int]
_FLASH_FEATURES = 256
_ALIGNED_SCORES = 16
"""Elements to which rows of a mask have to be aligned for the memory-efficient kernel."""


class Piece(NamedTuple):
    """Rows and columns of a shard of scores that a kernel computes at once.

    Attributes:
        rows: of the query.
        columns: rows of the key.
        square: whether only the columns up to a row's own number in the piece count.
    """

    rows: slice
    columns: slice
    square: bool


def pieces_of(rows: int, columns: int, causal: bool, shift: int) -> list[Piece]:
    """How a shard of scores is computed.

    Args:
        rows: of the query's shard.
        columns: of the key's shard.
        causal: whether row i sees the columns up to ``i + shift`` only.
        shift: where the shard lies: its first row's number less its first column's.

    Returns:
        Pieces that are not empty, at most two for any row.
    """
    if not causal:
        parts = [(0, rows, 0, columns, False)]
    else:
        first = min(max(-shift, 0), rows)  # rows before it see nothing
        before = min(max(shift, 0), columns)  # columns that all rows see
        last = first + min(columns - before, rows - first)
        parts = [
            (first, last, 0, before, False),
            (first, last, before, before + last - first, True),
            (last, rows, 0, columns, False),
        ]
    return [Piece(slice(a, b), slice(c, d), square) for a, b, c, d, square in parts if a < b and c < d]


class _Inputs(NamedTuple):
    """What a kernel attends with, forward and backward."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


_Gradients = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""


@dataclass(frozen=True)
class _Kernels:
    """A pair of torch's fused kernels.

    Attributes:
        forward: from the inputs to the result and the logarithm of the softmax's denominator.
        backward: from the result's gradient, the inputs, the result and the logarithm to the gradients.
    """

    forward: Callable[[_Inputs], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, _Inputs, Tensor, Tensor], _Gradients]


def _cpu(x: _Inputs) -> tuple[Tensor, Tensor]:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    features, of_values = x.query.shape[-1], x.value.shape[-1]
    widest = max(features, of_values)  # the kernel takes as many of all three
    q, k, v = (_with_features(t, widest) for t in x[:3])
    out, denominator = op(q, k, v, 0.0, x.causal, attn_mask=x.mask, scale=x.scale)
    return out[..., :of_values], denominator


def _cpu_backward(grad: Tensor, x: _Inputs, out: Tensor, lse: Tensor) -> _Gradients:
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    features, of_values = x.query.shape[-1], x.value.shape[-1]
    widest = max(features, of_values)
    grad, q, k, v, out = (_with_features(t, widest) for t in (grad, *x[:3], out))
    grad_q, grad_k, grad_v = op(grad, q, k, v, out, lse, 0.0, x.causal, attn_mask=x.mask, scale=x.scale)
    return grad_q[..., :features], grad_k[..., :features], grad_v[..., :of_values]


def _with_features(x: Tensor, features: int) -> Tensor:
    """Pad the features of each row with zeros, which change no product."""
    return x if x.shape[-1] == features else aten.constant_pad_nd(x, [0, features - x.shape[-1]])


def _flash(x: _Inputs) -> tuple[Tensor, Tensor]:
    op = aten._scaled_dot_product_flash_attention.default
    out, denominator = op(*x[:3], 0.0, x.causal, False, scale=x.scale)[:2]
    return out, denominator


def _flash_backward(grad: Tensor, x: _Inputs, out: Tensor, lse: Tensor) -> _Gradients:
    op = aten._scaled_dot_product_flash_attention_backward.default
    state = x.query.new_zeros(2, dtype=torch.uint64)  # of random numbers, of which none are drawn
    rows, columns = x.query.shape[2], x.key.shape[2]
    args = (out, lse.contiguous(), None, None, rows, columns, 0.0, x.causal, state, state[:0])
    grad_q, grad_k, grad_v = op(grad, *x[:3], *args, scale=x.scale)
    return grad_q, grad_k, grad_v


def _efficient(x: _Inputs) -> tuple[Tensor, Tensor]:
    op = aten._scaled_dot_product_efficient_attention.default
    q, k, v = _with_equal_heads(x)
    out, denominator = op(q, k, v, _as_bias(x), True, 0.0, x.causal, scale=x.scale)[:2]
    return out, denominator[..., : q.shape[2]]  # it is padded


def _efficient_backward(grad: Tensor, x: _Inputs, out: Tensor, lse: Tensor) -> _Gradients:
    op = aten._scaled_dot_product_efficient_attention_backward.default
    lse = aten.constant_pad_nd(lse, [0, -lse.shape[-1] % 32], float("inf"))
    state = x.query.new_zeros((), dtype=torch.int64)
    wanted = [True, True, True, False]
    args = (_as_bias(x), out, lse, state, state, 0.0, wanted, x.causal)
    grad_q, grad_k, grad_v, _ = op(grad, *_with_equal_heads(x), *args, scale=x.scale)
    heads = x.key.shape[1]
    return grad_q, summed_heads(grad_k, heads), summed_heads(grad_v, heads)


def _as_bias(x: _Inputs) -> Tensor | None:
    """A mask of full size whose rows are aligned."""
    if x.mask is None:
        return None
    columns = x.key.shape[2]
    padded = aten.constant_pad_nd(x.mask.expand(*x.mask.shape[:-1], columns), [0, -columns % _ALIGNED_SCORES])
    return padded[..., :columns].expand(*x.query.shape[:3], columns)


def _with_equal_heads(x: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    heads = x.query.shape[1]
    return x.query, repeated_heads(x.key, heads), repeated_heads(x.value, heads)


def repeated_heads(x: Tensor, heads: IntLike) -> Tensor:
    """Repeat heads of keys or values [batch, heads, rows, features] for each head of the query that uses them.

    Args:
        x: a plain or sharded tensor.
        heads: the query's.
    """
    batch, own, rows, features = x.shape
    if own is heads or own == heads:
        return x
    return x.unsqueeze(2).expand(batch, own, heads // own, rows, features).reshape(batch, heads, rows, features)


def summed_heads(x: Tensor, heads: IntLike) -> Tensor:
    """Inverse of `repeated_heads` for gradients.

    Args:
        x: a plain or sharded tensor.
        heads: those of the keys or values.
    """
    batch, many, rows, features = x.shape
    if many is heads or many == heads:
        return x
    return x.reshape(batch, heads, many // heads, rows, features).sum(2)


_ON_CPU = _Kernels(_cpu, _cpu_backward)
_FLASH = _Kernels(_flash, _flash_backward)
_EFFICIENT = _Kernels(_efficient, _efficient_backward)


def _kernels(q: Tensor, v: Tensor, mask: Tensor | None) -> _Kernels:
    """The fastest kernels that take these tensors."""
    if q.device.type == "cpu":
        return _ON_CPU
    features = q.shape[-1]
    fits_flash = features == v.shape[-1] and features % 8 == 0 and features <= _FLASH_FEATURES
    return _FLASH if mask is None and q.dtype in HALVES and fits_flash else _EFFICIENT


def _by_rows(like: Tensor, features: int | torch.SymInt, rows: int | torch.SymInt) -> Tensor:
    """Memory for a result, stored as the fused kernels do, so that heads can be joined by a view."""
    batch, heads = like.shape[:2]
    return like.new_empty([batch, rows, heads, features]).transpose(1, 2)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -float("inf"))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, shift: int, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    out = _by_rows(query, value.shape[-1], rows).zero_()
    denominator = query.new_full([batch, heads, rows], -float("inf"), dtype=wide_dtype(query.dtype))
    pieces = pieces_of(rows, key.shape[2], causal, shift) if batch and heads else []
    if not pieces:
        return out, denominator
    kernels, mask = _kernels(query, value, mask), _additive(mask, query.dtype)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    wide = out if len(pieces) == 1 else out.to(denominator.dtype)
    for r, c, square in pieces:
        part, lse = kernels.forward(_Inputs(query[:, :, r], key[:, :, c], value[:, :, c], mask, square, scale))
        if len(pieces) > 1:
            total = torch.logaddexp(denominator[:, :, r], lse)
            weight = (denominator[:, :, r] - total).exp().unsqueeze(-1)
            part, lse = wide[:, :, r] * weight + part * (lse - total).exp().unsqueeze(-1), total
        wide[:, :, r] = part
        denominator[:, :, r] = lse
    out = out if wide is out else out.copy_(wide)
    if mask is not None:  # kernels differ in what they give for a row of which nothing counts
        hidden = (mask == -float("inf")).all(-1)
        out.masked_fill_(hidden.unsqueeze(-1), 0)
        denominator.masked_fill_(hidden, -float("inf"))
    return out, denominator


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    denominator: Tensor,
    mask: Tensor | None,
    causal: bool,
    shift: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    grads = tuple(_by_rows(x, x.shape[-1], x.shape[2]).zero_() for x in (query, key, value))
    pieces = pieces_of(rows, key.shape[2], causal, shift) if batch and heads else []
    if not pieces:
        return grads  # type: ignore[return-value]
    kernels, mask = _kernels(query, value, mask), _additive(mask, query.dtype)
    grad, query, key, value, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, query, key, value, out))
    denominator = denominator.masked_fill(denominator == -float("inf"), 0)  # the scores alone make their weights 0
    wide = grads if len(pieces) == 1 else tuple(g.to(denominator.dtype) for g in grads)
    for r, c, square in pieces:
        inputs = _Inputs(query[:, :, r], key[:, :, c], value[:, :, c], mask, square, scale)
        grad_q, grad_k, grad_v = kernels.backward(grad[:, :, r], inputs, out[:, :, r], denominator[:, :, r])
        wide[0][:, :, r] += grad_q
        wide[1][:, :, c] += grad_k
        wide[2][:, :, c] += grad_v
    return grads if wide is grads else tuple(g.copy_(w) for g, w in zip(grads, wide, strict=True))  # type: ignore[return-value]


def _fake_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, shift: int, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    return _by_rows(query, value.shape[-1], rows), query.new_empty([batch, heads, rows], dtype=wide_dtype(query.dtype))


def _fake_attend_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return tuple(_by_rows(x, x.shape[-1], x.shape[2]) for x in (query, key, value))


def _attend_more(out: Tensor, denominator: Tensor, query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    part, lse = _attend(query, *others)
    total = torch.logaddexp(denominator, lse)
    before, now = (torch.where(x == -float("inf"), 0.0, (x - total).exp()).unsqueeze(-1) for x in (denominator, lse))
    return part.to(out.dtype).mul_(now).addcmul_(out, before), total  # in the memory of the part, which is ours


def _fake_attend_more(out: Tensor, denominator: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _by_rows(out, out.shape[-1], out.shape[2]), denominator.new_empty(denominator.shape)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_backward", _attend_backward, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::attend", _fake_attend, lib=_LIBRARY)
torch.library.register_fake("shardcompile::attend_backward", _fake_attend_backward, lib=_LIBRARY)
_LIBRARY.impl("attend_more", _attend_more, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::attend_more", _fake_attend_more, lib=_LIBRARY)

attend = torch.ops.shardcompile.attend.default
"""Attention. Takes query [batch, heads, rows, features], key and value (which may have fewer heads); a mask that is
added to the scores or tells which count (or None); whether row i sees the columns up to ``i + shift`` only; and a
factor of the scores. Gives the result and the logarithm of the softmax's denominator [batch, heads, rows]. A mask
and `causal` exclude each other.
"""

attend_backward = torch.ops.shardcompile.attend_backward.default
"""Takes the result's gradient, and the arguments and results of `attend`. Gives the gradients of query, key and
value. The result and the logarithm may be those of more keys than these: gradients of shards of keys add up.
"""

attend_more = torch.ops.shardcompile.attend_more.default
"""Merge more keys. Takes the results of `attend` over some keys (the first in the dtype of the second) and the
arguments of `attend` with other keys. Gives the results over all of them.
"""


def _count(shapes: Sequence[Sequence[int]], products: int) -> int:
    """Operations of products of scores with features, all of them: what a causal mask leaves out is not known."""
    (batch, heads, rows, features), (_, _, columns, _), (_, _, _, of_values) = shapes
    return products * batch * heads * rows * columns * (features + of_values)


@register_flop_formula(torch.ops.shardcompile.attend)
def _attend_flop(query: Shape, key: Shape, value: Shape, *rest: object, **named: object) -> int:
    return _count([query, key, value], 2)


@register_flop_formula(torch.ops.shardcompile.attend_more)
def _attend_more_flop(
    _: object, __: object, query: Shape, key: Shape, value: Shape, *rest: object, **named: object
) -> int:
    return _count([query, key, value], 2)


@register_flop_formula(torch.ops.shardcompile.attend_backward)
def _attend_backward_flop(_: object, query: Shape, key: Shape, value: Shape, *rest: object, **named: object) -> int:
    return _count([query, key, value], 5)
