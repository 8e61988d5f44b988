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
from shardcompile.layout import Cut, IntLike, Layout, Spec, order_of, sizes_of_key

CutKind = tuple[int, str, tuple[int, ...], int, int, tuple[int, ...], int]
"""Tensor dim, kind, mesh dims, inner, scale, the sizes of a fixed cut, and runs. Scale and runs that are symbols are
`_CARRIED`."""

_CARRIED = 0
"""In place of a number that is a symbol of the trace: the inner tensor ``_cut_keys`` has it in its shape."""


@dataclass(frozen=True)
class Metadata:
    """The part of a spec that a graph is specialised on: everything but extents and dynamic sizes.

    Equal metadata is the same object, so that the guard on it is a comparison of identities.
    """

    mesh: Any
    placements: tuple[Placement, ...]
    dtype: torch.dtype
    cuts: tuple[CutKind, ...]
    epoch: int
    copied: bool = False
    """Whether the block is a copy of what the tensor is a view of."""

    def __deepcopy__(self, memo: dict[int, object]) -> Metadata:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return intern_metadata, (self.mesh, self.placements, self.dtype, self.cuts, self.copied)

    @property
    def dynamic_dims(self) -> list[int]:
        """Tensor dims whose key is in the shape of the inner tensor ``_cut_keys``."""
        return [dim for dim, kind, *_ in self.cuts if kind == "dynamic"]

    @property
    def has_keys(self) -> bool:
        """Whether there is an inner tensor ``_cut_keys``."""
        return any(_CARRIED in (scale, runs) or kind == "dynamic" for _, kind, _, _, scale, _, runs in self.cuts)

    @property
    def has_stated_sizes(self) -> bool:
        """Whether there is a cut that does not follow from the extent and the placements."""
        return any(kind != "chunk" or scale != 1 for _, kind, _, _, scale, *_ in self.cuts)

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
                self.cuts,
                self.copied,
            )
        )


_INTERNED: dict[Metadata, Metadata] = {}
compat.forget_with_world(_INTERNED.clear)


def intern_metadata(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    dtype: torch.dtype,
    cuts: tuple[CutKind, ...],
    copied: bool = False,
) -> Metadata:
    """The metadata with these parts."""
    metadata = Metadata(mesh, placements, dtype, cuts, compat.world_epoch(), copied)
    return _INTERNED.setdefault(metadata, metadata)


def metadata_of(layout: Layout, copied: bool = False) -> Metadata:
    """The metadata of a layout, and whether the block is a copy that has to follow another tensor."""
    cuts = tuple(
        (d, c.kind, c.mesh_dims, c.inner, _stated(c.scale), c.sizes if c.kind == "fixed" else (), _stated(c.runs))
        for d, c in enumerate(layout.cuts)
        if c is not None
    )
    return intern_metadata(layout.mesh, layout.placements, layout.dtype, cuts, copied)


def _stated(number: IntLike) -> int:
    return number if isinstance(number, int) else _CARRIED


def _carried(layout: Layout, metadata: Metadata) -> list[IntLike]:
    """The numbers of a layout that a graph has as symbols, in the order of the metadata."""
    cuts = [(layout.cut_of(dim), scale, runs) for dim, _, _, _, scale, _, runs in metadata.cuts]
    return [n for c, scale, runs in cuts for n, known in ((c.scale, scale), (c.runs, runs)) if known == _CARRIED]


@functools.lru_cache(maxsize=1 << 12)
def of_input(layout: Layout) -> Layout:
    """The layout as which an input is traced: chunked partitions are dynamic ones, so that one graph serves both."""
    cuts = [c and c.as_dynamic() for c in layout.cuts]
    return Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, cuts)


compat.forget_with_world(of_input.cache_clear)


def as_stated_by(layout: Layout, metadata: Metadata) -> Layout:
    """The same shards, as chunked and dynamic partitions where the metadata of a graph's tensor has these."""
    cuts = list(layout.cuts)
    for dim, kind, _, _, scale, *_ in metadata.cuts:
        cut = cuts[dim]
        if cut is None:
            continue
        if kind == "dynamic":
            cuts[dim] = cut.as_dynamic()
        elif kind == "chunk" and cut.kind == "dynamic":
            factor = cut.scale if scale == _CARRIED else scale
            chunked = Cut.chunk(cut.mesh_dims, cut.parts, cut.extent // factor).scaled(factor)
            cuts[dim] = chunked if chunked.same_blocks(cut) else cut
    return Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, cuts)


