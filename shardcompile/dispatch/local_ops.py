"""Local kernels that need help on blocks: reductions that refuse an empty dim."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.dispatch.logsumexp import logsumexp
from shardcompile.dispatch.strides import in_one_order
from shardcompile.layout import order_of
from shardcompile.rules import images

aten = torch.ops.aten


def lowest(dtype: torch.dtype) -> Any:
    """The value that never wins a maximum."""
    if dtype is torch.bool:
        return False
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    """The value that never wins a minimum."""
    if dtype is torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _may_be_empty(extent: int | torch.SymInt) -> bool:
    return not isinstance(extent, int) or extent == 0


def padded(x: Tensor, dims: list[int], value: Any) -> Tensor:
    """`x` with one neutral row along dims that may be empty on this rank; Inductor fuses it into the reduction."""
    pad = [0] * (2 * x.ndim)
    for dim in dims:
        if _may_be_empty(x.shape[dim]):
            pad[2 * (x.ndim - 1 - dim % x.ndim) + 1] = 1
    if not any(pad):
        return x
    if x.dtype is torch.bool:  # constant_pad_nd of a bool wants a number
        return aten.constant_pad_nd(x.to(torch.uint8), pad, int(value)).to(torch.bool)
    return aten.constant_pad_nd(x, pad, value)


def _extremum(op: Any, neutral: Callable[[torch.dtype], Any]) -> Callable[..., Tensor]:
    def local(x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
        dims = list(range(x.ndim)) if dim is None or len(dim) == 0 else list(dim)
        return op(padded(x, dims, neutral(x.dtype)) if x.ndim else x, dim, keepdim)

    return local


def _whole_extremum(op: Any, neutral: Callable[[torch.dtype], Any]) -> Callable[..., Tensor]:
    def local(x: Tensor) -> Tensor:
        return op(padded(x, list(range(x.ndim)), neutral(x.dtype)), [], False) if x.ndim else x.clone()

    return local


_block_amax = _extremum(aten.amax.default, lowest)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """`logsumexp` of a block. In a trace torch's own asks whether there are elements."""
    if all(isinstance(n, int) for n in x.shape):
        return aten.logsumexp.default(x, dim, keepdim)
    dims = list(dim) if len(dim) else list(range(x.ndim))
    return logsumexp(x, dims, keepdim, _block_amax)


def unbound(x: Tensor, dim: int = 0) -> Any:
    """`unbind`. In a trace torch's own (2.11 - 2.15) keeps the dim, unless it asks for an extent that it knows is 1."""
    if isinstance(x.shape[dim], int):
        return aten.unbind.int(x, dim)
    return [aten.select.int(x, dim, i) for i in range(int(x.shape[dim]))]


def _view(x: Tensor, shape: Sequence[Any]) -> Tensor:
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


def _flat_batch(x: Tensor, batch: Sequence[Any]) -> Tensor:
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


def _unasked(op: Any) -> Callable[..., Tensor]:
    def local(x: Tensor, *args: Any) -> Tensor:
        """Inside a trace torch's own makes contiguous tensors, and asks for the size of the block."""
        with contextlib.nullcontext() if type(x) is Tensor else compat.without_guards(x):
            return op(x, *args)

    return local


def _masked_fill_(op: Any) -> Callable[..., Tensor]:
    functional: Any = compat.functional_variant(op)

    def local(x: Tensor, mask: Tensor, value: Any) -> Tensor:
        """Inside a trace torch's own makes a contiguous tensor, and asks for the size of a block that is not."""
        if type(x) is Tensor or x.ndim < 2:
            return op(x, mask, value)
        return copy_block(x, functional(*in_one_order(functional, [x, mask], x.stride()), value))

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


