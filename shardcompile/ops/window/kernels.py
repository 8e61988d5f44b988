"""Convolution and pooling of a shard that comes with all rows that its windows read.

Ops of our own, because a shard may be empty, which torch's kernels refuse, and because whether it is must not be asked
while tracing. Along the sharded dims windows start at the shard's first row and end at its last: nothing is padded
there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten
_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_CONVOLUTION = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_POOL = "int[] kernel, int[] stride, int[] padding"
for _schema in (
    f"convolution(Tensor x, Tensor weight, Tensor? bias, {_CONVOLUTION}, *, SymInt[] size, int[] partition, "
    "SymInt[] skipped, bool channels_last) -> Tensor",
    f"convolution_backward(Tensor grad, Tensor x, Tensor weight, SymInt[]? bias, {_CONVOLUTION}, bool[] wanted, *, "
    "int[] partition, SymInt[] skipped, bool channels_last) -> (Tensor, Tensor, Tensor)",
    f"max_pool(Tensor x, {_POOL}, int[] dilation, bool ceil_mode, *, SymInt[] size, SymInt[] whole, "
    "SymInt[] first) -> (Tensor, Tensor)",
    f"max_pool_backward(Tensor grad, Tensor indices, {_POOL}, int[] dilation, bool ceil_mode, *, SymInt[] size, "
    "SymInt[] whole, SymInt[] first) -> Tensor",
    f"sum_pool(Tensor x, {_POOL}, bool ceil_mode, int divisor, *, SymInt[] size) -> Tensor",
    f"sum_pool_backward(Tensor grad, {_POOL}, bool ceil_mode, int divisor, *, SymInt[] size) -> Tensor",
):
    _LIBRARY.define(_schema, tags=[torch.Tag.pt2_compliant_tag])


def _format(x: Tensor, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last if x.ndim == 4 else torch.channels_last_3d


def _without(values: Sequence[int], partition: Sequence[int]) -> list[int]:
    return [0 if d in partition else v for d, v in enumerate(values)]


# Convolution


def _window_of(x: Tensor, skipped: Sequence[int], partition: Sequence[int], size: Sequence[int]) -> Tensor:
    """This rank's rows of the transposed convolution of all rows that are read."""
    for d, start in zip(partition, skipped, strict=False):
        x = x.narrow(d + 2, start, size[d + 2])
    return x


