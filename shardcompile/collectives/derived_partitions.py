"""Partitions that follow from others, such as that of a slice; inside a trace by an op that works them out at run
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
from shardcompile.sharding import DERIVATIONS, IntLike, Layout, Partition, sizes_of_key

_SIZES, _KEY, _CHUNK, _WHOLE = range(4)
"""How a partition is written as numbers: with the all shard sizes, the key of a dynamic partition, an size that
torch.chunk divides, or an size that is not divided."""


def derive(
    how: str, partitions: Sequence[Partition | IntLike], numbers: Sequence[IntLike], size: IntLike, mesh: DeviceMesh
) -> tuple[Partition, IntLike]:
    """The partition that follows from others over the same mesh dims.

    Args:
        how: one of `DERIVATIONS`.
        partitions: what it follows from; an size stands for a dim that is whole on every rank.
        numbers: the function's other arguments.
        size: global size of the result.
        mesh: the mesh.

    Returns:
        The partition, and the row number that the function gives for this rank's local shard. Inside a trace, where
        the sizes are not known, both hold symbols.
    """
    like = next(c for c in partitions if isinstance(c, Partition))
    for c in partitions:
        if isinstance(c, Partition):
            c.check_one_segment()
    if isinstance(size, int) and size == 0:  # a trace would learn that its shard is 0, and take that for a guess
        return Partition.of_sizes(like.mesh_dims, like.parts, (0,) * math.prod(like.parts), "fixed"), 0
    known = all(isinstance(c, int) if not isinstance(c, Partition) else c.shards is not None for c in partitions)
    if known and all(isinstance(n, int) for n in numbers):
        sizes, rows = DERIVATIONS[how](
            [c.sizes if isinstance(c, Partition) else (int(c),) for c in partitions], *numbers
        )
        fixed = all(c.kind == "fixed" for c in partitions if isinstance(c, Partition)) or compat.is_compiling()
        partition = Partition.of_sizes(like.mesh_dims, like.parts, sizes, "fixed" if fixed else "dynamic")
        return _remembering(like, partition), rows[partition.shard_index(compat.coordinate(mesh) or ())]
    groups = ",".join(compat.group_name_of(mesh, m) for m in like.mesh_dims)
    code = [n for c in partitions for n in _code(c)]
    key, shard, row = _symbols(how, list(numbers), code, list(like.parts), groups, size)
    return _remembering(like, Partition.traced(like.mesh_dims, like.parts, size, key, shard)), row


def _remembering(like: Partition, partition: Partition) -> Partition:
    """A partition that follows from `like`, with what that one says of why it was chosen."""
    return replace(partition, home=like.home, makeshift=like.makeshift)


def derive_spread(
    partition: Partition, begin: IntLike, step: int, size: IntLike, mesh: DeviceMesh
) -> tuple[Partition, IntLike]:
    """The partition of `size` rows of which row ``begin + i * step`` is row i of a partition, and where this rank's
    first one is.

    New rows stay with the row before them. If none come between two rows of the partition, the result remembers it.
    """
    found, row = derive("spread", [partition], [begin, step, size], size, mesh)
    return (replace(found, core=(partition, begin)) if step == 1 else found), row


def shard_size(partition: Partition, mesh: DeviceMesh) -> IntLike:
    """Size of this rank's local shard of a partition; inside a trace a symbol, the same one wherever it is asked for.

    That of an input, if one is sharded identically, since the compiler does not know that another one is equal to it.
    """
    if partition.shard is not None or partition.shards is not None:
        return partition.local_size(compat.coordinate(mesh) or ())
    if partition.kind == "chunk":
        for of_input in compat.inputs_noted(_name(partition, mesh)):
            if of_input.kind == "chunk" or of_input.guard_chunked():
                return compat.retrace([of_input.shard])[0]  # type: ignore[no-any-return]
    shard = derive("located", [replace(partition, runs=1)], [], partition.size, mesh)[0].shard
    if shard is None:  # of a dim without rows the shards are known
        return 0
    return shard


def local_shape_of(layout: Layout) -> tuple[IntLike, ...]:
    """Shape of this rank's local shard; inside a trace with the symbols of `shard_size`."""
    return tuple(
        n if c is None else shard_size(c, layout.mesh) for n, c in zip(layout.shape, layout.partitions, strict=True)
    )


