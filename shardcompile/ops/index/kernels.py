"""Kernels of writes by index or mask that install no guard on the size of a local shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.ops import record_of, state
from shardcompile.ops.support.local_shards import copy_shard, index_copy
from shardcompile.ops.support.strides import in_one_order

aten = torch.ops.aten


def _masked_fill_(op: OpOverload) -> Callable[..., Tensor]:
    functional: Any = compat.functional_variant(op)

    def local(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        """Copies inside a trace: torch's `masked_fill_` guards there on the size of a shard that is not contiguous."""
        if type(x) is Tensor or x.ndim < 2:
            return op(x, mask, value)
        return copy_shard(x, functional(*in_one_order(record_of(functional), [x, mask], x.stride()), value))

    return local


def _index_fill(x: Tensor, dim: int, index: Tensor, value: complex) -> Tensor:
    """`index_fill`, by `index_copy` in a trace: torch's own compares strides, which unbacked shard sizes forbid."""
    if type(x) is Tensor or x.ndim == 0:
        return aten.index_fill.int_Scalar(x, dim, index, value)
    shape = list(x.shape)
    shape[dim] = index.numel()
    return index_copy(x, dim, index, x.new_full(shape, value))


state(aten.copy_.default, kernel=copy_shard)
state(aten.index_copy.default, kernel=index_copy)
# torch's fake kernel (2.11 - 2.15) forgets the order of dims of an expanded tensor.
state(aten.index_fill.int_Scalar, kernel=_index_fill, shape_kernel=lambda x, *_: x.clone())
state(aten.masked_fill_.Scalar, kernel=_masked_fill_(aten.masked_fill_.Scalar))
state(aten.masked_fill_.Tensor, kernel=_masked_fill_(aten.masked_fill_.Tensor))
