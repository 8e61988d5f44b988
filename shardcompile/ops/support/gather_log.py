"""The log of gathers: ops that run on full tensors, and inputs that the chosen strategy of an op replicates."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile.compat import OpOverload
from shardcompile.planning import RedistributionPlan
from shardcompile.sharding import Layout

_LOG = logging.getLogger("shardcompile")
_LOGGED_BYTES: dict[OpOverload, int] = {}
"""The most bytes of a logged gather, by op."""
_WORTH_ANOTHER_LINE = 10
"""A gather of at least this many times the bytes of those logged before is logged, too."""


def log_gather(op: OpOverload, nbytes: int, text: str) -> bool:
    """Logs a gather if it is the first one of an op, or moves far more than those before; returns whether it did."""
    logged = _LOGGED_BYTES.get(op)
    if not nbytes or (logged is not None and nbytes < _WORTH_ANOTHER_LINE * logged):
        return False
    _LOGGED_BYTES[op] = nbytes
    _LOG.info(text)
    return True


def inputs_text(layouts: Sequence[Layout]) -> str:
    """Describes the layouts of the inputs of a call."""
    return "; ".join(f"input {i}: {x.describe()}" for i, x in enumerate(layouts))


def log_replicated(op: OpOverload, plans: Sequence[RedistributionPlan]) -> None:
    """Logs the sharded inputs that a strategy replicates along a mesh dim.

    Args:
        op: the op.
        plans: the chosen plans of its tensor inputs.
    """
    gathered = [i for i, p in enumerate(plans) if p.steps and _replicates(p)]
    if gathered:
        nbytes = sum(plans[i].nbytes for i in gathered)
        which = ", ".join(f"input {i}" for i in gathered)
        inputs = inputs_text([p.src for p in plans])
        log_gather(op, nbytes, f"{op} gathers {which}, {nbytes} B: replicated by its cheapest strategy ({inputs})")


def _replicates(plan: RedistributionPlan) -> bool:
    return any(
        isinstance(before, Shard) and isinstance(after, Replicate)
        for before, after in zip(plan.src.placements, plan.dst.placements, strict=True)
    )
