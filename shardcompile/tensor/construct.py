"""Determines the layout of a sharded tensor from its local shards and the arguments of its constructor."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcompile import compat
from shardcompile.collectives import partition_of_sizes, symbolic_partition
from shardcompile.errors import LayoutError
from shardcompile.sharding import (
    QUANTIZED,
    IntLike,
    Layout,
    Partition,
    PlainPartition,
    Spec,
    digest_of,
    normalize_placements,
    read_plain,
    write_plain,
)
from shardcompile.tensor.inputs import (
    DTYPES,
    Coordinate,
    Given,
    as_tuple,
    check_given,
    check_kind,
    checksum,
    exchange,
    exchange_given,
    kind_of,
    require_same,
)

Sizes = Sequence[Any] | Tensor
"""Sizes of all shards along a dim: ints, shard shapes, or a tensor of integers, the same on every rank."""

ShardingShapes = Literal["infer", "chunk"] | Mapping[int, Sizes]
_ShardShapes = dict[tuple[int, ...], list[int]]
"""Shapes of all shards, by mesh coordinate."""


def layout_of_shard(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    sharding_shapes: ShardingShapes,
    global_shape: Sequence[int] | None,
    run_check: bool,
) -> Layout:
    """Returns the layout of the tensor of which `local` is this rank's local shard.

    Raises:
        LayoutError: the shards, the arguments or the ranks do not fit together.
    """
    if compat.coordinate(mesh) is None:
        raise LayoutError(f"rank {dist.get_rank()} is not among the ranks of {mesh}: only these can hold shards")
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    infer = isinstance(sharding_shapes, str) and sharding_shapes == "infer"
    if compat.is_fake(local) or not (run_check or infer):
        check_kind("from_local", kind_of(local, mesh))  # otherwise after the exchange, on all ranks
    shapes: _ShardShapes | None = None
    if compat.is_fake(local):
        compat.trace_size_obliviously()
        if run_check:
            raise LayoutError(
                "from_local(run_check=True) compares the ranks, which is not possible while tracing; call it outside"
            )
        if infer or _has_symbols(sharding_shapes):
            return _traced_layout(local, mesh, placements, sharding_shapes, global_shape)
    elif run_check or infer:
        # The exchange precedes everything that may fail on one rank alone: the other ranks would wait forever.
        shapes = _agreed_shapes(local, mesh, placements, sharding_shapes, global_shape)
    layout = _requested_layout(local, mesh, placements, sharding_shapes, global_shape, shapes)
    problem = _problem(local, layout, global_shape)
    if run_check:
        _check_ranks(local, layout, problem)
    if problem:
        raise LayoutError(problem)
    return layout


def refuse_quantized(dtype: torch.dtype) -> None:
    """Refuses quantized dtypes, whose elements mean nothing without a scale.

    Raises:
        LayoutError: the dtype is quantized.
    """
    if dtype in QUANTIZED:
        raise LayoutError(
            f"shards are dense tensors, got a quantized dtype ({dtype}); first dequantize(), or take int_repr() and "
            "keep the scale as a separate tensor"
        )


def _traced_layout(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shapes: ShardingShapes,
    global_shape: Sequence[int] | None,
) -> Layout:
    """Returns the layout of a shard while tracing; shard sizes that are not constants are symbols of the graph."""
    if mesh.ndim > 1 or global_shape is not None:
        raise LayoutError(
            "inside a compiled function from_local takes shard sizes that are not constants on 1-D meshes only, and "
            f"without global_shape; got sharding_shapes={shapes!r} on {mesh}. Call it outside"
        )
    stated = normalize_placements(placements, mesh, local.ndim)
    shape: list[Any] = list(local.shape)
    partitions: list[Partition | None] = [None] * local.ndim
    if isinstance(stated[0], Shard):
        dim = stated[0].dim
        sizes = None if isinstance(shapes, str) else _stated_sizes(shapes, stated, dim)
        shape[dim], key = symbolic_partition(local, dim, sizes, compat.group_name_of(mesh, 0))
        partitions[dim] = Partition.traced([0], mesh.shape, shape[dim], key, local.shape[dim])
    return Layout.of(mesh, stated, shape, local.dtype, partitions)


def _has_symbols(sharding_shapes: ShardingShapes) -> bool:
    return any(isinstance(v, torch.SymInt) for v in torch.utils._pytree.tree_leaves(sharding_shapes))


def _stated_sizes(shapes: Mapping[int, Sizes], placements: Sequence[Placement], dim: int) -> list[IntLike]:
    for mesh_dim in shapes:
        _require_shard(placements, mesh_dim)
    return [v[dim] if isinstance(v, (tuple, list)) else v for v in shapes[0]]


def _requested_layout(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sharding_shapes: ShardingShapes,
    global_shape: Sequence[int] | None,
    shapes: _ShardShapes | None,
) -> Layout:
    stated = normalize_placements(placements, mesh, local.ndim)
    if isinstance(sharding_shapes, Mapping):
        return _stated_layout(local, mesh, stated, sharding_shapes)
    if sharding_shapes == "infer":
        assert shapes is not None, "the ranks have exchanged their shapes"
        return _inferred_layout(shapes, mesh, stated, local.dtype)
    if sharding_shapes != "chunk":
        raise LayoutError(f'sharding_shapes must be "infer", "chunk" or a mapping, got {sharding_shapes!r}')
    if global_shape is None:
        raise LayoutError('sharding_shapes="chunk" needs global_shape')
    if len(global_shape) != local.ndim:
        raise LayoutError(f"global_shape {tuple(global_shape)} for a shard of {local.ndim} dims")
    return Layout.chunked(mesh, stated, tuple(global_shape), local.dtype)


def _problem(local: Tensor, layout: Layout, global_shape: Sequence[int] | None) -> str | None:
    expected = layout.local_shape(compat.coordinate(layout.mesh))
    if len(expected) != local.ndim or any(a != b for a, b in zip(expected, local.shape, strict=True)):
        return (
            f"this rank's local shard has shape {tuple(local.shape)}, but {layout.describe()} gives it {expected}: "
            "sharding_shapes or global_shape do not match the tensor"
        )
    if global_shape is not None and tuple(global_shape) != layout.shape:
        return f"global_shape is {tuple(global_shape)}, but the shards add up to {layout.shape} ({layout.describe()})"
    return None


def stated_partitions(
    now: Layout, placements: Sequence[Placement], shapes: Mapping[int, Sizes] | None, fixed: bool
) -> dict[int, Partition]:
    """Returns the partitions, by tensor dim, that a mapping from mesh dims to shard sizes states.

    Args:
        now: a layout that has the mesh and the global shape.
        placements: the placements of the stated layout.
        shapes: the mapping as a user passes it, see `Sizes`.
        fixed: whether the sizes become constants of the graph, as they do while tracing.

    Raises:
        LayoutError: a mesh dim shards nothing, or the sizes do not add up to the global size.
    """
    partitions: dict[int, Partition] = {}
    for mesh_dim, values in (shapes or {}).items():
        dim = _require_shard(placements, mesh_dim)
        partition = _stated_partition(now.mesh, placements, dim, values, fixed, now.shape[dim])
        if isinstance(now.shape[dim], int) and partition.size != now.shape[dim]:
            raise LayoutError(
                f"sharding_shapes {list(partition.sizes)} for mesh dim {mesh_dim} add up to {partition.size}, but "
                f"tensor dim {dim} has size {now.shape[dim]} ({now.describe()})"
            )
        partitions[dim] = partition
    return partitions


def _require_shard(placements: Sequence[Placement], mesh_dim: int) -> int:
    """Returns the tensor dim that a mesh dim shards, and raises an error if there is none."""
    placement = placements[mesh_dim] if 0 <= mesh_dim < len(placements) else None
    if not isinstance(placement, Shard):
        raise LayoutError(f"sharding_shapes names mesh dim {mesh_dim}, which shards nothing in {list(placements)}")
    return placement.dim


def _stated_partition(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    dim: int,
    values: Sizes,
    fixed: bool,
    size: IntLike | None = None,
    shard: IntLike | None = None,
) -> Partition:
    mesh_dims = [m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
    if isinstance(values, Tensor):
        return partition_of_sizes(values, mesh, mesh_dims, size, shard)
    sizes = [_size(v, dim, values) for v in values]
    return Partition.of_sizes(mesh_dims, [mesh.shape[m] for m in mesh_dims], sizes, "fixed" if fixed else "dynamic")


def _size(value: Tensor, dim: int, sizes: Sequence[object]) -> int:
    """Returns a shard size that is stated as an integer or as the shape of the shard; `sizes` is for the message."""
    if isinstance(value, (tuple, list)) and dim < len(value):
        value = value[dim]
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise LayoutError(
            f"a shard size is an integer, or the shape of the shard; got {value!r} for tensor dim {dim} in "
            f"sharding_shapes {sizes!r}"
        ) from None


def _stated_layout(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shapes: Mapping[int, Sizes]
) -> Layout:
    shape = list(local.shape)
    partitions: list[Partition | None] = [None] * local.ndim
    for mesh_dim in shapes:
        _require_shard(placements, mesh_dim)
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Shard) or partitions[placement.dim] is not None:
            continue
        mesh_dims = [m for m, p in enumerate(placements) if p == placement]
        values = next((shapes[m] for m in reversed(mesh_dims) if m in shapes), None)
        if values is None:
            raise LayoutError(
                f"sharding_shapes {dict(shapes)} has no entry for mesh dim {mesh_dim}, which shards tensor dim "
                f"{placement.dim}"
            )
        shard = local.shape[placement.dim] if compat.is_fake(local) else None  # outside of traces `_problem` checks it
        partition = _stated_partition(mesh, placements, placement.dim, values, fixed=False, shard=shard)
        sizes = partition.static_sizes
        if partition.is_traced and sizes is not None:  # the shard is a plain tensor of a trace, with numbers for sizes
            index = partition.shard_index(compat.coordinate(mesh) or ())
            partition = partition.with_trace(local_size=sizes[index])
        partitions[placement.dim] = partition
        shape[placement.dim] = partition.size  # type: ignore[assignment]
    return Layout.of(mesh, placements, shape, local.dtype, partitions)


# Exchanging shapes


def _agreed_shapes(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sharding_shapes: ShardingShapes,
    global_shape: Sequence[int] | None,
) -> _ShardShapes:
    """Exchanges the shapes of all shards, and checks that all ranks pass the same arguments."""
    request = repr((list(placements), sharding_shapes, as_tuple(global_shape)))
    given = exchange_given(Given.of(request, local, kind_of(local, mesh)), mesh)
    check_given("from_local", given)
    require_same(given, "ndim", "another number of dims", lambda g: str(g.ndim))
    require_same(given, "dtype", "another dtype", lambda g: str(DTYPES[g.dtype]))
    require_same(given, "request", "other placements or sizes", lambda g: f"digest {g.request:x}; here {request}")
    return {c: list(g.sizes()) for c, g in given.items()}


def _inferred_layout(
    shapes: _ShardShapes, mesh: DeviceMesh, placements: tuple[Placement, ...], dtype: torch.dtype
) -> Layout:
    ndim = len(next(iter(shapes.values())))
    dim_sizes: list[int] = []
    partitions: list[Partition | None] = []
    for dim in range(ndim):
        mesh_dims = [m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        sizes = _sizes_along(shapes, mesh_dims, dim)
        if mesh_dims:
            partitions.append(Partition.of_sizes(mesh_dims, [mesh.shape[m] for m in mesh_dims], sizes))
            dim_sizes.append(sum(sizes))
        else:
            partitions.append(None)
            dim_sizes.append(sizes[0])
    return Layout.of(mesh, placements, dim_sizes, dtype, partitions)


def _sizes_along(shapes: _ShardShapes, mesh_dims: list[int], dim: int) -> list[int]:
    """Returns the shard sizes along a tensor dim, and checks that they depend on the given mesh dims only."""
    sizes: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
    for coordinate, shape in sorted(shapes.items()):
        index = tuple(coordinate[m] for m in mesh_dims)
        size, first = sizes.setdefault(index, (shape[dim], coordinate))
        if size != shape[dim]:
            raise LayoutError(
                f"the shards do not fit together: dim {dim} has size {size} at mesh coordinate {first} and "
                f"{shape[dim]} at {coordinate}; it is sharded by mesh dims {mesh_dims} only"
            )
    return [sizes[index][0] for index in sorted(sizes)]


class _Digest(NamedTuple):
    """What ranks compare of a tensor: digests of its layout and of its values, and whether the shard does not fit."""

    layout: int
    is_wrong: int
    values: int


def _check_ranks(local: Tensor, layout: Layout, problem: str | None) -> None:
    """Compares layouts and replicated values over the ranks, and raises the same error on all of them.

    Raises:
        LayoutError: layouts differ, a shard does not fit on some rank, or replicated values differ.
    """
    digest = _Digest(digest_of(layout.describe()), int(problem is not None), checksum(local))
    rows = {c: _Digest(*r) for c, r in exchange(digest, layout.mesh).items()}
    require_same(rows, "layout", "another layout", lambda r: f"digest {r.layout:x}; here {layout.describe()}")
    wrong = [c for c, r in rows.items() if r.is_wrong]
    if wrong:
        raise LayoutError(problem or f"the shard at mesh coordinate {wrong[0]} does not fit {layout.describe()}")
    sharding_dims = [m for m, p in enumerate(layout.placements) if not isinstance(p, Replicate)]
    replicas: dict[Coordinate, tuple[int, Coordinate]] = {}
    for coordinate, row in rows.items():
        index = tuple(coordinate[m] for m in sharding_dims)
        value, first = replicas.setdefault(index, (row.values, coordinate))
        if value != row.values:
            raise LayoutError(f"replicated values differ between mesh coordinates {first} and {coordinate}")


# Pickling


PlainParts = tuple[
    DeviceMesh, Sequence[Placement], Sequence[IntLike], Sequence[IntLike], Sequence[PlainPartition | None]
]
"""Mesh, placements, shape, strides and partitions."""


def plain_parts(spec: Spec) -> PlainParts:
    """Returns a spec as a mesh, placements and numbers, which ``torch.load(weights_only=True)`` accepts."""
    layout = spec.layout
    partitions = [write_plain(p) for p in layout.partitions]
    return layout.mesh, list(layout.placements), layout.shape, spec.stride, partitions


def spec_of_plain_parts(
    dtype: torch.dtype,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[IntLike],
    stride: Sequence[IntLike],
    partitions: Sequence[PlainPartition | None],
) -> Spec:
    """Returns the spec that `plain_parts` has taken apart."""

    found = [read_plain(p, mesh.shape, size) for p, size in zip(partitions, shape, strict=True)]
    return Spec.of(Layout.of(mesh, placements, tuple(shape), dtype, found), tuple(stride))
