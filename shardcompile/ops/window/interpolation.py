"""Interpolation along sharded spatial dims.

The nearest element of a grid that is coarser by integer factors is on the same rank. Of the two elements that linear
interpolation reads, one may be on another rank: it is fetched by a halo exchange, as for a convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import Window
from shardcompile.compat import OpOverload
from shardcompile.ops import NotServed, state
from shardcompile.ops.record import Run
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.precision import widened
from shardcompile.ops.support.sharded_rows import has_static_sizes, positions
from shardcompile.ops.window.sharded import Windows
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike

aten = torch.ops.aten


def _factors(coarse: Sequence[IntLike], fine: Sequence[IntLike], scales: Sequence[float | None]) -> list[int] | None:
    """The integer factors by which a grid is finer along each dim; None if one is not an integer."""
    found = []
    for a, b, scale in itertools.zip_longest(coarse, fine, scales):
        factor = compat.size_hint(b) // max(compat.size_hint(a), 1) if scale is None else scale
        if factor < 1 or factor != int(factor) or not compat.statically_known_true(a * int(factor) == b):
            return None
        found.append(int(factor))
    return found


def nearest(x: Tensor, output_size: Sequence[IntLike], *scales: float | None) -> Tensor | NotServed:
    """``aten.upsample_nearest`` by integer factors: repeats each element.

    Args:
        x: the coarse grid.
        output_size: sizes of the fine grid.
        scales: the stated scale factors, or None.
    """
    first = x.ndim - len(output_size)
    factors = _factors(x.shape[first:], output_size, scales)
    if factors is None:
        return NotServed("the fine grid is not finer by integer factors")
    if has_static_sizes(x):
        return NotServed("the trace has specialized on shard sizes")
    shape = list(x.shape[:first])
    for n, factor in zip(x.shape[first:], factors, strict=True):
        x = x.unsqueeze(len(shape) + 1)
        expanded = [*x.shape]
        expanded[len(shape) + 1] = factor
        shape.append(n * factor)
        x = x.expand(expanded).flatten(len(shape) - 1, len(shape))
    return x


def _nearest_backward(
    grad: Sharded, output_size: Sequence[IntLike], input_size: Sequence[IntLike], *scales: float | None
) -> Tensor | NotServed:
    first = grad.ndim - len(output_size)
    factors = _factors(input_size[first:], output_size, scales)
    if factors is None:
        return NotServed("the fine grid is not finer by integer factors")
    if has_static_sizes(grad):
        return NotServed("the trace has specialized on shard sizes")
    partitions = grad._spec.layout.partitions[first:]
    if any(c is not None and c.unflatten_trailing(f) is None for c, f in zip(partitions, factors, strict=True)):
        return NotServed("a shard boundary falls inside an element of the coarse grid")
    for d, factor in enumerate(factors, first):
        grad = grad.unflatten(d, (input_size[d], factor)).sum(d + 1)
    return grad


# Linear


def _neighbours(rows: Tensor, coarse: Any, fine: Any, align: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of the fine grid: the rows of the coarse grid on either side of it, and the weight of the second.

    The positions are torch's. With `align` (``align_corners``) the first rows of both grids coincide, and so do the
    last ones. Otherwise the outer edges of the first and of the last cells coincide; rows beyond the first or last row
    of the coarse grid get its value.
    """
    if align:
        position, unit = rows * (coarse - 1), fine - 1
    else:
        position, unit = ((2 * rows + 1) * coarse - fine).clamp(min=0), 2 * fine
    low = position // unit
    return low, (low + 1).clamp(max=coarse - 1), (position - low * unit).to(dtype) / unit


