"""`flex_attention` on sharded tensors: functions of scores and masks see the numbers of the whole tensors.

Ranks keep their rows of the query, or parts of batch and heads. They fetch keys and values from the first to the last
shard of keys that the shard mask names for their queries. Scores are computed as torch's unfused kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import derive, fetch_named
from shardcompile.compat.higher_order import over_scores
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops.attention.kernels import repeated_heads
from shardcompile.sharding import IntLike, Layout
from shardcompile.tensor.aligned_rows import on_mesh, wrapped
from shardcompile.tensor.autograd import Promote, ToLocal, gradient_layout, redistributed
from shardcompile.tensor.core import ShardTensor

aten = torch.ops.aten
_BATCH, _HEADS, _ROWS = range(3)
_SPARE = 2
"""Rows that are added along dims that may be empty. Functions are mapped over two or more rows, since code for one
row differs.
"""


def attend(
    _: Callable[..., object],
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: object,
    of_score: Sequence[object] = (),
    of_mask: Sequence[object] = (),
) -> tuple[Tensor, ...]:
    """What the higher-order op gives: the result, and (to base 2) the logarithm of the denominator and the largest
    score.

    Args:
        query: [batch, heads, rows, features].
        key: [batch, heads, rows, features]; heads divide those of the query, the batch may be 1.
        value: as `key`; its features may be others.
        score_mod: from a score and four numbers (batch, head, row of the query, row of the key) to a score.
        block_mask: as `BlockMask.as_tuple` gives it.
        scale: of the scores.
        kernel_options: for kernels that are not used here.
        of_score: tensors that `score_mod` takes besides.
        of_mask: tensors that the function of the mask takes besides.

    Raises:
        UnsupportedOpError: several mesh dims sharded the rows of the query.
    """
    mesh = next(x for x in (query, key, value) if isinstance(x, ShardTensor))._spec.layout.mesh
    query, key, value = (on_mesh(x, mesh) for x in (query, key, value))
    layout = _layout_to_keep(query, key)
    q = _shard(query, layout)
    k, v, first_key = _keys(key, value, layout, block_mask)
    others = [[_whole(x, layout) if isinstance(x, Tensor) else x for x in xs] for xs in (of_score, of_mask)]
    q, k, v = (_pad(x, layout, d == 0) for d, x in enumerate((q, k, v)))
    numbers = [_numbers(layout, d, q.shape[d]) for d in (_BATCH, _HEADS, _ROWS)]
    columns: Any = torch.arange(k.shape[_ROWS], device=k.device)
    numbers.append((columns + first_key).clamp(max=key.shape[_ROWS] - 1))
    scores = _scores(q, k, scale)
    is_seen = over_scores(block_mask[-1], False, len(of_mask))(*numbers, *others[1])
    is_seen = is_seen.logical_and(columns < k.shape[_ROWS] - _SPARE)
    scores = over_scores(score_mod, True, len(of_score))(scores, *numbers, *others[0])
    scores = scores.to(_precision(q)).masked_fill(is_seen.logical_not(), -math.inf)
    results = _averages(scores, v, q.dtype)
    shapes = ((*layout.shape[:3], value.shape[3]), layout.shape[:3], layout.shape[:3])
    return tuple(_lay_out(x, layout, s) for x, s in zip(results, shapes, strict=True))


def _layout_to_keep(query: ShardTensor, key: ShardTensor) -> Layout:
    """The layout of the query, with whole features, and whole batch and heads where keys have fewer."""
    now = query._spec.layout.reduced()
    of_rows = now.partitions[_ROWS]
    if of_rows is not None and len(of_rows.mesh_dims) > 1:
        raise UnsupportedOpError(
            f"flex_attention: rows of {now.describe()} are sharded over several mesh dims; redistribute them to one "
            f"first, "
            "or use scaled_dot_product_attention or shardcompile.varlen_attention"
        )
    same = [compat.same_symbol(query.shape[d], key.shape[d]) for d in (_BATCH, _HEADS)]
    kept = [now.partitions[0] if same[0] else None, now.partitions[1] if same[1] else None, of_rows, None]
    placements = [p if isinstance(p, Shard) and kept[p.dim] is not None else Replicate() for p in now.placements]
    return Layout.of(now.mesh, placements, now.shape, now.dtype, kept)


def _shard(x: ShardTensor, layout: Layout, parts: Sequence[int] = ()) -> Tensor:
    """This rank's shard of a tensor in a layout.

    Args:
        x: the tensor.
        layout: how batch, heads and rows are sharded.
        parts: mesh dims of which each rank finds a part of the shard's gradient.
    """
    wanted = Layout.of(layout.mesh, layout.placements, tuple(x.shape), x.dtype, layout.partitions)
    placements = [Partial() if m in parts else p for m, p in enumerate(layout.placements)]
    return ToLocal.apply(redistributed(x, wanted), gradient_layout(wanted, placements))


def _keys(
    key: ShardTensor, value: ShardTensor, layout: Layout, block_mask: tuple[object, ...]
) -> tuple[Tensor, Tensor, IntLike]:
    """The rows of keys and values that a rank's queries need, and the number of the first one."""
    of_query, partition = layout.partitions[_ROWS], key._spec.layout.partitions[_ROWS]
    by_rows = () if of_query is None else of_query.mesh_dims
    if of_query is None or partition is None or partition.mesh_dims != by_rows:
        placements = [Replicate() if m in by_rows else p for m, p in enumerate(layout.placements)]
        whole = Layout.of(layout.mesh, placements, layout.shape, layout.dtype, [*layout.partitions[:2], None, None])
        k, v = (_shard(x, whole, by_rows) for x in (key, value))
        return k, v, 0
    partitions = [*layout.partitions[:2], partition, None]
    sharded_in_rows = Layout.of(layout.mesh, layout.placements, tuple(key.shape), layout.dtype, partitions)
    k, v = (_shard(x, sharded_in_rows) for x in (key, value))
    rows, first = fetch_named(torch.cat([k, v], -1).movedim(_ROWS, 0), block_mask, of_query, partition, layout.mesh)
    rows = rows.movedim(0, _ROWS)
    return rows[..., : k.shape[-1]], rows[..., k.shape[-1] :], first


