"""Whether ranks wait for one another without end, from what they say they do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardcompile.watch.states import ORDERLY_ENDS, State, members_of

BLOCKED_SECONDS = 3.0
"""How long all ranks have to have waited, with nothing sent, before that counts as a deadlock."""


def verdict(states: Mapping[int, State], gone: Mapping[int, str]) -> str | None:
    """Why some rank waits without end, or None if no such rank is known.

    Args:
        states: by rank, what it last said; of ranks that never said anything there is none.
        gone: ranks whose processes are known to be dead, with how that was found.
    """
    return _first_difference(states) or _left_alone(states, gone) or _deadlock(states)


def _first_difference(states: Mapping[int, State]) -> str | None:
    """The first collective of a group that two ranks have stated differently."""
    first: dict[tuple[str, int], tuple[int, int, str]] = {}
    found: list[tuple[int, str]] = []
    for rank in sorted(states):
        for group, calls in states[rank].recent.items():
            for number, tag, what in calls:
                other, tag_there, what_there = first.setdefault((group, number), (rank, tag, what))
                if tag != tag_there:
                    text = (
                        f"ranks {other} and {rank} differ in collective number {number} of the group of ranks "
                        f"{_ranks_text(group)}: rank {other} has {what_there or 'another one'}{_at(states, other)}; "
                        f"rank {rank} has {what or 'another one'}{_at(states, rank)}. The program takes a decision by "
                        "what only one rank knows: the rank, the size of its block, or its values"
                    )
                    found.append((number, text))
    return min(found)[1] if found else None


def _left_alone(states: Mapping[int, State], gone: Mapping[int, str]) -> str | None:
    """A rank that waits for one that is dead or has ended."""
    lost = {**gone} | {rank: s.ended for rank, s in states.items() if s.ended}
    for rank, how in sorted(lost.items()):
        for waiting, state in sorted(states.items()):
            if waiting in lost or state.stay is None or not _may_wait_for(state, rank, states.get(rank)):
                continue
            last = _last_call(states.get(rank), state.stay.group)
            return f"rank {rank} {how}{last}; rank {waiting} waits for it in {_where(state)}"
    return None


def _may_wait_for(state: State, rank: int, other: State | None) -> bool:
    stay = state.stay
    assert stay is not None
    if not stay.group:
        return True  # a collective that is not ours: its group is not known
    if rank not in members_of(stay.group):
        return False
    entered = 0 if other is None else other.counts.get(stay.group, 0)
    # Who has ended in order has completed what it entered; who raised or died may have done so inside of it.
    return entered < stay.number or (entered == stay.number and (other is None or other.ended not in ORDERLY_ENDS))


def _deadlock(states: Mapping[int, State]) -> str | None:
    """All ranks wait, and one of them for another that waits elsewhere."""
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
