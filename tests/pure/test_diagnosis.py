"""Whether ranks wait for one another without end, from what they say."""

from __future__ import annotations

import re
import threading
import time

import pytest

from shardcompile.diagnosis.deadlock import diagnose
from shardcompile.diagnosis.main_thread import tell_main_thread
from shardcompile.diagnosis.queued import Queued
from shardcompile.diagnosis.states import State, Stay, key_of, members_of
from shardcompile.errors import DivergenceError

WORLD, PAIR = key_of([0, 1, 2], 0), key_of([0, 2], 1)


def at(
    number: int,
    *,
    tag: int = 7,
    seconds: float | None = None,
    group: str = WORLD,
    ended: str = "",
    counts: dict[str, int] | None = None,
    quiet: float | None = None,
) -> State:
    """A rank that has entered so many collectives, and has been waiting in the last one for some seconds."""
    what = f"all_gather_v number {number}"
    stay = (
        None
        if seconds is None
        else Stay(seconds, seconds if quiet is None else quiet, "train.py:7 in step", group, number, what)
    )
    recent = {group: [(n, 7, "") for n in range(1, number)] + ([(number, tag, what)] if number else [])}
    return State(5, 100, "here", {group: number} | (counts or {}), recent, ended, stay)


def elsewhere(number: int, seconds: float) -> State:
    """A rank that stands still in a collective that is not ours."""
    state = at(number)
    return State(5, 100, "here", state.counts, state.recent, "", Stay(seconds, seconds, "model.py:3 in forward"))


@pytest.mark.parametrize(
    "states",
    [
        {0: at(3, seconds=500.0), 1: at(3, seconds=500.0), 2: at(2)},
        {0: at(3, seconds=500.0), 1: at(3, seconds=500.0), 2: at(3, seconds=500.0)},
        {0: at(3, seconds=9.0), 1: at(3), 2: at(3, ended="has come to its end")},
        {0: at(3), 1: at(3), 2: at(2, ended="has come to its end")},
        {0: elsewhere(3, 50.0), 1: elsewhere(3, 50.0), 2: elsewhere(3, 50.0)},
        {0: at(4, seconds=2.0), 1: elsewhere(3, 2.0), 2: at(4, seconds=2.0)},
        {0: at(4, seconds=9.0, quiet=0.5), 1: elsewhere(3, 9.0), 2: at(4, seconds=9.0)},
        {0: at(1, seconds=9.0, group=PAIR), 1: at(0, ended="has come to its end"), 2: at(0, group=PAIR)},
    ],
    ids=[
        "one rank is busy",
        "all are in the same collective",
        "the one that has ended took part",
        "nobody waits for the one that has ended",
        "all are in collectives that are not ours",
        "not for long enough",
        "something is being sent",
        "the one that has ended is not of the group",
    ],
)
def test_ranks_that_may_go_on(states: dict[int, State]) -> None:
    assert diagnose(states, {}) is None


def test_collectives_that_differ() -> None:
    states = {0: at(3, seconds=2.0), 1: at(3, seconds=2.0), 2: at(3, tag=8)}
    text = diagnose(states, {})
    assert text is not None
    assert re.search(
        r"ranks 0 and 2 differ in collective number 3 of the group of ranks 0, 1, 2: rank 0 has all_ga", text
    )
    assert "(train.py:7 in step)" in text


def test_the_first_collective_that_differs_is_named() -> None:
    one, other = at(5, tag=1), at(6, tag=2)
    other.recent[WORLD][1] = (2, 9, "all_reduce")
    assert "collective number 2 of" in str(diagnose({0: one, 1: other}, {}))


def test_a_rank_that_died_is_named_where_it_is_waited_for() -> None:
    states = {0: at(3, seconds=2.5), 1: at(3, seconds=2.5), 2: at(2)}
    assert "rank 2 has died (its last collective there: all_gather_v number 2); rank 0 waits for it in" in str(
        diagnose(states, {2: "has died"})
    )
    assert diagnose({0: at(3), 1: at(3), 2: at(2)}, {2: "has died"}) is None


def test_whoever_is_in_a_collective_of_torchs_may_wait_for_anybody() -> None:
    states = {0: elsewhere(3, 4.0), 1: at(3), 2: at(3, ended="has raised ValueError: x")}
    assert "rank 2 has raised ValueError: x" in str(diagnose(states, {}))


def test_all_wait_for_one_another() -> None:
    states = {0: at(4, seconds=4.0), 1: elsewhere(3, 4.0), 2: at(4, seconds=4.0)}
    text = str(diagnose(states, {}))
    assert text.startswith(
        "all ranks wait, and rank 0 for rank 1, which waits elsewhere: rank 0 in all_gather_v number 4"
    )
    assert "rank 1 in a collective that is not shardcompile's (model.py:3 in forward)" in text


def test_states_go_through_the_store_as_text() -> None:
    state = at(3, seconds=4.0, counts={PAIR: 2})
    assert State.from_text(state.to_text()) == state
    assert members_of(PAIR) == [0, 2]


def test_calls_on_a_queue_are_waited_for_in_their_order() -> None:
    queued: Queued[str] = Queued()
    passed = {"first": False, "second": False}
    for name in passed:
        queued.note(name, lambda name=name: passed[name])  # type: ignore[misc]
    assert queued.oldest() is not None and queued.oldest()[0] == "first"  # type: ignore[index]
    passed["first"] = True
    assert queued.oldest()[0] == "second"  # type: ignore[index]
    passed["second"] = True
    assert queued.oldest() is None


def test_a_queue_keeps_some_places_only() -> None:
    queued: Queued[int] = Queued()
    for number in range(3000):
        queued.note(number, lambda: False)
    assert len(queued._places) <= 1024 and queued.oldest()[0] == 0  # type: ignore[index]


def test_the_main_thread_is_told_wherever_it_is() -> None:
    told = threading.Thread(target=tell_main_thread, args=("ranks 0 and 1 differ",))
    with pytest.raises(DivergenceError, match="ranks 0 and 1 differ"):
        told.start()
        while True:
            time.sleep(0.001)
