"""Convolution and pooling along sharded spatial dims, by halo exchange: every rank fetches the rows beyond the edges of
its shard that its windows read.

The result is sharded like the input: a row of it is computed by the rank that has the middle of its window. In the
backward pass the gradients of fetched rows are sent back, and added on the ranks that hold these rows. Several spatial
dims may be sharded, over one mesh dim each; corners are then fetched along with the rows of the other dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import Reads, Window, local_shape_of
from shardcompile.compat import OpOverload
from shardcompile.ops import NotServed, state
from shardcompile.ops.record import Run
from shardcompile.ops.support.global_meta import global_meta
from shardcompile.ops.support.kept import keep, kept, sees_writes
from shardcompile.ops.support.precision import widened
from shardcompile.ops.support.sharded_rows import has_static_sizes, local_shard_in, with_partition, wrap
from shardcompile.ops.window import kernels as window_shards
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, contiguous_stride

aten = torch.ops.aten


@dataclass(frozen=True)
class Windows:
    """The rows that windows read for a result, along all dims.

    Attributes:
        layout: the layout to which the input is redistributed first.
        reads: the halo exchange along each sharded spatial dim.
        spatial: number of spatial dims, which are the last ones.
        shape: global shape of the result.
    """

    layout: Layout
    reads: tuple[Reads, ...]
    spatial: int
    shape: tuple[IntLike, ...]

    @staticmethod
    def of(x: Tensor, windows: Sequence[Window], shape: Sequence[IntLike], keep_channels: bool) -> Windows | NotServed:
        """The rows that are read of a tensor; NotServed if no spatial dim is sharded, or if one has to be gathered.

        Args:
            x: the input.
            windows: the windows along each spatial dim.
            shape: global shape of the result.
            keep_channels: whether channels may be sharded, too.
        """
        if not isinstance(x, Sharded):
            return NotServed("the input is not sharded")
        spatial, layout = len(windows), x._spec.layout
        first = x.ndim - spatial
        sharded_dims = [d for d in range(first, x.ndim) if layout.partitions[d] is not None]
        if not sharded_dims:
            return NotServed("no spatial dim is sharded")
        if any(len(layout.partition_of(d).mesh_dims) > 1 for d in sharded_dims):
            return NotServed("a spatial dim is sharded over several mesh dims")
        if has_static_sizes(x):
            return NotServed("the trace has specialized on shard sizes")
        layout = layout.reduced()
        if not keep_channels and layout.partitions[1] is not None:
            layout = layout.gathered(1)
        reads = [Reads.of(d, layout.partition_of(d), shape[d], windows[d - first], layout.mesh) for d in sharded_dims]
        return Windows(layout, tuple(reads), spatial, tuple(shape))

    @functools.cached_property
    def out(self) -> Layout:
        """Layout of the result."""
        layout = self.layout
        for r in self.reads:
            layout = with_partition(layout, r.dim, r.partition)
        first = len(self.shape) - self.spatial
        shape = [n if d < first or layout.partitions[d] is None else layout.shape[d] for d, n in enumerate(self.shape)]
        return Layout.of(layout.mesh, layout.placements, shape, layout.dtype, layout.partitions)

    @property
    def partition(self) -> list[int]:
        """The spatial dims that are sharded, counted from the first spatial one."""
        return [r.dim - len(self.shape) + self.spatial for r in self.reads]

    @property
    def size(self) -> list[IntLike]:
        """Shape of this rank's local shard of the result."""
        return list(local_shape_of(self.out))

    def without_padding(self, padding: Sequence[int]) -> list[int]:
        """The padding that is left to a kernel: none along sharded dims, where the rows that are read include it."""
        return [0 if d in self.partition else p for d, p in enumerate(padding)]

    def fetch(self, x: Tensor, fill: float = 0.0, channels_last: bool = False) -> Tensor:
        """Returns the local shard of the input with all rows that are read.

        Args:
            x: the input.
            fill: the value of rows outside of the image.
            channels_last: whether to return images with the channel last in memory.
        """
        shard = local_shard_in(x, self.layout)
        if not channels_last:
            for r in self.reads:
                shard = r.fetch(shard, fill)
            return shard
        stored = _in_memory(shard, True).permute(0, 2, 3, 1)
        for r in self.reads:
            stored = r.fetch(stored, fill, r.dim - 1)
        return stored.permute(0, 3, 1, 2)

    def fetch_for_backward(self, x: Sharded, channels_last: bool) -> Tensor:
        """Returns `fetch(x)`. In eager mode the input keeps the rows of other ranks for `fetch_again`."""
        if not sees_writes(x) or not torch.is_grad_enabled():
            return self.fetch(x, channels_last=channels_last)
        rows, shard = [], local_shard_in(x, self.layout)
        for r in self.reads:
            fetched = r.fetch(shard, 0.0)
            rows.append(r.from_others(shard, fetched, 0.0))
            shard = fetched
        keep(x, self._windows, rows)
        return shard

    def fetch_again(self, x: Sharded, channels_last: bool) -> Tensor:
        """Returns `fetch(x)`, without another exchange if the forward pass has read the same rows."""
        found = kept(x, self._windows) if sees_writes(x) else None
        if found is None:
            return self.fetch(x, channels_last=channels_last)
        shard = local_shard_in(x, self.layout)
        for r, rows in zip(self.reads, found, strict=True):
            shard = r.joined(shard, rows, 0.0)
        return shard

    @property
    def _windows(self) -> object:
        return "halos", *((r.dim, r.window, r.partition) for r in self.reads)

    def give_back(self, grad: Tensor, stride: Sequence[IntLike], like: Tensor, channels_last: bool = False) -> Tensor:
        """Returns the gradient of the input, from the gradient of a shard with all rows that are read.

        Args:
            grad: the gradient.
            stride: the global strides of the result.
            like: a sharded tensor, of the class of the result.
            channels_last: whether `grad` are images with the channel last in memory, but `stride` is not.
        """
        if channels_last:
            stored = grad.permute(0, 2, 3, 1)
            for r in reversed(self.reads):
                stored = r.give_back(stored, r.dim - 1)
            grad = _in_memory(stored.permute(0, 3, 1, 2), False)
        else:
            for r in reversed(self.reads):
                grad = r.give_back(grad)
        return wrap(_as_sharded(like), grad, self.layout.with_dtype(grad.dtype), stride)

    def result(self, local: Tensor, stride: Sequence[IntLike], like: Tensor) -> Tensor:
        """Wraps a local shard of the result."""
        stride = compat.retrace(stride)
        return wrap(_as_sharded(like), local, self.out.with_dtype(local.dtype), stride)

    def sums(self, local: Tensor, like: Tensor) -> Tensor:
        """Wraps this rank's term of a sum over all samples and rows, such as the gradient of a weight, as pending."""
        layout = self.layout
        placements = [Partial("sum") if isinstance(p, Shard) else Replicate() for p in layout.placements]
        shape = tuple(local.shape)
        summed = Layout.of(layout.mesh, placements, shape, local.dtype, (None,) * local.ndim)
        return wrap(_as_sharded(like), local, summed, contiguous_stride(shape))


