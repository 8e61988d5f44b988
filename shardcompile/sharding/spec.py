"""`Spec`: a layout and the strides of the global tensor, which is all of a ShardTensor but its local data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from shardcompile.compat import coordinate, forget_with_world, size_hint, statically_known_true
from shardcompile.errors import LayoutError, refusal
from shardcompile.sharding.layout import Layout
from shardcompile.sharding.mesh import Mesh
from shardcompile.sharding.sizes import IntLike

_INTERNED: dict[tuple[int, tuple[IntLike, ...]], Spec] = {}
_INTERNED_LIMIT = 1 << 16
forget_with_world(_INTERNED.clear)


class TensorMeta(NamedTuple):
    """Shape, strides and dtype of the global tensor, like the `TensorMeta` of DTensor's spec."""

    shape: torch.Size
    stride: tuple[IntLike, ...]
    dtype: torch.dtype


class Spec:
    """A `Layout` and the strides of the global tensor. Immutable, hashable and interned.

    Dispatch caches its decisions by specs. So specs are equal if they hold the same in all respects, also the kind,
    `TraceState` and `Provenance` of partitions (`Layout.identity`), which layouts ignore when they are compared.

    Attributes:
        layout: the layout.
        stride: the strides of the global tensor in elements, equal to those of the plain tensor.
        shape: the global shape.
        is_plain: whether the spec holds no symbols.
    """

    __slots__ = ("is_plain", "layout", "shape", "stride")

    layout: Layout
    stride: tuple[IntLike, ...]
    shape: tuple[IntLike, ...]
    is_plain: bool

    def __init__(self, layout: Layout, stride: tuple[IntLike, ...]) -> None:
        plain = not layout.has_symbols and all(type(s) is int for s in stride)
        fix = object.__setattr__
        fix(self, "layout", layout)
        fix(self, "stride", stride)
        fix(self, "shape", layout.shape)
        fix(self, "is_plain", plain)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"specs cannot be changed, they are shared: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"specs cannot be changed, they are shared: {name}")

    @staticmethod
    def of(layout: Layout, stride: Sequence[IntLike]) -> Spec:
        """Returns the interned spec with these parts."""
        spec = Spec(layout, tuple(stride))
        if not spec.is_plain:
            return spec
        if len(_INTERNED) >= _INTERNED_LIMIT:
            _INTERNED.clear()
        return _INTERNED.setdefault((id(layout), spec.stride), spec)  # the spec keeps the layout alive

    # Attributes that handlers written for DTensor and for PhysicsNeMo's ShardTensor read.

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        return self.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements, one per mesh dim."""
        return self._layout_of_shards().placements

    @property
    def tensor_meta(self) -> TensorMeta:
        """Shape, strides and dtype of the global tensor."""
        return TensorMeta(torch.Size(self.shape), self.stride, self.layout.dtype)  # type: ignore[arg-type]

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's local shard."""
        layout = self._layout_of_shards()
        return torch.Size(layout.local_shape(coordinate(layout.mesh)))  # type: ignore[arg-type]

    def sharding_shapes(self, mesh_dim: int | None = None) -> Any:
        """Returns the local shapes along each mesh dim with a `Shard` placement, as `from_local` takes them.

        The shapes along a mesh dim are those of the ranks whose mesh coordinates differ from this rank's along that dim
        only. If several mesh dims shard one tensor dim, each of them has the shapes of all shards of that dim. There is
        no communication.

        Args:
            mesh_dim: returns the shapes along this mesh dim only.

        Raises:
            LayoutError: `mesh_dim` shards nothing.
            UnsupportedOpError: called while tracing, where one graph serves all shard sizes.
        """
        if any(partition is not None and partition.is_traced for partition in self.layout.partitions):
            raise refusal(
                "sharding_shapes()",
                self.layout.describe(),
                "one graph serves all shard sizes",
                "In a graph leave them out: from_local(local, mesh, placements) has the ranks exchange them, and "
                "local_map takes them from its inputs",
            )
        local_shape = self.local_shape
        shapes = {
            m: tuple((*local_shape[: p.dim], size, *local_shape[p.dim + 1 :]) for size in self.layout.sizes(p.dim))
            for m, p in enumerate(self.placements)
            if isinstance(p, Shard)
        }
        if mesh_dim is None:
            return shapes
        if mesh_dim not in shapes:
            raise LayoutError(f"mesh dim {mesh_dim} shards nothing in {self.layout.describe()}")
        return shapes[mesh_dim]

    def _layout_of_shards(self) -> Layout:
        """Returns the layout whose shards `to_local` returns.

        Raises:
            LayoutError: a segmented dim is sharded over several mesh dims, so that `to_local` has to redistribute it,
                and its target layout is found only by comparing costs.
        """
        for partition in self.layout.partitions:
            if partition is not None and len(partition.mesh_dims) > 1:
                partition.check_one_segment()
        return self.layout

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Spec) or not self.is_plain or self.stride != other.stride:
            return False
        return self.layout is other.layout or self.layout.identity == other.layout.identity

    def __hash__(self) -> int:
        return hash((self.layout, self.stride)) if self.is_plain else object.__hash__(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Spec:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Spec.of, (self.layout, self.stride)

    def __repr__(self) -> str:
        return f"Spec({self.layout.describe()}, stride={self.stride})"


def contiguous_stride(shape: Sequence[IntLike]) -> tuple[IntLike, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    strides: list[IntLike] = []
    step: IntLike = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return tuple(reversed(strides))


def order_of(stride: Sequence[IntLike]) -> list[int]:
    """Returns the dims in the order of their strides, the largest first."""
    return sorted(range(len(stride)), key=lambda d: -size_hint(stride[d]))


def dense_stride(shape: Sequence[IntLike], like: Sequence[IntLike]) -> tuple[IntLike, ...]:
    """Returns dense strides for a shape, with the dims in the order of the strides `like`, like ``torch.empty_like``.

    Among dims of equal stride, as views of windows have, the larger dim is the outer one; an expanded dim is as far out
    as its neighbours allow. If `like` is dense already, it is returned as it is, including the strides of dims of size
    1, which kernels read as well.
    """
    order = _slowest_first(shape, like)
    by_dim = dict(zip(order, contiguous_stride([shape[d] for d in order]), strict=True))
    dense = tuple(by_dim[d] for d in range(len(order)))
    # Hints must not decide here: the hints of a local shard differ between ranks.
    same = all(
        (isinstance(n, int) and n == 1) or statically_known_true(a == b)
        for n, a, b in zip(shape, dense, like, strict=True)
    )
    return tuple(like) if same else dense


def _slowest_first(shape: Sequence[IntLike], stride: Sequence[IntLike]) -> list[int]:
    """Returns the dims in the order of memory, the outermost first, by the insertion sort of torch (2.11 - 2.15).

    That sort does not compare dims of stride 0. So the order of the other dims depends on where an expanded dim is, and
    no sort key would reproduce it.
    """
    step, size = [size_hint(s) for s in stride], [size_hint(n) for n in shape]
    if 0 not in step:  # fast path with the same result, for eager ops
        return sorted(range(len(step)), key=lambda d: (-step[d], -size[d]))
    fastest = list(reversed(range(len(step))))
    for i in range(1, len(fastest)):
        at = i
        for before in reversed(range(i)):
            a, b = fastest[before], fastest[at]
            if 0 in (step[a], step[b]) or (step[a], size[a]) == (step[b], size[b]):
                continue
            if (step[a], size[a]) < (step[b], size[b]):
                break
            fastest[before], fastest[at], at = b, a, before
    return fastest[::-1]


def may_overlap(shape: Sequence[IntLike], stride: Sequence[IntLike]) -> bool:
    """Whether several elements of a tensor may share a memory location, as overlapping windows do."""
    dims = sorted((size_hint(s), size_hint(n)) for n, s in zip(shape, stride, strict=True))
    if any(n == 0 for _, n in dims):
        return False
    reach = 0
    for step, n in dims:
        if n > 1 and step <= reach:
            return True
        reach += (n - 1) * step
    return False
