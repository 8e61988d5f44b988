"""`flex_attention` on sharded tensors: `score_mod` and `mask_mod` receive global indices.

Ranks keep their shards of the query, along its rows, batch or heads. They fetch the keys and values from the first to
the last block that the block mask has for their queries. Scores are computed as in torch's unfused kernel.
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
_PADDING = 2
"""Padding rows along dims whose shards may be empty. Two, since `vmap` generates other code for a size of 1."""


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
    """Implements the higher-order op `flex_attention`: returns the result, the logsumexp and the maximum of the scores.

    The last two are to base 2.

    Args:
        query: [batch, heads, rows, features].
        key: [batch, heads, rows, features]; the number of heads divides that of the query, the batch may be 1.
        value: as `key`; the number of features may differ.
        score_mod: from a score and four indices (batch, head, row of the query, row of the key) to a score.
        block_mask: the result of `BlockMask.as_tuple`.
        scale: factor of the scores.
        kernel_options: ignored; they are for kernels that are not used.
        of_score: tensors that `score_mod` captures.
        of_mask: tensors that `mask_mod` captures.

    Raises:
        UnsupportedOpError: several mesh dims shard the rows of the query.
    """
    mesh = next(x for x in (query, key, value) if isinstance(x, ShardTensor))._spec.layout.mesh
    query, key, value = (on_mesh(x, mesh) for x in (query, key, value))
    layout = _attention_layout(query, key)
    q = _local_shard(query, layout)
    k, v, first_key = _fetch_keys(key, value, layout, block_mask)
    captured = [[_replicated(x, layout) if isinstance(x, Tensor) else x for x in xs] for xs in (of_score, of_mask)]
    q, k, v = (_pad(x, layout, d == 0) for d, x in enumerate((q, k, v)))
    indices = [_global_indices(layout, d, q.shape[d]) for d in (_BATCH, _HEADS, _ROWS)]
    columns: Any = torch.arange(k.shape[_ROWS], device=k.device)
    indices.append((columns + first_key).clamp(max=key.shape[_ROWS] - 1))
    scores = _scores(q, k, scale)
    mask = over_scores(block_mask[-1], False, len(of_mask))(*indices, *captured[1])
    mask = mask.logical_and(columns < k.shape[_ROWS] - _PADDING)
    scores = over_scores(score_mod, True, len(of_score))(scores, *indices, *captured[0])
    scores = scores.to(_precision(q)).masked_fill(mask.logical_not(), -math.inf)
    results = _softmax_average(scores, v, q.dtype)
    shapes = ((*layout.shape[:3], value.shape[3]), layout.shape[:3], layout.shape[:3])
    return tuple(_wrap_without_padding(x, layout, s) for x, s in zip(results, shapes, strict=True))


def _attention_layout(query: ShardTensor, key: ShardTensor) -> Layout:
    """Returns the layout of the query with features replicated; batch and heads too, if the key has fewer of them."""
    current = query._spec.layout.reduced()
    row_partition = current.partitions[_ROWS]
    if row_partition is not None and len(row_partition.mesh_dims) > 1:
        raise UnsupportedOpError(
            f"flex_attention: rows of {current.describe()} are sharded over several mesh dims; redistribute them to "
            "one first, or use scaled_dot_product_attention or shardcompile.varlen_attention"
        )
    same = [compat.guard_equal(query.shape[d], key.shape[d]) for d in (_BATCH, _HEADS)]
    kept = [current.partitions[0] if same[0] else None, current.partitions[1] if same[1] else None, row_partition, None]
    placements = [p if isinstance(p, Shard) and kept[p.dim] is not None else Replicate() for p in current.placements]
    return Layout.of(current.mesh, placements, current.shape, current.dtype, kept)


def _local_shard(x: ShardTensor, layout: Layout, partial_dims: Sequence[int] = ()) -> Tensor:
    """Returns this rank's local shard of a tensor, redistributed to the partitions of a layout.

    Args:
        x: the tensor.
        layout: the layout of batch, heads and rows.
        partial_dims: mesh dims along which each rank computes one term of the gradient of the shard.
    """
    wanted = Layout.of(layout.mesh, layout.placements, tuple(x.shape), x.dtype, layout.partitions)
    placements = [Partial() if m in partial_dims else p for m, p in enumerate(layout.placements)]
    return ToLocal.apply(redistributed(x, wanted), gradient_layout(wanted, placements))


def _fetch_keys(
    key: ShardTensor, value: ShardTensor, layout: Layout, block_mask: tuple[object, ...]
) -> tuple[Tensor, Tensor, IntLike]:
    """Returns the rows of keys and values that a rank's queries attend to, and the global index of the first one."""
    query_partition, partition = layout.partitions[_ROWS], key._spec.layout.partitions[_ROWS]
    row_mesh_dims = () if query_partition is None else query_partition.mesh_dims
    if query_partition is None or partition is None or partition.mesh_dims != row_mesh_dims:
        placements = [Replicate() if m in row_mesh_dims else p for m, p in enumerate(layout.placements)]
        all_rows = Layout.of(layout.mesh, placements, layout.shape, layout.dtype, [*layout.partitions[:2], None, None])
        k, v = (_local_shard(x, all_rows, row_mesh_dims) for x in (key, value))
        return k, v, 0
    partitions = [*layout.partitions[:2], partition, None]
    sharded_rows = Layout.of(layout.mesh, layout.placements, tuple(key.shape), layout.dtype, partitions)
    k, v = (_local_shard(x, sharded_rows) for x in (key, value))
    keys_and_values = torch.cat([k, v], -1).movedim(_ROWS, 0)
    rows, first = fetch_named(keys_and_values, block_mask, query_partition, partition, layout.mesh)
    rows = rows.movedim(0, _ROWS)
    return rows[..., : k.shape[-1]], rows[..., k.shape[-1] :], first


