"""Threads that take turns: exactly one of them runs, until it has to wait for another one.

Ranks that live in one process run in this way. What a rank does between two waits is not interrupted. So a run is the
same each time, and a debugger sees one thread at a time. Nobody can run: that is the definition of a deadlock, which is
found at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class RanksWaitError(RuntimeError):
    """Ranks wait for what no rank will do. Raised in each rank that waits."""


class RankEnded(BaseException):
    """Ends a rank whose test has been given up. No test should catch it, so that it is no `Exception`."""


def _at_once() -> bool:
    return True


def _shut() -> threading.Lock:
    gate = threading.Lock()  # lighter than a semaphore, which threads of Python build from locks
    gate.acquire()
    return gate


@dataclass
class _Seat:
    """A thread's place.

    Attributes:
        gate: held shut while it is another thread's turn.
        ready: what it waits for; None while it runs, or has ended.
        what: the same in words.
        stuck: what this rank is to be told: that no rank can go on.
        ended: how, in words; None before.
    """

    gate: threading.Lock = field(default_factory=_shut)
    ready: Callable[[], bool] | None = _at_once  # every thread begins by waiting for its first turn
    what: Callable[[], str] = str
    stuck: str | None = None
    ended: str | None = None


class Turns:
    """The turns of a number of threads, one for each rank.

    Args:
        count: how many.
        leave: called by a thread that stops running for a while; what it returns goes to `enter`.
        enter: called by a thread that goes on.
        check: called before a thread waits; raises if it must not.
    """

    def __init__(
        self,
        count: int,
        leave: Callable[[], object] = lambda: None,
        enter: Callable[[Any], None] = lambda _: None,
        check: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._seats = [_Seat() for _ in range(count)]
        self._leave, self._enter, self._check = leave, enter, check
        self._over = threading.Event()
        self._abandoned = False
        self._running = 0

    @property
    def running(self) -> int:
        """The rank whose turn it is."""
        return self._running

    def start(self, first: int = 0) -> None:
        """Give a rank the first turn. All threads come to `begin`, at any time."""
        self._seats[first].gate.release()

    def begin(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._sleep(rank)
        self._seats[rank].ready = None

    def wait(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Let others run until something is there.

        Args:
            rank: whose turn it is.
            ready: whether it is there; may be asked by any thread, at any time.
            what: what this rank waits for, in words.

        Raises:
            RanksWaitError: nobody can go on.
        """
        if ready():
            return
        self._check(what())
        self._step_aside(rank, ready, what)
        seat = self._seats[rank]
        if not ready():
            text, seat.stuck = seat.stuck, None
            raise RanksWaitError(text)

    def let_others_run(self, rank: int) -> None:
        """Let others run until they wait, or end, or let others run themselves."""
        self._step_aside(rank, _at_once, str)

    def _step_aside(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        seat = self._seats[rank]
        seat.ready, seat.what = ready, what
        kept = self._leave()
        following = self._next(rank)
        if following != rank:
            self._seats[following].gate.release()
            self._sleep(rank)
        seat.ready = None
        self._enter(kept)

    def end(self, rank: int, how: str) -> None:
        """A rank has come to its end: the others go on.

        Args:
            rank: which.
            how: in words, for those who wait for it.
        """
        seat = self._seats[rank]
        seat.ready, seat.ended = None, how
        if all(s.ended is not None for s in self._seats):
            self._over.set()
        else:
            self._seats[self._next(rank)].gate.release()

    def join(self, timeout: float | None) -> bool:
        """Wait until all ranks have ended; whether they have within a number of seconds."""
        return self._over.wait(timeout)

    def abandon(self) -> None:
        """Have every rank that waits, now or later, end."""
        self._abandoned = True
        for seat in self._seats:
            with contextlib.suppress(RuntimeError):  # it is open
                seat.gate.release()

    def _sleep(self, rank: int) -> None:
        self._seats[rank].gate.acquire()
        if self._abandoned:
            raise RankEnded
        self._running = rank

    def _next(self, rank: int) -> int:
        """Who runs after a rank: the next one that can; if none can, all that wait are told so, each in its turn."""
        count = len(self._seats)
        order = [(rank + 1 + i) % count for i in range(count)]
        waiting = [r for r in order if self._seats[r].ready is not None]
        able = next((r for r in waiting if self._can_go_on(self._seats[r])), None)
        if able is None:
            text = describe_wait([self._state(r) for r in range(count)])
            for r in waiting:
                self._seats[r].stuck = text
            able = waiting[0]
        return able

    @staticmethod
    def _can_go_on(seat: _Seat) -> bool:
        return seat.stuck is not None or (seat.ready is not None and seat.ready())

    def _state(self, rank: int) -> str:
        seat = self._seats[rank]
        return f"waits for {seat.what()}" if seat.ended is None else seat.ended


def describe_wait(states: Sequence[str]) -> str:
    """The text of a deadlock.

    Args:
        states: what each rank does.
    """
    return "\n".join(["no rank can go on:", *(f"  rank {rank} {state}" for rank, state in enumerate(states))])
