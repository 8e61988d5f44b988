"""The layout of a sharded tensor: the same object on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

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
_INTERNED: dict[Layout, Layout] = {}
_INTERNED_LIMIT = 1 << 16
forget_with_world(_INTERNED.clear)


class Layout:
    """Mesh, placements, global shape, dtype and the partition of every sharded dim.

    Immutable, hashable and picklable. Which rank it is used on is a parameter of its queries, never part of it.
    Inside a trace the shape and the partitions may hold symbols; such a layout compares by identity.

    Attributes:
        mesh: the mesh of ranks.
        placements: one for each mesh dim.
        shape: global shape.
        dtype: element type.
        partitions: for each tensor dim its `Partition`, or None if it is not sharded.
        is_traced: whether it holds symbols.
    """

    __slots__ = ("__weakref__", "_epoch", "_hash", "dtype", "is_traced", "mesh", "partitions", "placements", "shape")

    mesh: Any
    placements: tuple[Placement, ...]
    shape: tuple[IntLike, ...]
    dtype: torch.dtype
    partitions: tuple[Partition | None, ...]
    is_traced: bool
    _epoch: int
    _hash: int

    def __init__(
        self,
        mesh: Mesh,
        placements: Sequence[Placement],
        shape: Sequence[IntLike],
        dtype: torch.dtype,
        partitions: Sequence[Partition | None],
    ) -> None:
        parts = (mesh, tuple(placements), tuple(shape), dtype, tuple(partitions))
        traced = any(c is not None and c.has_symbols for c in partitions)
        traced = traced or not all(type(s) is int for s in shape)
        fix = object.__setattr__
        for name, value in zip(_PARTS, parts, strict=True):
            fix(self, name, value)
        fix(self, "is_traced", traced)
        fix(self, "_epoch", world_epoch())
        fix(self, "_hash", object.__hash__(self) if traced else hash(parts))

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
        """The layout with these parts; equal layouts are the same object as a rule."""
        layout = Layout(mesh, placements, shape, dtype, partitions)
        if layout.is_traced:
            return layout
        if len(_INTERNED) >= _INTERNED_LIMIT:
            _INTERNED.clear()
        return _INTERNED.setdefault(layout, layout)

    @staticmethod
    def of_partitions(
        mesh: Mesh, shape: Sequence[IntLike], dtype: torch.dtype, partitions: Sequence[Partition | None]
    ) -> Layout:
        """The layout with these partitions, which is replicated along all mesh dims by which nothing is sharded.

        Args:
            mesh: the mesh of ranks.
            shape: global shape.
            dtype: element type.
            partitions: by tensor dim.
        """
        placements: list[Placement] = [Replicate()] * len(mesh.shape)
        for dim, partition in enumerate(partitions):
            for m in () if partition is None else partition.mesh_dims:
                placements[m] = Shard(dim)
        return Layout.of(mesh, placements, shape, dtype, partitions)

    @staticmethod
    def chunked(mesh: Mesh, placements: Sequence[Placement], shape: Sequence[IntLike], dtype: torch.dtype) -> Layout:
        """The layout in which every sharded dim has the partition of torch.chunk.

        Args:
            mesh: the mesh of ranks.
            placements: one for each mesh dim; several mesh dims may shard one tensor dim, the first one outermost.
            shape: global shape.
            dtype: element type.
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
        if not isinstance(other, Layout) or self.is_traced or other.is_traced or self._hash != other._hash:
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
        return self._hash

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
        """Whether every rank holds the whole tensor."""
        return all(type(p) is Replicate for p in self.placements)

    @property
    def is_partial(self) -> bool:
        """Whether a reduction is pending on some mesh dim."""
        return any(isinstance(p, Partial) for p in self.placements)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold shards of the same shape."""
        return all(partition is None or partition.is_even for partition in self.partitions)

    def partition_of(self, dim: int) -> Partition:
        """The partition of a sharded tensor dim.

        Raises:
            LayoutError: the dim is not sharded.
        """
        partition = self.partitions[dim]
        if partition is None:
            raise LayoutError(f"tensor dim {dim} is not sharded in {self.describe()}")
        return partition

    def sizes(self, dim: int) -> tuple[int, ...]:
        """Sizes of all shards along a sharded tensor dim, outermost mesh dim slowest."""
        return self.partition_of(dim).sizes

    def local_shape(self, coordinate: Sequence[int]) -> tuple[IntLike, ...]:
        """Shape of the shard that the rank at a mesh coordinate holds."""
        return tuple(
            size if partition is None else partition.local_size(coordinate)
            for size, partition in zip(self.shape, self.partitions, strict=True)
        )

    def offset(self, coordinate: Sequence[int], dim: int) -> int:
        """Where the shard of a mesh coordinate starts along a tensor dim; 0 if the dim is not sharded."""
        partition = self.partitions[dim]
        return 0 if partition is None else partition.offset(coordinate)

    def offsets(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Where the shard of a mesh coordinate starts, for every tensor dim."""
        return tuple(self.offset(coordinate, d) for d in range(self.ndim))

    def shard_slices(self, coordinate: Sequence[int]) -> tuple[slice, ...]:
        """Index of the shard of a mesh coordinate in the global tensor."""
        shape = self.local_shape(coordinate)
        return tuple(slice(o, o + int(s)) for o, s in zip(self.offsets(coordinate), shape, strict=True))

    @property
    def imbalance(self) -> float:
        """How many times the mean the largest shard is, along the dim where that is most; see `Partition.imbalance`."""
        return max((partition.imbalance for partition in self.partitions if partition is not None), default=1.0)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(int(s) for s in self.shape) * self.dtype.itemsize

    def with_dtype(self, dtype: torch.dtype) -> Layout:
        """The same layout for another element type."""
        return (
            self if dtype is self.dtype else Layout.of(self.mesh, self.placements, self.shape, dtype, self.partitions)
        )

    def replicated(self) -> Layout:
        """The layout in which every rank holds the whole tensor."""
        return Layout.whole(self.mesh, self.shape, self.dtype)

    @staticmethod
    def whole(mesh: Mesh, shape: Sequence[IntLike], dtype: torch.dtype) -> Layout:
        """The layout of a plain tensor: the same value on every rank."""
        return Layout.of(mesh, (Replicate(),) * len(mesh.shape), shape, dtype, (None,) * len(shape))

    def gathered(self, dim: int) -> Layout:
        """The layout in which every rank has all shards of a sharded tensor dim."""
        mesh_dims = self.partition_of(dim).mesh_dims
        placements = [Replicate() if m in mesh_dims else p for m, p in enumerate(self.placements)]
        partitions = [None if d == dim else c for d, c in enumerate(self.partitions)]
        return Layout.of(self.mesh, placements, self.shape, self.dtype, partitions)

    def reduced(self) -> Layout:
        """The same layout with every pending reduction carried out."""
        if not self.is_partial:
            return self
        placements = [Replicate() if isinstance(p, Partial) else p for p in self.placements]
        return Layout.of(self.mesh, placements, self.shape, self.dtype, self.partitions)

    def describe_placements(self) -> str:
        """Placements and sizes in short, e.g. ``S(0)[3,5], P(sum)``."""
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
        """One line: dtype, global shape, and what each mesh dim does with it."""
        names = self.mesh.mesh_dim_names or tuple(map(str, range(len(self.placements))))
        parts = (f"{n}: {self._describe_mesh_dim(m)}" for m, n in enumerate(names))
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}] {', '.join(parts)}"


def short_dtype(dtype: torch.dtype) -> str:
    """`torch.float32` as ``f32``, and so on."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def mesh_dims_by_tensor_dim(placements: Sequence[Placement], ndim: int) -> list[tuple[int, ...]]:
    """For each tensor dim the mesh dims that shard it, in mesh order."""
    return [tuple(m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim) for dim in range(ndim)]


def normalize_placements(placements: Sequence[Placement], mesh: Mesh, ndim: int) -> tuple[Placement, ...]:
    """Check placements against a mesh and a number of tensor dims; negative shard dims become positive.

    Raises:
        LayoutError: not one placement per mesh dim, a shard dim out of range, an unknown reduction or placement,
            reductions that do not commute.
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
    """The value of a tensor with two pending reductions must not depend on which is carried out first."""
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
