"""Views that a local shard cannot hold: copies that follow the tensor that they view.

A view along a sharded dim, such as ``x[2:5]``, may need rows of other ranks, so that its shard is a copy. To its user
it has to be a view. So the copy is made again after the viewed tensor was written to, and what is written to the copy
is written back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.errors import UnsupportedOpError
from shardcompile.ops import record_of, state
from shardcompile.ops.record import Run
from shardcompile.sharded import Sharded
from shardcompile.sharding import may_overlap

aten = torch.ops.aten


class Writes:
    """How often a storage has been written to since it was first watched."""

    def __init__(self) -> None:
        self.count = 0


WATCHED: dict[int, weakref.ref[Writes]] = {}
"""Write counters by storage; empty where nothing depends on writes, so that in-place ops can skip the look-up."""


def watch(shard: Tensor) -> Writes:
    """Returns the counter of writes to the storage of a shard by any sharded tensor; it counts while it is alive."""
    if type(shard) is not Tensor:  # in a trace versions count writes, and storages do not
        return Writes()
    key = shard.untyped_storage()._cdata
    watched = WATCHED[key]() if key in WATCHED else None
    if watched is not None:
        return watched
    writes = Writes()
    WATCHED[key] = weakref.ref(writes, lambda _: WATCHED.pop(key, None))
    return writes


def stored_shard(x: Sharded) -> Tensor:
    """Returns the local shard as it is stored, which for a copied view may be out of date.

    `_local_tensor` would bring it up to date, by a collective that other ranks may not take part in.
    """
    return x._local_tensor if x._copied is None else x._copied.shard  # type: ignore[no-any-return]


def note_write(x: Sharded) -> None:
    """Records that the local shard of a sharded tensor was written to."""
    shard = stored_shard(x)
    if type(shard) is Tensor:
        writes = WATCHED.get(shard.untyped_storage()._cdata, lambda: None)()
        if writes is not None:
            writes.count += 1


def note_view(x: Sharded, view: Sharded) -> None:
    """Records a view of a sharded tensor for `has_views`, as long as the view is alive."""
    if not torch.is_grad_enabled():
        return
    views = x._views
    if views is None:
        views = x._views = []
    elif len(views) >= 8:  # dead views are dropped now and then
        views[:] = [v for v in views if v() is not None]
    views.append(weakref.ref(view))


def has_views(x: Sharded) -> bool:
    """Whether a view of a sharded tensor is alive that autograd knows as one."""
    return any(v() is not None for v in x._views or ())


TURNED: dict[int, weakref.ref[Any]] = {}
"""Sharded tensors, by identity, that an op such as ``transpose_`` turned into a view of themselves while there were
views of them.
"""


def note_turn(x: Sharded) -> None:
    """Records that a sharded tensor with views was turned into a view of itself, as by ``transpose_``."""
    key = id(x)
    TURNED[key] = weakref.ref(x, lambda _: TURNED.pop(key, None))


def was_turned(x: Sharded) -> bool:
    """Whether `note_turn` recorded a sharded tensor, or the tensor that it is a view of."""
    base = x._base if x._is_view() else x
    return any(t() is x or t() is base for t in TURNED.values())


class CopiedView:
    """The local shard of a view that had to be copied.

    Args:
        op: the view op.
        args: its arguments, of which the first is the viewed tensor.
        index: the position of the view among several results of the op; None for a single result.
        shard: the copy.
        remake: computes the shard again.
    """

    def __init__(
        self, op: OpOverload, args: tuple[Any, ...], index: int | None, shard: Tensor, remake: Callable[[], Tensor]
    ) -> None:
        self.op, self.args, self.index, self.shard, self.remake = op, args, index, shard, remake
        self.writes = watch(args[0]._local_tensor)
        self.seen = self.state()

    def state(self) -> object:
        """Changes with every write to the viewed tensor, which shares its version with all of its views."""
        parent = self.args[0]
        version = None if parent.is_inference() else parent._version
        return version, self.writes.count, None if parent._copied is None else parent._copied.state()

    def follows(self, x: Sharded) -> bool:
        """Whether this is a view of `x`, or a view of a view of it."""
        parent = self.args[0]
        return parent is x or (parent._copied is not None and parent._copied.follows(x))

    @property
    def is_stale(self) -> bool:
        """Whether the shard is out of date."""
        return bool(self.state() != self.seen)

    def current(self) -> Tensor:
        """Returns the shard, computed again if it is out of date."""
        if self.is_stale:
            with compat.in_mode_of(self.shard):
                self.shard, self.seen = self.remake(), self.state()
        return self.shard

    def write_back(self, view: Sharded) -> None:
        """Writes the shard into the viewed tensor.

        Args:
            view: the sharded tensor of this shard.

        Raises:
            UnsupportedOpError: it cannot be written back.
        """
        parent = self.args[0]
        with torch._C.DisableTorchFunctionSubclass():
            value = type(view)._wrap(self.shard, view._spec)
            aten.copy_.default(parent, self._inverse(value))

    def check_writable(self, op: object) -> None:
        """Raises if what `op` writes to the view cannot be written back.

        Raises:
            UnsupportedOpError: it cannot.
        """
        parent = self.args[0]
        if record_of(self.op).write_back is None:
            raise UnsupportedOpError(
                f"{op} writes to a view ({self.op}) that a shard cannot hold and that had to be copied, and there is "
                f"no way back to the tensor that was viewed ({parent._spec.layout.describe()}). Write to the tensor "
                "itself, or clone first"
            )
        if self.op is aten.as_strided.default and may_overlap(*self.args[1:3]):
            raise UnsupportedOpError(
                f"{op} writes to a view ({self.op}) that a shard cannot hold and that had to be copied. Several of its "
                f"elements lie in one place of the tensor that was viewed ({parent._spec.layout.describe()}). Write to "
                "the tensor itself, or clone first"
            )
        if parent._copied is not None:
            parent._copied.check_writable(op)

    def _inverse(self, value: Tensor) -> object:
        """Returns the new value of the viewed tensor, in which the view has a new value."""
        write_back = record_of(self.op).write_back
        assert write_back is not None, "check_writable has been called"
        return write_back(self.args[0], value, self.index, *self.args[1:])


class GivenCopy:
    """In a trace, the local shard of an input that is a copied view. The graph may read it but not write to it.

    What a graph writes to a shard does not reach the tensor from which the shard was copied.
    """

    def __init__(self, shard: Tensor) -> None:
        self.shard = shard

    def state(self) -> object:
        return None

    def follows(self, x: Sharded) -> bool:
        return False

    def current(self) -> Tensor:
        return self.shard

    def write_back(self, view: Sharded) -> None:
        raise AssertionError("check_writable has been called")

    def check_writable(self, op: object) -> None:
        raise UnsupportedOpError(
            f"{op} in a compiled function writes to an input that is a view which a shard cannot hold, and that had to "
            "be copied: what the graph writes would not reach the tensor that was viewed. Pass that tensor and take "
            "the view inside of the function, or write to a clone"
        )


def _unbind_back(parent: Tensor, value: Tensor, index: int, dim: int = 0) -> Tensor:
    return aten.select_scatter.default(parent, value, dim, index)


def _split_back(parent: Tensor, value: Tensor, index: int, size: int, dim: int = 0) -> Tensor:
    start = index * size
    return aten.slice_scatter.default(parent, value, dim, start, start + value.shape[dim])


def _split_sizes_back(parent: Tensor, value: Tensor, index: int, sizes: Sequence[int], dim: int = 0) -> Tensor:
    start = sum(sizes[:index])
    return aten.slice_scatter.default(parent, value, dim, start, start + sizes[index])


def _scatter(op: OpOverload) -> Run:
    return lambda parent, value, _, *args: op(parent, value, *args)


def _reshape(parent: Tensor, value: Tensor, *_: object) -> Tensor:
    return aten.reshape.default(value, list(parent.shape))


def _permute_back(parent: Tensor, value: Tensor, _: object, dims: Sequence[int]) -> Tensor:
    inverse = [0] * len(dims)
    for i, d in enumerate(dims):
        inverse[d % len(dims)] = i
    return aten.permute.default(value, inverse)


state(aten.slice.Tensor, write_back=_scatter(aten.slice_scatter.default))
state(aten.select.int, write_back=_scatter(aten.select_scatter.default))
state(aten.diagonal.default, write_back=_scatter(aten.diagonal_scatter.default))
state(aten.as_strided.default, write_back=_scatter(aten.as_strided_scatter.default))
state(aten.unbind.int, write_back=_unbind_back)
state(aten.split.Tensor, write_back=_split_back)
state(aten.split_with_sizes.default, write_back=_split_sizes_back)
state(aten.t.default, write_back=lambda parent, value, _: aten.t.default(value))
state(aten.transpose.int, write_back=lambda parent, value, _, a, b: aten.transpose.int(value, a, b))
state(aten.permute.default, write_back=_permute_back)
state(aten.view.default, write_back=_reshape)
state(aten._unsafe_view.default, write_back=_reshape)
state(aten.reshape.default, write_back=_reshape)
state(aten.unsqueeze.default, write_back=_reshape)
state(aten.squeeze.default, write_back=_reshape)
state(aten.squeeze.dim, write_back=_reshape)
state(aten.squeeze.dims, write_back=_reshape)
state(aten.alias.default, write_back=lambda parent, value, _: value)
state(aten.detach.default, write_back=lambda parent, value, _: value, is_same=True)


def follow(
    view: Sharded, op: OpOverload, args: tuple[Any, ...], index: int | None, remake: Callable[[], Tensor]
) -> None:
    """Makes a view whose local shard is a copy follow the tensor that it views: the first of `args`."""
    view._copied = CopiedView(op, args, index, view.__dict__.pop("_local_tensor"), remake)
    args[0]._followers = [*(v for v in args[0]._followers if v() is not None), weakref.ref(view)]


def has_followers(x: Sharded) -> bool:
    """Whether a copied view of a sharded tensor is alive, which is computed again from it."""
    return any(v() is not None for v in x._followers)
