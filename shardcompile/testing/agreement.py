"""Checks that fail on all ranks, with the same text, if they fail on one.

Ranks communicate through the store of the default process group, not by collectives. A rank whose check failed may have
left the others in a collective, and must not start another one against it.
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
"""How long a rank waits for the others."""

GRACE_SECONDS = 10.0
"""How long a rank that has failed waits for the others, which may never come."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Failure:
    """A failure on a rank.

    Attributes:
        headline: the failure in few words, without the rank.
        detail: the lines below the headline.
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
        in_step: whether every rank has come to the check, so that all of them can go on.
    """

    def __init__(self, text: str, in_step: bool = True) -> None:
        super().__init__(text)
        self.in_step = in_step


@dataclass(frozen=True)
class _Verdict:
    """The result of a check on one rank."""

    failures: list[Failure] = field(default_factory=list)
    facts: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> _Verdict:
        fields = json.loads(text)
        return _Verdict([Failure(**f) for f in fields["failures"]], fields["facts"])


def together(
    stage: str,
    action: Callable[[], _T],
    facts: Callable[[_T], str] = lambda _: "",
    error: Callable[[str, bool], Exception] = RanksFailedError,
) -> _T:
    """Run an action on every rank, and go on only if it succeeded on all of them.

    Args:
        stage: a name for the action, for messages.
        action: may raise any exception, or `CheckFailed` for a failed check.
        facts: a function of the result, which returns a text that must be the same on every rank.
        error: makes the exception, from a text and from whether all ranks are in step.

    Raises:
        RanksFailedError: or the exception that `error` makes, on every rank: the action failed on one, or the facts
            differ.
    """
    try:
        result = action()
        verdict = _Verdict(facts=facts(result))
    except CheckFailed as failed:
        verdict = _Verdict(list(failed.failures))
    except Exception as raised:
        verdict = _Verdict([_failure_of(raised)])
    said = _exchange(verdict.to_json(), GRACE_SECONDS if verdict.failures else PATIENCE_SECONDS)
    verdicts = [None if text is None else _Verdict.from_json(text) for text in said]
    if text := _judge(stage, verdicts):
        raise error(text, None not in verdicts) from None  # the text has the traceback, on every rank
    return result


def agree_on_use(stage: str, action: Callable[[], _T], facts: Callable[[_T], str] = lambda _: "") -> _T:
    """Run an action as `together` does, to check what the user passed.

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
    """The error of `together` for wrong arguments of the user."""
    return ValueError(text)


def _failure_of(error: Exception) -> Failure:
    first_line = str(error).partition("\n")[0]
    error = error.with_traceback(_of_the_user(error.__traceback__))
    return Failure(f"{type(error).__name__}: {first_line}", "".join(traceback.format_exception(error)).rstrip())


def _of_the_user(frames: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback, without the outer ones in this package."""
    here = os.path.dirname(__file__)
    while frames and frames.tb_next and os.path.dirname(frames.tb_frame.f_code.co_filename) == here:
        frames = frames.tb_next
    return frames


def _judge(stage: str, verdicts: Sequence[_Verdict | None]) -> str:
    """The failure in words, the same on every rank; empty if there is none."""
    failing = [rank for rank, v in enumerate(verdicts) if v is not None and v.failures]
    missing = [rank for rank, v in enumerate(verdicts) if v is None]
    if failing:
        return _describe(stage, failing, verdicts[failing[0]], missing)  # type: ignore[arg-type]
    if missing:
        return f"{stage}: {_ranks(missing)} did not come to its end within {PATIENCE_SECONDS:g} s"
    return _disagreement(stage, [v.facts.split("\n") for v in verdicts if v is not None])


def _disagreement(stage: str, facts: Sequence[Sequence[str]]) -> str:
    """The first line that differs between ranks, with the ranks of each version; empty if no line differs."""
    for lines in itertools.zip_longest(*facts, fillvalue="nothing"):
        if len(set(lines)) > 1:
            holders = {line: [r for r, other in enumerate(lines) if other == line] for line in lines}
            said = [f"  {_ranks(r)} {'has' if len(r) == 1 else 'have'} {line}" for line, r in holders.items()]
            return "\n".join([f"{stage}: the ranks disagree", *said])
    return ""


def _describe(stage: str, failing: list[int], first: _Verdict, missing: list[int]) -> str:
    failures = first.failures
    others = f" ({_ranks(failing[1:])} as well)" if failing[1:] else ""
    lines = [f"{stage}: {failures[0].headline} on rank {failing[0]}{others}"]
    if failures[0].detail:
        lines.append(_indent(failures[0].detail))
    if failures[1:]:
        lines += [f"and on rank {failing[0]}", *map(str, failures[1:])]
    if missing:
        lines.append(
            f"{_ranks(missing)} did not come here within {GRACE_SECONDS:g} s, and probably wait in a collective for "
            f"rank {failing[0]}"
        )
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


def _exchange(value: str, seconds: float) -> list[str | None]:
    """The values of all ranks; None for a rank that has not given one in time."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    store, me = compat.store(), dist.get_rank()
    call = store.add(f"shardcompile/testing/calls/{me}", 1)
    store.set(_key(call, me), value)
    end = time.monotonic() + seconds
    said: list[str | None] = []
    for rank in range(dist.get_world_size()):
        try:
            store.wait([_key(call, rank)], timedelta(seconds=max(0.01, end - time.monotonic())))
            said.append(store.get(_key(call, rank)).decode())
        except RuntimeError:  # torch's DistStoreError, at the timeout
            said.append(None)
    if None not in said:
        store.delete_key(_key(call - 1, me))  # every rank has read it
    return said


def _key(call: int, rank: int) -> str:
    return f"shardcompile/testing/{call}/{rank}"
