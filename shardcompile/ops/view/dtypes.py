"""Views that reinterpret the memory of a tensor as another dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops.registry import register, state
from shardcompile.ops.strategy import OpCall, Strategy, along
from shardcompile.ops.view.reshape import WholeRows, merged_partition
from shardcompile.ops.view.rule import LocalShape
from shardcompile.sharding import IntLike, Layout

aten = torch.ops.aten


def _view(call: OpCall) -> Iterable[Strategy]:
    """Any dim may be sharded; along the last one, a rank needs all bytes of each element of the new dtype."""
    layout = call.tensors[0].layout
    ndim, last = layout.ndim, layout.ndim - 1
    old_size, new_size = layout.dtype.itemsize, call.args[1].itemsize
    yield from (along([d], [d]) for d in range(ndim if old_size == new_size else last))
    if old_size > new_size:
        yield along([last], [last], lambda partition: partition.flatten_trailing(old_size // new_size))
    if old_size < new_size:
        count = new_size // old_size
        whole_rows = WholeRows(count, layout.shape[last] // count)
        merged = functools.partial(merged_partition, count)
        yield along([last], [last], merged, functools.partial(whole_rows.shard_like, merged, layout.mesh))


def _kernel(x: Tensor, dtype: torch.dtype, shape: Sequence[IntLike]) -> Tensor:
    """Views the local shard as `dtype`, and copies it first if it, or a row of it, begins within an element of that."""
    count = dtype.itemsize // x.itemsize
    if count < 2:
        return aten.view.dtype(x, dtype)
    x = _aligned(x, count)
    return aten.squeeze.dim(aten.view.dtype(aten.view.default(x, [*shape, count]), dtype), -1)


def _as_complex(x: Tensor) -> Tensor:
    """Views pairs as complex numbers, and copies the local shard first if it, or a row of it, begins within a pair."""
    return aten.view_as_complex.default(_aligned(x, 2))


def _aligned(x: Tensor, count: int) -> Tensor:
    """Returns the local shard, copied unless it and its rows statically begin at multiples of `count` elements.

    Where they begin follows from the partition, so the program is not at fault if they do not. The same holds for the
    end of the memory: torch (2.11 - 2.15) copies the entire storage of a tensor that `slice_scatter` writes to.
    """
    starts = [x.storage_offset(), *x.stride()[:-1]]
    if type(x) is Tensor:
        starts.append(x.untyped_storage().nbytes() // x.itemsize)
    if all(compat.statically_known_true(n % count == 0) for n in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _append_local_shape(
    call: OpCall, args: tuple[object, ...], outputs: Sequence[Layout], shape: LocalShape
) -> tuple[object, ...]:
    """Appends the local output shape, which `_kernel` needs."""
    return (*args[:2], list(shape(outputs[0])))


def _may_copy(src: Layout, dst: Layout) -> bool:
    """Whether a shard may begin within an element of the result's dtype on some rank."""
    return dst.dtype.itemsize > src.dtype.itemsize


def _write_back(parent: Tensor, value: Tensor, _: object, dtype: torch.dtype) -> Tensor:
    return aten.view.dtype(value, parent.dtype)


register(aten.view.dtype, _view, _append_local_shape)
state(aten.view.dtype, kernel=_kernel, copies_shard=_may_copy, write_back=_write_back)
state(
    aten.view_as_complex.default,
    kernel=_as_complex,
    copies_shard=_may_copy,
    write_back=lambda parent, value, _: aten.view_as_real.default(value),
)
state(aten.view_as_real.default, write_back=lambda parent, value, _: aten.view_as_complex.default(value))
