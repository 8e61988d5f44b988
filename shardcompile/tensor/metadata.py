"""The metadata of `__tensor_flatten__`: what the compiler knows about a sharded tensor besides its inner tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardcompile import compat
from shardcompile.collectives import note_partition
from shardcompile.sharding import IntLike, Layout, Partition, PartitionMetadata, Spec, cached_for_layouts, order_of


@dataclass(frozen=True)
class Metadata:
    """The part of a spec that a graph is specialized on: everything but global sizes and dynamic shard sizes.

    Metadata is interned: equal metadata is the same object, so the guard on it compares identities.
    """

    mesh: Any
    placements: tuple[Placement, ...]
    dtype: torch.dtype
    partitions: tuple[PartitionMetadata, ...]
    epoch: int
    copied: bool = False
    """Whether the tensor is a copied view: its local shard is a copy of a part of its base."""

    def __deepcopy__(self, memo: dict[int, object]) -> Metadata:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.mesh, self.placements, self.dtype, self.partitions, self.copied)

    @property
    def dynamic_dims(self) -> list[int]:
        """The tensor dims whose partition key is in the shape of the inner tensor ``_partition_keys``."""
        return [part.dim for part in self.partitions if part.kind == "dynamic"]

    @property
    def has_keys(self) -> bool:
        """Whether there is an inner tensor ``_partition_keys``."""
        return any(part.kind == "dynamic" or part.num_symbols for part in self.partitions)

    @property
    def has_stated_sizes(self) -> bool:
        """Whether there is a partition that does not follow from the global size and the placements."""
        return any(part.kind != "chunk" or part.scale != 1 for part in self.partitions)

    def stable_text(self) -> str:
        """Returns a text that is the same for the same metadata in every process, and differs between ranks.

        Inside of `compat.keys_of_all_ranks`, the ranks of a mesh have the same text.
        """
        mesh = self.mesh
        return repr(
            (
                compat.describe_mesh(mesh),
                mesh.get_coordinate() if compat.keys_tell_the_rank() else None,
                [compat.group_name_of(mesh, m) for m in range(mesh.ndim)],
                [str(p) for p in self.placements],
                str(self.dtype),
                self.partitions,
                self.copied,
            )
        )


_INTERNED: dict[Metadata, Metadata] = {}
compat.forget_with_world(_INTERNED.clear)


def intern_metadata(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    dtype: torch.dtype,
    partitions: tuple[PartitionMetadata, ...],
    copied: bool = False,
) -> Metadata:
    """Returns the interned metadata with these fields."""
    metadata = Metadata(mesh, placements, dtype, partitions, compat.world_epoch(), copied)
    return _INTERNED.setdefault(metadata, metadata)


def _restore(mesh: DeviceMesh, *fields: Any) -> Metadata:
    """Unpickles metadata, which another rank may have pickled, with the mesh as this rank knows it.

    Raises:
        RuntimeError: it comes from another rank, and this one has no sharded tensor on such a mesh.
    """
    known = (m.mesh for m in _INTERNED if compat.describe_mesh(m.mesh) == compat.describe_mesh(mesh))
    own = next(known, mesh)
    if own is mesh and dist.is_initialized():
        at = mesh.get_coordinate()
        if at is None or int(mesh.mesh[tuple(at)]) != dist.get_rank():
            raise RuntimeError(f"metadata of a sharded tensor on {mesh} comes from another rank")
    return intern_metadata(own, *fields)


def metadata_of(layout: Layout, copied: bool = False) -> Metadata:
    """Returns the metadata of a layout; `copied` says whether the tensor is a copied view."""
    partitions = tuple(PartitionMetadata.of(d, p) for d, p in enumerate(layout.partitions) if p is not None)
    return intern_metadata(layout.mesh, layout.placements, layout.dtype, partitions, copied)


def _symbols(layout: Layout, metadata: Metadata) -> list[IntLike]:
    """Returns the scales and numbers of segments of a layout that are symbols of a graph, in the metadata's order."""
    return [n for part in metadata.partitions for n in part.symbols_of(layout.partition_of(part.dim))]


@cached_for_layouts
def of_input(layout: Layout) -> Layout:
    """Returns the layout with which an input is traced: chunked partitions become dynamic, so one graph serves both."""
    partitions = [c and c.as_dynamic() for c in layout.partitions]
    return Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions)


def as_stated_by(layout: Layout, metadata: Metadata) -> Layout:
    """Returns a layout of the same shards whose partitions are chunked or dynamic where those of the metadata are."""
    partitions = list(layout.partitions)
    for part in metadata.partitions:
        partition = partitions[part.dim]
        if partition is None:
            continue
        if part.kind == "dynamic":
            partitions[part.dim] = partition.as_dynamic()
        elif part.kind == "chunk" and partition.kind == "dynamic":
            scale = part.scale or partition.trace.scale
            mesh_dims, parts = partition.mesh_dims, partition.parts
            chunked = Partition.chunk(mesh_dims, parts, partition.size // scale).flatten_trailing(scale)
            partitions[part.dim] = chunked if chunked.guard_same_shards(partition) else partition
    return Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions)


