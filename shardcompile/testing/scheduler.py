"""Threads that take turns: exactly one of them runs, until it has to wait for another one.

Ranks in one process run in this way. Nothing interrupts a rank between two waits. So each run is the same, and a
debugger sees one thread at a time. If no thread can run, there is a deadlock, which is found at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class RanksWaitError(RuntimeError):
    """No rank can go on. Each rank that waits raises this."""


class RankEnded(BaseException):
    """Ends a rank whose test was abandoned. It is no `Exception`, so that no test catches it."""


def _at_once() -> bool:
    return True


def _shut() -> threading.Lock:
    gate = threading.Lock()  # lighter than a semaphore, which Python builds from locks
    gate.acquire()
    return gate


@dataclass
class _Seat:
    """The state of a thread.

    Attributes:
        gate: a lock that is held while it is another thread's turn.
        ready: whether the thread can go on; None while it runs, or after its end.
        what: what the thread waits for, in words.
        stuck: the text of a deadlock that this rank must raise, or None.
        ended: how the thread ended, in words; None before its end.
    """

    gate: threading.Lock = field(default_factory=_shut)
    ready: Callable[[], bool] | None = _at_once  # every thread first waits for its first turn
    what: Callable[[], str] = str
    stuck: str | None = None
    ended: str | None = None


class Turns:
    """The turns of a number of threads, one for each rank.

    Args:
        count: how many.
        leave: a thread calls it when its turn ends. `enter` gets its result.
        enter: a thread calls it when its next turn begins.
        check: a thread calls it before it waits. It raises if the thread must not wait.
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
        """Give a rank the first turn. All threads must call `begin`, sooner or later."""
        self._seats[first].gate.release()

    def begin(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._sleep(rank)
        self._seats[rank].ready = None

    def wait(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Let other ranks run until a condition holds.

        Args:
            rank: the rank whose turn it is.
            ready: the condition. Any thread may call it, at any time.
            what: what this rank waits for, in words.

        Raises:
            RanksWaitError: no rank can go on.
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
        """Let other ranks run until they wait, end, or call this, too."""
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
        """End a rank, so that the others go on.

        Args:
            rank: the rank.
            how: how it ended, in words, for ranks that wait for it.
        """
        seat = self._seats[rank]
        seat.ready, seat.ended = None, how
        if all(s.ended is not None for s in self._seats):
            self._over.set()
        else:
            self._seats[self._next(rank)].gate.release()

    def join(self, timeout: float | None) -> bool:
        """Wait until all ranks have ended, and return whether they have.

        Args:
            timeout: the longest wait in seconds; None for no limit.
        """
        return self._over.wait(timeout)

    def abandon(self) -> None:
        """End every rank that waits, now or later."""
        self._abandoned = True
        for seat in self._seats:
            with contextlib.suppress(RuntimeError):  # the gate is open
                seat.gate.release()

    def _sleep(self, rank: int) -> None:
        self._seats[rank].gate.acquire()
        if self._abandoned:
            raise RankEnded
        self._running = rank

    def _next(self, rank: int) -> int:
        """The next rank that can run. If none can, each rank that waits gets a turn in which it raises."""
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
        states: the state of each rank, in words.
    """
    return "\n".join(["no rank can go on:", *(f"  rank {rank} {state}" for rank, state in enumerate(states))])
