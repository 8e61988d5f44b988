"""Windows as a dim of their own along a sharded dim: every rank fetches the rows that its windows reach over its edges.

A window stays with the rank that has its middle row. `im2col` is two of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import Reads, Window, derive_spread
from shardcompile.ops import state
from shardcompile.ops.support.copied_views import follow, note_view
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.local_shards import may_be_empty, view_shard
from shardcompile.ops.view.kernels import add_windows
from shardcompile.ops.view.rows import base_of, has_static_sizes, moved, reduced, with_partition, wrap
from shardcompile.ops.view.strided import strided_view
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Spec, contiguous_stride

aten = torch.ops.aten
_strided = strided_view(aten.unfold.default)


def _window(size: int, step: int) -> Window:
    return Window(step, 1, 0, size - 1, (size - 1) // 2)


def _is_in_one_piece(x: Sharded, dim: int) -> bool:
    """Whether a dim is sharded over one mesh dim, sharded of which windows may reach into others."""
    partition = x._spec.layout.partitions[dim]
    return partition is not None and len(partition.mesh_dims) == 1 and not has_static_sizes(x)


def unfold(x: Sharded, dim: int, size: int, step: int) -> Tensor:
    """``aten.unfold`` along a sharded dim: a copy that follows what it is a view of."""
    meta = global_meta(aten.unfold.default, (x, dim, size, step), {})
    if x.ndim == 0 or size == 0 or not _is_in_one_piece(x, dim % x.ndim):
        return _strided(x, dim, size, step)  # type: ignore[return-value]
    dim = dim % x.ndim
    layout, window = x._spec.layout, _window(size, step)
    held, count = layout.partition_of(dim), compat.global_sizes(meta.shape)[dim]
    reads = Reads.of(dim, held, count, window, layout.mesh)
    partition = reads.partition  # of rows that lay there before others were added around them, or of this tensor's
    if held.core is None or partition is not held.core[0]:
        partition = partition.of_rows(held, window.shift, step)
    out = with_partition(layout, dim, partition)
    out = Layout.of(out.mesh, out.placements, (*out.shape, size), out.dtype, (*out.partitions, None))

    def shard() -> Tensor:
        return _windows_of(reads.fetch(x._local_tensor, 0.0), dim, reads.count, size, step)

    wrapped = type(x)._wrap(shard(), Spec.of(out, compat.retrace(meta.stride())))
    note_view(x, wrapped)
    follow(wrapped, aten.unfold.default, (x, dim, size, step), None, shard)
    return wrapped


def _windows_of(rows: Tensor, dim: int, count: IntLike, size: int, step: int) -> Tensor:
    """The windows over a shard of which the rows are all that is read."""
    first = rows.movedim(dim, 0).contiguous()
    width = first.stride(0)
    stride = [step * width, width, *first.stride()[1:]]
    return aten.as_strided.default(first, [count, size, *first.shape[1:]], stride).movedim(1, -1).movedim(0, dim)


def unfold_backward(grad: Sharded, sizes: Sequence[IntLike], dim: int, size: int, step: int) -> Tensor:
    """The gradient of windows along a sharded dim: in the partition of what they are of, if the gradient still
    tells.
    """
    dim = dim % max(len(sizes), 1)
    if not sizes or size == 0 or not _is_in_one_piece(grad, dim) or grad._spec.layout.partitions[-1] is not None:
        return NotImplemented
    global_meta(aten.unfold_backward.default, (grad, sizes, dim, size, step), {})
    grad = reduced(grad)
    layout, window = grad._spec.layout, _window(size, step)
    held = base_of(layout.partition_of(dim), sizes[dim], window.shift, step)
    if held is None:
        held = derive_spread(layout.partition_of(dim), window.shift, step, sizes[dim], layout.mesh)[0]
    reads = Reads.of(dim, held, grad.shape[dim], window, layout.mesh)
    local = add_windows(moved(grad, with_partition(layout, dim, reads.partition)), reads.rows, dim, size, step)
    out = with_partition(layout, dim, held)
    out = Layout.of(out.mesh, out.placements, out.shape[:-1], out.dtype, out.partitions[:-1])
    return wrap(grad, reads.give_back(local), out, contiguous_stride(out.shape))


# Windows over images


def _im2col(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """``aten.im2col`` of images that are sharded along their height."""
    global_meta(aten.im2col.default, (x, kernel, dilation, padding, stride), {})
    whole = (
        not isinstance(x, Sharded) or x._spec.layout.partitions[-1] is not None or not _is_in_one_piece(x, x.ndim - 2)
    )
    if whole or tuple(dilation) != (1, 1):
        return NotImplemented
    if x.ndim == 3:
        return aten.im2col.default(x.unsqueeze(0), kernel, dilation, padding, stride).squeeze(0)
    (high, wide), (down, right) = padding, stride
    x = aten.constant_pad_nd.default(x, [wide, wide, high, high])
    windows = x.unfold(2, kernel[0], down).unfold(3, kernel[1], right)
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(4, 5).flatten(1, 3)


def _col2im(
    x: Tensor,
    size: Sequence[IntLike],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """``aten.col2im`` of windows of which the rows of an image are sharded."""
    global_meta(aten.col2im.default, (x, size, kernel, dilation, padding, stride), {})
    high, wide = (n + 2 * p for n, p in zip(size, padding, strict=True))
    rows, columns = ((n - k) // s + 1 for n, k, s in zip((high, wide), kernel, stride, strict=True))
    partition = x._spec.layout.partitions[-1] if isinstance(x, Sharded) else None
    if (
        not isinstance(x, Sharded)
        or partition is None
        or not _is_in_one_piece(x, x.ndim - 1)
        or tuple(dilation) != (1, 1)
    ):
        return NotImplemented
    if not isinstance(columns, int) or partition.unscaled(columns) is None:
        return NotImplemented
    if x.ndim == 2:
        return aten.col2im.default(x.unsqueeze(0), size, kernel, dilation, padding, stride).squeeze(0)
    channels = x.shape[1] // (kernel[0] * kernel[1])
    windows = x.unflatten(2, (rows, columns)).unflatten(1, (channels, *kernel)).permute(0, 1, 4, 5, 2, 3)
    shape = [x.shape[0], channels, rows, wide, kernel[0]]
    strips = aten.unfold_backward.default(windows, shape, 3, kernel[1], stride[1])
    image = aten.unfold_backward.default(strips, [*shape[:2], high, wide], 2, kernel[0], stride[0])
    for dim, n, p in zip((2, 3), size, padding, strict=True):
        image = image.narrow(dim, p, n) if p else image
    return image


def _im2col_kernel(x: Tensor, kernel: Sequence[int], *rest: Sequence[int]) -> Tensor:
    """``aten.im2col`` of a local shard: channels as samples where there may be none, which torch's kernel refuses."""
    *samples, channels, height, width = x.shape
    if not may_be_empty(channels):
        return aten.im2col.default(x, kernel, *rest)
    out = aten.im2col.default(view_shard(x, [math.prod(samples) * channels, 1, height, width]), kernel, *rest)
    return view_shard(out, [*samples, channels * out.shape[1], out.shape[2]])


def _col2im_kernel(x: Tensor, size: Sequence[IntLike], kernel: Sequence[int], *rest: Sequence[int]) -> Tensor:
    """``aten.col2im`` of a local shard, in the same way."""
    *samples, rows, places = x.shape
    if not may_be_empty(rows):
        return aten.col2im.default(x, size, kernel, *rest)
    channels = rows // math.prod(kernel)
    windows = view_shard(x, [math.prod(samples) * channels, math.prod(kernel), places])
    return view_shard(aten.col2im.default(windows, size, kernel, *rest), [*samples, channels, *size])


state(aten.unfold.default, sharded=unfold)
state(aten.unfold_backward.default, sharded=unfold_backward)
state(aten.im2col.default, sharded=_im2col, kernel=_im2col_kernel)
state(aten.col2im.default, sharded=_col2im, kernel=_col2im_kernel)
