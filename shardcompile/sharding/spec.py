"""A layout together with the strides of the global tensor: what a ShardTensor is, besides its data."""

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

_INTERNED: dict[Spec, Spec] = {}
_INTERNED_LIMIT = 1 << 16
forget_with_world(_INTERNED.clear)


class TensorMeta(NamedTuple):
    """Shape, strides and dtype of the global tensor, as in a spec of DTensor."""

    shape: torch.Size
    stride: tuple[IntLike, ...]
    dtype: torch.dtype


class Spec:
    """A `Layout` and global strides. Immutable and hashable; equal ones are the same object as a rule.

    Attributes:
        layout: the layout.
        stride: strides of the global tensor in elements, as plain PyTorch would have them.
        shape: global shape.
        is_plain: whether it holds no symbols.
    """

    __slots__ = ("_hash", "is_plain", "layout", "shape", "stride")

    layout: Layout
    stride: tuple[IntLike, ...]
    shape: tuple[IntLike, ...]
    is_plain: bool
    _hash: int

    def __init__(self, layout: Layout, stride: tuple[IntLike, ...]) -> None:
        plain = not layout.is_traced and all(type(s) is int for s in stride)
        fix = object.__setattr__
        fix(self, "layout", layout)
        fix(self, "stride", stride)
        fix(self, "shape", layout.shape)
        fix(self, "is_plain", plain)
        fix(self, "_hash", hash((layout, stride)) if plain else object.__hash__(self))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"specs cannot be changed, they are shared: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"specs cannot be changed, they are shared: {name}")

    @staticmethod
    def of(layout: Layout, stride: Sequence[IntLike]) -> Spec:
        """The spec with these parts."""
        spec = Spec(layout, tuple(stride))
        if not spec.is_plain:
            return spec
        if len(_INTERNED) >= _INTERNED_LIMIT:
            _INTERNED.clear()
        return _INTERNED.setdefault(spec, spec)

    # What handlers of DTensor and of PhysicsNeMo's ShardTensor read.

    @property
    def mesh(self) -> Mesh:
        """The mesh of ranks."""
        return self.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each mesh dim."""
        return self._layout_of_shards().placements

    @property
    def tensor_meta(self) -> TensorMeta:
        """Shape, strides and dtype of the global tensor."""
        return TensorMeta(torch.Size(self.shape), self.stride, self.layout.dtype)  # type: ignore[arg-type]

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's shard."""
        layout = self._layout_of_shards()
        return torch.Size(layout.local_shape(coordinate(layout.mesh)))  # type: ignore[arg-type]

    def sharding_shapes(self, mesh_dim: int | None = None) -> Any:
        """Shapes of the shards along each mesh dim that shards, as `from_local` takes them; nothing is sent.

        Shapes are those of the ranks that this rank's coordinates share but along the mesh dim. Where several mesh dims
        shard one tensor dim, each of them has the shapes of all shards of that dim.

        Args:
            mesh_dim: gives the shapes along this one only.

        Raises:
            LayoutError: `mesh_dim` shards nothing.
            UnsupportedOpError: inside a graph, which serves all shard sizes.
        """
        if any(partition is not None and partition.is_traced for partition in self.layout.partitions):
            raise refusal(
                "sharding_shapes()",
                self.layout.describe(),
                "one graph serves all shard sizes",
                "In a graph leave them out: from_local(local, mesh, placements) has the ranks exchange them, and "
                "local_map takes them from its inputs",
            )
        mine = self.local_shape
        shapes = {
            m: tuple((*mine[: p.dim], size, *mine[p.dim + 1 :]) for size in self.layout.sizes(p.dim))
            for m, p in enumerate(self.placements)
            if isinstance(p, Shard)
        }
        if mesh_dim is None:
            return shapes
        if mesh_dim not in shapes:
            raise LayoutError(f"mesh dim {mesh_dim} shards nothing in {self.layout.describe()}")
        return shapes[mesh_dim]

    def _layout_of_shards(self) -> Layout:
        """The layout that `to_local` gives shards of.

        Raises:
            LayoutError: to know it, the ways to bring rows together would have to be compared.
        """
        for partition in self.layout.partitions:
            if partition is not None and len(partition.mesh_dims) > 1:
                partition.check_one_segment()
        return self.layout

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Spec) or self._hash != other._hash:
            return False
        return self.is_plain and self.layout == other.layout and self.stride == other.stride

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: dict[int, object]) -> Spec:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Spec.of, (self.layout, self.stride)

    def __repr__(self) -> str:
        return f"Spec({self.layout.describe()}, stride={self.stride})"


def contiguous_stride(shape: Sequence[IntLike]) -> tuple[IntLike, ...]:
    """Strides of a contiguous tensor of this shape."""
    strides: list[IntLike] = []
    step: IntLike = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return tuple(reversed(strides))


def order_of(stride: Sequence[IntLike]) -> list[int]:
    """The dims from the slowest to the fastest."""
    return sorted(range(len(stride)), key=lambda d: -size_hint(stride[d]))


def dense_stride(shape: Sequence[IntLike], like: Sequence[IntLike]) -> tuple[IntLike, ...]:
    """Strides without gaps for a shape, the dims in the order of the strides `like`, as those of ``torch.empty_like``.

    Of dims with equal strides, as windows have them, the larger one is the slower one; an expanded dim is as slow as
    the dims around it let it be. Those of a shape that `like` has no gaps for are `like` itself: kernels read the
    strides of sizes of 1 as well.
    """
    order = _slowest_first(shape, like)
    by_dim = dict(zip(order, contiguous_stride([shape[d] for d in order]), strict=True))
    dense = tuple(by_dim[d] for d in range(len(order)))
    # Not by hints: those of a shard are others on other ranks.
    same = all(
        (isinstance(n, int) and n == 1) or statically_known_true(a == b)
        for n, a, b in zip(shape, dense, like, strict=True)
    )
    return tuple(like) if same else dense


def _slowest_first(shape: Sequence[IntLike], stride: Sequence[IntLike]) -> list[int]:
    """The dims of a tensor in memory, by the insertion sort of torch (2.11 - 2.15); a stride of 0 has no place in it.

    So the order of other dims depends on where an expanded one is, and no key to sort by would give it.
    """
    step, size = [size_hint(s) for s in stride], [size_hint(n) for n in shape]
    if 0 not in step:  # the same order, sooner: eager ops come here
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
    """Whether several elements of a tensor may lie in one place in memory, as those of windows do."""
    dims = sorted((size_hint(s), size_hint(n)) for n, s in zip(shape, stride, strict=True))
    if any(n == 0 for _, n in dims):
        return False
    reach = 0
    for step, n in dims:
        if n > 1 and step <= reach:
            return True
        reach += (n - 1) * step
    return False
