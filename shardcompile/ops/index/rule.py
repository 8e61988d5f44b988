"""Rules of ops that gather, write and add by an index tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Shard

from shardcompile.compat import is_one
from shardcompile.ops.pointwise.rule import is_stretched
from shardcompile.ops.registry import register
from shardcompile.ops.strategy import OpCall, Strategy, TensorArg, along, partial
from shardcompile.sharding import IntLike

aten = torch.ops.aten


def _may_shard(source: TensorArg, dim: int, indices: Sequence[TensorArg]) -> bool:
    """Whether to offer strategies that shard a dim which is not indexed.

    Not where these would move the indices out of their sharding. The result, with many features for each index, would
    lose that sharding as well, and the next op mostly wants it back.
    """
    if any(isinstance(p, Shard) and p.dim == dim for p in source.layout.placements):
        return True
    return not any(isinstance(p, Shard) for i in indices for p in i.layout.placements)


def _embedding(call: OpCall) -> Iterable[Strategy]:
    table, indices = call.tensors
    yield from (along([None, d], [d]) for d in range(indices.ndim))
    if _may_shard(table, 1, [indices]):
        yield along([1, None], [indices.ndim])


def _embedding_backward(call: OpCall) -> Iterable[Strategy]:
    grad, indices = call.tensors
    if not call.arg(4, "scale_grad_by_freq", False):  # a rank does not know the global frequency of an index
        yield from (along([d, d], ["sum"]) for d in range(indices.ndim))
    yield along([grad.ndim - 1, None], [1])


def _index_select(call: OpCall) -> Iterable[Strategy]:
    source, index = call.tensors
    if source.ndim == 0 or index.ndim == 0:
        return
    dim = call.args[1] % source.ndim
    yield from (along([d, None], [d]) for d in range(source.ndim) if d != dim and _may_shard(source, d, [index]))
    yield along([None, 0], [dim])


def _index(call: OpCall) -> Iterable[Strategy]:
    """``x[..., i, j, ...]`` with adjacent index tensors of equal rank; other indexing is left to the fallback."""
    source = call.tensors[0]
    at = _indexed_dims(call)
    if not at:
        return
    rank = call.args[1][at[0]].ndim
    for dim in range(source.ndim):
        if (dim < at[0] or dim > at[-1]) and _may_shard(source, dim, call.tensors[1:]):
            out = dim if dim < at[0] else dim - len(at) + rank
            yield along([dim, *[None] * len(at)], [out])
    yield from (along([None, *[d] * len(at)], [at[0] + d]) for d in range(rank))


def neighbours(indices: Sequence[Any]) -> list[int]:
    """The dims that are indexed, if they are adjacent and no index is a mask; otherwise none.

    Args:
        indices: for each dim a tensor, or its `shardcompile.ops.strategy.TensorArg`, or None.
    """
    at = [d for d, i in enumerate(indices) if i is not None]
    if not at or at[-1] - at[0] != len(at) - 1:
        return []
    return [] if any(indices[d].dtype in (torch.bool, torch.uint8) for d in at) else at


def _indexed_dims(call: OpCall) -> list[int]:
    """The dims that are indexed; none if they are not adjacent, or if their indices are masks or differ in shape."""
    at = neighbours(call.args[1])
    if not at:
        return []
    indices = [call.args[1][d] for d in at]
    same = len({i.ndim for i in indices}) == 1 and not any(_broadcasts(i, indices[0]) for i in indices)
    return at if same else []


def _broadcasts(index: TensorArg, other: TensorArg) -> bool:
    return any(a is not b and a != b for a, b in zip(index.shape, other.shape, strict=True))


def _index_put(call: OpCall) -> Iterable[Strategy]:
    """``x[..., i, j, ...] = values``, with the same indices as `_index`; values are written, or added."""
    target = call.tensors[0]
    values = call.args[2]
    at = _indexed_dims(call)
    if not at:
        return
    rank = call.args[1][at[0]].ndim
    outer = target.ndim - len(at) + rank - values.ndim
    add = bool(call.arg(3, "accumulate", False))
    for dim in range(target.ndim):
        if dim < at[0] or dim > at[-1]:
            out = (dim if dim < at[0] else dim - len(at) + rank) - outer
            broadcast = out < 0 or is_stretched(values.shape[out], target.shape[dim])
            yield along([dim, *[None] * len(at), None if broadcast else out], [dim])
    if add:
        yield partial(["sum", *[None] * len(at), "sum"], ["sum"])
        for dim in range(rank):
            out = at[0] + dim - outer
            if out >= 0 and not is_one(values.shape[out]):
                yield Strategy((Partial("sum"), *[Shard(dim)] * len(at), Shard(out)), (Partial("sum"),))


def _same(a: IntLike, b: IntLike) -> bool:
    return a is b or bool(a == b)


def _along_other_dims(call: OpCall) -> Iterable[Strategy]:
    """Ops that index along ``dim`` with tensors of full rank: a dim of the same size in all of them may be sharded."""
    ndim = call.tensors[0].ndim
    dim = call.args[1] % max(ndim, 1)
    if any(t.ndim != ndim for t in call.tensors):
        return
    for other in range(ndim):
        size = call.tensors[0].shape[other]
        if other != dim and all(_same(t.shape[other], size) for t in call.tensors):
            yield along([other] * len(call.tensors), [other])


def _scatter_add(call: OpCall) -> Iterable[Strategy]:
    yield from _along_other_dims(call)
    yield partial(["sum", None, "sum"], ["sum"])
    target, index, source = call.tensors
    dim = call.args[1] % max(target.ndim, 1)
    if index.ndim == source.ndim == target.ndim > 0 and _same(index.shape[dim], source.shape[dim]):
        yield Strategy((Partial("sum"), Shard(dim), Shard(dim)), (Partial("sum"),))


def _index_add(call: OpCall) -> Iterable[Strategy]:
    target, index, source = call.tensors
    if source.ndim != target.ndim or not target.ndim or index.ndim != 1:
        return
    dim = call.args[1] % target.ndim
    yield from (along([d, None, d], [d]) for d in range(target.ndim) if d != dim)
    yield partial(["sum", None, "sum"], ["sum"])
    yield Strategy((Partial("sum"), Shard(0), Shard(dim)), (Partial("sum"),))


def _index_write(call: OpCall) -> Iterable[Strategy]:
    """``index_copy`` and ``index_fill``: any dim but the one that is indexed."""
    target = call.tensors[0]
    dim = call.args[1] % max(target.ndim, 1)
    for other in range(target.ndim):
        if other != dim and all(t.ndim == target.ndim or t.ndim <= 1 for t in call.tensors[2:]):
            yield along([other, None, *[other if t.ndim == target.ndim else None for t in call.tensors[2:]]], [other])


def _lookup(call: OpCall) -> Iterable[Strategy]:
    """``bucketize``, ``isin``, ``searchsorted``: each element of a tensor is looked up in a replicated one."""
    queries = 1 if "searchsorted" in call.op._schema.name else 0
    if any(t.ndim != 1 for i, t in enumerate(call.tensors) if i != queries):
        return
    for dim in range(call.tensors[queries].ndim):
        yield along([dim if i == queries else None for i in range(len(call.tensors))], [dim])


register(aten.embedding.default, _embedding)
register(aten.embedding_dense_backward.default, _embedding_backward)
register(aten.index_select.default, _index_select)
register([aten.index.Tensor, aten._unsafe_index.Tensor], _index)
register([aten.index_put.default, aten._unsafe_index_put.default], _index_put)


def _gather(call: OpCall) -> Iterable[Strategy]:
    """The index may be sharded along the indexed dim, too: the source is then replicated."""
    yield from _along_other_dims(call)
    source, index = call.tensors
    dim = call.args[1] % max(source.ndim, 1)
    others = [d for d in range(source.ndim) if d != dim]
    if source.ndim == index.ndim > 0 and all(_same(source.shape[d], index.shape[d]) for d in others):
        yield along([None, dim], [dim])


register(aten.gather.default, _gather)
register([aten.scatter.src, aten.scatter.value, aten.scatter_reduce.two], _along_other_dims)
register([aten.scatter_add.default], _scatter_add)
register(aten.index_add.default, _index_add)
register([aten.index_copy.default, aten.index_fill.int_Scalar], _index_write)
register([aten.bucketize.Tensor, aten.isin.Tensor_Tensor], _lookup)
register(aten.searchsorted.Tensor, _lookup)
