"""Torch's fused attention ops on sharded tensors.

Where nothing is sharded the fused kernel itself runs. Otherwise it runs on local shards: a rank attends from its own
part of the batch or of the heads, or from its own rows of the query. In the last case it gathers the keys and values.
Where the query is whole, a rank attends over its own part of the keys, and the results are merged. Scores are never
held, except for the gradient of a mask.
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
from shardcompile.ops.attention.strategies import HEADS, ROWS, Question, Way, find_way, sharded_in_rows
from shardcompile.ops.record import Run
from shardcompile.ops.support.precision import widened
from shardcompile.ops.view.rows import first_row, layout_of, wrap
from shardcompile.planning import find_plan
from shardcompile.redistribute import run_plan
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import IntLike, Layout, Partition, Spec, contiguous_stride

aten = torch.ops.aten


@dataclass(frozen=True)
class _Attention:
    """The arguments that all fused ops share; tensors are [batch, heads, rows, features].

    Attributes:
        query: as given.
        key: as given; may have fewer heads.
        value: as given; may have fewer heads.
        mask: None, or what is added to the scores, or bools that tell which scores count; has four dims.
        causal: whether a row of the query sees only the rows of the key up to its own number; not with a mask.
        scale: factor of the scores.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    causal: bool
    scale: float

    @property
    def tensors(self) -> list[Tensor]:
        """Query, key, value and, if there is one, the mask."""
        return [x for x in (self.query, self.key, self.value, self.mask) if x is not None]

    def with_equal_heads(self) -> _Attention:
        """Where heads are sharded, those of keys and values repeated: theirs are then sharded as the query's are."""
        partition = any(
            x._spec.layout.partitions[HEADS] is not None for x in self.tensors[:3] if isinstance(x, Sharded)
        )
        heads = self.query.shape[HEADS]
        if not partition:
            return self
        key, value = repeated_heads(self.key, heads), repeated_heads(self.value, heads)
        return _Attention(self.query, key, value, self.mask, self.causal, self.scale)

    def gradient_of_mask(self, grad: Tensor, out: Tensor, denominator: Tensor) -> Tensor:
        """The gradient of what is added to the scores, from products: no fused kernel gives it for a shard."""
        grad = widened(grad)
        heads = self.query.shape[HEADS]
        key, value = repeated_heads(widened(self.key), heads), repeated_heads(widened(self.value), heads)
        scores = _product(widened(self.query), key.transpose(-2, -1)) * self.scale + self.mask
        denominator = torch.where(denominator == -float("inf"), 0.0, denominator)
        weights = (scores - denominator.unsqueeze(-1)).exp()
        mean = (grad * widened(out)).sum(-1, keepdim=True)
        grad_scores = weights * (_product(grad, value.transpose(-2, -1)) - mean)
        return grad_scores.sum_to_size(self.mask.shape).to(self.mask.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product with all dims of the batch kept apart, so that any of them may be sharded."""
    cls = type(a if isinstance(a, Sharded) else b)
    return cls.__torch_dispatch__(aten.matmul.default, (), (a, b), {})


# On shards


def _layout_of_result(layout: Layout, like: Layout) -> Layout:
    """Where a result is left: sharded as the input that it has the shape of, if a way was chosen that partitions
    other dims.
    """
    pairs = list(zip(layout.placements, like.placements, strict=True))
    same_shape = all(a is b or a == b for a, b in zip(layout.shape, like.shape, strict=True))
    if same_shape and all(isinstance(a, Shard) and isinstance(b, Shard) for a, b in pairs if a != b):
        return Layout.of(layout.mesh, like.placements, layout.shape, layout.dtype, like.partitions)
    return layout


def _return(local: Tensor, layout: Layout, like: Tensor) -> tuple[Tensor, Layout]:
    if not isinstance(like, Sharded):
        return local, layout
    target = _layout_of_result(layout, like._spec.layout)
    return run_plan(find_plan(layout, target), local), target


def _kernel(way: Way, query: Layout, key: Layout, a: _Attention) -> RingAttention | None:
    """The steps of a ring, if there is one."""
    if way.ring is None:
        return None
    partition = key.partition_of(ROWS)
    around = not (a.causal and partition.same_shards(query.partitions[ROWS]))
    first = first_row(query.partition_of(ROWS), query)
    by_rows = (_is_by_rows(a.key), _is_by_rows(a.value))
    return RingAttention(Ring(partition, key.mesh, around=around), first, a.causal, a.scale, by_rows)


def _is_by_rows(x: Sharded) -> bool:
    """Whether rows are stored one after the other with all their heads: by global strides, the same on every rank."""
    strides = x._spec.stride
    return compat.size_hint(strides[ROWS]) > compat.size_hint(strides[HEADS])


@contextlib.contextmanager
def _on_shards(tensors: Sequence[Tensor], a: _Attention, backward: bool) -> Iterator[tuple[Way, list[Tensor]]]:
    """How a rank attends, and the shards that it needs for it. What is traced inside says why it goes this way."""
    mesh = first_sharded(tensors)._spec.layout.mesh
    layouts = tuple(layout_of(x, mesh) for x in tensors)
    way = find_way(Question(layouts, a.mask is not None, a.causal, backward))
    locals_ = [x._local_tensor if isinstance(x, Sharded) else x for x in tensors]
    with compat.annotate_nodes(attention=way.reason) if way.reason and compat.is_traced() else contextlib.nullcontext():
        yield way, [run_plan(plan, x) for plan, x in zip(way.plans, locals_, strict=True)]


def _shift(query: Layout, key: Layout) -> IntLike:
    """Number of the first row of a shard of queries, less that of the shard of keys."""
    first, other = (0 if x.partitions[ROWS] is None else first_row(x.partition_of(ROWS), x) for x in (query, key))
    return first - other


def _stride_by_rows(shape: Sequence[IntLike]) -> tuple[IntLike, ...]:
    """Strides of a result of the fused kernels, of which heads can be joined by a view."""
    _, heads, rows, features = shape
    return (rows * heads * features, features, heads * features, 1)


def _forward_on_shards(a: _Attention) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of the softmax's denominator."""
    with _on_shards(a.tensors, a, backward=False) as (way, (q, k, v, *masks)):
        (query, key), choice = way.layouts[:2], way.choice
        mask, ring = masks[0] if masks else None, _kernel(way, query, key, a)
        if ring is not None:
            out, denominator = ring.forward(q, k, v, mask)
        else:
            out, denominator = attend(q, k, v, mask, a.causal, _shift(query, key) if a.causal else 0, a.scale)
        shape = (*query.shape[:3], a.value.shape[3])
        layout = choice.outputs[0].layout(query, shape, out.dtype)
        of_denominator = choice.outputs[1].layout(query, shape[:3], denominator.dtype)
        if layout.is_partial:
            out, denominator = _merge(out, denominator, layout, of_denominator)
            layout, of_denominator = layout.reduced(), of_denominator.reduced()
        out, layout = _return(out, layout, a.query)
    like = first_sharded(a.tensors)
    result = wrap(like, out, layout, _stride_by_rows(shape))
    return result, wrap(like, denominator, of_denominator, contiguous_stride(shape[:3]))


def _merge(out: Tensor, denominator: Tensor, layout: Layout, of_denominator: Layout) -> tuple[Tensor, Tensor]:
    """Merge what ranks found for their own keys: a mean weighted by the softmax's denominators."""
    over = [m for m, p in enumerate(layout.placements) if isinstance(p, Partial)]
    parts = [layout.mesh.shape[m] for m in over]
    one_each = Partition.of_sizes(over, parts, [1] * math.prod(parts), "fixed")
    placements = [
        Shard(0) if isinstance(p, Partial) else Shard(p.dim + 1) if isinstance(p, Shard) else p
        for p in of_denominator.placements
    ]
    shape, partitions = (math.prod(parts), *of_denominator.shape), (one_each, *of_denominator.partitions)
    stacked = Layout.of(layout.mesh, placements, shape, denominator.dtype, partitions)
    every = run_plan(find_plan(stacked, stacked.gathered(0)), denominator.unsqueeze(0))
    total = aten.logsumexp.default(every, [0])
    weight = torch.where(total == -float("inf"), 0.0, (denominator - total).exp())
    pending = layout.with_dtype(denominator.dtype)
    summed = run_plan(find_plan(pending, pending.reduced()), out.to(denominator.dtype) * weight.unsqueeze(-1))
    return summed.to(out.dtype), total


def _backward_on_shards(a: _Attention, grad: Tensor, out: Tensor, denominator: Tensor) -> Sequence[Tensor]:
    """The gradients of query, key and value."""
    tensors = [grad, *a.tensors[:3], out, denominator, *a.tensors[3:]]
    wrapped = []
    with _on_shards(tensors, a, backward=True) as (way, shards):
        query, key = way.layouts[1:3]
        mask, ring = shards[6] if a.mask is not None else None, _kernel(way, query, key, a)
        if ring is not None:
            shard, q, k, v, of_result, of_denominator = shards[:6]
            grads = ring.backward(shard, q, k, v, of_result, of_denominator, mask)
        else:
            shift = _shift(query, key) if a.causal else 0
            grads = attend_backward(*shards[:6], mask, a.causal, shift, a.scale)
        for i, (local, plan, x) in enumerate(zip(grads, way.choice.outputs, a.tensors, strict=False)):
            layout = plan.layout(query, tuple(x.shape), local.dtype)
            if way.ring is not None and i > 0:
                layout = sharded_in_rows(layout, way.ring, key.partition_of(ROWS))
            returned, layout = _return(local, layout, x)
            wrapped.append(wrap(first_sharded(tensors), returned, layout, _stride_by_rows(x.shape)))
    return wrapped


# The ops


def _is_whole(attention: _Attention) -> bool:
    return all(x._spec.layout.is_replicated for x in attention.tensors if isinstance(x, Sharded))


def _on_whole_values(op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> tuple[object, ...]:
    """The fused kernel on every rank, on full values."""
    sharded = first_sharded([*args, *kwargs.values()])
    cls, like = type(sharded), sharded._spec.layout.replicated()

    def whole(x: object) -> object:
        if not isinstance(x, Sharded):
            return x
        layout = x._spec.layout
        return run_plan(find_plan(layout, layout.replicated()), x._local_tensor)

    def wrapped(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        layout = Layout.of(like.mesh, like.placements, tuple(x.shape), x.dtype, (None,) * x.ndim)
        return cls._wrap(x, Spec.of(layout, tuple(x.stride())))

    return tuple(wrapped(x) for x in op(*[whole(a) for a in args], **{k: whole(a) for k, a in kwargs.items()}))


def _refuse_dropout(op: OpOverload, dropout_p: float) -> None:
    if dropout_p > 0:
        raise UnsupportedOpError(
            f"{op} with dropout on sharded tensors: use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def _argument(
    op: OpOverload, args: Sequence[object], kwargs: dict[str, object], name: str, default: object = None
) -> Any:
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            if i < len(args) and not argument.kwarg_only:
                return args[i]
            return kwargs.get(name, argument.default_value if argument.has_default_value() else default)
    return default


def _attention_of(op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> _Attention:
    def get(name: str) -> Any:
        return _argument(op, args, kwargs, name)

    _refuse_dropout(op, get("dropout_p"))
    query, scale, mask = get("query"), get("scale"), get("attn_mask")
    mask = get("attn_bias") if mask is None else mask
    if mask is not None and get("is_causal"):
        raise UnsupportedOpError(
            f"{op} with a mask and is_causal on sharded tensors; let the mask say what is_causal does"
        )
    if mask is not None and mask.ndim < query.ndim:
        mask = mask[(None,) * (query.ndim - mask.ndim)]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _Attention(query, get("key"), get("value"), mask, get("is_causal"), factor)


def _forward(op: OpOverload) -> Run:
    """The op's other results, such as the state of the random numbers, are empty: only our backward reads them."""

    def run(*args: object, **kwargs: object) -> tuple[object, ...]:
        attention = _attention_of(op, args, kwargs)
        if _is_whole(attention):
            return _on_whole_values(op, args, kwargs)
        out, denominator = _forward_on_shards(attention.with_equal_heads())
        others = [
            attention.key.shape[2] if "max" in r.name else denominator.new_zeros(()) for r in op._schema.returns[2:]
        ]
        return (out, denominator, *others)

    return run


def _backward(op: OpOverload) -> Run:
    def run(*args: object, **kwargs: object) -> tuple[object, ...]:
        attention = _attention_of(op, args, kwargs)
        if _is_whole(attention):
            return _on_whole_values(op, args, kwargs)
        grad = next(a for a in args if isinstance(a, Tensor))
        out, denominator = (_argument(op, args, kwargs, n) for n in ("out", "logsumexp"))
        grad_query, *others = _backward_on_shards(attention.with_equal_heads(), grad, out, denominator)
        grads = (
            grad_query,
            *(summed_heads(g, x.shape[HEADS]) for g, x in zip(others, (attention.key, attention.value), strict=True)),
        )
        if len(op._schema.returns) == 3:
            return grads
        mask = _argument(op, args, kwargs, "attn_bias")
        if mask is None or not _argument(op, args, kwargs, "grad_input_mask")[3]:
            return (*grads, None)
        return (*grads, attention.gradient_of_mask(grad, out, denominator).reshape(mask.shape))

    return run


# What the forward pass gives besides its first result is for our backward pass alone.
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
