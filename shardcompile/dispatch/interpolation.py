"""Interpolation along cut spatial dims.

The nearest element of a grid that is coarser by whole factors is on the same rank. Of the two between which a linear
interpolation takes place one may be on another: it is fetched, as the windows of a convolution are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import Reads, Window
from shardcompile.dispatch.global_meta import global_meta
from shardcompile.dispatch.precision import widened
from shardcompile.dispatch.rows import has_known_blocks, moved, positions, with_cut, wrap
from shardcompile.dispatch.strides import in_order
from shardcompile.layout import IntLike, Layout

aten = torch.ops.aten


def _factors(coarse: Sequence[IntLike], fine: Sequence[IntLike], scales: Sequence[float | None]) -> list[int] | None:
    """By how much a grid is finer along each dim; None if by parts of a whole."""
    found = []
    for a, b, scale in itertools.zip_longest(coarse, fine, scales):
        factor = compat.size_hint(b) // max(compat.size_hint(a), 1) if scale is None else scale
        if factor < 1 or factor != int(factor) or not compat.surely(a * int(factor) == b):
            return None
        found.append(int(factor))
    return found


def _nearest(x: Any, output_size: Sequence[IntLike], *scales: float | None) -> Any:
    first = x.ndim - len(output_size)
    factors = _factors(x.shape[first:], output_size, scales)
    if factors is None or has_known_blocks(x):
        return NotImplemented
    shape = list(x.shape[:first])
    for n, factor in zip(x.shape[first:], factors, strict=True):
        x = x.unsqueeze(len(shape) + 1)
        spread = [*x.shape]
        spread[len(shape) + 1] = factor
        shape.append(n * factor)
        x = x.expand(spread).flatten(len(shape) - 1, len(shape))
    return x


def _nearest_backward(
    grad: Any, output_size: Sequence[IntLike], input_size: Sequence[IntLike], *scales: float | None
) -> Any:
    first = grad.ndim - len(output_size)
    factors = _factors(input_size[first:], output_size, scales)
    if factors is None or has_known_blocks(grad):
        return NotImplemented
    cuts = grad._spec.layout.cuts[first:]
    if any(c is not None and c.unscaled(f) is None for c, f in zip(cuts, factors, strict=True)):
        return NotImplemented
    for d, factor in enumerate(factors, first):
        grad = grad.unflatten(d, (input_size[d], factor)).sum(d + 1)
    return grad


# Linear


def _places(rows: Tensor, coarse: Any, fine: Any, align: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows of a grid the two rows of another between which they are, and how far from the first one, of 1.

    As torch has it: with `align` the first rows of both grids are in one place, and the last ones. Otherwise the edges
    of the first and the last cell are, and rows in front of the first row or behind the last one get its value.
    """
    if align:
        place, unit = rows * (coarse - 1), fine - 1
    else:
        place, unit = ((2 * rows + 1) * coarse - fine).clamp(min=0), 2 * fine
    low = place // unit
    return low, (low + 1).clamp(max=coarse - 1), (place - low * unit).to(dtype) / unit


