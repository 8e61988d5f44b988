"""Refuses collectives of torch, DTensor, DDP and FSDP, and tracers, that would misinterpret sharded tensors.

Such a collective treats the local shard of each rank as a replica. That is correct along mesh dims whose ranks hold the
same shard. Across ranks that hold different shards it would mix up elements of different positions, so it is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NoReturn

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
"""Namespaces of collectives that write to their arguments, and of ops that prepare memory for them."""

_FUNCTIONAL = {"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d_functional"}
"""Namespaces of functional collectives, which name their group, and of ops without a group, such as waits."""


def hold_the_same_shard(layout: Layout, ranks: Sequence[int]) -> bool:
    """Whether those of these ranks that are in the layout's mesh hold the same shard, with no reduction pending."""
    coordinates = itertools.product(*map(range, layout.mesh.shape))
    sharding_dims = [m for m, p in enumerate(layout.placements) if not isinstance(p, Replicate)]
    shard_of = {r: tuple(c[m] for m in sharding_dims) for r, c in zip(ranks_of(layout.mesh), coordinates, strict=True)}
    return len({shard_of[r] for r in ranks if r in shard_of}) <= 1


def check_collective(op: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Raises if the op is one of torch's collectives and its ranks hold different shards.

    Raises:
        UnsupportedOpError: they do; raised on all ranks.
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
    """Returns the error for a collective of torch's that is called on a sharded tensor."""
    return refusal(
        name,
        layout.describe(),
        "it would send each rank's local shard as if that were the whole tensor",
        "x.full_tensor() is all of it, on every rank; x.redistribute(placements=...) gives another layout; to send "
        "this rank's local shard as such, take x.to_local()",
    )


def _ranks_of_group(name: str) -> list[int]:
    return dist.get_process_group_ranks(compat.process_group(name))


def refuse_other_tracers(cls: type[Sharded], args: Sequence[object]) -> None:
    """Refuses ops under a tracer that records sharded tensors as wholes, as AOTAutograd does not.

    Args:
        cls: the class of sharded tensors.
        args: the arguments of a function, before modes see it.
    """
    for x in tensors_of(args):
        tracer = compat.tracer_of(x) if type(x) is cls else None
        if tracer is not None:
            _refuse_tracer(tracer, x._spec.layout)  # type: ignore[attr-defined]


def refuse_compiled_autograd(layout: Layout) -> NoReturn:
    """Refuses a compilation whose backward pass compiled autograd would trace."""
    raise refusal(
        "compiled autograd",
        layout.describe(),
        "it would compile the backward pass for the size of this rank's local shard",
        "Set torch._dynamo.config.compiled_autograd to False: the backward pass of what torch.compile compiles is "
        "compiled with it",
    )


def _refuse_tracer(tracer: str, layout: Layout) -> NoReturn:
    """Refuses a tracer other than AOTAutograd: it does not trace the inner tensors and their symbolic sizes."""
    raise refusal(
        tracer,
        layout.describe(),
        "it would take shards for constants of the graph",
        "torch.compile captures sharded tensors in one graph; a graph that torch.export has made of plain tensors runs "
        "on sharded ones",
    )