def is_stated_by(layout: Layout, metadata: Metadata) -> bool:
    """Returns whether a tensor of a graph with this metadata may have this layout."""
    symbols = iter(_symbols(layout, metadata))
    partitions = tuple(part.with_symbols(symbols) for part in metadata.partitions)
    stated = intern_metadata(metadata.mesh, metadata.placements, metadata.dtype, partitions, metadata.copied)
    return metadata_of(layout, metadata.copied) is stated


def make_keys_tensor(layout: Layout, metadata: Metadata, like: Tensor, with_sizes: bool = False) -> Tensor:
    """Returns an empty tensor whose shape carries the keys of the dynamic partitions into a graph.

    The first size is 0 and the strides are 0, so that the storage size does not overflow. While tracing, a tensor that
    carries the same keys is reused, so that ops add no nodes to the graph. Unbacked global sizes follow the keys, since
    torch looks for the origin of their symbols in inner tensors only. Symbolic scales and segment counts come last.
    """
    partitions = [layout.partition_of(d) for d in metadata.dynamic_dims]
    keys = [p.trace.key for p in partitions]
    symbols = _symbols(layout, metadata)
    shape = [*keys, *symbols]
    if with_sizes or any(compat.is_unbacked(p.size) for p in partitions):
        shape = [*keys, *(p.size for p in partitions), *symbols]
    keys_tensor = partitions[0].trace.keys_tensor if partitions else None
    if (
        isinstance(keys_tensor, Tensor)
        and keys_tensor.ndim == 1 + len(shape)
        and all(p.trace.keys_tensor is keys_tensor for p in partitions)
    ):
        carried = [*keys_tensor.shape[1 : 1 + len(keys)], *keys_tensor.shape[keys_tensor.ndim - len(symbols) :]]
        if all(compat.statically_known_true(a == b) for a, b in zip(carried, [*keys, *symbols], strict=True)):
            return keys_tensor
    return like.new_empty_strided([0, *shape], [0] * (1 + len(shape)), dtype=torch.uint8)


_RUNTIME_SPECS: dict[Any, Spec] = {}
_RUNTIME_SPECS_LIMIT = 1 << 14
compat.forget_with_world(_RUNTIME_SPECS.clear)


def spec_from_parts(
    metadata: Metadata, local: Tensor, keys_tensor: Tensor | None, shape: Sequence[IntLike], stride: Sequence[IntLike]
) -> Spec:
    """Returns the spec of an unflattened tensor: at run time with shard sizes looked up by key, else with symbols."""
    shape, stride = tuple(shape), tuple(stride)
    keys = () if keys_tensor is None else tuple(keys_tensor.shape[1 : 1 + len(metadata.dynamic_dims)])
    num_symbols = sum(part.num_symbols for part in metadata.partitions)
    symbols = () if keys_tensor is None or not num_symbols else tuple(keys_tensor.shape[-num_symbols:])
    # The local shape is checked as well: a global size may be a constant while the shard size is still a symbol.
    is_static = all(type(s) is int for s in (*keys, *symbols, *shape, *stride, *local.shape))
    if is_static:
        cache_key = (metadata, keys, symbols, shape, stride)
        cached = _RUNTIME_SPECS.get(cache_key)
        if cached is not None:
            return cached
    key_of_dim = dict(zip(metadata.dynamic_dims, keys, strict=True))
    partitions: list[Partition | None] = [None] * len(shape)
    numbers = iter(symbols)
    for part in (part.with_symbols(numbers) for part in metadata.partitions):
        dim, parts = part.dim, [metadata.mesh.shape[m] for m in part.mesh_dims]
        partition = part.partition(parts, shape[dim], key_of_dim.get(dim, 0), local.shape[dim])
        note_partition(partition, metadata.mesh)
        partitions[dim] = partition.with_trace(keys_tensor=keys_tensor) if partition.is_traced else partition
    spec = Spec.of(Layout.of(metadata.mesh, metadata.placements, shape, metadata.dtype, partitions), stride)
    if is_static:
        if len(_RUNTIME_SPECS) >= _RUNTIME_SPECS_LIMIT:
            _RUNTIME_SPECS.clear()
        _RUNTIME_SPECS[cache_key] = spec
    return spec


