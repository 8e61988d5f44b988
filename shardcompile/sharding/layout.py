"""`Layout`: the rank-invariant description of how a tensor is sharded over a mesh."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile.compat import forget_with_world, world_epoch
from shardcompile.errors import LayoutError
from shardcompile.sharding.mesh import Mesh
from shardcompile.sharding.partition import Partition
from shardcompile.sharding.sizes import IntLike

REDUCE_OPS = ("sum", "avg", "product", "max", "min")
"""Reductions that a `Partial` placement may name."""

_PARTS = ("mesh", "placements", "shape", "dtype", "partitions")
_INTERNED: dict[tuple[Any, ...], Layout] = {}
_CACHE_LIMIT = 1 << 16
forget_with_world(_INTERNED.clear)

P = ParamSpec("P")
R = TypeVar("R")


class Layout:
    """Mesh, placements, global shape, dtype and the partition of every sharded dim.

    A layout is immutable, hashable and picklable. The rank is a parameter of its queries, never part of it. Layouts are
    equal if `describe` says the same of them on the same mesh: how a graph refers to the shard sizes, and where a
    partition comes from, play no part. While tracing, the shape and the partitions may hold symbols; such a layout
    equals only itself.

    Attributes:
        mesh: the device mesh.
        placements: one placement per mesh dim.
        shape: the global shape.
        dtype: the dtype.
        partitions: for each tensor dim its `Partition`, or None if the dim is not sharded.
        has_symbols: whether the layout holds symbols.
        identity: all that the layout holds, hashable and comparable: the key of caches of what depends on more than
            `==` compares; None if the layout holds symbols.
    """

    __slots__ = (
        "__weakref__",
        "_epoch",
        "dtype",
        "has_symbols",
        "identity",
        "mesh",
        "partitions",
        "placements",
        "shape",
    )

    mesh: Any
    placements: tuple[Placement, ...]
    shape: tuple[IntLike, ...]
    dtype: torch.dtype
    partitions: tuple[Partition | None, ...]
    has_symbols: bool
    identity: tuple[Any, ...] | None
    _epoch: int

    def __init__(
        self,
        mesh: Mesh,
        placements: Sequence[Placement],
        shape: Sequence[IntLike],
        dtype: torch.dtype,
        partitions: Sequence[Partition | None],
    ) -> None:
        parts = (mesh, tuple(placements), tuple(shape), dtype, tuple(partitions))
        traced = any(p is not None and p.has_symbols for p in partitions)
        traced = traced or not all(type(s) is int for s in shape)
        fix = object.__setattr__
        for name, value in zip(_PARTS, parts, strict=True):
            fix(self, name, value)
        fix(self, "has_symbols", traced)
        epoch = world_epoch()
        fix(self, "_epoch", epoch)
        identity = None if traced else (*parts[:4], tuple([p and p.identity for p in parts[4]]), epoch)
        fix(self, "identity", identity)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"layouts cannot be changed, they are shared: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"layouts cannot be changed, they are shared: {name}")

    @staticmethod
    def of(
        mesh: Mesh,
        placements: Sequence[Placement],
        shape: Sequence[IntLike],
        dtype: torch.dtype,
        partitions: Sequence[Partition | None],
    ) -> Layout:
        """Returns the interned layout with these parts: layouts of one `identity` are normally the same object."""
        layout = Layout(mesh, placements, shape, dtype, partitions)
        if layout.identity is None:
            return layout
        if len(_INTERNED) >= _CACHE_LIMIT:
            _INTERNED.clear()
        return _INTERNED.setdefault(layout.identity, layout)

    @staticmethod
    def of_partitions(
        mesh: Mesh, shape: Sequence[IntLike], dtype: torch.dtype, partitions: Sequence[Partition | None]
    ) -> Layout:
        """Returns the layout with these partitions; mesh dims that no partition uses are replicated.

        Args:
            mesh: the device mesh.
            shape: the global shape.
            dtype: the dtype.
            partitions: one per tensor dim, None for a dim that is not sharded.
        """
        placements: list[Placement] = [Replicate()] * len(mesh.shape)
        for dim, partition in enumerate(partitions):
            for m in () if partition is None else partition.mesh_dims:
                placements[m] = Shard(dim)
        return Layout.of(mesh, placements, shape, dtype, partitions)

    @staticmethod
    def chunked(mesh: Mesh, placements: Sequence[Placement], shape: Sequence[IntLike], dtype: torch.dtype) -> Layout:
        """Returns the layout in which every sharded dim is divided as by `torch.chunk`.

        Args:
            mesh: the device mesh.
            placements: one per mesh dim; several mesh dims may shard one tensor dim, the first one outermost.
            shape: the global shape.
            dtype: the dtype.
        """
        placements = normalize_placements(placements, mesh, len(shape))
        partitions: list[Partition | None] = [None] * len(shape)
        for dim, mesh_dims in enumerate(mesh_dims_by_tensor_dim(placements, len(shape))):
            if mesh_dims:
                partitions[dim] = Partition.chunk(mesh_dims, [mesh.shape[m] for m in mesh_dims], shape[dim])
        return Layout.of(mesh, placements, shape, dtype, partitions)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self.has_symbols or other.has_symbols:
            return False
        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and self.placements == other.placements
            and self.partitions == other.partitions
            and self.mesh == other.mesh
            and self._epoch == other._epoch
        )

    def __hash__(self) -> int:
        if self.has_symbols:
            return object.__hash__(self)
        return hash((self.mesh, self.placements, self.shape, self.dtype, self.partitions))

    def __reduce__(self) -> tuple[object, ...]:
        return Layout.of, (self.mesh, self.placements, self.shape, self.dtype, self.partitions)

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        return self

    def __repr__(self) -> str:
        return f"Layout({self.describe()})"

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @property
    def is_replicated(self) -> bool:
        """Whether the tensor is replicated along every mesh dim."""
        return all(type(p) is Replicate for p in self.placements)

    @property
    def is_partial(self) -> bool:
        """Whether a reduction is pending along some mesh dim."""
        return any(isinstance(p, Partial) for p in self.placements)

    @property
    def is_even(self) -> bool:
        """Whether all local shards have the same shape."""
        return all(partition is None or partition.is_even for partition in self.partitions)

    def partition_of(self, dim: int) -> Partition:
        """Returns the partition of a sharded tensor dim.

        Raises:
            LayoutError: the dim is not sharded.
        """
        partition = self.partitions[dim]
        if partition is None:
            raise LayoutError(f"tensor dim {dim} is not sharded in {self.describe()}")
        return partition

    def sizes(self, dim: int) -> tuple[int, ...]:
        """Returns the sizes of all shards along a sharded tensor dim, the outermost mesh dim varying slowest."""
        return self.partition_of(dim).sizes

    def local_shape(self, coordinate: Sequence[int]) -> tuple[IntLike, ...]:
        """Returns the shape of the local shard of the rank at a mesh coordinate."""
        return tuple(
            size if partition is None else partition.local_size(coordinate)
            for size, partition in zip(self.shape, self.partitions, strict=True)
        )

    def offset(self, coordinate: Sequence[int], dim: int) -> int:
        """Returns the global offset of a mesh coordinate's shard along a tensor dim; 0 if the dim is not sharded."""
        partition = self.partitions[dim]
        return 0 if partition is None else partition.offset(coordinate)

    def offsets(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Returns the global offsets of a mesh coordinate's shard, one per tensor dim."""
        return tuple(self.offset(coordinate, d) for d in range(self.ndim))

    def shard_slices(self, coordinate: Sequence[int]) -> tuple[slice, ...]:
        """Returns the slices that select a mesh coordinate's shard from the global tensor."""
        shape = self.local_shape(coordinate)
        return tuple(slice(o, o + int(s)) for o, s in zip(self.offsets(coordinate), shape, strict=True))

    @property
    def imbalance(self) -> float:
        """The largest `Partition.imbalance` (largest shard size over mean shard size) of all sharded dims."""
        return max((partition.imbalance for partition in self.partitions if partition is not None), default=1.0)

    @property
    def nbytes(self) -> int:
        """Size of the global tensor in bytes."""
        return math.prod(int(s) for s in self.shape) * self.dtype.itemsize

    def with_dtype(self, dtype: torch.dtype) -> Layout:
        """Returns the same layout with another dtype."""
        return (
            self if dtype is self.dtype else Layout.of(self.mesh, self.placements, self.shape, dtype, self.partitions)
        )

    def replicated(self) -> Layout:
        """Returns the layout of the same tensor, replicated along every mesh dim."""
        return Layout.whole(self.mesh, self.shape, self.dtype)

    @staticmethod
    def whole(mesh: Mesh, shape: Sequence[IntLike], dtype: torch.dtype) -> Layout:
        """Returns the layout of a plain tensor, which is replicated: every rank holds the same value."""
        return Layout.of(mesh, (Replicate(),) * len(mesh.shape), shape, dtype, (None,) * len(shape))

    def gathered(self, dim: int) -> Layout:
        """Returns the layout after an all-gather of a sharded tensor dim over all of its mesh dims."""
        mesh_dims = self.partition_of(dim).mesh_dims
        placements = [Replicate() if m in mesh_dims else p for m, p in enumerate(self.placements)]
        partitions = [None if d == dim else p for d, p in enumerate(self.partitions)]
        return Layout.of(self.mesh, placements, self.shape, self.dtype, partitions)

    def reduced(self) -> Layout:
        """Returns the same layout with `Replicate` in place of every `Partial`."""
        if not self.is_partial:
            return self
        placements = [Replicate() if isinstance(p, Partial) else p for p in self.placements]
        return Layout.of(self.mesh, placements, self.shape, self.dtype, self.partitions)

    def describe_placements(self) -> str:
        """Returns the placements and shard sizes as short text, e.g. ``S(0)[3,5], P(sum)``."""
        return ", ".join(self._describe_mesh_dim(m) for m in range(len(self.placements)))

    def _describe_mesh_dim(self, mesh_dim: int) -> str:
        placement = self.placements[mesh_dim]
        if isinstance(placement, Partial):
            return f"P({placement.reduce_op})"
        if not isinstance(placement, Shard):
            return "R"
        partition = self.partition_of(placement.dim)
        last = partition.mesh_dims[-1] == mesh_dim
        order = (
            ""
            if list(partition.mesh_dims) == sorted(partition.mesh_dims)
            else f"<{partition.mesh_dims.index(mesh_dim)}>"
        )
        return f"S({placement.dim}){order}{partition.describe() if last else ''}"

    def describe(self) -> str:
        """Returns one line of text: dtype, global shape, and the placement along each mesh dim."""
        names = self.mesh.mesh_dim_names or tuple(map(str, range(len(self.placements))))
        parts = (f"{n}: {self._describe_mesh_dim(m)}" for m, n in enumerate(names))
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}] {', '.join(parts)}"