def _window(coarse: IntLike, fine: IntLike, align: bool) -> Window:
    """The rows of the coarse grid that a row of the fine grid reads."""
    if align:
        return Window(coarse - 1, fine - 1, fine - 2, fine - 1, (fine - 1) // 2)
    return Window(2 * coarse, 2 * fine, 3 * fine - coarse - 1, coarse + fine, coarse)


def _window_backward(coarse: IntLike, fine: IntLike, align: bool) -> Window:
    """The rows of the fine grid that read a row of the coarse grid."""
    if align:
        return Window(fine - 1, coarse - 1, fine - 1, fine - 1, (coarse - 1) // 2)
    return Window(2 * fine, 2 * coarse, coarse + fine, 3 * fine - coarse, fine)


def _follows_from_sizes(
    coarse: Sequence[IntLike], fine: Sequence[IntLike], align: bool, scales: Sequence[float | None]
) -> bool:
    """Whether the positions follow from the sizes of both grids, which a stated scale may contradict."""
    if align:
        return all(bool(n > 1) for n in (*coarse, *fine))
    given = itertools.zip_longest(coarse, fine, scales)
    return all(s is None or (s == int(s) and compat.statically_known_true(a * int(s) == b)) for a, b, s in given)


def _linear(op: OpOverload) -> Run:
    def run(x: Tensor, output_size: Sequence[IntLike], align: bool, *scales: float | None) -> Tensor | NotServed:
        meta = global_meta(op, (x, output_size, align, *scales), {})
        coarse = x.shape[-len(output_size) :]
        if not x.dtype.is_floating_point:
            return NotServed("the dtype is not floating point")
        if not _follows_from_sizes(coarse, output_size, align, scales):
            return NotServed("positions do not follow from the sizes of both grids")
        pairs = list(zip(coarse, output_size, strict=True))
        windows = Windows.of(x, [_window(n, m, align) for n, m in pairs], compat.global_sizes(meta.shape), True)
        if isinstance(windows, NotServed):
            return windows
        shard = widened(windows.fetch(x))
        for d, (n, m) in enumerate(pairs, x.ndim - len(pairs)):
            first, start, count = _local_range(windows, d, m)
            low, high, weight = _neighbours(positions(shard, first, 1, count), n, m, align, shard.dtype)
            weight = weight.reshape(-1, *[1] * (x.ndim - d - 1))
            shard = shard.index_select(d, low - start) * (1 - weight) + shard.index_select(d, high - start) * weight
        return windows.result(shard.to(x.dtype), meta.stride(), x)

    return run


def _linear_backward(op: OpOverload) -> Run:
    def run(
        grad: Tensor, output_size: Sequence[IntLike], input_size: Sequence[IntLike], align: bool, *scales: float | None
    ) -> Tensor | NotServed:
        meta = global_meta(op, (grad, output_size, input_size, align, *scales), {})
        coarse = input_size[-len(output_size) :]
        if not _follows_from_sizes(coarse, output_size, align, scales):
            return NotServed("positions do not follow from the sizes of both grids")
        pairs = list(zip(coarse, output_size, strict=True))
        windows = Windows.of(
            grad, [_window_backward(n, m, align) for n, m in pairs], compat.global_sizes(meta.shape), True
        )
        if isinstance(windows, NotServed):
            return windows
        shard = widened(windows.fetch(grad))
        for d, (n, m) in enumerate(pairs, grad.ndim - len(pairs)):
            first, start, count = _local_range(windows, d, n)
            rows = positions(shard, start, 1, shard.shape[d])
            low, high, fraction = _neighbours(rows, n, m, align, shard.dtype)
            out = shard.new_zeros([count if e == d else s for e, s in enumerate(shard.shape)])
            for row, weight in ((low - first, 1 - fraction), (high - first, fraction)):
                # Excludes reads of rows on other ranks, and fetched rows outside of the fine grid.
                is_valid = (row >= 0) & (row < count) & (rows >= 0) & (rows < m)
                weight = torch.where(is_valid, weight, 0).reshape(-1, *[1] * (grad.ndim - d - 1))
                out = out.index_add(d, torch.where(is_valid, row, 0), shard * weight)
            shard = out
        return windows.result(shard.to(grad.dtype), meta.stride(), grad)

    return run


def _local_range(windows: Windows, dim: int, size: IntLike) -> tuple[Any, Any, Any]:
    """This rank's first row of the result, the first row that is read for it, and the number of rows of the result."""
    reads = next((r for r in windows.reads if r.dim == dim), None)
    if reads is None:
        return 0, 0, size
    first = reads.first
    return first, reads.window.first_read(first), reads.count


_LINEAR = (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d)
_LINEAR_BACKWARD = (
    aten.upsample_linear1d_backward,
    aten.upsample_bilinear2d_backward,
    aten.upsample_trilinear3d_backward,
)
_NEAREST = (
    *(aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d),
    *(aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d),
)
_NEAREST_BACKWARD = (
    *(aten.upsample_nearest1d_backward, aten.upsample_nearest2d_backward, aten.upsample_nearest3d_backward),
    aten._upsample_nearest_exact1d_backward,
    aten._upsample_nearest_exact2d_backward,
    aten._upsample_nearest_exact3d_backward,
)


def _check_nonempty(op: OpOverload, given: Sequence[Any]) -> None:
    """Raises, as kernels do, if an image has no element. The batch may be empty."""
    if any(isinstance(n, int) and n == 0 for n in given[0].shape[1:]):
        shape = list(given[0].shape)
        raise RuntimeError(f"{op}: Non-empty {len(shape)}D data tensor expected but got a tensor with sizes {shape}")


def _shape_of_nearest(op: OpOverload) -> Run:
    """Runs the op on fake tensors; torch's own fails for an empty batch (2.11 - 2.15)."""

    def run(x: Tensor, output_size: Sequence[IntLike], *scales: float | None) -> Tensor:
        empty = isinstance(x.shape[0], int) and x.shape[0] == 0
        return x.new_empty([*x.shape[:2], *output_size]) if empty else op(x, output_size, *scales)  # type: ignore[no-any-return]

    return run


for _packet in _NEAREST:
    state(_packet.default, sharded=nearest, shape_kernel=_shape_of_nearest(_packet.default))
for _packet in _NEAREST_BACKWARD:
    state(_packet.default, sharded=_nearest_backward)
for _packet in _LINEAR:
    state(_packet.default, sharded=_linear(_packet.default))
for _packet in _LINEAR_BACKWARD:
    state(_packet.default, sharded=_linear_backward(_packet.default))
state(
    [packet.default for packet in (*_NEAREST, *_LINEAR, aten.upsample_bicubic2d)],
    check=_check_nonempty,
)
