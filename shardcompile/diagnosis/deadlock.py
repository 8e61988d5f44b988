"""Decides from the states of ranks whether some of them wait without end. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardcompile.diagnosis.states import ORDERLY_ENDS, State, members_of

BLOCKED_SECONDS = 3.0
"""How long all ranks must have waited, without a byte sent, to count as deadlocked."""


def diagnose(states: Mapping[int, State], gone: Mapping[int, str]) -> str | None:
    """Returns why some rank waits without end; None if no rank is known to.

    Args:
        states: the last known state of each rank.
        gone: the ranks whose processes are known to be dead, each with the evidence.
    """
    return _first_difference(states) or _waits_for_ended_rank(states, gone) or _deadlock(states)


def _first_difference(states: Mapping[int, State]) -> str | None:
    """Describes the first collective of a group that two ranks recorded differently."""
    first: dict[tuple[str, int], tuple[int, int, str]] = {}
    found: list[tuple[int, str]] = []
    for rank in sorted(states):
        for group, calls in states[rank].recent.items():
            for number, tag, what in calls:
                other, other_tag, other_what = first.setdefault((group, number), (rank, tag, what))
                if tag != other_tag:
                    text = (
                        f"ranks {other} and {rank} differ in collective number {number} of the group of ranks "
                        f"{_ranks_text(group)}: rank {other} has {other_what or 'another one'}{_at(states, other)}; "
                        f"rank {rank} has {what or 'another one'}{_at(states, rank)}. The program takes a decision by "
                        "what only one rank knows: the rank, the size of its shard, or its values"
                    )
                    found.append((number, text))
    return min(found)[1] if found else None


def _waits_for_ended_rank(states: Mapping[int, State], gone: Mapping[int, str]) -> str | None:
    """Describes a rank that waits for a rank that is dead or has ended."""
    ended = {**gone} | {rank: s.ended for rank, s in states.items() if s.ended}
    for rank, how in sorted(ended.items()):
        for waiting, state in sorted(states.items()):
            if waiting in ended or state.stay is None or not _may_wait_for(state, rank, states.get(rank)):
                continue
            last = _last_call(states.get(rank), state.stay.group)
            return f"rank {rank} {how}{last}; rank {waiting} waits for it in {_where(state)}"
    return None


def _may_wait_for(state: State, rank: int, other: State | None) -> bool:
    stay = state.stay
    assert stay is not None
    if not stay.group:
        return True  # a collective that is not shardcompile's, whose group is unknown
    if rank not in members_of(stay.group):
        return False
    entered = 0 if other is None else other.counts.get(stay.group, 0)
    # A rank with an orderly end has completed every collective that it entered. One that raised or died may not have.
    return entered < stay.number or (entered == stay.number and (other is None or other.ended not in ORDERLY_ENDS))


def _deadlock(states: Mapping[int, State]) -> str | None:
    """Describes a deadlock: all ranks wait, and one waits for a rank that waits in another collective."""
    stays = {
        rank: s.stay
        for rank, s in states.items()
        if s.stay is not None and min(s.stay.seconds, s.stay.quiet) >= BLOCKED_SECONDS
    }
    if len(stays) < len(states):
        return None
    for rank, stay in sorted(stays.items()):
        if not stay.group:
            continue
        for other in members_of(stay.group):
            if other in states and states[other].counts.get(stay.group, 0) < stay.number:
                places = "; ".join(f"rank {r} in {_where(states[r])}" for r in _some(states, rank, other))
                return f"all ranks wait, and rank {rank} for rank {other}, which waits elsewhere: {places}"
    return None


def _some(states: Mapping[int, State], *first: int) -> Iterator[int]:
    yield from first
    yield from [r for r in sorted(states) if r not in first][:6]


def _where(state: State) -> str:
    stay = state.stay
    assert stay is not None
    what = stay.what or "a collective that is not shardcompile's"
    return f"{what} ({stay.place})" if stay.place else what


def _at(states: Mapping[int, State], rank: int) -> str:
    stay = states[rank].stay
    return f" ({stay.place})" if stay is not None and stay.place else ""


def _last_call(state: State | None, group: str) -> str:
    calls = state.recent.get(group, []) if state is not None else []
    return f" (its last collective there: {calls[-1][2]})" if calls and calls[-1][2] else ""


def _ranks_text(group: str) -> str:
    ranks = members_of(group)
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)} ranks)"
