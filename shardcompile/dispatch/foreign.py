"""What happens when others work on the shards of sharded tensors: collectives of torch, DTensor, DDP, FSDP.

Others do the same with the shard of each rank. That is right along mesh dims whose ranks hold the same shard. Across
ranks that hold different shards it would mix up elements of different places, so it is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.tensor.placement_types import Replicate

from shardcompile import compat
from shardcompile.compat import OpOverload
from shardcompile.compat.wrappers import ranks_of
from shardcompile.errors import UnsupportedOpError, refusal
from shardcompile.ops.support.global_meta import tensors_of
from shardcompile.sharded import Sharded
from shardcompile.sharding import Layout

_IN_PLACE = {"c10d", "fsdp"}
"""Namespaces of collectives that write to their arguments, and of what prepares memory for them."""

_FUNCTIONAL = {"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d_functional"}
"""Namespaces of collectives that name their group, and of ops, such as waiting, that send nothing and name none."""


def hold_the_same_shard(layout: Layout, ranks: Sequence[int]) -> bool:
    """Whether these ranks, as far as they are in the mesh of a layout, hold the same shard, and all of it."""
    places = itertools.product(*map(range, layout.mesh.shape))
    sharding_of = [m for m, p in enumerate(layout.placements) if not isinstance(p, Replicate)]
    shard_of = {r: tuple(place[m] for m in sharding_of) for r, place in zip(ranks_of(layout.mesh), places, strict=True)}
    return len({shard_of[r] for r in ranks if r in shard_of}) <= 1


def check_collective(op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Refuse a collective of torch's across ranks that hold different shards.

    Raises:
        UnsupportedOpError: on all ranks alike.
    """
    if op.namespace not in _IN_PLACE | _FUNCTIONAL:
        return
    named = {a.name: v for a, v in zip(op._schema.arguments, args, strict=False)} | kwargs
    group = named.get("group_name")
    if op.namespace in _FUNCTIONAL and group is None:
        return
    ranks = _ranks_of_group(group) if isinstance(group, str) else None
    for x in tensors_of([*args, *kwargs.values()]):
        if isinstance(x, Sharded) and not (ranks and hold_the_same_shard(x._spec.layout, ranks)):
            raise collective_refusal(str(op), x._spec.layout)


def collective_refusal(name: str, layout: Layout) -> UnsupportedOpError:
    """The error for a collective of torch's that is given a sharded tensor."""
    return refusal(
        name,
        layout.describe(),
        "it would send each rank's local shard as if that were the whole tensor",
        "x.full_tensor() is all of it, on every rank; x.redistribute(placements=...) gives another layout; to send "
        "this rank's local shard as such, take x.to_local()",
    )


def _ranks_of_group(name: str) -> list[int]:
    return dist.get_process_group_ranks(compat.process_group(name))
