"""Partitions derived from other partitions, such as that of a slice.

In eager code they are computed at once. Inside a trace, where shard sizes may be unbacked, an op derives them at run
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.compat.own_ops import define_op
from shardcompile.sharding import IntLike, Layout, Partition, derive_sizes, read_sizes, write_sizes


def derive(
    how: str, partitions: Sequence[Partition | IntLike], numbers: Sequence[IntLike], size: IntLike, mesh: DeviceMesh
) -> tuple[Partition, IntLike]:
    """Derives a partition from others over the same mesh dims.

    Args:
        how: the derivation, a key of `shardcompile.sharding.derivations.DERIVATIONS`.
        partitions: the partitions that it is derived from; an int or a symbol stands for a replicated dim of that size.
        numbers: the other arguments of the derivation.
        size: global size of the result.
        mesh: the mesh.

    Returns:
        The partition, and the row index that the derivation yields for the local shard. Inside a trace both hold
        symbols, except for what is a number, the same on all ranks.
    """
    like = next(c for c in partitions if isinstance(c, Partition))
    for c in partitions:
        if isinstance(c, Partition):
            c.check_one_segment()
    if isinstance(size, int) and size == 0:  # a trace would specialise on the local shard size 0
        return Partition.of_sizes(like.mesh_dims, like.parts, (0,) * math.prod(like.parts), "fixed"), 0
    tables = [c.static_sizes if isinstance(c, Partition) else (c,) if isinstance(c, int) else None for c in partitions]
    found: Partition | None = None
    if None not in tables and all(isinstance(n, int) for n in numbers):
        sizes, rows = derive_sizes(how, tuple(tables), tuple(numbers))
        is_static = all(c.kind == "fixed" for c in partitions if isinstance(c, Partition)) or compat.is_compiling()
        partition = Partition.of_sizes(like.mesh_dims, like.parts, sizes, "fixed" if is_static else "dynamic")
        found = _chosen_like(like, partition)
        if not compat.is_compiling():
            return found, rows[partition.shard_index(compat.coordinate(mesh) or ())]
        if not found.is_traced and len(set(rows)) == 1:
            return found, rows[0]
    groups = ",".join(compat.group_name_of(mesh, m) for m in like.mesh_dims)
    code = [n for c in partitions for n in write_sizes(c)]
    key, shard, row = _symbols(how, list(numbers), code, list(like.parts), groups, size)
    if found is not None:
        return (found.with_trace(local_size=shard) if found.is_traced else found), row
    return _chosen_like(like, Partition.traced(like.mesh_dims, like.parts, size, key, shard)), row


def _chosen_like(like: Partition, partition: Partition) -> Partition:
    """Copies to a derived partition what `like` records about why it was chosen."""
    before = like.provenance
    return partition.with_provenance(moved_from=before.moved_from, provisional=before.provisional)


def derive_spread(
    partition: Partition, begin: IntLike, step: int, size: IntLike, mesh: DeviceMesh
) -> tuple[Partition, IntLike]:
    """Derives the partition of `size` rows of which row ``begin + i * step`` is row i of `partition`.

    New rows are held by the rank that holds the row before them. With a step of 1 the result remembers `partition`.

    Returns:
        The partition, and the index of the first row of the local shard.
    """
    found, row = derive("inverse_slice", [partition], [begin, step, size], size, mesh)
    return (found.with_provenance(unpadded=(partition, begin)) if step == 1 else found), row


def shard_size(partition: Partition, mesh: DeviceMesh) -> IntLike:
    """Returns the local shard size of a partition; inside a trace a symbol, the same one for every call.

    If an input is identically sharded, it is the symbol of that input: the compiler could not know that another symbol
    is equal to it.
    """
    if partition.trace.local_size is not None:
        return partition.trace.local_size  # reads no coordinate: the trace may serve all ranks
    if partition.known_sizes is not None:
        return partition.local_size(compat.coordinate(mesh) or ())
    if partition.kind == "chunk":
        for of_input in compat.inputs_noted(_name(partition, mesh)):
            if of_input.kind == "chunk" or of_input.guard_chunked():
                return compat.retrace([of_input.trace.local_size])[0]  # type: ignore[no-any-return]
    shard = derive("offset", [replace(partition, num_segments=1)], [], partition.size, mesh)[0].trace.local_size
    if shard is None:  # the shards of a dim without rows are static
        return 0
    return shard


def local_shape_of(layout: Layout) -> tuple[IntLike, ...]:
    """Returns the shape of the local shard; inside a trace with the symbols of `shard_size`."""
    return tuple(
        n if c is None else shard_size(c, layout.mesh) for n, c in zip(layout.shape, layout.partitions, strict=True)
    )


def note_partition(partition: Partition, mesh: DeviceMesh) -> None:
    """Inside a trace: registers the partition of an input, whose symbol `shard_size` uses for equal chunked partitions.

    A gradient is not registered if the trace itself has made its shard size: the forward graph comes before it.
    """
    if isinstance(partition.trace.local_size, torch.SymInt) and not compat.is_unbacked(partition.trace.local_size):
        compat.note_input(_name(partition, mesh), partition.trace.local_size, partition)


def _name(partition: Partition, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Returns the key under which partitions that may be equal are registered."""
    groups = tuple(compat.group_name_of(mesh, m) for m in partition.mesh_dims)
    return groups, compat.expression_of(partition.size), compat.expression_of(partition.trace.scale)


def _symbols(
    how: str, numbers: list[Any], code: list[Any], parts: list[int], groups: str, dim_size: IntLike
) -> tuple[IntLike, IntLike, IntLike]:
    def make() -> list[Any]:
        with compat.unrecorded_symbols():
            found = torch.ops.shardcompile.derive_partition(how, numbers, code, parts, groups)
            return [n.item() for n in found.unbind()]

    cache_key = (how, groups, *(compat.expression_of(n) for n in (*numbers, -1, *code)))
    key, shard, row = compat.once_in_trace(cache_key, make)
    for size in (shard, row):
        torch._check(size >= 0)
    if isinstance(dim_size, int) or compat.expression_of(dim_size).is_symbol:
        # Inductor may not know the symbols of a formula when it emits the check: no local shard has them as a size.
        torch._check(shard <= dim_size)
    return key, shard, row


def _derive_partition(
    how: str, numbers: list[int], partitions: list[int], parts: list[int], group_names: str
) -> Tensor:
    """Returns key of the derived partition, local shard size and row index: [3], int64, on the CPU."""
    sizes, rows = derive_sizes(how, tuple(read_sizes(partitions, parts)), tuple(numbers))
    index = 0
    for count, name in zip(parts, group_names.split(","), strict=True):
        index = index * count + compat.process_group(name).rank()
    partition = Partition.of_sizes(range(len(parts)), parts, sizes)
    return torch.tensor([partition.trace.key, sizes[index], rows[index]])


define_op(
    "derive_partition(str how, SymInt[] numbers, SymInt[] partitions, int[] parts, str group_names) -> Tensor",
    _derive_partition,
    lambda *_: torch.empty([3], dtype=torch.int64),
    any_strides=False,
)