def _behind(
    output_padding: Sequence[int],
    partition: Sequence[int],
    weight: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Output padding: along the sharded dims as far as the next window would begin, if windows are less than a
    stride.
    """
    reaches = [d * (k - 1) for k, d in zip(weight.shape[2:], dilation, strict=True)]
    return [max(stride[d] - 1 - reaches[d], 0) if d in partition else n for d, n in enumerate(output_padding)]


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
    output_padding = _behind(output_padding, partition, weight, stride, dilation) if transposed else output_padding
    options = (_without(padding, partition), dilation, transposed, output_padding, groups)
    out = aten.convolution.default(x, weight, bias, stride, *options)
    return _window_of(out, skipped, partition, size).contiguous(memory_format=layout)


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
        sums = grad.sum([0, *range(2, grad.ndim)])  # without rows to read there may be results, the bias
        grads = (torch.zeros_like(x), torch.zeros_like(weight), sums)
    else:
        if transposed:
            output_padding = _behind(output_padding, partition, weight, stride, dilation)
            whole = list(grad.shape)
            for d in partition:
                reach = dilation[d] * (weight.shape[d + 2] - 1)
                whole[d + 2] = (x.shape[d + 2] - 1) * stride[d] + reach + 1 + output_padding[d]
            embedded = grad.new_zeros(whole)
            _window_of(embedded, skipped, partition, grad.shape).copy_(grad)
            grad = embedded
        options = (_without(padding, partition), dilation, transposed, output_padding, groups)
        grads = aten.convolution_backward.default(grad, x, weight, channels, stride, *options, wanted)
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


# Pools, of 2 or 3 dims


def _renumber(
    indices: Tensor, sizes: Sequence[int], others: Sequence[int], shifts: Sequence[int], lowest: int | None
) -> Tensor:
    """Numbers of elements of a plane as those of another, of which the first one's origin is at `shifts`.

    Args:
        indices: numbers, row by row.
        sizes: of the plane that they count.
        others: of the other plane.
        shifts: what is added to the place along each dim.
        lowest: no place becomes less than this.
    """
    out = torch.zeros_like(indices)
    factor, run = 1, 1
    for size, other, shift in reversed(list(zip(sizes, others, shifts, strict=True))):
        place = indices // factor % size + shift
        out += (place if lowest is None else place.clamp(min=lowest)) * run
        factor, run = factor * size, run * other
    return out


def _max_pool(
    x: Tensor,
    kernel: list[int],
    *options: object,
    size: list[int],
    whole: list[int],
    first: list[int],
) -> tuple[Tensor, Tensor]:
    if not math.prod(size):
        return x.new_empty(size), x.new_empty(size, dtype=torch.int64)
    op = aten.max_pool2d_with_indices.default if len(kernel) == 2 else aten.max_pool3d_with_indices.default
    out, indices = op(x, kernel, *options)
    # Of a window without a number above minus infinity the first element counts, and in front of the dim there is none.
    indices = _renumber(indices, x.shape[-len(kernel) :], whole, first, 0)
    return out.contiguous(), indices.contiguous()


def _max_pool_backward(
    grad: Tensor,
    indices: Tensor,
    kernel: list[int],
    *options: object,
    size: list[int],
    whole: list[int],
    first: list[int],
) -> Tensor:
    if not grad.numel():
        return grad.new_zeros(size)
    spatial = len(kernel)
    op = aten.max_pool2d_with_indices_backward if spatial == 2 else aten.max_pool3d_with_indices_backward
    indices = _renumber(indices, whole, size[-spatial:], [-f for f in first], None)
    return op.default(grad.contiguous(), grad.new_empty(size), kernel, *options, indices).contiguous()


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


def _fake_max_pool(x: Tensor, *_: object, size: list[int], **__: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(size), x.new_empty(size, dtype=torch.int64)


def _fake_of_size(x: Tensor, *_: object, size: list[int], **__: object) -> Tensor:
    return x.new_empty(size)


for _name, _real, _fake in (
    ("convolution", _convolution, _fake_convolution),
    ("convolution_backward", _convolution_backward, _fake_convolution_backward),
    ("max_pool", _max_pool, _fake_max_pool),
    ("max_pool_backward", _max_pool_backward, _fake_of_size),
    ("sum_pool", _sum_pool, _fake_of_size),
    ("sum_pool_backward", _sum_pool_backward, _fake_of_size),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardcompile::{_name}", _fake, lib=_LIBRARY)

convolution = torch.ops.shardcompile.convolution.default
"""``aten.convolution`` of a shard. `size` is its shape, and `partition` the spatial dims that are sharded. `skipped`
has for each of them the rows of a transposed convolution that come before the shard (else it is empty).
`channels_last` says how it is stored.
"""

convolution_backward = torch.ops.shardcompile.convolution_backward.default
"""``aten.convolution_backward`` of a shard; empty tensors for what is not wanted."""

max_pool = torch.ops.shardcompile.max_pool.default
"""The maximum of every window and its number in the plane: `size` is the shard's shape, `whole` are the plane's
sizes, and `first` the place of the shard's first element in the plane."""

max_pool_backward = torch.ops.shardcompile.max_pool_backward.default
"""Its gradient; `size` is the shape of what was read."""

sum_pool = torch.ops.shardcompile.sum_pool.default
"""The sum of every window divided by a number: `size` is the shard's shape."""

sum_pool_backward = torch.ops.shardcompile.sum_pool_backward.default
"""Its gradient; `size` is the shape of what was read."""
