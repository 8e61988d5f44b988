"""What a sharded tensor tells the compiler about itself besides its inner tensors."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardcompile import compat
from shardcompile.collectives import note_partition
from shardcompile.sharding import IntLike, Layout, Partition, Spec, order_of, sizes_of_key

PartitionKind = tuple[int, str, tuple[int, ...], int, int, tuple[int, ...], int]
"""Tensor dim, kind, mesh dims, inner, scale, the sizes of a fixed partition, and runs. Scale and runs that are symbols
are `_CARRIED`."""

_CARRIED = 0
"""In place of a number that is a symbol of the trace: the inner tensor ``_partition_keys`` has it in its shape."""


@dataclass(frozen=True)
class Metadata:
    """The part of a spec that a graph is specialised on: everything but sizes and dynamic sizes.

    Equal metadata is the same object, so that the guard on it is a comparison of identities.
    """

    mesh: Any
    placements: tuple[Placement, ...]
    dtype: torch.dtype
    partitions: tuple[PartitionKind, ...]
    epoch: int
    copied: bool = False
    """Whether the shard is a copy of what the tensor is a view of."""

    def __deepcopy__(self, memo: dict[int, object]) -> Metadata:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return intern_metadata, (self.mesh, self.placements, self.dtype, self.partitions, self.copied)

    @property
    def dynamic_dims(self) -> list[int]:
        """Tensor dims whose key is in the shape of the inner tensor ``_partition_keys``."""
        return [dim for dim, kind, *_ in self.partitions if kind == "dynamic"]

    @property
    def has_keys(self) -> bool:
        """Whether there is an inner tensor ``_partition_keys``."""
        return any(_CARRIED in (scale, runs) or kind == "dynamic" for _, kind, _, _, scale, _, runs in self.partitions)

    @property
    def has_stated_sizes(self) -> bool:
        """Whether there is a partition that does not follow from the size and the placements."""
        return any(kind != "chunk" or scale != 1 for _, kind, _, _, scale, *_ in self.partitions)

    def stable_text(self) -> str:
        """The same text for the same metadata in every process; tells ranks of a mesh apart."""
        mesh = self.mesh
        return repr(
            (
                mesh.device_type,
                mesh.mesh.tolist(),
                mesh.mesh_dim_names,
                mesh.get_coordinate(),
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
    partitions: tuple[PartitionKind, ...],
    copied: bool = False,
) -> Metadata:
    """The metadata with these parts."""
    metadata = Metadata(mesh, placements, dtype, partitions, compat.world_epoch(), copied)
    return _INTERNED.setdefault(metadata, metadata)


def metadata_of(layout: Layout, copied: bool = False) -> Metadata:
    """The metadata of a layout, and whether the shard is a copy that has to follow another tensor."""
    partitions = tuple(
        (d, c.kind, c.mesh_dims, c.inner, _stated(c.scale), c.sizes if c.kind == "fixed" else (), _stated(c.runs))
        for d, c in enumerate(layout.partitions)
        if c is not None
    )
    return intern_metadata(layout.mesh, layout.placements, layout.dtype, partitions, copied)


def _stated(number: IntLike) -> int:
    return number if isinstance(number, int) else _CARRIED


def _carried(layout: Layout, metadata: Metadata) -> list[IntLike]:
    """The numbers of a layout that a graph has as symbols, in the order of the metadata."""
    partitions = [(layout.partition_of(dim), scale, runs) for dim, _, _, _, scale, _, runs in metadata.partitions]
    return [n for c, scale, runs in partitions for n, known in ((c.scale, scale), (c.runs, runs)) if known == _CARRIED]


@functools.lru_cache(maxsize=1 << 12)
def of_input(layout: Layout) -> Layout:
    """The layout as which an input is traced: chunked partitions are dynamic ones, so that one graph serves both."""
    partitions = [c and c.as_dynamic() for c in layout.partitions]
    return Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions)


compat.forget_with_world(of_input.cache_clear)


def as_stated_by(layout: Layout, metadata: Metadata) -> Layout:
    """The same shards, as chunked and dynamic partitions where the metadata of a graph's tensor has these."""
    partitions = list(layout.partitions)
    for dim, kind, _, _, scale, *_ in metadata.partitions:
        partition = partitions[dim]
        if partition is None:
            continue
        if kind == "dynamic":
            partitions[dim] = partition.as_dynamic()
        elif kind == "chunk" and partition.kind == "dynamic":
            factor = partition.scale if scale == _CARRIED else scale
            chunked = Partition.chunk(partition.mesh_dims, partition.parts, partition.size // factor).scaled(factor)
            partitions[dim] = chunked if chunked.same_shards(partition) else partition
    return Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions)


