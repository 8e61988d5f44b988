"""Makes sharded tensors from full values, without communication, with partitions that cover the edge cases."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcompile.api import distribute_tensor
from shardcompile.sharding import chunk_sizes
from shardcompile.tensor import ShardTensor

CHUNK = 3
"""The style of `uneven_sizes` that partitions as torch.chunk does."""


def seed_of(*what: object) -> int:
    """Returns a seed that depends on these values alone, and is the same in every process."""
    return zlib.crc32(repr(what).encode())


def uneven_sizes(size: int, parts: int, style: int) -> list[int]:
    """Returns the shard sizes of a dim, in one of four styles.

    Style 0 has a shard of size 2 and an empty shard. Styles 1 and 2 have a shard of size 1, if the dim is large enough.
    With three or more ranks they also have an empty shard; with two ranks only style 2 has one. Style `CHUNK`
    partitions as torch.chunk does.

        7 rows on 3 ranks:  [5, 0, 2]     [1, 6, 0]     [0, 1, 6]     [3, 3, 1]
        9 rows on 4 ranks:  [5, 0, 2, 2]  [1, 6, 0, 2]  [0, 1, 6, 2]  [3, 3, 3, 0]
    """
    style %= 4
    if style == CHUNK:
        return list(chunk_sizes(size, parts))
    if parts == 1:
        return [size]
    if parts == 2:
        few = min((2, 1, 0)[style], size)
        return [few, size - few] if style else [size - few, few]
    big, small = ((0, 2), (1, 0), (2, 1))[style]
    sizes = [0] * parts
    sizes[small] = min(1 if style else 2, size)
    rest = size - sizes[small]
    for rank in range(3, parts):
        sizes[rank] = rest // (parts - rank + 2)
        rest -= sizes[rank]
    sizes[big] = rest
    return sizes


@dataclass(frozen=True)
class InputLayout:
    """The layout of one input: its placements, and the style of its partitions (see `uneven_sizes`)."""

    placements: tuple[Placement, ...]
    style: int

    def __str__(self) -> str:
        return f"[{describe(self.placements)}]~{self.style}"


def describe(placements: Sequence[Placement]) -> str:
    """Returns a short text for placements, such as ``S(0), P(sum)``."""
    return ", ".join(_short(p) for p in placements)


def _short(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return f"S({placement.dim})" if isinstance(placement, Shard) else "R"


def sizes_in_style(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], style: int
) -> dict[int, list[int]]:
    """Returns the shard sizes of every sharded dim, by mesh dim, in the form of ``sharding_shapes``."""
    sizes: dict[int, list[int]] = {}
    for dim, size in enumerate(shape):
        mesh_dims = [m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        if mesh_dims:
            parts = 1
            for m in mesh_dims:
                parts *= mesh.shape[m]
            sizes[mesh_dims[-1]] = uneven_sizes(size, parts, style)
    return sizes


def lay_out(
    full: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sizes: Mapping[int, Sequence[int]] | Literal["chunk"],
    seed: int,
) -> ShardTensor:
    """Makes a sharded tensor from a full value that every rank holds, without communication.

    Args:
        full: the full value, the same on every rank.
        mesh: the mesh.
        placements: one for each mesh dim; tensor dims are not negative.
        sizes: the shard sizes of every sharded dim, in the form of ``sharding_shapes``. With ``"chunk"`` no sizes are
            stated: the partitions are chunked, and follow from the global size.
        seed: the seed for the terms of a pending sum.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in the mesh"
    term = full
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            term = _term(term, coordinate[mesh_dim], mesh.shape[mesh_dim], seed + mesh_dim)
    without_partial = [Replicate() if isinstance(p, Partial) else p for p in placements]
    stated = None if isinstance(sizes, str) else sizes
    shard = distribute_tensor(term.detach(), mesh, without_partial, src_data_rank=None, sharding_shapes=stated)
    return ShardTensor.from_local(shard.to_local().detach(), mesh, placements, sizes, global_shape=full.shape)


def _term(x: Tensor, index: int, count: int, seed: int) -> Tensor:
    """Returns term `index` of `count` terms that add up to `x`, exactly for values from `with_bits_to_spare`."""
    generator = torch.Generator().manual_seed(seed)
    others = [torch.randint(-3, 4, x.shape, generator=generator).to(x) for _ in range(count - 1)]
    return x - sum(others) if index == 0 else others[index - 1]


def with_bits_to_spare(x: Tensor) -> Tensor:
    """Rounds values so that the terms of a pending sum add up to them exactly, which ops that compare values need."""
    if x.is_complex():
        return torch.view_as_complex(with_bits_to_spare(torch.view_as_real(x.resolve_conj())))
    if not x.is_floating_point():
        return x
    unit = {torch.float64: 2.0**30, torch.float32: 2.0**14}.get(x.dtype)
    return x if unit is None else torch.where(x.abs() < 64, (x * unit).round() / unit, x)