def _roll(x: Tensor, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Tensor:
    """`roll`; inside a trace torch's own asks whether the block is empty."""
    if type(x) is Tensor or not dims:
        return aten.roll.default(x, shifts, dims)
    for shift, dim in zip(shifts, dims, strict=True):
        empty = isinstance(x.shape[dim], int) and x.shape[dim] == 0
        start = 0 if empty else (x.shape[dim] - shift) % x.shape[dim]
        x = aten.cat.default([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x


def _per_channel(op: Any, spatial: int) -> Callable[..., Any]:
    """Where this rank may have no channels, which kernels refuse: all leading dims as samples of one channel."""

    def local(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        leading = x.shape[:-spatial]
        if not _may_be_empty(leading[-1]):
            return op(x, *args, **kwargs)

        def merged(a: Any) -> Any:
            if isinstance(a, Tensor):
                return _view(a, [math.prod(a.shape[:-spatial]), 1, *a.shape[-spatial:]])
            is_shape = isinstance(a, (list, tuple)) and len(a) == spatial + len(leading) > spatial
            return [math.prod(a[:-spatial]), 1, *a[-spatial:]] if is_shape else a

        out = op(merged(x), *map(merged, args), **kwargs)
        if isinstance(out, Tensor):
            return _view(out, [*leading, *out.shape[-spatial:]])
        return tuple(_view(o, [*leading, *o.shape[-spatial:]]) for o in out)

    return local


def _running_extremum(op: Any, worst: Callable[[torch.dtype], Any]) -> Callable[[Tensor, int], Sequence[Tensor]]:
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


def _filled_like(op: Any, value: int) -> Callable[..., Tensor]:
    """`zeros_like` or `ones_like`. In a trace Inductor's own asks how a block is stored, and with it for its sizes."""

    def local(x: Tensor, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        stored = options.get("memory_format")
        if type(x) is Tensor or stored not in (None, torch.preserve_format, torch.contiguous_format):
            return op(x, dtype=dtype, device=device, **options)
        order = list(range(x.ndim)) if stored is torch.contiguous_format else order_of(x.stride())
        filled = x.new_full([x.shape[d] for d in order], value, dtype=dtype or x.dtype, device=device or x.device)
        return filled.permute(sorted(range(x.ndim), key=order.__getitem__))

    return local


_zeros_like = _filled_like(aten.zeros_like.default, 0)


def _zero_(x: Tensor) -> Tensor:
    """`zero_`, which functionalization makes a `zeros_like` of."""
    return aten.zero_.default(x) if type(x) is Tensor else copy_block(x, _zeros_like(x))


index_copy = _unasked(aten.index_copy.default)
running_maximum = _running_extremum(aten.cummax.default, lowest)
running_minimum = _running_extremum(aten.cummin.default, highest)

LOCAL_OPS: dict[Any, Callable[..., Any]] = {
    aten.amax.default: _block_amax,
    aten.amin.default: _extremum(aten.amin.default, highest),
    aten.logsumexp.default: _logsumexp,
    aten.max.default: _whole_extremum(aten.amax.default, lowest),
    aten.min.default: _whole_extremum(aten.amin.default, highest),
    aten.cummax.default: running_maximum,
    aten.cummin.default: running_minimum,
    aten.copy_.default: copy_block,
    aten.index_copy.default: index_copy,
    # In a trace torch's own asks how blocks are stored, and with it for their sizes.
    aten.native_layer_norm_backward.default: _unasked(aten.native_layer_norm_backward.default),
    aten.index_fill.int_Scalar: _unasked(aten.index_fill.int_Scalar),
    aten.masked_fill_.Scalar: _masked_fill_(aten.masked_fill_.Scalar),
    aten.masked_fill_.Tensor: _masked_fill_(aten.masked_fill_.Tensor),
    aten.zeros_like.default: _zeros_like,
    aten.zero_.default: _zero_,
    aten.ones_like.default: _filled_like(aten.ones_like.default, 1),
    aten.roll.default: _roll,
    aten._trilinear.default: lambda a, b, c, x, y, z, total, unroll=1: _trilinear(a, b, c, x, y, z, total),
    aten.matmul.default: _matmul,
    aten.unbind.int: unbound,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    # A block must not be conjugated or negated lazily: below `__torch_dispatch__` nothing heeds the bit.
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
    # The rule names the dims that go: on a block, others may have extent 1 as well.
    aten.squeeze.default: aten.squeeze.dims,
    aten.squeeze.dim: aten.squeeze.dims,
    **{op: _per_channel(op, n) for op, n in images.PER_CHANNEL.items()},
    **{op: _per_channel(op, n) for op, n in images.PER_CHANNEL_BACKWARD.items()},
    **{op: _per_channel(op, n) for op, n in images.INTERPOLATION_BACKWARD.items()},
}
"""By op, what runs on a block in its place."""

COPYING_VIEWS = {aten._conj.default, aten._neg_view.default}
"""View ops that have to copy the block."""
