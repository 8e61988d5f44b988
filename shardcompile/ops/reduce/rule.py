"""Rules of reductions, and of ops that work along one dim and treat the others as batch dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from shardcompile.ops.registry import Strategies, register
from shardcompile.ops.strategy import OpCall, Strategy, along, partial

aten = torch.ops.aten


def reduced_dims(dims: int | Sequence[int] | None, ndim: int) -> set[int]:
    """Returns the dims that are reduced; no dims given means all of them."""
    if dims is None or dims == [] or dims == ():
        return set(range(ndim))
    return {d % ndim if ndim else 0 for d in ([dims] if isinstance(dims, int) else dims)}


def kept_axes(ndim: int, dims: set[int], keepdim: bool) -> list[tuple[int, int]]:
    """Returns pairs of an input dim that is not reduced and its output dim."""
    pairs, out_dim = [], 0
    for dim in range(ndim):
        if dim in dims:
            out_dim += keepdim
        else:
            pairs.append((dim, out_dim))
            out_dim += 1
    return pairs


def reduction(reduce_op: str | None, passes: Sequence[str] = (), dim_at: int = 1, keepdim_at: int = 2) -> Strategies:
    """Returns the rule of a reduction over ``dim``.

    Args:
        reduce_op: the pending reduction of the result if a reduced dim is sharded; None if there is no such reduction.
        passes: pending reductions of the input with which the op commutes.
        dim_at: position of the argument ``dim``.
        keepdim_at: position of the argument ``keepdim``.
    """

    def rule(call: OpCall) -> Iterable[Strategy]:
        ndim = call.tensors[0].ndim
        dims = reduced_dims(call.arg(dim_at, "dim"), ndim)
        keepdim = bool(call.arg(keepdim_at, "keepdim", False))
        outputs = len(call.op._schema.returns)
        for dim, out_dim in kept_axes(ndim, dims, keepdim):
            yield along([dim], [out_dim] * outputs)
        if reduce_op is not None:
            for dim in sorted(dims & set(range(ndim))):
                yield along([dim], [reduce_op] * outputs)
        for op in passes:
            yield partial([op], [op] * outputs)

    return rule


def _full_reduction(reduce_op: str | None, passes: Sequence[str] = ()) -> Strategies:
    """Returns the rule of a full reduction, which has no argument ``dim``."""

    def rule(call: OpCall) -> Iterable[Strategy]:
        if reduce_op is not None:
            for dim in range(call.tensors[0].ndim):
                yield along([dim], [reduce_op])
        for op in passes:
            yield partial([op], [op])

    return rule


def other_dims(dim_at: int, default: int | None = None) -> Callable[[OpCall], Iterable[Strategy]]:
    """Returns the rule of an op along ``dim``: any other dim may be sharded, the same in all tensors of full rank."""

    def rule(call: OpCall) -> Iterable[Strategy]:
        ndim = max(t.ndim for t in call.tensors)
        dim = call.arg(dim_at, "dim", default)
        outputs = len(call.op._schema.returns)
        for other in range(ndim):
            if dim is not None and ndim and other != dim % ndim:
                yield along([other if t.ndim == ndim else None for t in call.tensors], [other] * outputs)

    return rule


register(aten.sum.dim_IntList, reduction("sum", ["sum", "avg"]))
register(aten.sum.default, _full_reduction("sum", ["sum", "avg"]))
register(aten.prod.dim_int, reduction("product"))
register(aten.prod.default, _full_reduction("product"))
register(aten.amax.default, reduction("max", ["max"]))
register(aten.amin.default, reduction("min", ["min"]))
register(aten.max.default, _full_reduction("max", ["max"]))
register(aten.min.default, _full_reduction("min", ["min"]))
register([aten.any.dim, aten.any.dims], reduction("max"))
register([aten.all.dim, aten.all.dims], reduction("min"))
register(aten.any.default, _full_reduction("max"))
register(aten.all.default, _full_reduction("min"))
register([aten.mean.dim], reduction(None, ["sum", "avg"]))
register([aten.mean.default], _full_reduction(None, ["sum", "avg"]))
register([aten.var.correction, aten.std.correction], reduction(None, keepdim_at=99))
register([aten.var_mean.correction, aten.std_mean.correction], reduction(None, keepdim_at=99))
register(aten.linalg_vector_norm.default, reduction(None, dim_at=2, keepdim_at=3))
register(aten.logsumexp.default, reduction(None))
register([aten.argmax.default, aten.argmin.default], reduction(None))
register([aten.max.dim, aten.min.dim, aten.mode.default, aten.median.dim, aten.nanmedian.dim], reduction(None))
register(aten.kthvalue.default, reduction(None, dim_at=2, keepdim_at=3))

register([aten._softmax.default, aten._log_softmax.default], other_dims(1))
register([aten._softmax_backward_data.default, aten._log_softmax_backward_data.default], other_dims(2))
register(aten.glu.default, other_dims(1, -1))