def is_stated_by(layout: Layout, metadata: Metadata) -> bool:
    """Whether a graph's tensor of this metadata may have this layout."""
    carried = iter(_carried(layout, metadata))
    partitions = tuple(_filled(kind, carried) for kind in metadata.partitions)
    stated = intern_metadata(metadata.mesh, metadata.placements, metadata.dtype, partitions, metadata.copied)
    return metadata_of(layout, metadata.copied) is stated


def keys_tensor(layout: Layout, metadata: Metadata, like: Tensor, with_sizes: bool = False) -> Tensor:
    """An empty tensor whose shape carries the keys of the dynamic partitions into a graph.

    The zero comes first and strides are 0, so that no storage size overflows. Inside a trace the tensor that brought
    the same keys in is used again, so that ops add nothing to the graph. Sizes that only become known when the graph
    runs follow the keys: torch looks for the origin of their symbols in inner tensors alone. Symbolic scales and counts
    of segments come last.
    """
    partitions = [layout.partition_of(d) for d in metadata.dynamic_dims]
    keys = [c.key for c in partitions]
    if with_sizes or any(compat.is_unbacked(c.size) for c in partitions):
        keys += [c.size for c in partitions]
    carried = _carried(layout, metadata)
    keys += carried
    carrier = partitions[0].carrier if partitions else None
    if isinstance(carrier, Tensor) and carrier.ndim == 1 + len(keys) and all(c.carrier is carrier for c in partitions):
        held = [*carrier.shape[1 : 1 + len(partitions)], *carrier.shape[len(carrier.shape) - len(carried) :]]
        wanted = [*(c.key for c in partitions), *carried]
        if all(compat.statically_known_true(a == b) for a, b in zip(held, wanted, strict=True)):
            return carrier
    return like.new_empty_strided([0, *keys], [0] * (1 + len(keys)), dtype=torch.uint8)


_RUNTIME_SPECS: dict[Any, Spec] = {}
_RUNTIME_SPECS_LIMIT = 1 << 14
compat.forget_with_world(_RUNTIME_SPECS.clear)


def spec_from_parts(
    metadata: Metadata, local: Tensor, carrier: Tensor | None, shape: Sequence[IntLike], stride: Sequence[IntLike]
) -> Spec:
    """The spec that unflattening gives: with sizes looked up by key at run time, with symbols inside a trace."""
    shape, stride = tuple(shape), tuple(stride)
    keys = () if carrier is None else tuple(carrier.shape[1 : 1 + len(metadata.dynamic_dims)])
    marks = [n for *_, scale, _, runs in metadata.partitions for n in (scale, runs) if n == _CARRIED]
    carried = () if carrier is None or not marks else tuple(carrier.shape[-len(marks) :])
    # An size may have become a number, and the shard's size along it still be a symbol of this trace.
    plain = all(type(s) is int for s in (*keys, *carried, *shape, *stride, *local.shape))
    if plain:
        cache_key = (metadata, keys, carried, shape, stride)
        found = _RUNTIME_SPECS.get(cache_key)
        if found is not None:
            return found
    by_dim = dict(zip(metadata.dynamic_dims, keys, strict=True))
    partitions: list[Partition | None] = [None] * len(shape)
    numbers = iter(carried)
    for kind in (_filled(kind, numbers) for kind in metadata.partitions):
        partition = _partition(metadata, kind, by_dim.get(kind[0], 0), shape[kind[0]], local)
        partitions[kind[0]] = partition if partition.shards is not None else replace(partition, carrier=carrier)
    spec = Spec.of(Layout.of(metadata.mesh, metadata.placements, shape, metadata.dtype, partitions), stride)
    if plain:
        if len(_RUNTIME_SPECS) >= _RUNTIME_SPECS_LIMIT:
            _RUNTIME_SPECS.clear()
        _RUNTIME_SPECS[cache_key] = spec
    return spec


def _filled(kind: PartitionKind, carried: Iterator[Any]) -> PartitionKind:
    """A kind with the numbers that the inner tensor has."""
    dim, how, mesh_dims, inner, scale, sizes, runs = kind
    scale, runs = (next(carried) if n == _CARRIED else n for n in (scale, runs))
    return dim, how, mesh_dims, inner, scale, sizes, runs


def _partition(metadata: Metadata, parts_of: PartitionKind, key: IntLike, size: IntLike, local: Tensor) -> Partition:
    partition = _partition_of_one_segment(metadata, parts_of, key, size, local)
    return partition if compat.is_one(parts_of[-1]) else replace(partition, runs=parts_of[-1])


