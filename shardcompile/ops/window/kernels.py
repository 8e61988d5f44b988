"""Kernels of convolution and pooling for a local shard together with all rows that its windows read.

They are ops of this library because a shard may be empty, which torch's kernels refuse, and because a trace must not
ask whether it is. Along sharded dims the first window starts at the first of these rows, and the last one ends at the
last: nothing is padded there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile.compat.own_ops import define_op

aten = torch.ops.aten
_CONVOLUTION = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_POOL = "int[] kernel, int[] stride, int[] padding"


def _format(x: Tensor, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if x.ndim == 4 else torch.channels_last_3d


def _stored(x: Tensor, channels_last: bool) -> Tensor:
    """Returns images with the strides of the memory format ``channels_last`` if they are to be so.

    Of a single image the stride is arbitrary, but torch's kernels read the memory format from it.
    """
    if not channels_last or x.ndim != 4:
        return x
    _, c, h, w = x.shape
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, (h * w * c, 1, w * c, c))


def _zero_sharded(values: Sequence[int], sharded_dims: Sequence[int]) -> list[int]:
    """Replaces the values of sharded dims by 0."""
    return [0 if d in sharded_dims else v for d, v in enumerate(values)]


# Convolution


def _local_rows(x: Tensor, skipped: Sequence[int], sharded_dims: Sequence[int], size: Sequence[int]) -> Tensor:
    """Selects this rank's rows from the transposed convolution of all rows that are read."""
    for d, start in zip(sharded_dims, skipped, strict=False):
        x = x.narrow(d + 2, start, size[d + 2])
    return x


def _output_padding(
    output_padding: Sequence[int],
    sharded_dims: Sequence[int],
    weight: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """The output padding that a kernel gets.

    Along sharded dims it reaches up to the start of the next window, if windows are shorter than a stride.
    """
    reaches = [d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True)]
    return [max(stride[d] - 1 - reaches[d], 0) if d in sharded_dims else n for d, n in enumerate(output_padding)]


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    *,
    size: list[int],
    partition: list[int],
    skipped: list[int],
    channels_last: bool,
) -> Tensor:
    layout = _format(x, channels_last)
    if not math.prod(size) or not x.numel():
        out = x.new_zeros(size)
        if bias is not None:
            out += bias.reshape(-1, *[1] * (x.ndim - 2))
        return out.contiguous(memory_format=layout)
    output_padding = (
        _output_padding(output_padding, partition, weight, stride, dilation) if transposed else output_padding
    )
    options = (_zero_sharded(padding, partition), dilation, transposed, output_padding, groups)
    out = aten.convolution.default(_stored(x, channels_last), weight, bias, stride, *options)
    return _local_rows(out, skipped, partition, size).contiguous(memory_format=layout)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
    *,
    partition: list[int],
    skipped: list[int],
    channels_last: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = _format(x, channels_last)
    channels = [grad.shape[1]]
    if not grad.numel() or not x.numel():
        sums = grad.sum([0, *range(2, grad.ndim)])  # where no row is read, results may still consist of the bias
        grads = (torch.zeros_like(x), torch.zeros_like(weight), sums)
    else:
        if transposed:
            output_padding = _output_padding(output_padding, partition, weight, stride, dilation)
            full_shape = list(grad.shape)
            for d in partition:
                reach = dilation[d] * (weight.shape[d + 2] - 1)
                full_shape[d + 2] = (x.shape[d + 2] - 1) * stride[d] + reach + 1 + output_padding[d]
            if full_shape != list(grad.shape):
                embedded = grad.new_zeros(full_shape)
                _local_rows(embedded, skipped, partition, grad.shape).copy_(grad)
                grad = embedded
        options = (_zero_sharded(padding, partition), dilation, transposed, output_padding, groups)
        images = (_stored(t, channels_last) for t in (grad, x))
        grads = aten.convolution_backward.default(*images, weight, channels, stride, *options, wanted)
    empty = grad.new_empty(0)
    grad_x, grad_weight, grad_bias = (g if w else empty for g, w in zip(grads, wanted, strict=True))
    grad_x = grad_x.contiguous(memory_format=layout) if wanted[0] else grad_x
    return grad_x, grad_weight.contiguous(), grad_bias


