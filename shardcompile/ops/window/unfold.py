"""`unfold` along a sharded dim, by halo exchange: every rank fetches the rows beyond its edges that its windows read.

A window belongs to the rank that has its middle row. `im2col` unfolds two dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import Reads, Window, derive_spread
from shardcompile.ops import NotServed, state
from shardcompile.ops.support.copied_views import follow, note_view
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.local_shards import may_be_empty, view_shard
from shardcompile.ops.support.sharded_rows import (
    base_of,
    has_static_sizes,
    local_shard_in,
    reduced,
    with_partition,
    wrap,
)
from shardcompile.ops.view.kernels import add_windows
from shardcompile.ops.view.strided import strided_view
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Spec, contiguous_stride

aten = torch.ops.aten
_strided = strided_view(aten.unfold.default)


def _window(size: int, step: int) -> Window:
    return Window(step, 1, 0, size - 1, (size - 1) // 2)


def _misfit(x: Sharded, dim: int) -> str:
    """Why windows along a dim cannot be read by halo exchange; empty if they can."""
    partition = x._spec.layout.partitions[dim]
    if partition is None:
        return "the dim of the windows is not sharded"
    if len(partition.mesh_dims) != 1:
        return "the dim of the windows is sharded over several mesh dims"
    return "the trace has specialized on shard sizes" if has_static_sizes(x) else ""


def unfold(x: Sharded, dim: int, size: int, step: int) -> Tensor:
    """``aten.unfold`` along a sharded dim: a copy that follows the tensor that it views."""
    meta = global_meta(aten.unfold.default, (x, dim, size, step), {})
    if x.ndim == 0 or size == 0 or _misfit(x, dim % x.ndim):
        return _strided(x, dim, size, step)  # type: ignore[return-value]
    dim = dim % x.ndim
    layout, window = x._spec.layout, _window(size, step)
    source, count = layout.partition_of(dim), compat.global_sizes(meta.shape)[dim]
    reads = Reads.of(dim, source, count, window, layout.mesh)
    partition = reads.partition  # may be that of the rows before padding, or `source` itself
    unpadded = source.provenance.unpadded
    if unpadded is None or partition is not unpadded[0]:
        partition = partition.with_slice(source, window.shift, step)
    out = with_partition(layout, dim, partition)
    out = Layout.of(out.mesh, out.placements, (*out.shape, size), out.dtype, (*out.partitions, None))

    def shard() -> Tensor:
        return _windows_of(reads.fetch(x._local_tensor, 0.0), dim, reads.count, size, step)

    wrapped = type(x)._wrap(shard(), Spec.of(out, compat.retrace(meta.stride())))
    note_view(x, wrapped)
    follow(wrapped, aten.unfold.default, (x, dim, size, step), None, shard)
    return wrapped


def _windows_of(rows: Tensor, dim: int, count: IntLike, size: int, step: int) -> Tensor:
    """Views all windows over the rows that a shard's windows read."""
    first = rows.movedim(dim, 0).contiguous()
    width = first.stride(0)
    stride = [step * width, width, *first.stride()[1:]]
    return aten.as_strided.default(first, [count, size, *first.shape[1:]], stride).movedim(1, -1).movedim(0, dim)


def unfold_backward(grad: Sharded, sizes: Sequence[IntLike], dim: int, size: int, step: int) -> Tensor | NotServed:
    """The gradient of ``aten.unfold`` along a sharded dim, partitioned like its input if that is remembered."""
    if not sizes:
        return NotServed("the input has no dims")
    if size == 0:
        return NotServed("the windows are empty")
    dim = dim % len(sizes)
    misfit = _misfit(grad, dim)
    if misfit:
        return NotServed(misfit)
    if grad._spec.layout.partitions[-1] is not None:
        return NotServed("the elements of a window are sharded")
    global_meta(aten.unfold_backward.default, (grad, sizes, dim, size, step), {})
    grad = reduced(grad)
    layout, window = grad._spec.layout, _window(size, step)
    source = base_of(layout.partition_of(dim), sizes[dim], window.shift, step)
    if source is None:
        source = derive_spread(layout.partition_of(dim), window.shift, step, sizes[dim], layout.mesh)[0]
    reads = Reads.of(dim, source, grad.shape[dim], window, layout.mesh)
    local = add_windows(local_shard_in(grad, with_partition(layout, dim, reads.partition)), reads.rows, dim, size, step)
    out = with_partition(layout, dim, source)
    out = Layout.of(out.mesh, out.placements, out.shape[:-1], out.dtype, out.partitions[:-1])
    return wrap(grad, reads.give_back(local), out, contiguous_stride(out.shape))


