"""Torch's fused attention ops on sharded tensors.

If no input is sharded, the fused kernel itself runs. Otherwise it runs on local shards of the batch, of the heads or of
the rows of the query. In the last case the keys and values are gathered or sent around a ring. If the query is
replicated, each rank attends over its local shard of the keys, and the results are merged. Scores are never
materialized, except for the gradient of a mask.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from shardcompile import compat
from shardcompile.collectives import Ring
from shardcompile.compat import OpOverload
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops import always, state
from shardcompile.ops.attention.kernels import attend, attend_backward, repeated_heads, summed_heads
from shardcompile.ops.attention.ring import RingAttention
from shardcompile.ops.attention.strategies import (
    HEADS,
    ROWS,
    AttentionCall,
    AttentionStrategy,
    choose_strategy,
    sharded_in_rows,
)
from shardcompile.ops.record import Run
from shardcompile.ops.support.precision import widened
from shardcompile.ops.support.sharded_rows import first_row, layout_of, wrap
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import IntLike, Layout, Partition, Spec, contiguous_stride

aten = torch.ops.aten


@dataclass(frozen=True)
class _Attention:
    """The arguments that all fused ops share; tensors are [batch, heads, rows, features].

    Attributes:
        query: the query.
        key: the key; may have fewer heads.
        value: the value; may have fewer heads.
        mask: None, an additive mask or a boolean one (True where a score counts); has four dims.
        causal: whether a row of the query attends only to the rows of the key up to its own index; not with a mask.
        scale: scale of the scores.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    causal: bool
    scale: float

    @property
    def tensors(self) -> list[Tensor]:
        """Query, key, value and the mask, if there is one."""
        return [x for x in (self.query, self.key, self.value, self.mask) if x is not None]

    def with_equal_heads(self) -> _Attention:
        """Returns the arguments with key and value heads repeated if heads are sharded.

        The heads of query, key and value can then have the same partition.
        """
        heads_sharded = any(
            x._spec.layout.partitions[HEADS] is not None for x in self.tensors[:3] if isinstance(x, Sharded)
        )
        heads = self.query.shape[HEADS]
        if not heads_sharded:
            return self
        key, value = repeated_heads(self.key, heads), repeated_heads(self.value, heads)
        return _Attention(self.query, key, value, self.mask, self.causal, self.scale)

    def gradient_of_mask(self, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """Returns the gradient of an additive mask from explicit products: no fused kernel computes it for a shard."""
        grad = widened(grad)
        heads = self.query.shape[HEADS]
        key, value = repeated_heads(widened(self.key), heads), repeated_heads(widened(self.value), heads)
        scores = _matmul(widened(self.query), key.transpose(-2, -1)) * self.scale + self.mask
        lse = torch.where(lse == -float("inf"), 0.0, lse)
        weights = (scores - lse.unsqueeze(-1)).exp()
        mean = (grad * widened(out)).sum(-1, keepdim=True)
        grad_scores = weights * (_matmul(grad, value.transpose(-2, -1)) - mean)
        return grad_scores.sum_to_size(self.mask.shape).to(self.mask.dtype)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns the batched matrix product without flattening the batch dims, so that any of them may be sharded."""
    cls = type(a if isinstance(a, Sharded) else b)
    return cls.__torch_dispatch__(aten.matmul.default, (), (a, b), {})


# On local shards


def _result_layout(layout: Layout, like: Layout) -> Layout:
    """Returns the layout to which a result is redistributed.

    It is the layout of the input of the same shape if the chosen strategy shards other dims than that input does.
    """
    pairs = list(zip(layout.placements, like.placements, strict=True))
    same_shape = all(a is b or a == b for a, b in zip(layout.shape, like.shape, strict=True))
    if same_shape and all(isinstance(a, Shard) and isinstance(b, Shard) for a, b in pairs if a != b):
        return Layout.of(layout.mesh, like.placements, layout.shape, layout.dtype, like.partitions)
    return layout


def _redistribute_result(local: Tensor, layout: Layout, like: Tensor) -> tuple[Tensor, Layout]:
    if not isinstance(like, Sharded):
        return local, layout
    target = _result_layout(layout, like._spec.layout)
    return run_plan(find_plan(layout, target), local), target


def _ring_attention(strategy: AttentionStrategy, query: Layout, key: Layout, a: _Attention) -> RingAttention | None:
    """Returns the ring attention of a strategy, or None if the strategy is another one."""
    if strategy.ring is None:
        return None
    partition = key.partition_of(ROWS)
    around = not (a.causal and partition.guard_same_shards(query.partitions[ROWS]))
    first = first_row(query.partition_of(ROWS), query)
    rows_first = (_has_rows_first(a.key), _has_rows_first(a.value))
    return RingAttention(Ring(partition, key.mesh, around=around), first, a.causal, a.scale, rows_first)


def _has_rows_first(x: Sharded) -> bool:
    """Whether each row is stored with all of its heads, judged by the global strides, which are rank-invariant."""
    strides = x._spec.stride
    return compat.size_hint(strides[ROWS]) > compat.size_hint(strides[HEADS])


@contextlib.contextmanager
def _on_shards(
    tensors: Sequence[Tensor], a: _Attention, backward: bool
) -> Iterator[tuple[AttentionStrategy, list[Tensor]]]:
    """Yields the strategy and the local shards that it requires. Nodes traced in the context record its reason."""
    mesh = first_sharded(tensors)._spec.layout.mesh
    layouts = tuple(layout_of(x, mesh) for x in tensors)
    strategy = choose_strategy(AttentionCall(layouts, a.mask is not None, a.causal, backward))
    locals_ = [x._local_tensor if isinstance(x, Sharded) else x for x in tensors]
    annotate = strategy.reason and compat.is_traced()
    with compat.annotate_nodes(attention=strategy.reason) if annotate else contextlib.nullcontext():
        yield strategy, [run_plan(plan, x) for plan, x in zip(strategy.plans, locals_, strict=True)]


def _shift(query: Layout, key: Layout) -> IntLike:
    """Returns the global index of the first row of the local query minus that of the local key."""
    first, other = (0 if x.partitions[ROWS] is None else first_row(x.partition_of(ROWS), x) for x in (query, key))
    return first - other


def _rows_first_stride(shape: Sequence[IntLike]) -> tuple[IntLike, ...]:
    """Returns the strides of a result of the fused kernels, stored as [batch, rows, heads, features]."""
    _, heads, rows, features = shape
    return (rows * heads * features, features, heads * features, 1)


def _forward_on_shards(a: _Attention) -> tuple[Tensor, Tensor]:
    """Returns the result and the logsumexp of the scores."""
    with _on_shards(a.tensors, a, backward=False) as (strategy, (q, k, v, *masks)):
        (query, key), choice = strategy.layouts[:2], strategy.choice
        mask, ring = masks[0] if masks else None, _ring_attention(strategy, query, key, a)
        if ring is not None:
            out, lse = ring.forward(q, k, v, mask)
        else:
            out, lse = attend(q, k, v, mask, a.causal, _shift(query, key) if a.causal else 0, a.scale)
        shape = (*query.shape[:3], a.value.shape[3])
        layout = choice.outputs[0].layout(query, shape, out.dtype)
        lse_layout = choice.outputs[1].layout(query, shape[:3], lse.dtype)
        if layout.is_partial:
            out, lse = _merge(out, lse, layout, lse_layout)
            layout, lse_layout = layout.reduced(), lse_layout.reduced()
        out, layout = _redistribute_result(out, layout, a.query)
    like = first_sharded(a.tensors)
    result = wrap(like, out, layout, _rows_first_stride(shape))
    return result, wrap(like, lse, lse_layout, contiguous_stride(shape[:3]))


def _merge(out: Tensor, lse: Tensor, layout: Layout, lse_layout: Layout) -> tuple[Tensor, Tensor]:
    """Merges the results of ranks over their local keys, weighted by the softmax denominators (online softmax)."""
    over = [m for m, p in enumerate(layout.placements) if isinstance(p, Partial)]
    parts = [layout.mesh.shape[m] for m in over]
    one_row_each = Partition.of_sizes(over, parts, [1] * math.prod(parts), "fixed")
    placements = [
        Shard(0) if isinstance(p, Partial) else Shard(p.dim + 1) if isinstance(p, Shard) else p
        for p in lse_layout.placements
    ]
    shape, partitions = (math.prod(parts), *lse_layout.shape), (one_row_each, *lse_layout.partitions)
    stacked = Layout.of(layout.mesh, placements, shape, lse.dtype, partitions)
    gathered = run_plan(find_plan(stacked, stacked.gathered(0)), lse.unsqueeze(0))
    total = aten.logsumexp.default(gathered, [0])
    weight = torch.where(total == -float("inf"), 0.0, (lse - total).exp())
    pending = layout.with_dtype(lse.dtype)
    summed = run_plan(find_plan(pending, pending.reduced()), out.to(lse.dtype) * weight.unsqueeze(-1))
    return summed.to(out.dtype), total


def _backward_on_shards(a: _Attention, grad: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    """Returns the gradients of query, key and value."""
    tensors = [grad, *a.tensors[:3], out, lse, *a.tensors[3:]]
    wrapped = []
    with _on_shards(tensors, a, backward=True) as (strategy, shards):
        query, key = strategy.layouts[1:3]
        mask, ring = shards[6] if a.mask is not None else None, _ring_attention(strategy, query, key, a)
        if ring is not None:
            grad_shard, q, k, v, out_shard, lse_shard = shards[:6]
            grads = ring.backward(grad_shard, q, k, v, out_shard, lse_shard, mask)
        else:
            shift = _shift(query, key) if a.causal else 0
            grads = attend_backward(*shards[:6], mask, a.causal, shift, a.scale)
        for i, (local, plan, x) in enumerate(zip(grads, strategy.choice.outputs, a.tensors, strict=False)):
            layout = plan.layout(query, tuple(x.shape), local.dtype)
            if strategy.ring is not None and i > 0:
                layout = sharded_in_rows(layout, strategy.ring, key.partition_of(ROWS))
            returned, layout = _redistribute_result(local, layout, x)
            wrapped.append(wrap(first_sharded(tensors), returned, layout, _rows_first_stride(x.shape)))
    return wrapped


# The ops


def _is_replicated(attention: _Attention) -> bool:
    return all(x._spec.layout.is_replicated for x in attention.tensors if isinstance(x, Sharded))


def _on_replicated(op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> tuple[object, ...]:
    """Runs the fused kernel on replicated inputs, the same on every rank."""
    sharded = first_sharded([*args, *kwargs.values()])
    cls, like = type(sharded), sharded._spec.layout.replicated()

    def replicated(x: object) -> object:
        if not isinstance(x, Sharded):
            return x
        layout = x._spec.layout
        return run_plan(find_plan(layout, layout.replicated()), x._local_tensor)

    def wrapped(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        layout = Layout.of(like.mesh, like.placements, tuple(x.shape), x.dtype, (None,) * x.ndim)
        return cls._wrap(x, Spec.of(layout, tuple(x.stride())))

    return tuple(wrapped(x) for x in op(*map(replicated, args), **{k: replicated(a) for k, a in kwargs.items()}))


def _refuse_dropout(op: OpOverload, dropout_p: float) -> None:
    if dropout_p > 0:
        raise UnsupportedOpError(
            f"{op} with dropout on sharded tensors: use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def _argument(op: OpOverload, args: Sequence[object], kwargs: dict[str, object], name: str) -> Any:
    defaults = {a.name: a.default_value for a in op._schema.arguments}
    return (dict(zip(defaults, args, strict=False)) | kwargs).get(name, defaults.get(name))


def _parse_arguments(op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> _Attention:
    def get(name: str) -> Any:
        return _argument(op, args, kwargs, name)

    _refuse_dropout(op, get("dropout_p"))
    query, scale, mask = get("query"), get("scale"), get("attn_mask")
    mask = get("attn_bias") if mask is None else mask
    if mask is not None and get("is_causal"):
        raise UnsupportedOpError(
            f"{op} with both a mask and is_causal on sharded tensors; apply the causal mask in attn_mask instead"
        )
    if mask is not None and mask.ndim < query.ndim:
        mask = mask[(None,) * (query.ndim - mask.ndim)]
    width = query.shape[-1]
    factor = scale if scale is not None else 1 / math.sqrt(width) if width else 1.0
    return _Attention(query, get("key"), get("value"), mask, get("is_causal"), factor)


def _forward(op: OpOverload) -> Run:
    """Returns the decomposition of a forward op.

    Its other results, such as the state of the random number generator, are placeholders: only our backward reads them.
    """

    def run(*args: object, **kwargs: object) -> tuple[object, ...]:
        attention = _parse_arguments(op, args, kwargs)
        if _is_replicated(attention):
            return _on_replicated(op, args, kwargs)
        out, lse = _forward_on_shards(attention.with_equal_heads())
        others = [attention.key.shape[2] if "max" in r.name else lse.new_zeros(()) for r in op._schema.returns[2:]]
        return (out, lse, *others)

    return run


def _backward(op: OpOverload) -> Run:
    """Returns the decomposition of a backward op."""

    def run(*args: object, **kwargs: object) -> tuple[object, ...]:
        attention = _parse_arguments(op, args, kwargs)
        if _is_replicated(attention):
            return _on_replicated(op, args, kwargs)
        grad = next(a for a in args if isinstance(a, Tensor))
        out, lse = (_argument(op, args, kwargs, n) for n in ("out", "logsumexp"))
        grad_query, *others = _backward_on_shards(attention.with_equal_heads(), grad, out, lse)
        grads = (
            grad_query,
            *(summed_heads(g, x.shape[HEADS]) for g, x in zip(others, (attention.key, attention.value), strict=True)),
        )
        if len(op._schema.returns) == 3:
            return grads
        mask = _argument(op, args, kwargs, "attn_bias")
        if mask is None or not _argument(op, args, kwargs, "grad_input_mask")[3]:
            return (*grads, None)
        return (*grads, attention.gradient_of_mask(grad, out, lse).reshape(mask.shape))

    return run


# Results of the forward op other than the first are read by our backward op only.
for _op in (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
):
    state(_op, sharded=always(_forward(_op), stored="first"))
for _op in (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
):
    state(_op, sharded=always(_backward(_op)))