def stable_hash(metadata: Metadata, tensors: Sequence[Tensor], requires_grad: bool) -> str:
    """Returns a hash of shapes, strides and metadata for the compiler's caches, the same in every process."""
    shapes = [(str(tuple(t.shape)), str(t.stride()), str(t.device)) for t in tensors]
    text = repr((metadata.stable_text(), shapes, requires_grad))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def size_hints(layout: Layout) -> dict[int, int]:
    """Returns for each sharded dim the hint of the global size, with which compilers take decisions: at least 2.

    A global size of 0 or 1 is static: such a dim may be broadcast, or skipped by a concatenation, its strides are
    ambiguous, and it is rank-invariant.
    """
    return {
        d: max(compat.size_hint(layout.shape[d]), 2)
        for d, c in enumerate(layout.partitions)
        if c is not None and layout.shape[d] not in (0, 1)
    }


def shard_hints(layout: Layout) -> dict[int, int]:
    """Returns for each sharded dim the hint of the shard size: rank-invariant, and at least 2.

    With its actual size as the hint, a rank with an empty shard would compile other code than the other ranks. This
    includes a global size of 1, which is static: one rank has the row, the others have none. With a global size of 0
    all shards are empty, and no hint is needed. The hint is a multiple of the partition's scale.
    """
    return {
        d: max(-(-compat.size_hint(layout.shape[d]) // (p.trace.scale * math.prod(p.parts))), 2) * p.trace.scale  # type: ignore[misc]
        for d, p in enumerate(layout.partitions)
        if p is not None and layout.shape[d] != 0
    }


def identity_of(layout: Layout, dim: int) -> tuple[object, ...]:
    """Returns what identifies the shards of a dim among all inputs of a graph."""
    partition = layout.partition_of(dim)
    return tuple(compat.group_name_of(layout.mesh, m) for m in partition.mesh_dims), partition.sizes


def uneven_shard_hints(layout: Layout) -> dict[int, int]:
    """Returns `shard_hints` for the dims whose shards differ in size."""
    partitions = layout.partitions
    return {d: h for d, h in shard_hints(layout).items() if (p := partitions[d]) is not None and not p.is_even}


def with_stated_strides(local: Tensor, spec: Spec) -> Tensor:
    """Returns the local shard with its meaningless strides set to those that a larger shard would have.

    The stride of a dim of size 1, and every stride of a tensor without elements, is meaningless, and ops leave
    arbitrary values there. A graph that was traced for a larger shard expects each stride to be the product of the
    sizes of the faster dims, including sharded sizes of 0; otherwise it would be recompiled for this shard, on this
    rank alone. A dim of size 0 that is not sharded counts as one of size 1, as in torch.

    Args:
        local: the local shard, with the order of dims that the spec states.
        spec: the spec of the global tensor.
    """
    if all(n > 1 for n in local.shape):
        return local
    strides, empty = list(local.stride()), local.numel() == 0
    step, global_step, no_faster_sharded_dim = 1, 1, True
    for d in reversed(order_of(spec.stride)):
        global_stride: Any = spec.stride[d]
        if empty or local.shape[d] == 1:
            if no_faster_sharded_dim:
                strides[d] = global_stride
            elif global_stride == global_step:
                strides[d] = step
        is_sharded = spec.layout.partitions[d] is not None
        step, global_step = (
            strides[d] * (local.shape[d] if is_sharded else max(local.shape[d], 1)),
            global_stride * max(spec.shape[d], 1),
        )
        no_faster_sharded_dim = no_faster_sharded_dim and not is_sharded
    return local if tuple(strides) == local.stride() else local.as_strided(local.shape, strides)


def gaps_along_partitions(spec: Spec) -> list[tuple[int, int | None]] | None:
    """Returns where the memory of a tensor has gaps, if one follows a sharded dim, as in a slice along a sharded dim.

    The local size of such a gap differs between ranks.

    Args:
        spec: the spec of the global tensor, outside of a trace.

    Returns:
        The dims from the fastest on, each with the gap before it in elements, or None where there is no gap. None if no
        gap follows a sharded dim.
    """
    dims: list[tuple[int, int | None]] = []
    step, after_sharded_dim, has_gaps = 1, False, False
    for d in reversed(order_of(spec.stride)):
        stride: Any = spec.stride[d]
        gap = stride - step if dims and stride not in (0, step) else None
        dims.append((d, gap))
        has_gaps = has_gaps or (after_sharded_dim and gap is not None)
        step = stride * spec.shape[d]
        after_sharded_dim = after_sharded_dim or spec.layout.partitions[d] is not None
    return dims if has_gaps else None


def with_shard_symbols(spec: Spec, local: Tensor) -> Spec:
    """Returns the spec, while tracing, with the symbol of the local shard size in its chunked partitions."""
    layout = spec.layout
    if not any(_lacks_symbol(c) for c in layout.partitions):
        return spec
    partitions = [
        c.with_trace(local_size=local.shape[d]) if c and _lacks_symbol(c) else c
        for d, c in enumerate(layout.partitions)
    ]
    return Spec.of(Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions), spec.stride)


def _lacks_symbol(partition: Partition | None) -> bool:
    return (
        partition is not None
        and partition.kind == "chunk"
        and partition.is_traced
        and partition.trace.local_size is None
    )
