"""Building blocks of kernels for local shards."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.sharding import IntLike

aten = torch.ops.aten
Scalar = int | float | bool | complex


def lowest(dtype: torch.dtype) -> Scalar:
    """The value that never wins a maximum."""
    if dtype is torch.bool:
        return False
    return -float("inf") if dtype.is_floating_point else _limits(dtype).min


def highest(dtype: torch.dtype) -> Scalar:
    """The value that never wins a minimum."""
    if dtype is torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else _limits(dtype).max


def _limits(dtype: torch.dtype) -> torch.iinfo:
    try:
        return torch.iinfo(dtype)
    except TypeError:
        raise NotImplementedError(f"{dtype} has no order") from None


def may_be_empty(size: int | torch.SymInt) -> bool:
    """Whether a size is 0, or may be 0 when the graph runs."""
    return not isinstance(size, int) or size == 0


def padded(x: Tensor, dims: list[int], value: Scalar) -> Tensor:
    """Pads dims that may be empty on this rank with one neutral row; Inductor fuses it into the reduction."""
    pad = [0] * (2 * x.ndim)
    for dim in dims:
        if may_be_empty(x.shape[dim]):
            pad[2 * (x.ndim - 1 - dim % x.ndim) + 1] = 1
    if not any(pad):
        return x
    if x.dtype is torch.bool:  # constant_pad_nd does not take a bool
        return aten.constant_pad_nd(x.to(torch.uint8), pad, int(bool(value))).to(torch.bool)
    return aten.constant_pad_nd(x, pad, value)


def view_shard(x: Tensor, shape: Sequence[IntLike]) -> Tensor:
    """Views a local shard, and copies it first where its strides forbid a view that the global strides allow.

    Inside a trace strides are compared by their hints, or the graph would be specialised on the size of this rank's
    shard. A view that is possible for many rows is possible for one or none.
    """
    if type(x) is Tensor:
        try:
            return aten.view.default(x, shape)
        except RuntimeError:
            return aten.view.default(aten.clone.default(x, memory_format=torch.contiguous_format), shape)
    with compat.without_guards(x):
        if not _can_be_viewed(x, shape):
            x = aten.clone.default(x, memory_format=torch.contiguous_format)
        return aten.view.default(x, shape)


def _can_be_viewed(x: Tensor, shape: Sequence[IntLike]) -> bool:
    """Whether strides, by their hints, allow a view.

    Torch's fake kernel (2.11 - 2.15) cannot decide it: it merges two dims that have a dim of size 1 between them,
    whatever their strides are, and the graph fails when it runs.
    """
    dims = [(compat.size_hint(n), compat.size_hint(s)) for n, s in zip(x.shape, x.stride(), strict=True)]
    merged: list[tuple[int, int]] = []  # dims that are contiguous together: elements, and the stride of the fastest
    for n, stride in reversed(dims):
        if n == 0:
            return True
        if n != 1 and merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = merged[-1][0] * n, merged[-1][1]
        elif n != 1:
            merged.append((n, stride))
    wanted = [compat.size_hint(n) for n in shape]
    if -1 in wanted:
        wanted[wanted.index(-1)] = math.prod(n for n, _ in dims) // -math.prod(wanted)
    for elements, _ in merged:
        remaining = elements
        while remaining > 1:
            n = wanted.pop() if wanted else 0
            if not n or remaining % n:
                return False
            remaining //= n
    return True


def copy_shard(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy_` without guards: in a trace it checks for overlaps, and would specialise on this rank's shard size."""
    if type(target) is Tensor:
        return target.copy_(source, non_blocking)
    with compat.without_guards(target):
        return target.copy_(source, non_blocking)


def unguarded(op: OpOverload) -> Callable[..., Tensor]:
    """Wraps an op whose fake kernel compares the size of a shard: in a trace hints decide, and install no guard."""

    def local(x: Tensor, *args: object) -> Tensor:
        with contextlib.nullcontext() if type(x) is Tensor else compat.without_guards(x):
            return op(x, *args)

    return local


index_copy = unguarded(aten.index_copy.default)
