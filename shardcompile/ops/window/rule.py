"""Rules of convolution, pooling, interpolation and sampling: samples are independent, and mostly channels are, too.

Along a spatial dim windows reach over the edges of shards. A rule gathers a tensor that is sharded there; see
`shardcompile.ops.window.sharded` for decompositions that exchange halos instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from shardcompile.compat import OpOverload
from shardcompile.ops.registry import records, register, state
from shardcompile.ops.strategy import OpCall, Strategy, along, partial
from shardcompile.ops.view.rule import local_shape_at

aten = torch.ops.aten


def _leading_dims(spatial: int) -> Callable[[OpCall], Iterable[Strategy]]:
    """Makes a rule by which every dim in front of the spatial ones may be sharded, identically in all tensors."""

    def rule(call: OpCall) -> Iterable[Strategy]:
        outputs = len(call.op._schema.returns)
        for dim in range(call.tensors[0].ndim - spatial):
            yield along([dim] * len(call.tensors), [dim] * outputs)

    return rule


def _linear(spatial: int) -> Callable[[OpCall], Iterable[Strategy]]:
    """Makes the same rule for an op that is linear in its only tensor."""

    def rule(call: OpCall) -> Iterable[Strategy]:
        yield from _leading_dims(spatial)(call)
        yield from (partial([op], [op]) for op in ("sum", "avg"))

    return rule


_LINEAR = ("avg_pool", "upsample")


def _is_linear(name: str) -> bool:
    return any(word in name for word in _LINEAR)


# Ops that treat each channel by itself, with their number of spatial dims.
for _op, _spatial in {
    aten.avg_pool2d.default: 2,
    aten.avg_pool3d.default: 3,
    aten._adaptive_avg_pool2d.default: 2,
    aten._adaptive_avg_pool3d.default: 3,
    aten.upsample_linear1d.default: 1,
    aten.upsample_bilinear2d.default: 2,
    aten.upsample_trilinear3d.default: 3,
    aten.upsample_nearest1d.default: 1,
    aten.upsample_nearest2d.default: 2,
    aten.upsample_nearest3d.default: 3,
    aten._upsample_nearest_exact1d.default: 1,
    aten._upsample_nearest_exact2d.default: 2,
    aten._upsample_nearest_exact3d.default: 3,
    aten.upsample_bicubic2d.default: 2,
    aten._upsample_bilinear2d_aa.default: 2,
    aten._upsample_bicubic2d_aa.default: 2,
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
    aten.max_unpool2d.default: 2,
    aten.max_unpool3d.default: 3,
}.items():
    register(_op, (_linear if _is_linear(_op._schema.name) else _leading_dims)(_spatial))
    state(_op, spatial=_spatial)

# Their gradients; all tensors have the same sizes but along spatial dims.
for _op, _spatial in {
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d_backward.default: 3,
    aten._adaptive_avg_pool2d_backward.default: 2,
    aten._adaptive_avg_pool3d_backward.default: 3,
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d_backward.default: 3,
}.items():
    register(_op, _leading_dims(_spatial))
    state(_op, spatial=_spatial)

# Gradients of interpolation; argument 2 is the shape of the input.
for _op, _spatial in {
    aten.upsample_linear1d_backward.default: 1,
    aten.upsample_bilinear2d_backward.default: 2,
    aten.upsample_trilinear3d_backward.default: 3,
    aten.upsample_bicubic2d_backward.default: 2,
    aten.upsample_nearest1d_backward.default: 1,
    aten.upsample_nearest2d_backward.default: 2,
    aten.upsample_nearest3d_backward.default: 3,
    aten._upsample_nearest_exact1d_backward.default: 1,
    aten._upsample_nearest_exact2d_backward.default: 2,
    aten._upsample_nearest_exact3d_backward.default: 3,
    aten._upsample_bilinear2d_aa_backward.default: 2,
    aten._upsample_bicubic2d_aa_backward.default: 2,
}.items():
    register(_op, _linear(_spatial), local_shape_at(2))
    state(_op, spatial=_spatial)


def per_channel() -> list[tuple[OpOverload, int]]:
    """Ops that treat all but the spatial dims as samples, with their number of spatial dims."""
    return [(record.op, record.spatial) for record in records() if record.spatial]


def _windows(call: OpCall) -> Iterable[Strategy]:
    """``im2col`` and ``col2im``: samples and channels may be sharded; the windows of a channel are adjacent."""
    unfolds = call.op._schema.name == "aten::im2col"
    channels = call.tensors[0].ndim - (3 if unfolds else 2)
    if channels:
        yield along([0], [0])
    size = math.prod(call.arg(1 if unfolds else 2, "kernel_size"))
    yield along(
        [channels],
        [channels],
        lambda partition: partition.flatten_trailing(size) if unfolds else partition.unflatten_trailing(size),
    )
    yield from (partial([op], [op]) for op in ("sum", "avg"))


register([aten.im2col.default, aten.col2im.default], _windows)


def _convolution(call: OpCall) -> Iterable[Strategy]:
    others = [None] * (len(call.tensors) - 1)
    yield along([0, *others], [0])
    if len(call.tensors) == 2:  # linear in each, without a bias
        yield from (partial(pattern, ["sum"]) for pattern in (["sum", None], [None, "sum"]))


register(aten.convolution.default, _convolution)


def _convolution_backward(call: OpCall) -> Iterable[Strategy]:
    yield along([0, 0, None], [0, "sum", "sum"])


register(aten.convolution_backward.default, _convolution_backward)


def _grid_sampler(call: OpCall) -> Iterable[Strategy]:
    """Samples, channels of the input, and dims of the sampled positions may be sharded."""
    yield along([0, 0], [0])
    yield along([1, None], [1])
    yield from (along([None, d], [d + 1]) for d in range(1, call.tensors[1].ndim - 1))


def _grid_sampler_backward(call: OpCall) -> Iterable[Strategy]:
    yield along([0, 0, 0], [0, 0])
    yield along([1, 1, None], [1, "sum"])
    yield from (along([d + 1, None, d], ["sum", d]) for d in range(1, call.tensors[2].ndim - 1))


register([aten.grid_sampler_2d.default, aten.grid_sampler_3d.default], _grid_sampler)
register([aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default], _grid_sampler_backward)
