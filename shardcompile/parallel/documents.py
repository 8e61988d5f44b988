"""Attention within packed documents (sequences of varying length) on sharded rows, and partitions that balance it."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import derive, fetch_reached
from shardcompile.errors import LayoutError
from shardcompile.ops.attention.documents import attend_documents
from shardcompile.sharding import IntLike, Layout
from shardcompile.tensor import ShardTensor
from shardcompile.tensor.aligned_rows import on_mesh, wrapped
from shardcompile.tensor.autograd import ToLocal, redistributed


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Computes attention within packed documents; shards may begin anywhere in a document. Differentiable.

    The documents of a rank's local rows may extend to other ranks. The rank fetches their keys and values from there
    in one exchange; with `causal`, only those before its local rows. A document that lies on one rank communicates
    nothing. One graph serves all partitions and documents; the number of documents is a size like any other, which may
    make torch compile once more when it changes for the first time.

    Args:
        query: [rows, heads, features], sharded along dim 0 by one mesh dim, or not sharded.
        key: [rows, heads, features]; it may have fewer heads, whose number divides that of the query's. It is
            redistributed to the partition of the query.
        value: as `key`; the number of features may differ.
        cu_seqlens: the cumulative document lengths: [documents + 1], increasing from 0 to the number of rows; the same
            on every rank. Empty documents are allowed.
        causal: whether a row attends only to the rows of its document up to itself.
        scale: factor of the scores; one over the square root of the number of features by default.

    Returns:
        [rows, heads, features of the value], sharded as the query. Plain if all arguments are plain.

    Raises:
        LayoutError: shapes or meshes do not fit, several mesh dims shard the rows, or `cu_seqlens` does not increase
            from 0 to the number of rows.
        DivergenceError: documents are not the same on every rank.
    """
    _check(query, key, value)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if not any(isinstance(x, ShardTensor) for x in (query, key, value)):
        rows = query.shape[0]
        return attend_documents(query, key, value, cu_seqlens, rows, 0, 0, causal, factor)[0]  # type: ignore[no-any-return]
    return _on_shards(query, key, value, cu_seqlens, causal, factor)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    same = compat.guard_equal
    fits = all(len(s) == 3 for s in shapes) and all(
        (
            *(same(s[0], shapes[0][0]) for s in shapes),
            same(key.shape[1], value.shape[1]),
            same(query.shape[2], key.shape[2]),
            same(query.shape[1] % key.shape[1], 0) if key.shape[1] != 0 else same(query.shape[1], 0),
        )
    )
    if not fits:
        raise LayoutError(
            f"varlen_attention takes query, key and value [rows, heads, features] of the same number of rows; query "
            f"and key have the same number of features, and the number of heads of key and value divides that of the "
            f"query; got {', '.join(map(str, shapes))}"
        )


@torch.compiler.allow_in_graph
def _on_shards(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, causal: bool, scale: float) -> Tensor:
    mesh = next(x for x in (query, key, value) if isinstance(x, ShardTensor))._spec.layout.mesh
    query, key, value = (on_mesh(x, mesh) for x in (query, key, value))
    layout = _attention_layout(query, key)
    shards = [ToLocal.apply(redistributed(x, _with_shape_of(x, layout)), None) for x in (query, key, value)]
    ends = cu_seqlens
    if isinstance(ends, ShardTensor):
        ends = ToLocal.apply(redistributed(ends, ends._spec.layout.replicated()), None)
    q, k, v = shards
    partition = layout.partitions[0]
    first: IntLike = 0
    first_key: IntLike = 0
    if partition is not None:
        features = k.shape[-1]
        rows, first_key = fetch_reached(torch.cat([k, v], -1), ends, causal, partition, mesh)
        k, v = rows[..., :features], rows[..., features:]
        first = derive("offset", [partition], [], partition.size, mesh)[1]
    out = attend_documents(q, k, v, ends, layout.shape[0], first, first_key, causal, scale)[0]
    shape = (*layout.shape[:2], value.shape[2])
    return wrapped(out, Layout.of(mesh, layout.placements, shape, out.dtype, layout.partitions))


def _attention_layout(query: ShardTensor, key: ShardTensor) -> Layout:
    """Returns the layout of the query with features replicated, and heads too if the key has fewer of them."""
    current = query._spec.layout.reduced()
    if current.partitions[0] is not None and len(current.partitions[0].mesh_dims) > 1:
        raise LayoutError(
            f"varlen_attention: dim 0 of {current.describe()} is sharded over several mesh dims; redistribute it to "
            f"one first"
        )
    same_heads = compat.guard_equal(query.shape[1], key.shape[1])
    kept = [current.partitions[0], current.partitions[1] if same_heads else None, None]
    placements = [p if isinstance(p, Shard) and kept[p.dim] is not None else Replicate() for p in current.placements]
    return Layout.of(current.mesh, placements, current.shape, current.dtype, kept)


def _with_shape_of(x: Tensor, layout: Layout) -> Layout:
    """Returns `layout` with the shape and dtype of `x`."""
    return Layout.of(layout.mesh, layout.placements, tuple(x.shape), x.dtype, layout.partitions)


def balanced_partition(
    lengths: Sequence[int], world_size: int, *, causal: bool = True, row_cost: float = 0.0
) -> list[int]:
    """Returns the partition of packed documents that minimizes the cost of the slowest rank.

    The cost of a row is the number of its query-key pairs, plus `row_cost` for the rest of the layer.

    Args:
        lengths: number of rows of each document.
        world_size: number of ranks.
        causal: whether a row attends to the rows of its document up to itself, or to all of them.
        row_cost: cost of a row besides attention, in query-key pairs. A pair takes ``4 * width`` operations in a model
            of that width, and the weights of a usual layer take ``24 * width ** 2`` per row: so ``6 * width``, or a
            measured ratio.

    Returns:
        The shard sizes, for `distribute_tensor` and similar functions; some may be 0.

    Raises:
        LayoutError: there is no rank, or a length or the cost is negative.
    """
    if world_size < 1 or row_cost < 0 or any(n < 0 for n in lengths):
        raise LayoutError(
            f"balanced_partition takes lengths and a row_cost that are not negative and at least one rank; got "
            f"{list(lengths)[:8]}, {row_cost} and {world_size}"
        )
    costs = itertools.chain.from_iterable((row_cost + (i + 1 if causal else n) for i in range(n)) for n in lengths)
    cumulative = list(itertools.accumulate(costs, initial=0.0))
    low, high = cumulative[-1] / world_size, cumulative[-1]
    best = _greedy_partition(cumulative, world_size, high)
    assert best is not None, "one rank can hold all rows"
    while high - low > 1e-9 * max(high, 1.0):
        limit = (low + high) / 2
        found = _greedy_partition(cumulative, world_size, limit)
        if found is None:
            low = limit
        else:
            best, high = found, limit
    return best


def _greedy_partition(cumulative: Sequence[float], num_ranks: int, limit: float) -> list[int] | None:
    """Gives each rank in turn as many rows as the cost limit allows; returns None if rows are left over.

    Args:
        cumulative: the total cost of all rows before each row, and of all rows.
        num_ranks: number of ranks.
        limit: highest cost of a rank.
    """
    sizes, start = [], 0
    for _ in range(num_ranks):
        end = bisect.bisect_right(cumulative, cumulative[start] + limit * (1 + 1e-12), lo=start) - 1
        sizes.append(end - start)
        start = end
    return sizes if start == len(cumulative) - 1 else None