def _fake_convolution(
    x: Tensor, weight: Tensor, *_: object, size: list[int], channels_last: bool, **__: object
) -> Tensor:
    return x.new_empty(size).contiguous(memory_format=_format(x, channels_last))


def _fake_convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *rest: object, channels_last: bool, **__: object
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_weight, grad_bias = (grad.new_empty(0) if w is False else None for w in rest[-1])  # type: ignore[attr-defined]
    if grad_x is None:
        grad_x = x.new_empty(x.shape).contiguous(memory_format=_format(x, channels_last))
    if grad_weight is None:
        grad_weight = weight.new_empty(weight.shape)
    return grad_x, grad_weight, grad.new_empty([grad.shape[1]]) if grad_bias is None else grad_bias


# Pooling, of 2 or 3 dims


def _convert_indices(
    indices: Tensor, sizes: Sequence[int], others: Sequence[int], shifts: Sequence[int], *, clamps: bool
) -> Tensor:
    """Converts flat indices into a plane to flat indices into another plane, in which its origin is at `shifts`.

    Args:
        indices: flat indices, row-major.
        sizes: sizes of the plane that they index.
        others: sizes of the other plane.
        shifts: what is added to the position along each dim.
        clamps: whether negative positions become 0.
    """
    if list(sizes[1:]) == list(others[1:]) and not any(shifts[1:]):
        rest = math.prod(sizes[1:])
        out = indices + shifts[0] * rest
        return out.where(out >= 0, out % rest) if clamps and shifts[0] < 0 else out
    out = torch.zeros_like(indices)
    divisor, stride = 1, 1
    for size, other, shift in reversed(list(zip(sizes, others, shifts, strict=True))):
        position = indices // divisor % size + shift
        out += (position.clamp(min=0) if clamps else position) * stride
        divisor, stride = divisor * size, stride * other
    return out


def _max_pool(
    x: Tensor,
    kernel: list[int],
    *options: object,
    size: list[int],
    whole: list[int],
    first: list[int],
    channels_last: bool,
) -> tuple[Tensor, Tensor]:
    if not math.prod(size):
        return _fake_max_pool(x, size=size, channels_last=channels_last)
    op = aten.max_pool2d_with_indices.default if len(kernel) == 2 else aten.max_pool3d_with_indices.default
    out, indices = op(_stored(x, channels_last), kernel, *options)
    # A window without an element above minus infinity yields its first element, which may be in front of the dim.
    indices = _convert_indices(indices, x.shape[-len(kernel) :], whole, first, clamps=True)
    layout = _format(x, channels_last)
    return out.contiguous(memory_format=layout), indices.contiguous(memory_format=layout)


def _max_pool_backward(
    grad: Tensor,
    indices: Tensor,
    kernel: list[int],
    *options: object,
    size: list[int],
    whole: list[int],
    first: list[int],
    channels_last: bool,
) -> Tensor:
    layout = _format(grad, channels_last)
    if not grad.numel():
        return grad.new_zeros(size).contiguous(memory_format=layout)
    spatial = len(kernel)
    op = aten.max_pool2d_with_indices_backward if spatial == 2 else aten.max_pool3d_with_indices_backward
    indices = _convert_indices(indices, whole, size[-spatial:], [-f for f in first], clamps=False)
    like = grad.new_empty(size).contiguous(memory_format=layout)
    found = op.default(_stored(grad, channels_last), like, kernel, *options, _stored(indices, channels_last))
    return found.contiguous(memory_format=layout)


