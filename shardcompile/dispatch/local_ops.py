"""Local kernels that need help on blocks: reductions that refuse an empty dim."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.dispatch.logsumexp import logsumexp
from shardcompile.dispatch.strides import in_one_order
from shardcompile.layout import IntLike
from shardcompile.ops import record_of, state
from shardcompile.ops.record import Run
from shardcompile.rules.images import per_channel

aten = torch.ops.aten
Scalar = int | float | bool | complex


def lowest(dtype: torch.dtype) -> Scalar:
    """The value that never wins a maximum."""
    if dtype is torch.bool:
        return False
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Scalar:
    """The value that never wins a minimum."""
    if dtype is torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _may_be_empty(extent: int | torch.SymInt) -> bool:
    return not isinstance(extent, int) or extent == 0


def padded(x: Tensor, dims: list[int], value: Scalar) -> Tensor:
    """`x` with one neutral row along dims that may be empty on this rank; Inductor fuses it into the reduction."""
    pad = [0] * (2 * x.ndim)
    for dim in dims:
        if _may_be_empty(x.shape[dim]):
            pad[2 * (x.ndim - 1 - dim % x.ndim) + 1] = 1
    if not any(pad):
        return x
    if x.dtype is torch.bool:  # constant_pad_nd of a bool wants a number
        return aten.constant_pad_nd(x.to(torch.uint8), pad, int(bool(value))).to(torch.bool)
    return aten.constant_pad_nd(x, pad, value)


def _extremum(op: OpOverload, neutral: Callable[[torch.dtype], Scalar]) -> Callable[..., Tensor]:
    def local(x: Tensor, dim: Sequence[int] | None = (), keepdim: bool = False) -> Tensor:
        dims = list(range(x.ndim)) if dim is None or len(dim) == 0 else list(dim)
        return op(padded(x, dims, neutral(x.dtype)) if x.ndim else x, dim, keepdim)

    return local


def _whole_extremum(op: OpOverload, neutral: Callable[[torch.dtype], Scalar]) -> Callable[..., Tensor]:
    def local(x: Tensor) -> Tensor:
        return op(padded(x, list(range(x.ndim)), neutral(x.dtype)), [], False) if x.ndim else x.clone()

    return local


_block_amax = _extremum(aten.amax.default, lowest)


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """`logsumexp` of a block. In a trace torch's own asks whether there are elements."""
    if all(isinstance(n, int) for n in x.shape):
        return aten.logsumexp.default(x, dim, keepdim)
    dims = list(dim) if len(dim) else list(range(x.ndim))
    return logsumexp(x, dims, keepdim, _block_amax)


def unbound(x: Tensor, dim: int = 0) -> Sequence[Tensor]:
    """`unbind`; as rows that are selected, where torch's own (2.11 - 2.15) asks in a trace for sizes as numbers.

    Of a dim whose extent is a symbol it keeps the dim, unless it is known to be 1. A write to a row it brings back to
    the whole by asking for all sizes.
    """
    if all(isinstance(n, int) for n in x.shape):
        return aten.unbind.int(x, dim)
    return [aten.select.int(x, dim, i) for i in range(int(x.shape[dim]))]


def _view(x: Tensor, shape: Sequence[IntLike]) -> Tensor:
    """A view, or a copy where the strides of a block forbid a view that those of the whole tensor allow.

    Inside a trace strides are compared by their hints, or the graph would be specialised on the size of this rank's
    block. What can be viewed so with rows can be with one or none.
    """
    with contextlib.nullcontext() if type(x) is Tensor else compat.without_guards(x):
        try:
            return aten.view.default(x, shape)
        except (RuntimeError, ValueError):
            return aten.view.default(aten.clone.default(x, memory_format=torch.contiguous_format), shape)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """`matmul`; torch's own reshapes the batch, and inside a trace specialises on the size of this rank's block."""
    if type(a) is Tensor or a.ndim < 3 or b.ndim < 3:
        return aten.matmul.default(a, b)
    ndim = max(a.ndim, b.ndim)
    a, b = (x[(None,) * (ndim - x.ndim)] for x in (a, b))
    batch = [n if isinstance(m, int) and m == 1 else m for m, n in zip(a.shape[:-2], b.shape[:-2], strict=True)]
    out = aten.bmm.default(_flat_batch(a, batch), _flat_batch(b, batch))
    return _view(out, [*batch, *out.shape[1:]])


def _flat_batch(x: Tensor, batch: Sequence[IntLike]) -> Tensor:
    """Broadcast to a batch, whose dims become one."""
    if any(isinstance(m, int) and m == 1 and n is not m for m, n in zip(x.shape, batch, strict=False)):
        x = x.expand([*batch, -1, -1])
    return _view(x, [math.prod(batch), *x.shape[-2:]])


