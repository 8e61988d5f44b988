"""Makes one report of the outcomes of all ranks, which names the rank to look at first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardcompile.testing.messages import Kind, Outcome

# The errors of collectives whose peer is gone (gloo in torch 2.13 to 2.15, NCCL's "remote error" family).
_PEER_IS_GONE = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|Broken pipe|ncclRemoteError|remote process exited"
)


def rank_to_blame(outcomes: Sequence[Outcome]) -> int | None:
    """Returns the lowest rank that failed by itself, and not because another rank failed.

    If there is none, returns the lowest rank that failed, died or hung; None if no rank did.
    """
    broken = [rank for rank, outcome in enumerate(outcomes) if outcome.kind in (Kind.FAILED, Kind.DIED)]
    independent = [rank for rank in broken if not _PEER_IS_GONE.search(outcomes[rank].traceback)]
    hung = [rank for rank, outcome in enumerate(outcomes) if outcome.kind is Kind.RUNNING]
    return next(iter(independent or broken or hung), None)


def describe(outcomes: Sequence[Outcome]) -> str:
    """Returns the report of a test that did not pass, or did not end in the same way on every rank."""
    blamed = rank_to_blame(outcomes)
    others = [f"  rank {rank}: {_sentence(each)}" for rank, each in enumerate(outcomes) if rank != blamed]
    if blamed is None:
        return "\n".join(["the ranks disagree about how the test ended", "", *others])
    headline = f"rank {blamed} of {len(outcomes)} {_sentence(outcomes[blamed])}"
    return "\n".join([headline, "", *outcomes[blamed].traceback.splitlines(), "", *others])


def _sentence(outcome: Outcome) -> str:
    return f"{outcome.kind.value}: {outcome.detail}" if outcome.detail else outcome.kind.value
