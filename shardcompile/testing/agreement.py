"""Rank-invariant checks: a check that fails on one rank fails on all ranks, with the same message.

Ranks communicate through the store of the default process group, not by collectives. A rank whose check failed may have
left the others in a collective, and a new collective would be matched with that one.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from shardcompile import compat
from shardcompile.errors import ShardError

PATIENCE_SECONDS = 1800.0
"""The time in which every rank must reach a check."""

GRACE_SECONDS = 10.0
"""How long a rank that has failed waits for the other ranks, which may be stuck in a collective."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Failure:
    """A failure on a rank.

    Attributes:
        headline: a short description of the failure, without the rank.
        detail: further lines.
    """

    headline: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.headline}:\n{_indent(self.detail)}" if self.detail else self.headline


class CheckFailed(Exception):
    """A check inside `together` failed on this rank."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("\n".join(map(str, failures)))
        self.failures = tuple(failures)


class RanksFailedError(AssertionError):
    """A check failed on some rank. Every rank that is not stuck raises this.

    Attributes:
        in_step: whether every rank has reached the check, so that all ranks can continue.
    """

    def __init__(self, text: str, in_step: bool = True) -> None:
        super().__init__(text)
        self.in_step = in_step


@dataclass(frozen=True)
class _CheckResult:
    """The outcome of a check on one rank.

    Attributes:
        failures: the failures on this rank; empty if the check passed.
        facts: a text that must be rank-invariant.
    """

    failures: list[Failure] = field(default_factory=list)
    facts: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> _CheckResult:
        fields = json.loads(text)
        return _CheckResult([Failure(**f) for f in fields["failures"]], fields["facts"])


def together(
    stage: str,
    action: Callable[[], _T],
    facts: Callable[[_T], str] = lambda _: "",
    error: Callable[[str, bool], Exception] = RanksFailedError,
) -> _T:
    """Runs an action on every rank, and returns its result only if the action succeeded on all ranks.

    Args:
        stage: a name for the action, for messages.
        action: may raise any exception, or `CheckFailed` for a failed check.
        facts: takes the result, and returns a text that must be rank-invariant.
        error: makes the exception, from its text and from whether all ranks are in step.

    Raises:
        RanksFailedError: or the exception that `error` makes, on every rank, if the action failed on some rank or the
            facts differ.
    """
    try:
        result = action()
        outcome = _CheckResult(facts=facts(result))
    except CheckFailed as failed:
        outcome = _CheckResult(list(failed.failures))
    except Exception as raised:
        outcome = _CheckResult([_failure_of(raised)])
    texts = _exchange(outcome.to_json(), GRACE_SECONDS if outcome.failures else PATIENCE_SECONDS)
    outcomes = [None if text is None else _CheckResult.from_json(text) for text in texts]
    if text := _judge(stage, outcomes):
        raise error(text, None not in outcomes) from None  # the text has the traceback, on every rank
    return result


def agree_on_use(stage: str, action: Callable[[], _T], facts: Callable[[_T], str] = lambda _: "") -> _T:
    """Runs an action as `together` does, to check the user's arguments.

    Raises:
        ValueError: on every rank, without the traceback of the action.
    """

    def checked() -> _T:
        try:
            return action()
        except (ValueError, ShardError) as error:
            raise CheckFailed([Failure(str(error))]) from error

    return together(stage, checked, facts, usage_error)


def usage_error(text: str, in_step: bool) -> Exception:
    """Makes the exception of `together` for wrong arguments of the user."""
    return ValueError(text)


def _failure_of(error: Exception) -> Failure:
    first_line = str(error).partition("\n")[0]
    error = error.with_traceback(_without_own_frames(error.__traceback__))
    return Failure(f"{type(error).__name__}: {first_line}", "".join(traceback.format_exception(error)).rstrip())


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Drops the outer frames of a traceback that are in this package."""
    package = os.path.dirname(__file__)
    while frames and frames.tb_next and os.path.dirname(frames.tb_frame.f_code.co_filename) == package:
        frames = frames.tb_next
    return frames


def _judge(stage: str, outcomes: Sequence[_CheckResult | None]) -> str:
    """Returns the text of the failure, which is rank-invariant; empty if there is no failure."""
    failing = [rank for rank, v in enumerate(outcomes) if v is not None and v.failures]
    missing = [rank for rank, v in enumerate(outcomes) if v is None]
    if failing:
        return _describe(stage, failing, outcomes[failing[0]], missing)  # type: ignore[arg-type]
    if missing:
        return f"{stage}: {_ranks(missing)} did not finish it within {PATIENCE_SECONDS:g} s"
    return _disagreement(stage, [v.facts.split("\n") for v in outcomes if v is not None])


def _disagreement(stage: str, facts: Sequence[Sequence[str]]) -> str:
    """Returns the first line that differs between ranks, with the ranks of each version; empty if no line differs."""
    for lines in itertools.zip_longest(*facts, fillvalue="nothing"):
        if len(set(lines)) > 1:
            holders = {line: [r for r, other in enumerate(lines) if other == line] for line in lines}
            versions = [f"  {_ranks(r)} {'has' if len(r) == 1 else 'have'} {line}" for line, r in holders.items()]
            return "\n".join([f"{stage}: the ranks disagree", *versions])
    return ""


def _describe(stage: str, failing: list[int], first: _CheckResult, missing: list[int]) -> str:
    failures = first.failures
    others = f" ({_ranks(failing[1:])} as well)" if failing[1:] else ""
    lines = [f"{stage}: {failures[0].headline} on rank {failing[0]}{others}"]
    if failures[0].detail:
        lines.append(_indent(failures[0].detail))
    if failures[1:]:
        lines += [f"and on rank {failing[0]}", *map(str, failures[1:])]
    if missing:
        lines.append(
            f"{_ranks(missing)} did not reach this check within {GRACE_SECONDS:g} s, and probably wait in a collective "
            f"for rank {failing[0]}"
        )
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


def _exchange(value: str, seconds: float) -> list[str | None]:
    """Exchanges a value between all ranks through the store; None for a rank whose value did not arrive in time."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    store, own_rank = compat.store(), dist.get_rank()
    call = store.add(f"shardcompile/testing/calls/{own_rank}", 1)
    store.set(_key(call, own_rank), value)
    end = time.monotonic() + seconds
    values: list[str | None] = []
    for rank in range(dist.get_world_size()):
        try:
            store.wait([_key(call, rank)], timedelta(seconds=max(0.01, end - time.monotonic())))
            values.append(store.get(_key(call, rank)).decode())
        except RuntimeError:  # torch's DistStoreError, at the timeout
            values.append(None)
    if None not in values:
        store.delete_key(_key(call - 1, own_rank))  # every rank has read it
    return values


def _key(call: int, rank: int) -> str:
    return f"shardcompile/testing/{call}/{rank}"
