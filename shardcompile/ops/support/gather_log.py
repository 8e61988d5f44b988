"""The log of gathers: ops that run on full tensors, and inputs that the chosen strategy of an op replicates.

`shardcompile.dispatch.gather` logs the former, `log_replicated` the latter; `shardcompile.dispatch.run` states with
`unserved` why a sharded decomposition did not serve. ``logging.getLogger("shardcompile").setLevel(logging.INFO)`` shows
the lines: the first gather of each op, and those that move ten times as much. Reports name the reason, too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from torch.distributed.tensor.placement_types import Replicate, Shard

from shardcompile.compat import OpOverload
from shardcompile.planning import RedistributionPlan
from shardcompile.sharding import Layout

_LOG = logging.getLogger("shardcompile")
_LOGGED_BYTES: dict[OpOverload, int] = {}
"""The most bytes of a logged gather, by op."""
_WORTH_ANOTHER_LINE = 10
"""A gather of at least this many times the bytes of those logged before is logged, too."""


_UNSERVED: ContextVar[str] = ContextVar("unserved", default="")


@contextlib.contextmanager
def unserved(reason: str) -> Iterator[None]:
    """States, for gathers that are logged inside the context, why the op's sharded decomposition does not serve."""
    token = _UNSERVED.set(reason)
    try:
        yield
    finally:
        _UNSERVED.reset(token)


def unserved_text() -> str:
    """Returns the reason that `unserved` states, as part of a message; empty if there is none."""
    reason = _UNSERVED.get()
    return reason and f"its sharded decomposition does not serve this call: {reason}"


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
        why = "; ".join(filter(None, ["replicated by its cheapest strategy", unserved_text()]))
        text = f"{op} gathers {which}, {nbytes} B: {why} ({inputs})"
        log_gather(op, nbytes, text)


def _replicates(plan: RedistributionPlan) -> bool:
    return any(
        isinstance(before, Shard) and isinstance(after, Replicate)
        for before, after in zip(plan.src.placements, plan.dst.placements, strict=True)
    )