def _window(coarse: IntLike, fine: IntLike, align: bool) -> Window:
    """What a row of the other grid reads."""
    if align:
        return Window(coarse - 1, fine - 1, fine - 2, fine - 1, (fine - 1) // 2)
    return Window(2 * coarse, 2 * fine, 3 * fine - coarse - 1, coarse + fine, coarse)


def _window_back(coarse: IntLike, fine: IntLike, align: bool) -> Window:
    """Which rows of the other grid read a row."""
    if align:
        return Window(fine - 1, coarse - 1, fine - 1, fine - 1, (coarse - 1) // 2)
    return Window(2 * fine, 2 * coarse, coarse + fine, 3 * fine - coarse, fine)


def _is_linear(coarse: Sequence[IntLike], fine: Sequence[IntLike], align: bool, scales: Sequence[float | None]) -> bool:
    """Whether the places follow from the extents of both grids, which a stated scale may contradict."""
    if align:
        return all(bool(n > 1) for n in (*coarse, *fine))
    given = itertools.zip_longest(coarse, fine, scales)
    return all(s is None or (s == int(s) and compat.surely(a * int(s) == b)) for a, b, s in given)


def _along(
    x: Any, dims: Sequence[int], layout: Layout, extents: Sequence[IntLike], windows: Sequence[Window]
) -> list[Any]:
    """What is read along every dim; None where it is whole."""
    return [
        None if layout.cuts[d] is None else Reads.of(d, layout.cuts[d], n, w, layout.mesh)  # type: ignore[arg-type]
        for d, n, w in zip(dims, extents, windows, strict=True)
    ]


def _frame(x: Any, spatial: int) -> tuple[Layout, list[int]] | None:
    """In which layout a tensor is needed, and its spatial dims; None if its rows are not to be fetched."""
    dims = list(range(x.ndim - spatial, x.ndim))
    layout = x._spec.layout.reduced()
    cuts = [layout.cuts[d] for d in dims]
    if has_known_blocks(x) or all(c is None for c in cuts):
        return None
    return None if any(c is not None and len(c.mesh_dims) > 1 for c in cuts) else (layout, dims)


def _linear(op: Any) -> Callable[..., Any]:
    def run(x: Any, output_size: Sequence[IntLike], align: bool, *scales: float | None) -> Any:
        meta = global_meta(type(x), op, (x, output_size, align, *scales), {})
        frame = _frame(x, len(output_size))
        coarse = x.shape[-len(output_size) :]
        if frame is None or not x.dtype.is_floating_point or not _is_linear(coarse, output_size, align, scales):
            return NotImplemented
        layout, dims = frame
        pairs = list(zip(coarse, output_size, strict=True))
        every = _along(x, dims, layout, output_size, [_window(a, b, align) for a, b in pairs])
        block = widened(moved(x, layout))
        for d, reads, (n, m) in zip(dims, every, pairs, strict=True):
            first, start, count = _own(reads, m)
            block = block if reads is None else reads.fetch(block, 0.0)
            low, high, part = _places(positions(block, first, 1, count), n, m, align, block.dtype)
            part = part.reshape(-1, *[1] * (x.ndim - d - 1))
            block = block.index_select(d, low - start) * (1 - part) + block.index_select(d, high - start) * part
            layout = with_cut(layout, d, reads.cut) if reads is not None else _with_extent(layout, d, m)
        return _wrapped(x, block.to(x.dtype), layout, meta)

    return run


def _linear_backward(op: Any) -> Callable[..., Any]:
    def run(
        grad: Any, output_size: Sequence[IntLike], input_size: Sequence[IntLike], align: bool, *scales: float | None
    ) -> Any:
        meta = global_meta(type(grad), op, (grad, output_size, input_size, align, *scales), {})
        spatial = len(output_size)
        frame, coarse = _frame(grad, spatial), input_size[-spatial:]
        if frame is None or not _is_linear(coarse, output_size, align, scales):
            return NotImplemented
        layout, dims = frame
        pairs = list(zip(coarse, output_size, strict=True))
        every = _along(grad, dims, layout, coarse, [_window_back(a, b, align) for a, b in pairs])
        block = widened(moved(grad, layout))
        for d, reads, (n, m) in zip(dims, every, pairs, strict=True):
            first, start, count = _own(reads, n)
            block = block if reads is None else reads.fetch(block, 0.0)
            low, high, part = _places(positions(block, start, 1, block.shape[d]), n, m, align, block.dtype)
            shape = [count if e == d else s for e, s in enumerate(block.shape)]
            out = block.new_zeros(shape)
            for row, weight in ((low - first, 1 - part), (high - first, part)):
                # Rows of the other grid that read rows of another rank, too, and rows that there are not.
                ours = (row >= 0) & (row < count) & _within(positions(block, start, 1, block.shape[d]), m)
                weight = torch.where(ours, weight, 0).reshape(-1, *[1] * (grad.ndim - d - 1))
                out = out.index_add(d, torch.where(ours, row, 0), block * weight)
            block = out
            layout = with_cut(layout, d, reads.cut) if reads is not None else _with_extent(layout, d, n)
        return _wrapped(grad, block.to(grad.dtype), layout, meta)

    return run


def _within(rows: Tensor, extent: IntLike) -> Tensor:
    return (rows >= 0) & (rows < extent)


def _own(reads: Reads | None, extent: IntLike) -> tuple[Any, Any, Any]:
    """The first row of the result on this rank, the first row that is read for it, and how many rows the result has."""
    if reads is None:
        return 0, 0, extent
    first = reads.first
    return first, reads.window.first_read(first), reads.count


def _with_extent(layout: Layout, dim: int, extent: IntLike) -> Layout:
    shape = [extent if d == dim else n for d, n in enumerate(layout.shape)]
    return Layout.of(layout.mesh, layout.placements, shape, layout.dtype, layout.cuts)


def _wrapped(like: Any, local: Tensor, layout: Layout, meta: Tensor) -> Any:
    stride = compat.retraced(meta.stride())
    return wrap(like, in_order(local, stride), layout, stride)


_LINEAR = (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d)
_LINEAR_BACKWARD = (
    aten.upsample_linear1d_backward,
    aten.upsample_bilinear2d_backward,
    aten.upsample_trilinear3d_backward,
)
INTERPOLATION_OPS: dict[Any, Callable[..., Any]] = {
    aten.upsample_nearest1d.default: _nearest,
    aten.upsample_nearest2d.default: _nearest,
    aten.upsample_nearest3d.default: _nearest,
    aten._upsample_nearest_exact1d.default: _nearest,
    aten._upsample_nearest_exact2d.default: _nearest,
    aten._upsample_nearest_exact3d.default: _nearest,
    aten.upsample_nearest1d_backward.default: _nearest_backward,
    aten.upsample_nearest2d_backward.default: _nearest_backward,
    aten.upsample_nearest3d_backward.default: _nearest_backward,
    aten._upsample_nearest_exact1d_backward.default: _nearest_backward,
    aten._upsample_nearest_exact2d_backward.default: _nearest_backward,
    aten._upsample_nearest_exact3d_backward.default: _nearest_backward,
    **{packet.default: _linear(packet.default) for packet in _LINEAR},
    **{packet.default: _linear_backward(packet.default) for packet in _LINEAR_BACKWARD},
}
"""By op, its form along cut spatial dims."""
