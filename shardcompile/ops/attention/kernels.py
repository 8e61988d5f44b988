"""Attention of a local shard of queries over a shard of keys, by torch's fused kernels.

The ops decide at run time what a trace cannot know: whether a shard is empty, which kernels refuse or crash on, and
where its rows and columns are in the full matrix of scores. A causal mask divides the block of scores of a shard into
rectangles that are not masked and a square that is causal by itself. Their results are merged by online softmax (Liu,
Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023). The block of scores, or a mask of its size, is
never materialized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardcompile.compat import OpOverload
from shardcompile.compat.own_ops import define_op
from shardcompile.ops.support.precision import HALVES, wide_dtype
from shardcompile.sharding import IntLike

aten = torch.ops.aten
Shape = Sequence[int]
_FLASH_FEATURES = 256
_ALIGNED_SCORES = 16
"""Alignment of the rows of a mask, in elements, that the memory-efficient kernel requires."""


class Piece(NamedTuple):
    """A rectangle of the block of scores, which one kernel call computes.

    Attributes:
        rows: rows of the query.
        columns: rows of the key.
        square: whether the piece is causal by itself: row i attends to the columns up to i, counted within the piece.
    """

    rows: slice
    columns: slice
    square: bool


def pieces_of(rows: int, columns: int, causal: bool, shift: int) -> list[Piece]:
    """Divides a block of scores into the pieces that are not masked.

    Args:
        rows: number of rows of the query's shard.
        columns: number of rows of the key's shard.
        causal: whether row i attends to the columns up to ``i + shift`` only.
        shift: global index of the first row minus that of the first column.

    Returns:
        Pieces that are not empty, at most two for any row.
    """
    if not causal:
        parts = [(0, rows, 0, columns, False)]
    else:
        first = min(max(-shift, 0), rows)  # rows before it attend to nothing
        before = min(max(shift, 0), columns)  # columns to which all rows attend
        last = first + min(columns - before, rows - first)
        parts = [
            (first, last, 0, before, False),
            (first, last, before, before + last - first, True),
            (last, rows, 0, columns, False),
        ]
    return [Piece(slice(a, b), slice(c, d), square) for a, b, c, d, square in parts if a < b and c < d]


class _Inputs(NamedTuple):
    """Inputs of a kernel, forward and backward."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


_Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query, key and value."""


@dataclass(frozen=True)
class _Kernels:
    """A pair of torch's fused kernels.

    Attributes:
        forward: maps the inputs to the result and the logsumexp of the scores.
        backward: maps the gradient of the result, the inputs, the result and the logsumexp to the gradients.
    """

    forward: Callable[[_Inputs], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, _Inputs, Tensor, Tensor], _Gradients]


def _cpu(x: _Inputs) -> tuple[Tensor, Tensor]:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    features, value_features = x.query.shape[-1], x.value.shape[-1]
    widest = max(features, value_features)  # the kernel requires the same number for all three
    q, k, v = (_with_features(t, widest) for t in x[:3])
    out, lse = op(q, k, v, 0.0, x.causal, attn_mask=x.mask, scale=x.scale)
    return out[..., :value_features], lse


def _cpu_backward(grad: Tensor, x: _Inputs, out: Tensor, lse: Tensor) -> _Gradients:
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    features, value_features = x.query.shape[-1], x.value.shape[-1]
    widest = max(features, value_features)
    grad, q, k, v, out = (_with_features(t, widest) for t in (grad, *x[:3], out))
    grad_q, grad_k, grad_v = op(grad, q, k, v, out, lse, 0.0, x.causal, attn_mask=x.mask, scale=x.scale)
    return grad_q[..., :features], grad_k[..., :features], grad_v[..., :value_features]


def _with_features(x: Tensor, features: int) -> Tensor:
    """Pads the features of each row with zeros, which do not change dot products."""
    return x if x.shape[-1] == features else aten.constant_pad_nd(x, [0, features - x.shape[-1]])


def _flash(x: _Inputs) -> tuple[Tensor, Tensor]:
    op = aten._scaled_dot_product_flash_attention.default
    out, lse = op(*x[:3], 0.0, x.causal, False, scale=x.scale)[:2]
    return out, lse


def _flash_backward(grad: Tensor, x: _Inputs, out: Tensor, lse: Tensor) -> _Gradients:
    op = aten._scaled_dot_product_flash_attention_backward.default
    state = x.query.new_zeros(2, dtype=torch.uint64)  # of a random number generator; without dropout it is not used
    rows, columns = x.query.shape[2], x.key.shape[2]
    args = (out, lse.contiguous(), None, None, rows, columns, 0.0, x.causal, state, state[:0])
    grad_q, grad_k, grad_v = op(grad, *x[:3], *args, scale=x.scale)
    return grad_q, grad_k, grad_v


def _efficient(x: _Inputs) -> tuple[Tensor, Tensor]:
    op = aten._scaled_dot_product_efficient_attention.default
    q, k, v = _repeat_heads(x)
    out, lse = op(q, k, v, _aligned_mask(x), True, 0.0, x.causal, scale=x.scale)[:2]
    return out, lse[..., : q.shape[2]]  # the kernel pads it


def _efficient_backward(grad: Tensor, x: _Inputs, out: Tensor, lse: Tensor) -> _Gradients:
    op = aten._scaled_dot_product_efficient_attention_backward.default
    lse = aten.constant_pad_nd(lse, [0, -lse.shape[-1] % 32], float("inf"))
    state = x.query.new_zeros((), dtype=torch.int64)
    wanted = [True, True, True, False]
    args = (_aligned_mask(x), out, lse, state, state, 0.0, wanted, x.causal)
    grad_q, grad_k, grad_v, _ = op(grad, *_repeat_heads(x), *args, scale=x.scale)
    heads = x.key.shape[1]
    return grad_q, summed_heads(grad_k, heads), summed_heads(grad_v, heads)


def _aligned_mask(x: _Inputs) -> Tensor | None:
    """Returns the mask expanded to the shape of the scores, with aligned rows."""
    if x.mask is None:
        return None
    columns = x.key.shape[2]
    padded = aten.constant_pad_nd(x.mask.expand(*x.mask.shape[:-1], columns), [0, -columns % _ALIGNED_SCORES])
    return padded[..., :columns].expand(*x.query.shape[:3], columns)


def _repeat_heads(x: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
    heads = x.query.shape[1]
    return x.query, repeated_heads(x.key, heads), repeated_heads(x.value, heads)


def repeated_heads(x: Tensor, heads: IntLike) -> Tensor:
    """Repeats heads of keys or values [batch, heads, rows, features] for each query head that uses them.

    Args:
        x: a plain or sharded tensor.
        heads: number of query heads.
    """
    batch, kv_heads, rows, features = x.shape
    if kv_heads is heads or kv_heads == heads:
        return x
    return (
        x.unsqueeze(2).expand(batch, kv_heads, heads // kv_heads, rows, features).reshape(batch, heads, rows, features)
    )


def summed_heads(x: Tensor, heads: IntLike) -> Tensor:
    """Sums gradients over repeated heads: the adjoint of `repeated_heads`.

    Args:
        x: a plain or sharded tensor.
        heads: number of heads of the keys or values.
    """
    batch, query_heads, rows, features = x.shape
    if query_heads is heads or query_heads == heads:
        return x
    return x.reshape(batch, heads, query_heads // heads, rows, features).sum(2)


_ON_CPU = _Kernels(_cpu, _cpu_backward)
_FLASH = _Kernels(_flash, _flash_backward)
_EFFICIENT = _Kernels(_efficient, _efficient_backward)


def _kernels(q: Tensor, v: Tensor, mask: Tensor | None) -> _Kernels:
    """Returns the fastest kernels that support these tensors."""
    if q.device.type == "cpu":
        return _ON_CPU
    features = q.shape[-1]
    fits_flash = features == v.shape[-1] and features % 8 == 0 and features <= _FLASH_FEATURES
    return _FLASH if mask is None and q.dtype in HALVES and fits_flash else _EFFICIENT


def _new_result(like: Tensor, features: int | torch.SymInt, rows: int | torch.SymInt) -> Tensor:
    """Allocates a result, stored as [batch, rows, heads, features] like those of the fused kernels.

    Heads and features can then be flattened by a view.
    """
    batch, heads = like.shape[:2]
    return like.new_empty([batch, rows, heads, features]).transpose(1, 2)


def _as_additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -float("inf"))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, shift: int, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    out = _new_result(query, value.shape[-1], rows).zero_()
    lse = query.new_full([batch, heads, rows], -float("inf"), dtype=wide_dtype(query.dtype))
    pieces = pieces_of(rows, key.shape[2], causal, shift) if batch and heads else []
    if not pieces:
        return out, lse
    kernels, mask = _kernels(query, value, mask), _as_additive(mask, query.dtype)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    wide = out if len(pieces) == 1 else out.to(lse.dtype)
    for r, c, square in pieces:
        part, part_lse = kernels.forward(_Inputs(query[:, :, r], key[:, :, c], value[:, :, c], mask, square, scale))
        if len(pieces) > 1:
            total = torch.logaddexp(lse[:, :, r], part_lse)
            weight = (lse[:, :, r] - total).exp().unsqueeze(-1)
            part, part_lse = wide[:, :, r] * weight + part * (part_lse - total).exp().unsqueeze(-1), total
        wide[:, :, r] = part
        lse[:, :, r] = part_lse
    out = out if wide is out else out.copy_(wide)
    if mask is not None:  # kernels differ in the result of a row that is fully masked
        hidden = (mask == -float("inf")).all(-1)
        out.masked_fill_(hidden.unsqueeze(-1), 0)
        lse.masked_fill_(hidden, -float("inf"))
    return out, lse


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    shift: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    grads = tuple(_new_result(x, x.shape[-1], x.shape[2]).zero_() for x in (query, key, value))
    pieces = pieces_of(rows, key.shape[2], causal, shift) if batch and heads else []
    if not pieces:
        return grads  # type: ignore[return-value]
    kernels, mask = _kernels(query, value, mask), _as_additive(mask, query.dtype)
    grad, query, key, value, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, query, key, value, out))
    lse = lse.masked_fill(lse == -float("inf"), 0)  # the scores are -inf, so the weights are 0 anyway
    wide = grads if len(pieces) == 1 else tuple(g.to(lse.dtype) for g in grads)
    for r, c, square in pieces:
        inputs = _Inputs(query[:, :, r], key[:, :, c], value[:, :, c], mask, square, scale)
        grad_q, grad_k, grad_v = kernels.backward(grad[:, :, r], inputs, out[:, :, r], lse[:, :, r])
        wide[0][:, :, r] += grad_q
        wide[1][:, :, c] += grad_k
        wide[2][:, :, c] += grad_v
    return grads if wide is grads else tuple(g.copy_(w) for g, w in zip(grads, wide, strict=True))  # type: ignore[return-value]


def _fake_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, shift: int, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    return _new_result(query, value.shape[-1], rows), query.new_empty(
        [batch, heads, rows], dtype=wide_dtype(query.dtype)
    )


def _fake_attend_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return tuple(_new_result(x, x.shape[-1], x.shape[2]) for x in (query, key, value))


def _attend_more(out: Tensor, lse: Tensor, query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    part, part_lse = _attend(query, *others)
    total = torch.logaddexp(lse, part_lse)
    before, now = (torch.where(x == -float("inf"), 0.0, (x - total).exp()).unsqueeze(-1) for x in (lse, part_lse))
    return part.to(out.dtype).mul_(now).addcmul_(out, before), total  # in place: no one else holds the part


def _fake_attend_more(out: Tensor, lse: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _new_result(out, out.shape[-1], out.shape[2]), lse.new_empty(lse.shape)


# A CUDA graph may capture these ops: it is specialized on integer inputs, which are the sizes and `shift`, and these
# alone determine which kernels run.
attend = define_op(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, SymInt shift, float scale) "
    "-> (Tensor, Tensor)",
    _attend,
    _fake_attend,
    capturable=True,
)
"""Attention of a shard of queries over a shard of keys.