def is_stated_by(layout: Layout, metadata: Metadata) -> bool:
    """Whether a graph's tensor of this metadata may have this layout."""
    carried = iter(_carried(layout, metadata))
    cuts = tuple(_filled(kind, carried) for kind in metadata.cuts)
    stated = intern_metadata(metadata.mesh, metadata.placements, metadata.dtype, cuts, metadata.copied)
    return metadata_of(layout, metadata.copied) is stated


def keys_tensor(layout: Layout, metadata: Metadata, like: Tensor, with_extents: bool = False) -> Tensor:
    """An empty tensor whose shape carries the keys of the dynamic cuts into a graph.

    The zero comes first and strides are 0, so that no storage size overflows. Inside a trace the tensor that brought
    the same keys in is used again, so that ops add nothing to the graph. Extents that only become known when the graph
    runs follow the keys: torch looks for the origin of their symbols in inner tensors alone. Symbolic scales and counts
    of segments come last.
    """
    cuts = [layout.cut_of(d) for d in metadata.dynamic_dims]
    keys = [c.key for c in cuts]
    if with_extents or any(compat.is_unbacked(c.extent) for c in cuts):
        keys += [c.extent for c in cuts]
    carried = _carried(layout, metadata)
    keys += carried
    carrier = cuts[0].carrier if cuts else None
    if isinstance(carrier, Tensor) and carrier.ndim == 1 + len(keys) and all(c.carrier is carrier for c in cuts):
        held = [*carrier.shape[1 : 1 + len(cuts)], *carrier.shape[len(carrier.shape) - len(carried) :]]
        wanted = [*(c.key for c in cuts), *carried]
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
    marks = [n for *_, scale, _, runs in metadata.cuts for n in (scale, runs) if n == _CARRIED]
    carried = () if carrier is None or not marks else tuple(carrier.shape[-len(marks) :])
    # An extent may have become a number, and the block's size along it still be a symbol of this trace.
    plain = all(type(s) is int for s in (*keys, *carried, *shape, *stride, *local.shape))
    if plain:
        cache_key = (metadata, keys, carried, shape, stride)
        found = _RUNTIME_SPECS.get(cache_key)
        if found is not None:
            return found
    by_dim = dict(zip(metadata.dynamic_dims, keys, strict=True))
    cuts: list[Cut | None] = [None] * len(shape)
    numbers = iter(carried)
    for kind in (_filled(kind, numbers) for kind in metadata.cuts):
        cut = _cut(metadata, kind, by_dim.get(kind[0], 0), shape[kind[0]], local)
        cuts[kind[0]] = cut if cut.blocks is not None else replace(cut, carrier=carrier)
    spec = Spec.of(Layout.of(metadata.mesh, metadata.placements, shape, metadata.dtype, cuts), stride)
    if plain:
        if len(_RUNTIME_SPECS) >= _RUNTIME_SPECS_LIMIT:
            _RUNTIME_SPECS.clear()
        _RUNTIME_SPECS[cache_key] = spec
    return spec


def _filled(kind: CutKind, carried: Iterator[Any]) -> CutKind:
    """A kind with the numbers that the inner tensor has."""
    dim, how, mesh_dims, inner, scale, sizes, runs = kind
    scale, runs = (next(carried) if n == _CARRIED else n for n in (scale, runs))
    return dim, how, mesh_dims, inner, scale, sizes, runs


def _cut(metadata: Metadata, parts_of: CutKind, key: IntLike, extent: IntLike, local: Tensor) -> Cut:
    cut = _cut_in_one_piece(metadata, parts_of, key, extent, local)
    return cut if compat.is_one(parts_of[-1]) else replace(cut, runs=parts_of[-1])


