"""Determinants and solves for a sharded batch of matrices.

Torch's kernels factor the transpose of a contiguous matrix, and the gradient formulas check whether the global tensor
is contiguous. So a local shard is copied to the memory format of the global tensor before it is factored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile.compat import OpOverload, global_sizes, guard_equal, retrace
from shardcompile.ops import NotServed, state
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.sharded_rows import layout_of, local_shard_in, reduced, wrap
from shardcompile.sharded import Sharded, first_sharded
from shardcompile.sharding import IntLike, Layout

aten = torch.ops.aten


def _batched(op: OpOverload) -> Callable[..., object]:
    """Returns the decomposition of an op on a batch of square matrices, whose results have the same batch dims."""

    def run(x: Sharded) -> object:
        x = reduced(x)
        layout = x._spec.layout
        if not _shards_only_batch(layout, x.ndim - 2):
            return NotServed("rows or columns of the matrices are sharded")
        return _results(op, (x,), layout, op(_like_global_format(x._local_tensor, x)))

    return run


def solve(x: Tensor, right: Tensor, *, left: bool = True, check_errors: bool = False) -> object:
    """``aten._linalg_solve_ex`` for matrices and right-hand sides with the same batch dims."""
    if check_errors:  # all ranks have to raise, so each needs all matrices
        return NotServed("errors are checked, for which each rank needs all matrices")
    mesh = first_sharded([t for t in (x, right) if isinstance(t, Sharded)])._spec.layout.mesh
    x, right = reduced(x), reduced(right)
    x_layout, right_layout = layout_of(x, mesh), layout_of(right, mesh)
    batch = x.ndim - 2
    vector = right.ndim == batch + 1 and _same(right.shape, x.shape[:-1])
    if right.ndim != batch + 2 - vector or not _same(right.shape[:batch], x.shape[:batch]):
        return NotServed("the right-hand sides have other batch dims than the matrices")
    like = x_layout if any(c is not None for c in x_layout.partitions) else right_layout
    if not _shards_only_batch(like, batch):
        return NotServed("rows or columns of the matrices are sharded")
    matrices, sides = (_shard_like(like, batch, of.shape, of.dtype) for of in (x_layout, right_layout))
    shard = _like_global_format(local_shard_in(x, matrices), x)
    out = aten._linalg_solve_ex.default(shard, local_shard_in(right, sides), left=left)
    return _results(aten._linalg_solve_ex.default, (x, right), matrices, out, left=left)


def _shards_only_batch(layout: Layout, batch: int) -> bool:
    return not layout.is_partial and all(c is None for c in layout.partitions[batch:])


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(guard_equal, a, b))


def _shard_like(like: Layout, batch: int, shape: Sequence[IntLike], dtype: torch.dtype) -> Layout:
    """Returns the layout of a tensor whose batch dims are sharded like those of another one."""
    partitions = [*like.partitions[:batch], *[None] * (len(shape) - batch)]
    return Layout.of(like.mesh, like.placements, shape, dtype, partitions)


def _like_global_format(shard: Tensor, x: Tensor) -> Tensor:
    """Returns a copy of a shard, contiguous if the global tensor is, and with contiguous transposes otherwise."""
    if x.is_contiguous():
        return shard.clone(memory_format=torch.contiguous_format)
    return shard.mT.clone(memory_format=torch.contiguous_format).mT


def _results(op: OpOverload, args: tuple[Any, ...], like: Layout, shards: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Wraps local results whose batch dims are sharded like those of `like`."""
    meta, sharded = global_meta(op, args, kwargs), first_sharded([a for a in args if isinstance(a, Sharded)])
    out = []
    for shard, global_result in zip(shards, meta, strict=True):
        layout = _shard_like(like, like.ndim - 2, global_sizes(global_result.shape), shard.dtype)
        out.append(wrap(sharded, shard, layout, retrace(global_result.stride())))
    return tuple(out)


for _op in (aten._linalg_det.default, aten._linalg_slogdet.default):
    state(_op, sharded=_batched(_op))
state(aten._linalg_solve_ex.default, sharded=solve)