def copy_block(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy_`; inside a trace it looks for overlaps, and would specialise on the size of this rank's block."""
    if type(target) is Tensor:
        return target.copy_(source, non_blocking)
    with compat.without_guards(target):
        return target.copy_(source, non_blocking)


def _index_write(op: OpOverload) -> Callable[..., Tensor]:
    def local(x: Tensor, *args: object) -> Tensor:
        """Inside a trace torch's own makes a contiguous tensor, and asks for the size of the block."""
        with contextlib.nullcontext() if type(x) is Tensor else compat.without_guards(x):
            return op(x, *args)

    return local


def _masked_fill_(op: OpOverload) -> Callable[..., Tensor]:
    functional: Any = compat.functional_variant(op)

    def local(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        """Inside a trace torch's own makes a contiguous tensor, and asks for the size of a block that is not."""
        if type(x) is Tensor or x.ndim < 2:
            return op(x, mask, value)
        return copy_block(x, functional(*in_one_order(record_of(functional), [x, mask], x.stride()), value))

    return local


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand_a: list[int], expand_b: list[int], expand_c: list[int], total: list[int]
) -> Tensor:
    """`_trilinear`; inside a trace torch's own takes sizes for numbers, and specialises on that of a block."""
    if type(a) is Tensor:
        return aten._trilinear.default(a, b, c, expand_a, expand_b, expand_c, total)
    out: Any = 1
    for x, dims in ((a, expand_a), (b, expand_b), (c, expand_c)):
        for d in sorted(dims):
            x = x.unsqueeze(d)
        out = x * out
    return out.sum(total)


def _roll(x: Tensor, shifts: Sequence[IntLike], dims: Sequence[int] = ()) -> Tensor:
    """`roll`; inside a trace torch's own asks whether the block is empty."""
    if type(x) is Tensor or not dims:
        return aten.roll.default(x, shifts, dims)
    for shift, dim in zip(shifts, dims, strict=True):
        empty = isinstance(x.shape[dim], int) and x.shape[dim] == 0
        start = 0 if empty else (x.shape[dim] - shift) % x.shape[dim]
        x = aten.cat.default([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x


def _per_channel(op: OpOverload, spatial: int) -> Run:
    """Where this rank may have no channels, which kernels refuse: all leading dims as samples of one channel."""

    def local(x: Tensor, *args: Any, **kwargs: Any) -> object:
        leading = x.shape[:-spatial]
        if not _may_be_empty(leading[-1]):
            return op(x, *args, **kwargs)

        def merged(a: Tensor) -> Tensor:
            if isinstance(a, Tensor):
                return _view(a, [math.prod(a.shape[:-spatial]), 1, *a.shape[-spatial:]])
            is_shape = isinstance(a, (list, tuple)) and len(a) == spatial + len(leading) > spatial
            return [math.prod(a[:-spatial]), 1, *a[-spatial:]] if is_shape else a

        out = op(merged(x), *map(merged, args), **kwargs)
        if isinstance(out, Tensor):
            return _view(out, [*leading, *out.shape[-spatial:]])
        return tuple(_view(o, [*leading, *o.shape[-spatial:]]) for o in out)

    return local


def _running_extremum(
    op: OpOverload, worst: Callable[[torch.dtype], Scalar]
) -> Callable[[Tensor, int], Sequence[Tensor]]:
    """`cummax` or `cummin` of a block, which in a trace has a row more along dims that may be empty on some ranks.

    Run for shapes alone, torch's kernel asks whether there are elements, to look at `dim` then. Nothing can be said of
    a size that a run gives; of another the answer would be a guard that holds on some ranks only.
    """

    def run(x: Tensor, dim: int) -> Sequence[Tensor]:
        dims = [d for d in range(x.ndim) if isinstance(x.shape[d], torch.SymInt)]
        found = op(padded(x, dims, worst(x.dtype)) if dims else x, dim)
        for d in dims:
            found = [aten.slice.Tensor(t, d, 0, x.shape[d]) for t in found]
        return found

    return run


index_copy = _index_write(aten.index_copy.default)
running_maximum = _running_extremum(aten.cummax.default, lowest)
running_minimum = _running_extremum(aten.cummin.default, highest)

state(aten.amax.default, kernel=_block_amax)
state(aten.amin.default, kernel=_extremum(aten.amin.default, highest))
state(aten.logsumexp.default, kernel=_logsumexp)
state(aten.max.default, kernel=_whole_extremum(aten.amax.default, lowest))
state(aten.min.default, kernel=_whole_extremum(aten.amin.default, highest))
state(aten.cummax.default, kernel=running_maximum)
state(aten.cummin.default, kernel=running_minimum)
state(aten.copy_.default, kernel=copy_block)
state(aten.index_copy.default, kernel=index_copy)
state(aten.index_fill.int_Scalar, kernel=_index_write(aten.index_fill.int_Scalar))
state(aten.masked_fill_.Scalar, kernel=_masked_fill_(aten.masked_fill_.Scalar))
state(aten.masked_fill_.Tensor, kernel=_masked_fill_(aten.masked_fill_.Tensor))
state(aten.roll.default, kernel=_roll)
state(aten._trilinear.default, kernel=lambda a, b, c, x, y, z, total, unroll=1: _trilinear(a, b, c, x, y, z, total))
state(aten.matmul.default, kernel=_matmul)
state(aten.unbind.int, kernel=unbound)
state(aten.view.default, kernel=_view)
state(aten._unsafe_view.default, kernel=_view)
state(aten.reshape.default, kernel=_view)
# A block must not be conjugated or negated lazily: below `__torch_dispatch__` nothing heeds the bit.
state(aten._conj.default, kernel=aten._conj_physical.default, copies_block=True)
state(aten._neg_view.default, kernel=aten.neg.default, copies_block=True)
# The rule names the dims that go: on a block, others may have extent 1 as well.
state(aten.squeeze.default, kernel=aten.squeeze.dims)
state(aten.squeeze.dim, kernel=aten.squeeze.dims)
for _op, _spatial in per_channel():
    state(_op, kernel=_per_channel(_op, _spatial))
