"""`Sharded`: the typed base class of sharded tensors, on which dispatch and the ops depend.

Ops need only the spec and the local shard. How the compiler flattens and unflattens the subclass, and the methods that
users call, are in `shardcompile.tensor`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from shardcompile.sharding import Layout, Spec


class Copied(Protocol):
    """The copied local shard of a view that could not alias its base; it is kept in sync with the base."""

    shard: Tensor

    def current(self) -> Tensor:
        """Returns the shard, copied again from the base if it is stale."""

    def state(self) -> object:
        """Returns a value that changes with every write to the base."""

    def follows(self, x: Sharded) -> bool:
        """Whether this is a view of a tensor, directly or through other views."""

    def write_back(self, view: Sharded) -> None:
        """Writes the shard back to the base."""

    def check_writable(self, op: object) -> None:
        """Raises, before the shard is written to, if the write could not be written back to the base."""


class Sharded(torch.Tensor):
    """A tensor of the global shape whose local shards are held by the ranks of a mesh.

    Attributes:
        _spec: its layout and global strides.
        _local_tensor: this rank's local shard, stored in the order of dims that the strides state.
        _in_flight: the local shard while a collective still computes it; awaited at the first access of the shard.
        _copied: the copied shard of a view that cannot alias its base; None for any other tensor.
        _views: weak references to the views of it that autograd tracks.
        _followers: weak references to the copied views of it.
        _align_grad: whether a hook that gives the gradient its layout has still to be registered.
        _borrows: whether the local shard is memory of a user, who may write to it unseen.
        _kept: results of collectives that later ops use again; see `ops.support.kept`.
        _elements: of a view of integers, how it was made; see `ops.support.view_elements`.
        _deposit: where a gradient that is reduced together with others is to be found; see `gradient_buckets`.
    """

    _spec: Spec
    _local_tensor: Tensor
    _in_flight: Tensor
    _copied: Copied | None = None
    _views: list[weakref.ref[Sharded]] | None = None
    _followers: Sequence[weakref.ref[Sharded]] = ()
    _align_grad: bool = False
    _borrows: bool = False
    _kept: Any = None
    _elements: Any = None
    _deposit: Any = None

    @classmethod
    def _wrap(cls, local: Tensor, spec: Spec) -> Self:
        """Wraps a local shard in a sharded tensor."""
        raise NotImplementedError

    def _stand_in(self) -> Self:
        """Returns another wrapper of the same local shard."""
        raise NotImplementedError

    def _turn_into(self, other: Self) -> None:
        """Takes over the local shard and the layout of another sharded tensor."""
        raise NotImplementedError

    def full_tensor(self) -> Tensor:
        """Returns the full tensor as a plain tensor on every rank."""
        raise NotImplementedError

    @classmethod
    def from_dtensor(cls, x: object) -> Self:
        """Converts a DTensor to a sharded tensor."""
        raise NotImplementedError


def layout_if_sharded(x: object) -> Layout | None:
    """Returns the layout of a sharded tensor; None for a plain tensor and for an object that is no tensor."""
    return x._spec.layout if isinstance(x, Sharded) else None


def shard_of(x: Tensor) -> Tensor:
    """Returns this rank's local shard of a sharded tensor; a plain tensor is replicated and returned as it is."""
    return x._local_tensor if isinstance(x, Sharded) else x


def first_sharded(values: Sequence[object]) -> Sharded:
    """Returns the first sharded tensor among arguments that hold at least one."""
    return next(x for x in values if isinstance(x, Sharded))