def _as_sharded(x: Tensor) -> Sharded:
    assert isinstance(x, Sharded), "only sharded tensors have Windows"
    return x


def _per_dim(values: Sequence[int] | int, spatial: int) -> list[int]:
    """Expands an option to one value for each spatial dim."""
    given = [values] if isinstance(values, int) else list(values)
    return given * spatial if len(given) == 1 else given


def _in_memory(images: Tensor, channels_last: bool) -> Tensor:
    """Copies images to another memory format."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return aten.clone.default(images, memory_format=memory_format)


def _converts(x: Tensor, spatial: int, stride: Sequence[IntLike]) -> bool:
    """Whether a graph computes a convolution or a pool with the channel last in memory, though `stride` is not so.

    As Inductor does on CPUs with convolutions of plain images: the kernels of oneDNN are faster so. Copies to and from
    that format are fused with what is computed between convolutions.
    """
    if spatial != 2 or x.ndim != 4 or x.device.type != "cpu" or not compat.is_traced():
        return False
    return torch.backends.mkldnn.is_available() and not _is_channels_last(stride)


def _is_channels_last(stride: Sequence[IntLike]) -> bool:
    """Whether strides are those of the memory format ``channels_last``."""
    return len(stride) in (4, 5) and compat.size_hint(stride[1]) == 1 and compat.size_hint(stride[-1]) != 1


# Convolution


def _convolution_windows(weight: Tensor, options: Sequence[Any], spatial: int) -> list[Window]:
    stride, padding, dilation = (_per_dim(o, spatial) for o in options[:3])
    windows = []
    for size, s, p, d in zip(weight.shape[2:], stride, padding, dilation, strict=True):
        reach = d * (size - 1)  # from the first row of a window to its last
        if options[3]:
            reach = max(reach, s - 1)  # rows between windows, to which nothing is written, belong to the one before
            windows.append(Window(1, s, reach - p, p, p - (reach + 2 - s) // 2))
        else:
            windows.append(_forward_window(s, p, reach))
    return windows


def _forward_window(stride: int, padding: int, reach: int) -> Window:
    """The rows that are read for a row of the result of a convolution or pooling.

    If the padding is a window less one row, each row of the input has a row of the result, which stays on its rank.
    Causal convolutions slice off the remaining rows.
    """
    if stride == 1 and padding == reach:
        return Window(1, 1, padding, 0, 0)
    return Window(stride, 1, padding, reach - padding, -((2 * padding - reach) // 2))


def _num_rows_before(windows: Windows, options: Sequence[Any]) -> list[IntLike]:
    """How many rows of the transposed convolution of all rows that are read come before this rank's, for each dim."""
    _, padding, _, transposed, *_ = options
    if not transposed:
        return []
    pads = _per_dim(padding, windows.spatial)
    rows = []
    for r, d in zip(windows.reads, windows.partition, strict=True):
        first = r.first
        rows.append(first + pads[d] - r.window.first_read(first) * r.window.den)
    return rows


