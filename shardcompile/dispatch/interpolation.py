"""Interpolation along cut spatial dims: the nearest element of a coarser grid, where it is finer by whole factors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardcompile import compat
from shardcompile.dispatch.rows import has_known_blocks
from shardcompile.layout import IntLike

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
}
"""By op, its form along cut spatial dims."""