def _cut_in_one_piece(metadata: Metadata, parts_of: CutKind, key: IntLike, extent: IntLike, local: Tensor) -> Cut:
    dim, kind, mesh_dims, inner, scale, sizes, _ = parts_of
    parts = [metadata.mesh.shape[m] for m in mesh_dims]
    if kind == "fixed":
        return Cut.of_sizes(mesh_dims, parts, sizes, "fixed")
    if kind == "chunk":
        cut = Cut.chunk(mesh_dims, parts, extent // scale).scaled(scale)
        block = local.shape[dim]
        if cut.blocks is not None and type(block) is int:
            return cut
        # Also of a known extent: with known sizes every rank would have a graph of its own.
        cut = replace(cut, block=block, blocks=None)
        note_partition(cut, metadata.mesh)
        return cut
    if type(key) is not int or type(extent) is not int:
        cut = replace(Cut.traced(mesh_dims, parts, extent, key, local.shape[dim]), inner=inner, scale=scale)
        note_partition(cut, metadata.mesh)
        return cut
    blocks = sizes_of_key(key, inner, scale)
    return Cut("dynamic", mesh_dims, tuple(parts), extent, blocks, key, inner=inner, scale=scale)


def stable_hash(metadata: Metadata, tensors: Sequence[Tensor], requires_grad: bool) -> str:
    """A hash for the compiler's caches: shapes, strides and metadata, the same in every process."""
    shapes = [(str(tuple(t.shape)), str(t.stride()), str(t.device)) for t in tensors]
    text = repr((metadata.stable_text(), shapes, requires_grad))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def extent_hints(layout: Layout) -> dict[int, int]:
    """By sharded dim, the global extent that compilers take decisions with: at least 2.

    A global extent of 0 or 1 is static: it may be there to be broadcast, or to be skipped by a join, strides are
    ambiguous for it, and all ranks see it alike.
    """
    return {
        d: max(compat.size_hint(layout.shape[d]), 2)
        for d, c in enumerate(layout.cuts)
        if c is not None and layout.shape[d] not in (0, 1)
    }


def block_hints(layout: Layout) -> dict[int, int]:
    """By sharded dim, the block size that compilers take decisions with: the same on every rank, and at least 2.

    With its own size as the hint a rank with an empty block would compile other code than the others. So would it where
    the extent is 1, and static: one rank has the row, the others have none. Where it is 0 all have none. Rows of which
    each became several elements stay whole.
    """
    return {
        d: max(-(-compat.size_hint(layout.shape[d]) // (c.scale * math.prod(c.parts))), 2) * c.scale  # type: ignore[misc]
        for d, c in enumerate(layout.cuts)
        if c is not None and layout.shape[d] != 0
    }


def with_stated_strides(local: Tensor, spec: Spec) -> Tensor:
    """The block, with strides that mean nothing set to those that a block of more rows would have.

    They mean nothing where an extent is 1, and where there are no elements; ops leave any number there. A graph that
    was traced for a block with rows expects strides to be products of extents, zeros of cut dims included. Otherwise it
    would be compiled again for this block, on this rank alone. A dim that is not cut and has no elements counts as one
    element, as torch has it.

    Args:
        local: the block, stored in the order that the spec states.
        spec: of the global tensor.
    """
    if all(n > 1 for n in local.shape):
        return local
    strides, empty = list(local.stride()), local.numel() == 0
    step, global_step, whole = 1, 1, True
    for d in reversed(order_of(spec.stride)):
        stated: Any = spec.stride[d]
        if empty or local.shape[d] == 1:
            if whole:  # nothing that is faster is cut
                strides[d] = stated
            elif stated == global_step:
                strides[d] = step
        cut = spec.layout.cuts[d] is not None
        step, global_step = (
            strides[d] * (local.shape[d] if cut else max(local.shape[d], 1)),
            stated * max(spec.shape[d], 1),
        )
        whole = whole and not cut
    return local if tuple(strides) == local.stride() else local.as_strided(local.shape, strides)


def gaps_along_cuts(spec: Spec) -> list[tuple[int, int | None]] | None:
    """Where a tensor that is a slice along a cut dim leaves memory unused, which on each rank is another amount.

    Args:
        spec: of the global tensor, outside of a trace.

    Returns:
        Dims from the fastest on, with the gap in front of the next one in elements where there is one; None if there is
        none behind a cut dim.
    """
    found: list[tuple[int, int | None]] = []
    step, cut, gaps = 1, False, False
    for d in reversed(order_of(spec.stride)):
        stride: Any = spec.stride[d]
        gap = stride - step if found and stride not in (0, step) else None
        found.append((d, gap))
        gaps = gaps or (cut and gap is not None)
        step, cut = stride * spec.shape[d], cut or spec.layout.cuts[d] is not None
    return found if gaps else None


def with_block_symbols(spec: Spec, local: Tensor) -> Spec:
    """Inside a trace: the spec whose chunk cuts know the symbol of this rank's block."""
    layout = spec.layout
    if not any(_lacks_symbol(c) for c in layout.cuts):
        return spec
    cuts = [replace(c, block=local.shape[d]) if c and _lacks_symbol(c) else c for d, c in enumerate(layout.cuts)]
    return Spec.of(Layout.of(layout.mesh, layout.placements, layout.shape, layout.dtype, cuts), spec.stride)


def _lacks_symbol(cut: Cut | None) -> bool:
    return cut is not None and cut.kind == "chunk" and cut.is_traced and cut.block is None
