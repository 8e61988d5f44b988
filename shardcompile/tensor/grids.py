"""The nearest element of a coarser grid, in a trace: there torch's own looks rows up by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardcompile import compat
from shardcompile.layout import IntLike
from shardcompile.ops.window.interpolation import nearest as spread
from shardcompile.sharded import Sharded


def interpolate(
    func: Callable[..., object],
    input: Tensor,
    size: Sequence[IntLike] | IntLike | None = None,
    scale_factor: Sequence[float] | float | None = None,
    mode: str = "nearest",
    *args: object,
    **kwargs: object,
) -> object:
    """``torch.nn.functional.interpolate``; grids that are not finer by whole factors are left to torch."""
    plain = not args and all(v is None or v is False for v in kwargs.values())
    if plain and mode in ("nearest", "nearest-exact") and compat.is_compiling() and isinstance(input, Sharded):
        out = _finer(input, size, scale_factor)
        if out is not NotImplemented:
            return out
    return func(input, size, scale_factor, mode, *args, **kwargs)


def _finer(x: Sharded, size: Sequence[IntLike] | IntLike | None, scale: Sequence[float] | float | None) -> object:
    spatial = x.ndim - 2
    if (size is None) == (scale is None):
        return NotImplemented
    given: Any = size if scale is None else scale
    each: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given] * spatial
    if len(each) != spatial:
        return NotImplemented
    if scale is None:
        return spread(x, each)
    if any(s != int(s) for s in each):
        return NotImplemented
    return spread(x, [n * int(s) for n, s in zip(x.shape[2:], each, strict=True)], *each)