def note_partition(partition: Partition, mesh: DeviceMesh) -> None:
    """Inside a trace: have `shard_size` use the local shard of this partition of an input for chunked ones.

    A gradient is no such input if the trace itself has made a shard of its size: the forward graph comes before it.
    """
    if isinstance(partition.shard, torch.SymInt) and not compat.is_unbacked(partition.shard):
        compat.note_input(_name(partition, mesh), partition.shard, partition)


def _name(partition: Partition, mesh: DeviceMesh) -> tuple[Any, ...]:
    """What partitions have in common that may be the same one."""
    groups = tuple(compat.group_name_of(mesh, m) for m in partition.mesh_dims)
    return groups, compat.expression_of(partition.size), compat.expression_of(partition.scale)


def _code(partition: Partition | IntLike) -> list[IntLike]:
    if not isinstance(partition, Partition):
        return [_WHOLE, partition]
    if partition.kind == "chunk":
        return [_CHUNK, partition.size, partition.scale]
    if partition.kind == "dynamic" and partition.shards is None:
        return [_KEY, partition.key, partition.inner, partition.scale]
    return [_SIZES, len(partition.sizes), *partition.sizes]


def _decode(code: list[int], parts: list[int]) -> list[tuple[int, ...]]:
    partitions: list[tuple[int, ...]] = []
    rest = iter(code)
    for kind in rest:
        if kind == _WHOLE:
            partitions.append((next(rest),))
        elif kind == _CHUNK:
            size, scale = next(rest), next(rest)
            partitions.append(Partition.chunk(range(len(parts)), parts, size // scale).scaled(scale).sizes)
        elif kind == _SIZES:
            partitions.append(tuple(next(rest) for _ in range(next(rest))))
        else:
            partitions.append(sizes_of_key(next(rest), next(rest), next(rest)))
    return partitions


def _symbols(
    how: str, numbers: list[Any], code: list[Any], parts: list[int], groups: str, dim_size: IntLike
) -> tuple[IntLike, IntLike, IntLike]:
    def make() -> list[Any]:
        with compat.unrecorded_symbols():
            found = torch.ops.shardcompile.derive_partition(how, numbers, code, parts, groups)
            return [n.item() for n in found.unbind()]

    asked = (how, groups, *(compat.expression_of(n) for n in (*numbers, -1, *code)))
    key, shard, row = compat.once_in_trace(asked, make)
    for size in (shard, row):
        torch._check(size >= 0)
    if isinstance(dim_size, int) or compat.expression_of(dim_size).is_symbol:
        # Inductor may not know the symbols of a formula when it writes the check down: no tensor of a shard has them.
        torch._check(shard <= dim_size)
    return key, shard, row


def _derive_partition(
    how: str, numbers: list[int], partitions: list[int], parts: list[int], group_names: str
) -> Tensor:
    """Key of the derived partition, this rank's local shard size and row number: [3], int64, on the CPU."""
    sizes, rows = DERIVATIONS[how](_decode(partitions, parts), *numbers)
    index = 0
    for count, name in zip(parts, group_names.split(","), strict=True):
        index = index * count + compat.process_group(name).rank()
    partition = Partition.of_sizes(range(len(parts)), parts, sizes)
    return torch.tensor([partition.key, sizes[index], rows[index]])


_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_LIBRARY.define(
    "derive_partition(str how, SymInt[] numbers, SymInt[] partitions, int[] parts, str group_names) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe],
)
_LIBRARY.impl("derive_partition", _derive_partition, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardcompile::derive_partition", lambda *_: torch.empty([3], dtype=torch.int64), lib=_LIBRARY
)