def _has_no_channels(x: Tensor) -> bool:
    """Whether images have no channels. Nothing has to be sent then, as torch's kernel returns no channels, either."""
    return isinstance(x.shape[1], int) and x.shape[1] == 0


def convolution(x: Sharded, weight: Tensor, bias: Tensor, *options: object) -> Tensor | NotServed:
    """``aten.convolution`` of images of which a spatial dim is sharded."""
    spatial = x.ndim - 2
    meta = global_meta(aten.convolution.default, (x, weight, bias, *options), {})
    windows = Windows.of(x, _convolution_windows(weight, options, spatial), compat.global_sizes(meta.shape), False)
    if isinstance(windows, NotServed):
        return windows
    if _has_no_channels(x):
        return NotServed("the input has no channels")
    stride = compat.retrace(meta.stride())
    converts = _converts(x, spatial, stride)
    local = window_shards.convolution(
        windows.fetch_for_backward(x, converts),
        _full(weight, windows),
        None if bias is None else _full(bias, windows),
        *_per_dim_options(options, spatial),
        size=windows.size,
        partition=windows.partition,
        skipped=_num_rows_before(windows, options),
        channels_last=converts or _is_channels_last(stride),
    )
    return windows.result(_in_memory(local, False) if converts else local, stride, x)


def convolution_backward(
    grad: Tensor, x: Sharded, weight: Tensor, bias_sizes: Sequence[int] | None, *options: Any
) -> tuple[Tensor | None, ...] | NotServed:
    """``aten.convolution_backward`` of images of which a spatial dim is sharded."""
    *options_, output_mask = options
    options, spatial = tuple(options_), x.ndim - 2
    windows = Windows.of(x, _convolution_windows(weight, options, spatial), tuple(grad.shape), False)
    if isinstance(windows, NotServed):
        return windows
    if _has_no_channels(x):
        return NotServed("the input has no channels")
    metas = global_meta(aten.convolution_backward.default, (grad, x, weight, bias_sizes, *options, output_mask), {})
    stride = x._spec.stride if metas[0] is None else compat.retrace(metas[0].stride())
    converts = _converts(x, spatial, stride)
    local_grad = local_shard_in(grad, windows.out)
    grad_x, grad_weight, grad_bias = window_shards.convolution_backward(
        _in_memory(local_grad, True) if converts else local_grad,
        windows.fetch_again(x, converts),
        _full(weight, windows),
        bias_sizes,
        *_per_dim_options(options, spatial),
        output_mask,
        partition=windows.partition,
        skipped=_num_rows_before(windows, options),
        channels_last=converts or _is_channels_last(stride),
    )
    return (
        windows.give_back(grad_x, stride, x, converts) if output_mask[0] else None,
        windows.sums(grad_weight, x) if output_mask[1] else None,
        windows.sums(grad_bias, x) if output_mask[2] else None,
    )