def cached_for_layouts(function: Callable[P, R]) -> Callable[P, R]:
    """Caches a function of layouts without symbols and of other hashable arguments.

    Interned layouts are compared as objects: a result may depend on more of them than `==` compares.
    """
    results: dict[tuple[Any, ...], tuple[tuple[Any, ...], R]] = {}
    forget_with_world(results.clear)

    @functools.wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> R:
        given = (*args, *kwargs, *kwargs.values())
        key = tuple([id(a) if type(a) is Layout else a for a in given])
        entry = results.get(key)
        if entry is None:
            if len(results) >= _CACHE_LIMIT:
                results.clear()
            entry = results[key] = (given, function(*args, **kwargs))  # keeps layouts alive, so that ids stay unique
        return entry[1]

    return cached


def short_dtype(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype, e.g. ``f32`` for `torch.float32`."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def mesh_dims_by_tensor_dim(placements: Sequence[Placement], ndim: int) -> list[tuple[int, ...]]:
    """Returns for each tensor dim the mesh dims that shard it, in mesh order."""
    return [tuple(m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim) for dim in range(ndim)]


def normalize_placements(placements: Sequence[Placement], mesh: Mesh, ndim: int) -> tuple[Placement, ...]:
    """Checks placements against a mesh and a number of tensor dims, and makes negative shard dims positive.

    Raises:
        LayoutError: there is not one placement per mesh dim, a shard dim is out of range, a reduction or a placement
            is unknown, or two reductions do not commute.
    """
    placements = tuple(placements)
    if len(placements) != len(mesh.shape):
        raise LayoutError(
            f"a mesh of {len(mesh.shape)} dims needs as many placements, got {len(placements)}: {list(placements)}"
        )
    placements = tuple(_normalize(p, ndim) for p in placements)
    _check_reductions_commute(placements)
    return placements


def _check_reductions_commute(placements: Sequence[Placement]) -> None:
    """Raises unless the value of a tensor with several pending reductions is independent of their order."""
    pending = [(m, p) for m, p in enumerate(placements) if isinstance(p, Partial)]
    for (a, p), (b, q) in itertools.pairwise(pending):
        if p != q and {p.reduce_op, q.reduce_op} != {"sum", "avg"}:
            raise LayoutError(
                f"mesh dims {a} and {b} ({p}, {q}): these reductions do not commute, so that the value would depend "
                "on their order; reduce one of them first"
            )


def _normalize(placement: Placement, ndim: int) -> Placement:
    if type(placement) is Shard:
        dim = placement.dim
        if not -ndim <= dim < ndim:
            raise LayoutError(f"{placement} is out of range for a tensor of {ndim} dims")
        return placement if dim >= 0 else Shard(dim + ndim)
    if type(placement) is Replicate:
        return placement
    if type(placement) is Partial:
        if placement.reduce_op not in REDUCE_OPS:
            raise LayoutError(f"{placement}: the reduction must be one of {', '.join(REDUCE_OPS)}")
        return placement
    raise LayoutError(
        f"placement {placement!r} is not supported; use Shard, Replicate or Partial of "
        "torch.distributed.tensor.placement_types (several Shards of one dim for nested sharding)"
    )
