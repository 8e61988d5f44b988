"""Sequences packed one after the other, sharded anywhere: attention within each, and partitions that balance its
work.
"""

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
    """Attention within packed documents, the rows of which may be sharded anywhere. Differentiable.

    A rank fetches the rows that its own rows' documents have on other ranks, keys and values together in one exchange:
    with `causal` only those in front of its own. What lies on one rank sends nothing. One graph serves all partitions
    and documents; the number of documents is a size like any other, which may make torch compile once more when it
    changes for the first time.

    Args:
        query: [rows, heads, features], sharded along dim 0 by one mesh dim, or not at all.
        key: [rows, heads, features]; the heads may be fewer, and divide those of the query. Brought to the query's
            sharded.
        value: as `key`; its features may be others.
        cu_seqlens: where documents begin and end: [documents + 1], rising from 0 to the number of rows; the same on
            every rank. Empty documents are allowed.
        causal: whether a row sees only the rows of its document up to itself.
        scale: factor of the scores; one over the square root of the features by default.

    Returns:
        [rows, heads, features of the value], sharded as the query. Plain if all tensors are.

    Raises:
        LayoutError: shapes or meshes do not fit, several mesh dims sharded the rows, or `cu_seqlens` does not rise
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
    same = compat.same_symbol
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
            f"varlen_attention takes [rows, heads, features] of as many rows each, of the key as many features as of "
            f"the query, and heads of key and value that divide those of the query; got {', '.join(map(str, shapes))}"
        )


@torch.compiler.allow_in_graph
def _on_shards(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, causal: bool, scale: float) -> Tensor:
    mesh = next(x for x in (query, key, value) if isinstance(x, ShardTensor))._spec.layout.mesh
    query, key, value = (on_mesh(x, mesh) for x in (query, key, value))
    layout = _rows_and_heads(query, key)
    shards = [ToLocal.apply(redistributed(x, _like(layout, x)), None) for x in (query, key, value)]
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
        first = derive("located", [partition], [], partition.size, mesh)[1]
    out = attend_documents(q, k, v, ends, layout.shape[0], first, first_key, causal, scale)[0]
    shape = (*layout.shape[:2], value.shape[2])
    return wrapped(out, Layout.of(mesh, layout.placements, shape, out.dtype, layout.partitions))


def _rows_and_heads(query: ShardTensor, key: ShardTensor) -> Layout:
    """The layout of the query, with whole features, and whole heads where those of the keys are fewer."""
    now = query._spec.layout.reduced()
    if now.partitions[0] is not None and len(now.partitions[0].mesh_dims) > 1:
        raise LayoutError(
            f"varlen_attention: dim 0 of {now.describe()} is sharded over several mesh dims; redistribute it to one "
            f"first"
        )
    heads = compat.same_symbol(query.shape[1], key.shape[1])
    kept = [now.partitions[0], now.partitions[1] if heads else None, None]
    placements = [p if isinstance(p, Shard) and kept[p.dim] is not None else Replicate() for p in now.placements]
    return Layout.of(now.mesh, placements, now.shape, now.dtype, kept)


def _like(layout: Layout, x: Tensor) -> Layout:
    return Layout.of(layout.mesh, layout.placements, tuple(x.shape), x.dtype, layout.partitions)


def balanced_partition(
    lengths: Sequence[int], world_size: int, *, causal: bool = True, row_cost: float = 0.0
) -> list[int]:
    """The partition of packed documents that makes the ranks' work as equal as whole rows allow.

    A row costs as many pairs of a query and a key as it has, and `row_cost` for the rest of the layer. The partition
    is the one with the least work on the slowest rank.

    Args:
        lengths: rows of each document.
        world_size: ranks.
        causal: whether a row sees the rows of its document up to itself, or all of them.
        row_cost: what a row costs besides attention, in pairs. A pair takes ``4 * width`` operations of a model of that
            width, and the weights of a usual layer ``24 * width ** 2`` a row: so ``6 * width``, or a measured ratio.

    Returns:
        Rows of each rank, for `distribute_tensor` and the like; some may have none.

    Raises:
        LayoutError: there is no rank, or a length or the cost is negative.
    """
    if world_size < 1 or row_cost < 0 or any(n < 0 for n in lengths):
        raise LayoutError(
            f"balanced_partition takes lengths and a row_cost that are not negative and at least one rank; got "
            f"{list(lengths)[:8]}, {row_cost} and {world_size}"
        )
    costs = itertools.chain.from_iterable((row_cost + (i + 1 if causal else n) for i in range(n)) for n in lengths)
    done = list(itertools.accumulate(costs, initial=0.0))
    low, high = done[-1] / world_size, done[-1]
    best = _fill(done, world_size, high)
    assert best is not None, "one rank can do all"
    while high - low > 1e-9 * max(high, 1.0):
        limit = (low + high) / 2
        found = _fill(done, world_size, limit)
        if found is None:
            low = limit
        else:
            best, high = found, limit
    return best


def _fill(done: Sequence[float], ranks: int, limit: float) -> list[int] | None:
    """Rows of each rank if none works more than a limit and each as much as it may; None if rows are left.

    Args:
        done: work of all rows before each.
        ranks: how many there are.
        limit: work of a rank.
    """
    sizes, start = [], 0
    for _ in range(ranks):
        end = bisect.bisect_right(done, done[start] + limit * (1 + 1e-12), lo=start) - 1
        sizes.append(end - start)
        start = end
    return sizes if start == len(done) - 1 else None
