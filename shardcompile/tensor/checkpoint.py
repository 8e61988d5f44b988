"""Saving and loading: the protocol by which `torch.distributed.checkpoint` writes and reads sharded tensors.

A rank writes its local shard with its offsets in the global tensor, and reads the part of the saved tensor that its
local shard covers. A checkpoint can therefore be loaded with any world size, mesh, placements and partition, and as
plain tensors and DTensors; nothing is gathered. If several ranks hold the same shard, torch keeps one.

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
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardcompile.tensor.core import ShardTensor

# torch.distributed.checkpoint is imported inside the functions: their callers have imported it, and other programs do
# not need it.


def write_items(name: str, x: ShardTensor) -> list[WriteItem]:
    """Returns what this rank writes for a tensor: its local shard, unless that is empty.

    Args:
        name: the name under which it is saved.
        x: the tensor.

    Raises:
        ShardError: `x` is a pending reduction.
    """
    # The caller has imported it, and other programs do not need it.
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
    """Returns the chunk of the global tensor that this rank holds: one box, or none.

    A checkpoint identifies a chunk by its name and its offsets. An empty shard has the same offsets as the shard that
    follows it, so it is not a chunk. For a tensor without elements the first rank of the mesh has the only chunk, so
    that the checkpoint contains the tensor.
    """
    # The caller has imported it, and other programs do not need it.
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
    """Returns the local shard from which a chunk is written, or into which it is read.

    Raises:
        ValueError: this rank's local shard has other offsets.
    """
    starts = [chunk.offsets for chunk in chunks(x)]
    if index.offset is not None and torch.Size(index.offset) not in starts:
        raise ValueError(
            f"{index.fqn}: no chunk of {x._spec.layout.describe()} on this rank starts at {tuple(index.offset)}; "
            f"there is one at {[tuple(s) for s in starts]}"
        )
    local: Tensor = x._local_tensor
    return local.detach()


def shard_like(full: Tensor, like: ShardTensor) -> ShardTensor:
    """Shards a full tensor, which every rank has, in the layout of another one.

    Args:
        full: a plain tensor.
        like: a tensor of the same shape.
    """
    layout: Layout = like._spec.layout
    if layout.is_partial:
        raise ShardError(f"a full tensor cannot be sharded as {layout.describe()}, a pending reduction")
    values = full[layout.shard_slices(compat.coordinate(layout.mesh))] if full.ndim else full
    local = torch.empty_like(like._local_tensor).copy_(values.detach())
    return like._wrap_like(like, local)


def teach(sharded: type[ShardTensor]) -> None:
    """Makes ``get_state_dict`` and related functions gather, offload and distribute sharded tensors."""
    teach_state_dicts(sharded, shard_like)


# torch.save


def saver() -> int:
    """Returns the global rank that pickles a tensor; -1 without process groups."""
    return dist.get_rank() if dist.is_initialized() else -1


def check_saver(rank: int, layout: Layout) -> None:
    """Checks that a pickled shard is not that of another rank.

    Args:
        rank: the rank that has pickled the shard, see `saver`.
        layout: the layout of the tensor.

    Raises:
        ShardError: the shard is that of another rank, and would silently be taken for this rank's own.
    """
    loader = saver()
    if -1 not in (loader, rank) and loader != rank and not layout.is_replicated:
        raise ShardError(
            f"this is the local shard of {layout.describe()} on rank {rank}, and it is loaded on rank {loader}. A file "
            "of torch.save, or a pickled tensor, holds one rank's shard. Save with torch.distributed.checkpoint, which "
            "can be loaded on any ranks, or save and send x.full_tensor()"
        )
