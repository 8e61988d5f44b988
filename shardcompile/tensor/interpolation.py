"""`interpolate` while tracing: the op is kept, so that it is sharded as in eager mode.

Torch would decompose it above `__torch_dispatch__`, into gathers by index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike
from shardcompile.tensor.autograd import sharded_gradient

aten = torch.ops.aten


class _Grid(NamedTuple):
    """The interpolation op of `aten`, which is linear in the image, and the op of its gradient."""

    forward: OpOverload
    backward: OpOverload


_NAMES = {
    **{("nearest", n): f"upsample_nearest{n}d" for n in (1, 2, 3)},
    **{("nearest-exact", n): f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)},
    ("linear", 1): "upsample_linear1d",
    ("bilinear", 2): "upsample_bilinear2d",
    ("trilinear", 3): "upsample_trilinear3d",
    ("bicubic", 2): "upsample_bicubic2d",
}
"""The name of the op, by mode and number of spatial dims."""


class _Interpolate(torch.autograd.Function):
    """Interpolation of an image, or its adjoint; each is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, grid: _Grid, back: bool, fine: list[IntLike], coarse: list[IntLike], options: list[Any]
    ) -> object:
        """Runs the op on the sharded tensor; `fine` and `coarse` are the sizes of the result and of the image."""
        ctx.cls, ctx.layout, ctx.rest = type(x), x._spec.layout, (grid, not back, fine, coarse, options)
        op, sizes = (grid.backward, [fine, coarse]) if back else (grid.forward, [fine])
        with compat.below_autograd():
            return op(x, *sizes, *options)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Runs the adjoint op."""
        grad = sharded_gradient(grad, ctx.cls, ctx.layout)
        return _Interpolate.apply(grad, *ctx.rest), *[None] * 5


def interpolate(
    func: Callable[..., object],
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> object:
    """Implements ``torch.nn.functional.interpolate``; arguments that torch refuses are left to torch."""
    given = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if not isinstance(input, Sharded) or not compat.is_compiling() or compat.is_transforming():
        return func(input, *given)
    spatial = input.ndim - 2
    name, scales = _NAMES.get((mode, spatial)), scale_factor
    wanted: Any = size if scales is None else scales
    wanted = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted] * spatial
    invalid = (
        (size is None) == (scales is None) or len(wanted) != spatial or (recompute_scale_factor and scales is None)
    )
    if name is None or invalid or not input.dtype.is_floating_point:
        return func(input, *given)
    options: list[Any] = [None] * spatial
    if scales is not None:
        options = options if recompute_scale_factor else wanted
        wanted = [_scaled(n, scale) for n, scale in zip(input.shape[2:], wanted, strict=True)]
    is_nearest = mode.startswith("nearest")
    if (is_nearest and (align_corners is not None or antialias)) or (antialias and spatial != 2):
        return func(input, *given)
    name = f"_{name}_aa" if antialias else name
    grid = _Grid(getattr(aten, name).default, getattr(aten, f"{name}_backward").default)
    options = options if is_nearest else [bool(align_corners), *options]
    return _Interpolate.apply(input, grid, False, wanted, list(input.shape), options)


def _scaled(size: IntLike, scale: float) -> IntLike:
    return size * int(scale) if scale == int(scale) else torch.sym_int(size * scale)