def _sum_pool(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    divisor: int,
    *,
    size: list[int],
) -> Tensor:
    if not math.prod(size):
        return x.new_empty(size)
    op = aten.avg_pool2d.default if len(kernel) == 2 else aten.avg_pool3d.default
    return op(x, kernel, stride, padding, ceil_mode, True, divisor).contiguous()


def _sum_pool_backward(
    grad: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    divisor: int,
    *,
    size: list[int],
) -> Tensor:
    if not grad.numel():
        return grad.new_zeros(size)
    op = aten.avg_pool2d_backward.default if len(kernel) == 2 else aten.avg_pool3d_backward.default
    options = (kernel, stride, padding, ceil_mode, True, divisor)
    return op(grad.contiguous(), grad.new_empty(size), *options).contiguous()


def _fake_max_pool(x: Tensor, *_: object, size: list[int], channels_last: bool, **__: object) -> tuple[Tensor, Tensor]:
    empty = x.new_empty(size).contiguous(memory_format=_format(x, channels_last))
    return empty, torch.empty_like(empty, dtype=torch.int64)


def _fake_max_pool_backward(grad: Tensor, *_: object, size: list[int], channels_last: bool, **__: object) -> Tensor:
    return grad.new_empty(size).contiguous(memory_format=_format(grad, channels_last))


def _fake_of_size(x: Tensor, *_: object, size: list[int], **__: object) -> Tensor:
    return x.new_empty(size)


_define = functools.partial(define_op, capturable=True, any_strides=False)

convolution = _define(
    f"convolution(Tensor x, Tensor weight, Tensor? bias, {_CONVOLUTION}, *, SymInt[] size, int[] partition, "
    "SymInt[] skipped, bool channels_last) -> Tensor",
    _convolution,
    _fake_convolution,
)
"""``aten.convolution`` of a local shard. `size` is the shape of the result, and `partition` lists the spatial dims that
are sharded. `skipped` has, for each of them, the number of rows of a transposed convolution before the shard (otherwise
it is empty). `channels_last` is the memory format of the result.
"""

convolution_backward = _define(
    f"convolution_backward(Tensor grad, Tensor x, Tensor weight, SymInt[]? bias, {_CONVOLUTION}, bool[] wanted, *, "
    "int[] partition, SymInt[] skipped, bool channels_last) -> (Tensor, Tensor, Tensor)",
    _convolution_backward,
    _fake_convolution_backward,
)
"""``aten.convolution_backward`` of a local shard; returns empty tensors for gradients that are not `wanted`."""

max_pool = _define(
    f"max_pool(Tensor x, {_POOL}, int[] dilation, bool ceil_mode, *, SymInt[] size, SymInt[] whole, "
    "SymInt[] first, bool channels_last) -> (Tensor, Tensor)",
    _max_pool,
    _fake_max_pool,
)
"""The maximum of every window, and its flat index in the global plane. `size` is the shape of the local result, `whole`
are the sizes of the plane, and `first` is the position in it of the first element that is read. `channels_last` is the
memory format of the results.
"""

max_pool_backward = _define(
    f"max_pool_backward(Tensor grad, Tensor indices, {_POOL}, int[] dilation, bool ceil_mode, *, SymInt[] size, "
    "SymInt[] whole, SymInt[] first, bool channels_last) -> Tensor",
    _max_pool_backward,
    _fake_max_pool_backward,
)
"""The gradient of `max_pool`; `size` is the shape of what was read."""

sum_pool = _define(
    f"sum_pool(Tensor x, {_POOL}, bool ceil_mode, int divisor, *, SymInt[] size) -> Tensor", _sum_pool, _fake_of_size
)
"""The sum of every window, divided by `divisor`. `size` is the shape of the local result."""

sum_pool_backward = _define(
    f"sum_pool_backward(Tensor grad, {_POOL}, bool ceil_mode, int divisor, *, SymInt[] size) -> Tensor",
    _sum_pool_backward,
    _fake_of_size,
)
"""The gradient of `sum_pool`; `size` is the shape of what was read."""
