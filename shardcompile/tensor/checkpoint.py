"""Saving and loading: what `torch.distributed.checkpoint` asks a tensor sharded for.

A rank writes its shard with the place where it starts in the global tensor. It reads the part of whatever was saved
that its shard covers. So a checkpoint fits any other world size, mesh, placement and sharded, plain tensors and
DTensors; nothing is gathered. If several ranks hold the same shard, torch keeps one.

Protocol: `torch.distributed._checkpointable` (2.11 to 2.15).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardcompile import compat
from shardcompile.compat.state_dicts import teach_state_dicts
from shardcompile.errors import ShardError
from shardcompile.sharding import Layout

if TYPE_CHECKING:
    # Whoever calls this has imported it; others need not pay.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardcompile.tensor.core import ShardTensor

# torch.distributed.checkpoint is imported when it is used: whoever calls these functions has imported it.


def write_items(name: str, x: ShardTensor) -> list[WriteItem]:
    """What this rank writes for a tensor: its shard, unless that is empty.

    Args:
        name: under which it is saved.
        x: the tensor.

    Raises:
        ShardError: `x` is a pending reduction.
    """
    # Whoever calls this has imported it; others need not pay.
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk, properties=TensorProperties.create_from_tensor(x._local_tensor), size=torch.Size(x.shape)
            ),
        )
        for chunk in chunks(x)
    ]


def chunks(x: ShardTensor) -> list[ChunkStorageMetadata]:
    """The part of the global tensor that this rank holds: one box, or none.

    A checkpoint knows a part by its name and where it starts, as the shard behind an empty one does, too: so an empty
    shard is no part. A tensor without elements is held by the first rank of the mesh, so that the checkpoint knows it.
    """
    # Whoever calls this has imported it; others need not pay.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    layout = x._spec.layout
    if layout.is_partial:
        raise ShardError(
            f"{layout.describe()} is a pending reduction, which cannot be saved or loaded; first "
            "redistribute(placements=[Replicate(), ...]) or to Shard"
        )
    coordinate = compat.coordinate(layout.mesh)
    if coordinate is None:
        return []
    offsets, sizes = layout.offsets(coordinate), tuple(x._local_tensor.shape)
    if x.numel() == 0:
        if any(coordinate):
            return []
        offsets, sizes = (0,) * x.ndim, tuple(x.shape)
    elif 0 in sizes:
        return []
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]


def shard(x: ShardTensor, index: MetadataIndex) -> Tensor:
    """The shard from which a part is written, or into which it is read.

    Raises:
        ValueError: this rank's local shard starts somewhere else.
    """
    starts = [chunk.offsets for chunk in chunks(x)]
    if index.offset is not None and torch.Size(index.offset) not in starts:
        raise ValueError(
            f"{index.fqn}: no part of {x._spec.layout.describe()} on this rank starts at {tuple(index.offset)}; "
            f"there is one at {[tuple(s) for s in starts]}"
        )
    local: Tensor = x._local_tensor
    return local.detach()


def shard_like(full: Tensor, like: ShardTensor) -> ShardTensor:
    """Full values in the layout of another tensor; every rank has the full values.

    Args:
        full: plain.
        like: of the same shape.
    """
    layout: Layout = like._spec.layout
    if layout.is_partial:
        raise ShardError(f"full values cannot be put into {layout.describe()}, a pending reduction")
    mine = full[layout.shard_slices(compat.coordinate(layout.mesh))] if full.ndim else full
    fresh = torch.empty_like(like._local_tensor).copy_(mine.detach())
    return like._wrap_like(like, fresh)


def teach(sharded: type[ShardTensor]) -> None:
    """Have ``get_state_dict`` and its kin gather, offload and sharded tensors sharded."""
    teach_state_dicts(sharded, shard_like)


# torch.save


def saver() -> int:
    """Which rank pickles: -1 without process groups."""
    return dist.get_rank() if dist.is_initialized() else -1


def check_saver(rank: int, layout: Layout) -> None:
    """Refuse the shard of another rank.

    Args:
        rank: that has pickled the shard, see `saver`.
        layout: of the tensor.

    Raises:
        ShardError: a shard of another rank, which would silently stand for this rank's own.
    """
    here = saver()
    if -1 not in (here, rank) and here != rank and not layout.is_replicated:
        raise ShardError(
            f"this is the shard that rank {rank} had of {layout.describe()}, and this is rank {here}. A file of "
            "torch.save, or a pickled tensor, holds one rank's shard. Save with torch.distributed.checkpoint, which "
            "can be loaded on any ranks, or save and send x.full_tensor()"
        )