Takes query [batch, heads, rows, features]; key and value (which may have fewer heads); a mask, either additive or
boolean, or None; `causal`, by which row i attends to the columns up to ``i + shift`` only; `shift`; and the scale of
the scores. A mask and `causal` exclude each other.

Returns the result and the logsumexp of the scores [batch, heads, rows].
"""

attend_backward = define_op(
    "attend_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor denominator, "
    "Tensor? mask, bool causal, SymInt shift, float scale) -> (Tensor, Tensor, Tensor)",
    _attend_backward,
    _fake_attend_backward,
    capturable=True,
)
"""The backward op of `attend`.

Takes the gradient of the result, and the arguments and results of `attend`. Returns the gradients of query, key and
value. The result and the logsumexp may be those over more keys than these: the gradients of shards of keys add up.
"""

attend_more = define_op(
    "attend_more(Tensor out, Tensor denominator, Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, "
    "SymInt shift, float scale) -> (Tensor, Tensor)",
    _attend_more,
    _fake_attend_more,
    capturable=True,
)
"""Accumulates attention over more keys by online softmax.

Takes the results of `attend` over some keys (the result in the dtype of the logsumexp) and the arguments of `attend`
with other keys. Returns the results over all of these keys.
"""


def _count_flops(shapes: Sequence[Sequence[int]], products: int) -> int:
    """Counts the operations of matrix products between scores and features.

    Masked scores are included: a trace does not know which ones a causal mask leaves out.
    """
    (batch, heads, rows, features), (_, _, columns, _), (_, _, _, value_features) = shapes
    return products * batch * heads * rows * columns * (features + value_features)


def _state_flops(op: OpOverload, first: int, products: int) -> None:
    """States the operations of an op whose argument `first` is the query, before key and value."""

    @register_flop_formula(op.overloadpacket)
    def count(*shapes: Shape, **named: object) -> int:
        return _count_flops(shapes[first : first + 3], products)


_state_flops(attend, 0, 2)
_state_flops(attend_more, 2, 2)
_state_flops(attend_backward, 1, 5)
