"""Views of the same memory as elements of another dtype."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.ops.registry import register, state
from shardcompile.ops.strategy import OpCall, Strategy, along
from shardcompile.ops.view.reshape import WholeRows
from shardcompile.ops.view.rule import LocalShape
from shardcompile.sharding import IntLike, Layout, Partition

aten = torch.ops.aten


def _view(call: OpCall) -> Iterable[Strategy]:
    """Any dim may be sharded; along the last one a rank needs all bytes of each of its new elements."""
    layout = call.tensors[0].layout
    ndim, last = layout.ndim, layout.ndim - 1
    now, wanted = layout.dtype.itemsize, call.args[1].itemsize
    yield from (along([d], [d]) for d in range(ndim if now == wanted else last))
    if now > wanted:
        yield along([last], [last], lambda partition: partition.scaled(now // wanted))
    if now < wanted:
        count = wanted // now
        whole = WholeRows(count, layout.shape[last] // count)
        into = functools.partial(whole.shard_like, functools.partial(_joined, count), layout.mesh)
        yield along([last], [last], functools.partial(_joined, count), into)


def _joined(count: int, partition: Partition) -> Partition | None:
    """The partition of a dim of which `count` neighbouring elements become one; None if they lie on several ranks."""
    return partition.unscaled(count)


def _kernel(x: Tensor, dtype: torch.dtype, shape: Sequence[IntLike]) -> Tensor:
    """A view of the local shard; a copy where that begins within an element of the dtype, or has rows that do."""
    count = dtype.itemsize // x.itemsize
    if count < 2:
        return aten.view.dtype(x, dtype)
    x = _in_units(x, count)
    return aten.squeeze.dim(aten.view.dtype(aten.view.default(x, [*shape, count]), dtype), -1)


def _as_complex(x: Tensor) -> Tensor:
    """A view of the local shard; a copy where that begins within a pair, or has rows that do."""
    return aten.view_as_complex.default(_in_units(x, 2))


def _in_units(x: Tensor, count: int) -> Tensor:
    """The local shard, copied unless it and its rows are known to begin at multiples of `count` elements of memory.

    Where they begin follows from the partition. It is no fault of the program. Nor is it where the memory ends: torch
    (2.11 - 2.15) copies the whole memory of what is written to by `slice_scatter`.
    """
    starts = [x.storage_offset(), *x.stride()[:-1]]
    if type(x) is Tensor:
        starts.append(x.untyped_storage().nbytes() // x.itemsize)
    if all(compat.statically_known_true(n % count == 0) for n in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _with_shape(
    call: OpCall, args: tuple[object, ...], outputs: Sequence[Layout], shape: LocalShape
) -> tuple[object, ...]:
    return (*args[:2], list(shape(outputs[0])))


def _may_copy(now: Layout, then: Layout) -> bool:
    """Whether a shard may begin within an element of the result's dtype on some rank."""
    return then.dtype.itemsize > now.dtype.itemsize


def _back(parent: Tensor, value: Tensor, _: object, dtype: torch.dtype) -> Tensor:
    return aten.view.dtype(value, parent.dtype)


register(aten.view.dtype, _view, _with_shape)
state(aten.view.dtype, kernel=_kernel, copies_shard=_may_copy, way_back=_back)
state(
    aten.view_as_complex.default,
    kernel=_as_complex,
    copies_shard=_may_copy,
    way_back=lambda parent, value, _: aten.view_as_real.default(value),
)
state(aten.view_as_real.default, way_back=lambda parent, value, _: aten.view_as_complex.default(value))