def _whole(x: Tensor, layout: Layout) -> Tensor:
    """The whole of a tensor that a function reads. Each rank finds the part of its gradient that comes from its own
    scores.
    """
    if not isinstance(x, ShardTensor) and not x.requires_grad:
        return x
    partition = x if isinstance(x, ShardTensor) else Promote.apply(x, ShardTensor, layout.mesh)
    whole = redistributed(partition, partition._spec.layout.replicated())
    parts = [Partial() if isinstance(p, Shard) else Replicate() for p in layout.placements]
    return ToLocal.apply(whole, gradient_layout(whole._spec.layout, parts))  # type: ignore[no-any-return]


def _pad(x: Tensor, layout: Layout, is_query: bool) -> Tensor:
    """With rows of zeros behind those along dims that may be empty."""
    dims = [d for d in (_BATCH, _HEADS) if layout.partitions[d] is not None]
    if not is_query or layout.partitions[_ROWS] is not None:
        dims.append(_ROWS)
    return aten.constant_pad_nd(x, [n for d in reversed(range(4)) for n in (0, _SPARE if d in dims else 0)])  # type: ignore[no-any-return]


def _numbers(layout: Layout, dim: int, rows: IntLike) -> Tensor:
    """The number in the whole tensor of each row along a dim. A padded row gets a number that exists."""
    device = layout.mesh.device_type
    numbers: Any = torch.arange(rows, device=device)  # type: ignore[arg-type]
    partition = layout.partitions[dim]
    if partition is None:
        return numbers  # type: ignore[no-any-return]
    first = derive("located", [partition], [], partition.size, layout.mesh)[1]
    return (numbers + first).clamp(max=partition.size - 1)  # type: ignore[no-any-return]


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    k = repeated_heads(k, q.shape[_HEADS])
    return (q.to(_precision(q)) @ k.to(_precision(q)).mT) * scale


def _averages(scores: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    shown = scores.masked_fill(hidden, 0)
    weights = shown.softmax(-1).masked_fill(hidden, 0)
    denominator = shown.logsumexp(-1).masked_fill(hidden.squeeze(-1), -math.inf)
    out = weights.to(dtype) @ repeated_heads(v, scores.shape[_HEADS])
    return out, denominator / math.log(2), scores.detach().amax(-1) / math.log(2)


def _lay_out(x: Tensor, layout: Layout, shape: tuple[IntLike, ...]) -> Tensor:
    """A result without what was padded, in the layout of the query."""
    partitions = layout.partitions[: len(shape)]
    for d, partition in enumerate(partitions):
        if partition is not None:
            x = x.narrow(d, 0, x.shape[d] - _SPARE)
    return wrapped(
        x.clone(memory_format=torch.contiguous_format),
        Layout.of(layout.mesh, layout.placements, shape, x.dtype, partitions),
    )