def _replicated(x: Tensor, layout: Layout) -> Tensor:
    """Returns the full value of a captured tensor. Each rank computes the term of its gradient from its own scores."""
    if not isinstance(x, ShardTensor) and not x.requires_grad:
        return x
    sharded = x if isinstance(x, ShardTensor) else Promote.apply(x, ShardTensor, layout.mesh)
    replicated = redistributed(sharded, sharded._spec.layout.replicated())
    grad_placements = [Partial() if isinstance(p, Shard) else Replicate() for p in layout.placements]
    return ToLocal.apply(replicated, gradient_layout(replicated._spec.layout, grad_placements))  # type: ignore[no-any-return]


def _pad(x: Tensor, layout: Layout, is_query: bool) -> Tensor:
    """Appends rows of zeros along dims whose shards may be empty."""
    dims = [d for d in (_BATCH, _HEADS) if layout.partitions[d] is not None]
    if not is_query or layout.partitions[_ROWS] is not None:
        dims.append(_ROWS)
    return aten.constant_pad_nd(x, [n for d in reversed(range(4)) for n in (0, _PADDING if d in dims else 0)])  # type: ignore[no-any-return]


def _global_indices(layout: Layout, dim: int, num_rows: IntLike) -> Tensor:
    """Returns the global index of each local row along a dim. Padding rows get an index that is in range."""
    device = layout.mesh.device_type
    indices: Any = torch.arange(num_rows, device=device)  # type: ignore[arg-type]
    partition = layout.partitions[dim]
    if partition is None:
        return indices  # type: ignore[no-any-return]
    first = derive("offset", [partition], [], partition.size, layout.mesh)[1]
    return (indices + first).clamp(max=partition.size - 1)  # type: ignore[no-any-return]


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    k = repeated_heads(k, q.shape[_HEADS])
    return (q.to(_precision(q)) @ k.to(_precision(q)).mT) * scale


def _softmax_average(scores: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Averages the values by the softmax of the scores; also returns logsumexp and maximum of the scores, to base 2."""
    fully_masked = (scores == -math.inf).all(-1, keepdim=True)
    safe_scores = scores.masked_fill(fully_masked, 0)
    weights = safe_scores.softmax(-1).masked_fill(fully_masked, 0)
    logsumexp = safe_scores.logsumexp(-1).masked_fill(fully_masked.squeeze(-1), -math.inf)
    out = weights.to(dtype) @ repeated_heads(v, scores.shape[_HEADS])
    return out, logsumexp / math.log(2), scores.detach().amax(-1) / math.log(2)


def _wrap_without_padding(x: Tensor, layout: Layout, shape: tuple[IntLike, ...]) -> Tensor:
    """Removes the padding rows of a result and wraps it in the layout of the query."""
    partitions = layout.partitions[: len(shape)]
    for d, partition in enumerate(partitions):
        if partition is not None:
            x = x.narrow(d, 0, x.shape[d] - _PADDING)
    return wrapped(
        x.clone(memory_format=torch.contiguous_format),
        Layout.of(layout.mesh, layout.placements, shape, x.dtype, partitions),
    )
