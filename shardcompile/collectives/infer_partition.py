"""Partitions inside a trace: inferred by gathering the shard sizes, or made of stated ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardcompile import compat
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.pending import wait
from shardcompile.collectives.shards import check_shard
from shardcompile.collectives.traffic import GroupShards, Member, even_gather
from shardcompile.errors import CollectiveError
from shardcompile.sharding import IntLike, Partition, digest_of


class GatherPartition(NamedTuple):
    """Arguments of `gather_partition`.

    Attributes:
        input: the local shard.
        dim: the sharded dim.
        group_name: the process group.
    """

    input: Tensor
    dim: int
    group_name: str


class StatePartition(NamedTuple):
    """Arguments of `state_partition`.

    Attributes:
        input: the local shard.
        dim: the sharded dim.
        sizes: all shard sizes.
        group_name: the process group.
    """

    input: Tensor
    dim: int
    sizes: list[IntLike]
    group_name: str


def symbolic_partition(
    x: Tensor, dim: int, sizes: Sequence[IntLike] | None, group_name: str
) -> tuple[IntLike, IntLike]:
    """Returns the global size and the key of the partition whose local shard is `x`, as unbacked symbols.

    Args:
        x: the local shard.
        dim: the sharded dim.
        sizes: all shard sizes; None to gather them from the other ranks.
        group_name: the process group.
    """
    x = x.detach()
    if sizes is None:
        both = wait(GATHER_PARTITION.packet(x, dim, group_name))
    else:
        both = STATE_PARTITION.packet(x, dim, sizes, group_name)
    size, key = both.unbind()
    total = compat.keep_symbol(size.item())
    torch._check(total >= x.shape[dim])
    return total, compat.keep_symbol(key.item())


def _gather(a: GatherPartition) -> Tensor:
    """Returns global size and key: [2], int64, on the CPU."""
    group, x, dim = compat.process_group(a.group_name), a.input, a.dim
    rest = [x.ndim, *(s for d, s in enumerate(x.shape) if d != dim)]
    row = torch.tensor([x.shape[dim], digest_of(repr((str(x.dtype), dim, rest)))], device=x.device)
    pending = torch.ops._c10d_functional.all_gather_into_tensor(row, group.size(), a.group_name)
    rows = wait(pending).view(group.size(), 2).tolist()
    other = next((i for i, r in enumerate(rows) if r[1] != rows[0][1]), None)
    if other is not None:
        raise CollectiveError(
            f"the shards do not belong together: dtype or sizes other than that of dim {dim} differ between "
            f"ranks 0 and {other} of the group; this rank has {x.dtype}, {tuple(x.shape)}"
        )
    return _size_and_key([r[0] for r in rows])


def _state(a: StatePartition) -> Tensor:
    """Returns global size and key: [2], int64, on the CPU."""
    group, sizes = compat.process_group(a.group_name), [int(n) for n in a.sizes]
    if len(sizes) != group.size():
        raise CollectiveError(f"sharding_shapes has {len(sizes)} sizes for a mesh dim of {group.size()} ranks: {sizes}")
    check_shard(a.input.shape, a.dim, (0, sizes[group.rank()]), group.rank(), "from_local")
    return _size_and_key(sizes)


def _size_and_key(sizes: list[int]) -> Tensor:
    """Returns size and key on the CPU, where they are read without a device synchronization."""
    partition = Partition.of_sizes([0], [len(sizes)], sizes)
    return torch.tensor([partition.size, partition.trace.key], device="cpu")


def _fake(a: GatherPartition | StatePartition) -> Tensor:
    return a.input.new_empty([2], dtype=torch.int64, device="cpu")


GATHER_PARTITION = Descriptor(
    "gather_partition",
    GatherPartition,
    _gather,
    fake=_fake,
    members=lambda a, n: [Member(GroupShards(None), None, 16)],
    traffic=even_gather,
    of_one_rank=True,
    moves_rows=False,
)

STATE_PARTITION = Descriptor(
    "state_partition",
    StatePartition,
    _state,
    fake=_fake,
    communicates=False,
)
