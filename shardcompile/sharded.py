"""The typed base of sharded tensors: what is known of them below the class itself.

Ops are carried out on a spec and a shard. How the class is taken apart by the compiler, and what it offers to users, is
in `shardcompile.tensor`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from shardcompile.sharding import Layout, Spec


class Copied(Protocol):
    """The shard of a view that had to be copied, and follows what it is a view of."""

    shard: Tensor

    def current(self) -> Tensor:
        """The shard, made again if it is out of date."""

    def state(self) -> object:
        """What changes with every write to what is viewed."""

    def follows(self, x: Sharded) -> bool:
        """Whether this is a view of a tensor, or a view of a view of it."""

    def write_back(self, view: Sharded) -> None:
        """Write the shard into what is viewed."""

    def check_writable(self, op: object) -> None:
        """Raise before anything is written that could not be written back."""


class Sharded(torch.Tensor):
    """A tensor of the global shape whose shards lie on the ranks of a mesh.

    Attributes:
        _spec: its layout and its strides.
        _local_tensor: this rank's local shard, in the order of dims that the strides state.
        _in_flight: the shard while it is on its way; waited for when the shard is first asked for.
        _copied: for a view that a shard cannot hold.
        _views: views of it that autograd knows, while they are there.
        _followers: copied views of it.
        _align_grad: whether its gradient has still to be told to come in its layout.
    """

    _spec: Spec
    _local_tensor: Tensor
    _in_flight: Tensor
    _copied: Copied | None = None
    _views: list[weakref.ref[Sharded]] | None = None
    _followers: Sequence[weakref.ref[Sharded]] = ()
    _align_grad: bool = False

    @classmethod
    def _wrap(cls, local: Tensor, spec: Spec) -> Self:
        """The sharded tensor of a shard."""
        raise NotImplementedError

    def _stand_in(self) -> Self:
        """Another wrapper of the same shard."""
        raise NotImplementedError

    def _turn_into(self, other: Self) -> None:
        """Take over shard and layout of another one."""
        raise NotImplementedError

    def full_tensor(self) -> Tensor:
        """The whole tensor, as a plain one, on every rank."""
        raise NotImplementedError

    @classmethod
    def from_dtensor(cls, x: object) -> Self:
        """A DTensor as a sharded tensor."""
        raise NotImplementedError


def layout_if_sharded(x: object) -> Layout | None:
    """The layout of a sharded tensor; None for a plain one, and for what is no tensor."""
    return x._spec.layout if isinstance(x, Sharded) else None


def shard_of(x: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; a plain one is its own, the same on every rank."""
    return x._local_tensor if isinstance(x, Sharded) else x


def first_sharded(values: Sequence[object]) -> Sharded:
    """The first sharded tensor among arguments, of which there is one."""
    return next(x for x in values if isinstance(x, Sharded))
