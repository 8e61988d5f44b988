"""Ops that replace the memory of a tensor, `set_` and `resize_`: each returns the tensor that its argument becomes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops import state
from shardcompile.ops.view.strided import as_strided
from shardcompile.sharded import Sharded
from shardcompile.sharding import IntLike, Layout, Spec, contiguous_stride

aten = torch.ops.aten


def _set(x: Sharded, source: Tensor) -> Tensor:
    """``x.set_(source)``: a new tensor on the local shard of `source`."""
    if isinstance(source, Sharded):
        return source._stand_in()
    return type(x)._wrap(
        source, Spec.of(Layout.whole(x._spec.layout.mesh, source.shape, source.dtype), source.stride())
    )


def _resize(x: Sharded, size: Sequence[IntLike], *, memory_format: torch.memory_format | None = None) -> Tensor:
    """``x.resize_(size)`` to no more elements than `x` has: a view of the first ones."""
    if len(size) == x.ndim and all(compat.guard_equal(a, b) for a, b in zip(size, x.shape, strict=True)):
        return x  # torch leaves the strides as well
    fits = compat.guard_or_false(math.prod(size) <= x.numel())
    if not fits or memory_format not in (None, torch.contiguous_format):
        raise UnsupportedOpError(
            f"resize_ of {x._spec.layout.describe()} to {tuple(size)} needs new memory, which views of the tensor "
            "would have to follow; make a new tensor with new_empty"
        )
    return as_strided(x, size, contiguous_stride(size))


def _resize_as(x: Sharded, like: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return _resize(x, like.shape, memory_format=memory_format)


def _refuse(x: Sharded, *_: object, **__: object) -> Tensor:
    raise UnsupportedOpError(
        f"set_ of {x._spec.layout.describe()} to a storage: a sharded tensor has none; set_ takes a tensor"
    )


state(aten.set_.source_Tensor, becomes=_set)
state(aten.set_.default, becomes=_refuse)
state(aten.set_.source_Storage, becomes=_refuse)
state(aten.set_.source_Storage_storage_offset, becomes=_refuse)
state(aten.set_.source_Tensor_storage_offset, becomes=_refuse)
state(aten.resize_.default, becomes=_resize)
state(aten.resize_as_.default, becomes=_resize_as)