# Unfolding of images


def _im2col(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor | NotServed:
    """``aten.im2col`` of images that are sharded along their height."""
    global_meta(aten.im2col.default, (x, kernel, dilation, padding, stride), {})
    if not isinstance(x, Sharded):
        return NotServed("the images are not sharded")
    if x._spec.layout.partitions[-1] is not None:
        return NotServed("the images are sharded along their width")
    misfit = _misfit(x, x.ndim - 2)
    if misfit:
        return NotServed(misfit)
    if tuple(dilation) != (1, 1):
        return NotServed("the dilation is not 1")
    if x.ndim == 3:
        return aten.im2col.default(x.unsqueeze(0), kernel, dilation, padding, stride).squeeze(0)
    (pad_h, pad_w), (stride_h, stride_w) = padding, stride
    x = aten.constant_pad_nd.default(x, [pad_w, pad_w, pad_h, pad_h])
    windows = x.unfold(2, kernel[0], stride_h).unfold(3, kernel[1], stride_w)
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(4, 5).flatten(1, 3)


def _col2im(
    x: Tensor,
    size: Sequence[IntLike],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor | NotServed:
    """``aten.col2im`` of windows that are sharded over the rows of an image."""
    global_meta(aten.col2im.default, (x, size, kernel, dilation, padding, stride), {})
    height, width = (n + 2 * p for n, p in zip(size, padding, strict=True))
    num_rows, num_columns = ((n - k) // s + 1 for n, k, s in zip((height, width), kernel, stride, strict=True))
    if not isinstance(x, Sharded):
        return NotServed("the windows are not sharded")
    misfit = _misfit(x, x.ndim - 1)
    if misfit:
        return NotServed(misfit)
    if tuple(dilation) != (1, 1):
        return NotServed("the dilation is not 1")
    if not isinstance(num_columns, int):
        return NotServed("the width of the image is symbolic")
    if x._spec.layout.partition_of(x.ndim - 1).unflatten_trailing(num_columns) is None:
        return NotServed("a shard boundary falls inside a row of windows")
    if x.ndim == 2:
        return aten.col2im.default(x.unsqueeze(0), size, kernel, dilation, padding, stride).squeeze(0)
    channels = x.shape[1] // (kernel[0] * kernel[1])
    windows = x.unflatten(2, (num_rows, num_columns)).unflatten(1, (channels, *kernel)).permute(0, 1, 4, 5, 2, 3)
    shape = [x.shape[0], channels, num_rows, width, kernel[0]]
    strips = aten.unfold_backward.default(windows, shape, 3, kernel[1], stride[1])
    image = aten.unfold_backward.default(strips, [*shape[:2], height, width], 2, kernel[0], stride[0])
    for dim, n, p in zip((2, 3), size, padding, strict=True):
        image = image.narrow(dim, p, n) if p else image
    return image


def _im2col_kernel(x: Tensor, kernel: Sequence[int], *rest: Sequence[int]) -> Tensor:
    """``aten.im2col`` of a local shard; with channels as samples if there may be none, which torch's kernel refuses."""
    *samples, channels, height, width = x.shape
    if not may_be_empty(channels):
        return aten.im2col.default(x, kernel, *rest)
    out = aten.im2col.default(view_shard(x, [math.prod(samples) * channels, 1, height, width]), kernel, *rest)
    return view_shard(out, [*samples, channels * out.shape[1], out.shape[2]])


def _col2im_kernel(x: Tensor, size: Sequence[IntLike], kernel: Sequence[int], *rest: Sequence[int]) -> Tensor:
    """``aten.col2im`` of a local shard; with channels as samples if there may be none, which torch's kernel refuses."""
    *samples, patch_size, num_windows = x.shape
    if not may_be_empty(patch_size):
        return aten.col2im.default(x, size, kernel, *rest)
    channels = patch_size // math.prod(kernel)
    windows = view_shard(x, [math.prod(samples) * channels, math.prod(kernel), num_windows])
    return view_shard(aten.col2im.default(windows, size, kernel, *rest), [*samples, channels, *size])


state(aten.unfold.default, sharded=unfold)
state(aten.unfold_backward.default, sharded=unfold_backward)
state(aten.im2col.default, sharded=_im2col, kernel=_im2col_kernel)
state(aten.col2im.default, sharded=_col2im, kernel=_col2im_kernel)