def _partition_of_one_segment(
    metadata: Metadata, parts_of: PartitionKind, key: IntLike, size: IntLike, local: Tensor
) -> Partition:
    dim, kind, mesh_dims, inner, scale, sizes, _ = parts_of
    parts = [metadata.mesh.shape[m] for m in mesh_dims]
    if kind == "fixed":
        return Partition.of_sizes(mesh_dims, parts, sizes, "fixed")
    if kind == "chunk":
        partition = Partition.chunk(mesh_dims, parts, size // scale).scaled(scale)
        shard = local.shape[dim]
        if partition.shards is not None and type(shard) is int:
            return partition
        # Also of a known size: with known sizes every rank would have a graph of its own.
        partition = replace(partition, shard=shard, shards=None)
        note_partition(partition, metadata.mesh)
        return partition
    if type(key) is not int or type(size) is not int:
        partition = replace(Partition.traced(mesh_dims, parts, size, key, local.shape[dim]), inner=inner, scale=scale)
        note_partition(partition, metadata.mesh)
        return partition
    shards = sizes_of_key(key, inner, scale)
    return Partition("dynamic", mesh_dims, tuple(parts), size, shards, key, inner=inner, scale=scale)


def stable_hash(metadata: Metadata, tensors: Sequence[Tensor], requires_grad: bool) -> str:
    """A hash for the compiler's caches: shapes, strides and metadata, the same in every process."""
    shapes = [(str(tuple(t.shape)), str(t.stride()), str(t.device)) for t in tensors]
    text = repr((metadata.stable_text(), shapes, requires_grad))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def size_hints(layout: Layout) -> dict[int, int]:
    """By sharded dim, the global size that compilers take decisions with: at least 2.

    A global size of 0 or 1 is static: it may be there to be broadcast, or to be skipped by a join, strides are
    ambiguous for it, and all ranks see it alike.
    """
    return {
        d: max(compat.size_hint(layout.shape[d]), 2)
        for d, c in enumerate(layout.partitions)
        if c is not None and layout.shape[d] not in (0, 1)
    }


def shard_hints(layout: Layout) -> dict[int, int]:
    """By sharded dim, the shard size that compilers take decisions with: the same on every rank, and at least 2.

    With its own size as the hint a rank with an empty shard would compile other code than the others. So would it where
    the size is 1, and static: one rank has the row, the others have none. Where it is 0 all have none. Rows of which
    each became several elements stay whole.
    """
    return {
        d: max(-(-compat.size_hint(layout.shape[d]) // (c.scale * math.prod(c.parts))), 2) * c.scale  # type: ignore[misc]
        for d, c in enumerate(layout.partitions)
        if c is not None and layout.shape[d] != 0
    }


def with_stated_strides(local: Tensor, spec: Spec) -> Tensor:
    """The shard, with strides that mean nothing set to those that a shard of more rows would have.

    They mean nothing where an size is 1, and where there are no elements; ops leave any number there. A graph that
    was traced for a shard with rows expects strides to be products of sizes, zeros of sharded dims included. Otherwise
    it would be compiled again for this shard, on this rank alone. A dim that is not sharded and has no elements counts
    as one element, as torch has it.

    Args:
        local: the shard, stored in the order that the spec states.
        spec: of the global tensor.
    """
    if all(n > 1 for n in local.shape):
        return local
    strides, empty = list(local.stride()), local.numel() == 0
    step, global_step, whole = 1, 1, True
    for d in reversed(order_of(spec.stride)):
        stated: Any = spec.stride[d]
        if empty or local.shape[d] == 1:
            if whole:  # nothing that is faster is sharded
                strides[d] = stated
            elif stated == global_step:
                strides[d] = step
        partition = spec.layout.partitions[d] is not None
        step, global_step = (
            strides[d] * (local.shape[d] if partition else max(local.shape[d], 1)),
            stated * max(spec.shape[d], 1),
        )
        whole = whole and not partition
    return local if tuple(strides) == local.stride() else local.as_strided(local.shape, strides)


def gaps_along_partitions(spec: Spec) -> list[tuple[int, int | None]] | None:
    """Where a tensor that is a slice along a sharded dim leaves memory unused, which on each rank is another amount.

    Args:
        spec: of the global tensor, outside of a trace.

    Returns:
        Dims from the fastest on, with the gap in front of the next one in elements where there is one; None if there is
        none behind a sharded dim.
    """
    found: list[tuple[int, int | None]] = []
    step, partition, gaps = 1, False, False
    for d in reversed(order_of(spec.stride)):
        stride: Any = spec.stride[d]
        gap = stride - step if found and stride not in (0, step) else None
        found.append((d, gap))
        gaps = gaps or (partition and gap is not None)
        step, partition = stride * spec.shape[d], partition or spec.layout.partitions[d] is not None
    return found if gaps else None


def with_shard_symbols(spec: Spec, local: Tensor) -> Spec:
    """Inside a trace: the spec whose chunk partitions know the symbol of this rank's local shard."""
    layout = spec.layout
    if not any(_lacks_symbol(c) for c in layout.partitions):
        return spec
    partitions = [
        replace(c, shard=local.shape[d]) if c and _lacks_symbol(c) else c for d, c in enumerate(layout.partitions)
    ]
    return Spec.of(Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, partitions), spec.stride)


def _lacks_symbol(partition: Partition | None) -> bool:
    return partition is not None and partition.kind == "chunk" and partition.is_traced and partition.shard is None
