"""Stores local shards in the order of dims that the strides of the global tensor state.

Global strides decide views, and whether a view is possible at all. A shard that is stored in another order, as after a
redistribution, would have to be copied where the global tensor would not be, and on some ranks only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops import OpRecord, Order, state
from shardcompile.sharding import IntLike, contiguous_stride, dense_stride, order_of, transfer_dtype_of

aten = torch.ops.aten

state(
    [
        *(aten.logaddexp.default, aten.logaddexp2.default, aten.copysign.Tensor, aten.heaviside.default),
        *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.floor_divide.default),
        *(aten.xlogy.Tensor, aten.special_xlog1py.default, aten.logit_backward.default),
        *(aten.native_dropout_backward.default, aten.div.Tensor_mode),
    ],
    order=Order.AS_A_SUM,
)
state(aten.pow.Scalar, order=Order.IN_ROWS)
state(
    [
        op.default
        for op in (
            *(aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data),
            *(aten._fused_rms_norm, aten._fused_rms_norm_backward, aten.native_layer_norm),
            *(aten.triu, aten.tril, aten.renorm, aten.diag_embed, aten.index_add, aten.unfold_backward),
            *(aten.pixel_shuffle, aten.pixel_unshuffle, aten.linalg_vector_norm, aten.native_group_norm),
            *(aten.native_layer_norm_backward, aten.native_group_norm_backward, aten.native_batch_norm_backward),
            *(aten.binary_cross_entropy, aten.binary_cross_entropy_backward, aten.log_sigmoid_forward),
            *(aten.mse_loss_backward, aten.huber_loss_backward, aten.smooth_l1_loss_backward),
            *(aten.soft_margin_loss_backward, aten.glu_backward, aten._weight_norm_interface),
        )
    ],
    order=Order.OF_ROWS,
)
state(
    [aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.masked_fill.Scalar, aten.masked_fill.Tensor],
    order=Order.OF_ROWS,
)
state([aten.convolution.default, aten.convolution_backward.default], order=Order.ASKED)


def in_order(local: Tensor, stride: Sequence[IntLike]) -> Tensor:
    """Returns a local shard, copied if it is not stored densely in the order of global strides.

    Args:
        local: the shard.
        stride: strides of the global tensor.
    """
    if type(local) is Tensor:
        return _in_order(local, _dense_stride_of(local.shape, tuple(stride)))
    order = order_of(stride)
    shape = [compat.size_hint(local.shape[d]) for d in order]
    stored = [compat.size_hint(local.stride(d)) for d in order]
    if 0 in shape or _same(shape, stored, contiguous_stride(shape)):
        return local
    # Not `contiguous`: that compares the size of the shard, and specialises on the answer.
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return local.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


_dense_stride_of = functools.lru_cache(maxsize=4096)(dense_stride)  # of ints: shapes and strides of eager mode


def _in_order(local: Tensor, wanted: tuple[IntLike, ...]) -> Tensor:
    """Returns a local shard in eager mode with these strides."""
    if local.stride() == wanted:
        return local  # the common case first
    if local.numel() == 0 or _same(local.shape, local.stride(), wanted):
        # Strides of dims of size 1 and of empty shards mean nothing, but some kernels read them.
        return local.as_strided(local.shape, wanted)
    transfer_dtype = transfer_dtype_of(local.dtype)
    if transfer_dtype is not local.dtype:  # a dtype that torch may be unable to copy
        return _in_order(local.view(transfer_dtype), wanted).view(local.dtype)
    return local.new_empty_strided(local.shape, wanted).copy_(local)


def _same(shape: Sequence[IntLike], a: Sequence[IntLike], b: Sequence[IntLike]) -> bool:
    """Whether strides are equal, except along dims of size 1."""
    return all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True))


def may_misstate_strides(record: OpRecord, ndims: Sequence[int]) -> bool:
    """Whether a trace may state wrong strides for the result of an op, or guard on the size of a shard.

    Both happen where an op takes shards that are stored in several orders of dims. Later ops, such as views, are then
    decided by strides that the result does not have.

    Args:
        record: the record of the op.
        ndims: numbers of dims of its tensors.
    """
    if record.op.is_view or record.op._schema.is_mutable:
        return False
    return record.order is not Order.FAKE_KERNEL or (record.elementwise and sum(n > 1 for n in ndims) > 1)


def in_one_order(record: OpRecord, shards: Sequence[Any], stride: Sequence[IntLike]) -> list[object]:
    """Brings the shards that an op takes into the order of the strides of its result; for some ops, contiguous.

    Args:
        record: the record of an op for which `may_misstate_strides` holds.
        shards: its arguments. Those that are expanded, or that are not tensors of as many dims, stay as they are.
        stride: global strides of its result.
    """

    def aligned(x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.ndim < 2 or (x.ndim != len(stride) and not record.order.needs_rows):
            return x
        if any(compat.size_hint(s) == 0 and compat.size_hint(n) > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
            return x
        return in_order(x, range(x.ndim, 0, -1) if record.order.needs_rows else stride)

    return [aligned(x) for x in shards]


def all_in_order(out: Tensor, specs: Sequence[Any]) -> Tensor:
    """Brings the results of a local op into the order of their specs; a spec is None for what is not a tensor."""
    if isinstance(out, Tensor):
        return out if specs[0] is None else in_order(out, specs[0].stride)
    if len(specs) == 1 and isinstance(specs[0], list):
        return [o if s is None else in_order(o, s.stride) for o, s in zip(out, specs[0], strict=True)]
    return tuple(o if s is None or o is None else in_order(o, s.stride) for o, s in zip(out, specs, strict=True))