def _full(x: Tensor, windows: Windows) -> Tensor:
    """The full value of a sharded or plain tensor."""
    return local_shard_in(x, Layout.whole(windows.layout.mesh, tuple(x.shape), x.dtype))


def _per_dim_options(options: Sequence[Any], spatial: int) -> list[Any]:
    """The options of a convolution, with a value for each spatial dim."""
    stride, padding, dilation, transposed, output_padding, groups = options
    lists = (_per_dim(o, spatial) for o in (stride, padding, dilation))
    return [*lists, transposed, _per_dim(output_padding, spatial), groups]


# Pooling


@dataclass(frozen=True)
class _Pool:
    """The options that poolings share, with a value for each spatial dim."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool

    @staticmethod
    def of(
        spatial: int, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
    ) -> _Pool:
        kernel = _per_dim(kernel, spatial)
        steps = _per_dim(stride, spatial) if stride else kernel
        return _Pool(kernel, steps, _per_dim(padding, spatial), _per_dim(dilation, spatial), ceil)

    @property
    def windows(self) -> list[Window]:
        """The windows along each spatial dim."""
        options = zip(self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [_forward_window(s, p, d * (k - 1)) for k, s, p, d in options]


def _max_pool(spatial: int, op: OpOverload) -> Run:
    def run(x: Tensor, *options: Any) -> tuple[Tensor, ...] | NotServed:
        values, indices = global_meta(op, (x, *options), {})
        pool = _Pool.of(spatial, *options)
        if not x.dtype.is_floating_point:
            return NotServed("the dtype is not floating point")
        windows = Windows.of(x, pool.windows, compat.global_sizes(values.shape), True)
        if isinstance(windows, NotServed):
            return windows
        padding = windows.without_padding(pool.padding)
        stride = compat.retrace(values.stride())
        converts = _converts(x, spatial, stride)
        found = window_shards.max_pool(
            windows.fetch(x, -math.inf, converts),
            *(pool.kernel, pool.stride, padding, pool.dilation, pool.ceil_mode),
            size=windows.size,
            whole=list(x.shape[-spatial:]),
            first=_first_read(windows),
            channels_last=converts or _is_channels_last(stride),
        )
        return tuple(
            windows.result(_in_memory(local, False) if converts else local, meta.stride(), x)
            for local, meta in zip(found, (values, indices), strict=True)
        )

    return run


def _first_read(windows: Windows) -> list[IntLike]:
    """The position in the plane of the first element that is read."""
    first: list[IntLike] = [0] * windows.spatial
    for r, d in zip(windows.reads, windows.partition, strict=True):
        first[d] = r.window.first_read(r.first)
    return first


def _max_pool_backward(spatial: int, op: OpOverload) -> Run:
    def run(
        grad: Tensor,
        x: Tensor,
        kernel: object,
        stride: object,
        padding: object,
        dilation: object,
        ceil: bool,
        indices: Tensor,
    ) -> Tensor | NotServed:
        pool = _Pool.of(spatial, kernel, stride, padding, dilation, ceil)
        windows = Windows.of(x, pool.windows, tuple(grad.shape), True)
        if isinstance(windows, NotServed):
            return windows
        meta = global_meta(op, (grad, x, kernel, stride, padding, dilation, ceil, indices), {})
        stride = compat.retrace(meta.stride())
        converts = _converts(x, spatial, stride)
        local_grad, local_indices = (local_shard_in(t, windows.out) for t in (grad, indices))
        local = window_shards.max_pool_backward(
            _in_memory(local_grad, True) if converts else local_grad,
            _in_memory(local_indices, True) if converts else local_indices,
            *(pool.kernel, pool.stride, windows.without_padding(pool.padding), pool.dilation, pool.ceil_mode),
            size=_read_shape(windows),
            whole=list(x.shape[-spatial:]),
            first=_first_read(windows),
            channels_last=converts or _is_channels_last(stride),
        )
        return windows.give_back(local, stride, x, converts)

    return run


def _read_shape(windows: Windows) -> list[IntLike]:
    """Shape of the local shard of the input with all rows that are read."""
    layout = windows.layout
    shape = list(local_shape_of(layout))
    for r in windows.reads:
        shape[r.dim] = r.rows
    return shape


def _average(spatial: int, options: Sequence[Any]) -> tuple[_Pool, bool, int | None]:
    """Returns the pooling, `count_include_pad` and `divisor_override` of an average pooling."""
    defaults: list[Any] = [[], 0, False, True, None]
    kernel, stride, padding, ceil, count_include_pad, divisor_override = [*options, *defaults[len(options) - 1 :]]
    return _Pool.of(spatial, kernel, stride, padding, 1, ceil), count_include_pad, divisor_override


def _divisor(pool: _Pool, count_include_pad: bool, divisor_override: int | None) -> int | None:
    """The divisor of all windows; None if it differs from window to window."""
    if divisor_override is not None:
        return divisor_override
    regular = not pool.ceil_mode and (count_include_pad or not any(pool.padding))
    return math.prod(pool.kernel) if regular else None


def _counts(x: Tensor, pool: _Pool, shape: Sequence[IntLike], count_include_pad: bool) -> Tensor:
    """The number of elements that count in each window, [..., rows, columns], for all samples and channels."""
    spatial = len(pool.kernel)
    counts: Any = 1
    for d, (k, s, p) in enumerate(zip(pool.kernel, pool.stride, pool.padding, strict=True)):
        size: Any = x.shape[d - spatial]
        num_windows: Any = shape[d - spatial]
        begin = torch.arange(num_windows, device=x.device) * s - p
        counted_padding = p if count_include_pad else 0
        along = (begin + k).clamp(max=size + counted_padding) - begin.clamp(min=-counted_padding)
        counts = counts * along.reshape(-1, *[1] * (spatial - d - 1))
    return counts  # type: ignore[no-any-return]


def _avg_pool(spatial: int, op: OpOverload) -> Run:
    def run(x: Tensor, *options: object) -> Tensor | NotServed:
        meta = global_meta(op, (x, *options), {})
        pool, count_include_pad, divisor_override = _average(spatial, options)
        windows = Windows.of(x, pool.windows, compat.global_sizes(meta.shape), True)
        if isinstance(windows, NotServed):
            return windows
        if not x.dtype.is_floating_point:
            return NotServed("the dtype is not floating point")
        divisor = _divisor(pool, count_include_pad, divisor_override)
        padding = windows.without_padding(pool.padding)
        local = windows.fetch(x)
        local = window_shards.sum_pool(
            local if divisor else widened(local),
            pool.kernel,
            pool.stride,
            padding,
            pool.ceil_mode,
            divisor or 1,
            size=windows.size,
        )
        out = windows.result(local, meta.stride(), x)
        return out if divisor else (out / _counts(x, pool, windows.out.shape, count_include_pad)).to(x.dtype)

    return run


def _avg_pool_backward(spatial: int, op: OpOverload) -> Run:
    def run(grad: Tensor, x: Tensor, *options: object) -> Tensor | NotServed:
        pool, count_include_pad, divisor_override = _average(spatial, options)
        windows = Windows.of(x, pool.windows, tuple(grad.shape), True)
        if isinstance(windows, NotServed):
            return windows
        meta = global_meta(op, (grad, x, *options), {})
        divisor = _divisor(pool, count_include_pad, divisor_override)
        grad = grad if divisor else widened(grad) / _counts(x, pool, windows.out.shape, count_include_pad)
        options_ = (pool.kernel, pool.stride, windows.without_padding(pool.padding), pool.ceil_mode, divisor or 1)
        local = window_shards.sum_pool_backward(local_shard_in(grad, windows.out), *options_, size=_read_shape(windows))
        return windows.give_back(local.to(x.dtype), compat.retrace(meta.stride()), x)

    return run


state(aten.convolution.default, sharded=convolution)
state(aten.convolution_backward.default, sharded=convolution_backward)
for _make, _packets in (
    (_max_pool, (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)),
    (_max_pool_backward, (aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward)),
    (_avg_pool, (aten.avg_pool2d, aten.avg_pool3d)),
    (_avg_pool_backward, (aten.avg_pool2d_backward, aten.avg_pool3d_backward)),
):
    for _spatial, _packet in zip((2, 3), _packets, strict=True):
        state(_packet.default, sharded=_make(_spatial, _packet.default))
