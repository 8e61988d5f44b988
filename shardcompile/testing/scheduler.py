"""A cooperative scheduler for in-process ranks: exactly one thread runs, until it has to wait for another one.

Nothing interrupts a rank between two waits, so runs are deterministic, and a debugger sees one thread at a time. If no
thread can run, there is a deadlock, which is detected at once.
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


def _always() -> bool:
    return True


def _locked() -> threading.Lock:
    gate = threading.Lock()  # lighter than a semaphore, which Python builds from locks
    gate.acquire()
    return gate


@dataclass
class _ThreadState:
    """The state of a thread.

    Attributes:
        gate: a lock that is held while it is another thread's turn.
        ready: whether the thread can continue; None while it runs, or after its end.
        what: describes what the thread waits for.
        stuck: the text of a deadlock that this rank must raise, or None.
        ended: how the thread ended; None before its end.
    """

    gate: threading.Lock = field(default_factory=_locked)
    ready: Callable[[], bool] | None = _always  # every thread starts by waiting for its first turn
    what: Callable[[], str] = str
    stuck: str | None = None
    ended: str | None = None


class ThreadScheduler:
    """Schedules threads, one for each rank, so that exactly one of them runs at a time.

    Args:
        count: the number of threads.
        leave: a thread calls it when its turn ends. Its result is passed to `enter`.
        enter: a thread calls it when its next turn begins.
        check: a thread calls it before it waits, with what it would wait for. It raises if the thread must not wait.
    """

    def __init__(
        self,
        count: int,
        leave: Callable[[], object] = lambda: None,
        enter: Callable[[Any], None] = lambda _: None,
        check: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._threads = [_ThreadState() for _ in range(count)]
        self._leave, self._enter, self._check = leave, enter, check
        self._all_ended = threading.Event()
        self._abandoned = False
        self._running = 0

    @property
    def running(self) -> int:
        """The rank whose turn it is."""
        return self._running

    def start(self, first: int = 0) -> None:
        """Gives a rank the first turn. All threads must call `begin` at some time."""
        self._threads[first].gate.release()

    def begin(self, rank: int) -> None:
        """Waits for this rank's first turn."""
        self._sleep(rank)
        self._threads[rank].ready = None

    def wait(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Lets other ranks run until a condition holds.

        Args:
            rank: the rank whose turn it is.
            ready: the condition. Any thread may call it, at any time.
            what: describes what this rank waits for.

        Raises:
            RanksWaitError: no rank can go on.
        """
        if ready():
            return
        self._check(what())
        self._yield_turn(rank, ready, what)
        state = self._threads[rank]
        if not ready():
            text, state.stuck = state.stuck, None
            raise RanksWaitError(text)

    def let_others_run(self, rank: int) -> None:
        """Lets other ranks run until they wait, end, or call this, too."""
        self._yield_turn(rank, _always, str)

    def _yield_turn(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        state = self._threads[rank]
        state.ready, state.what = ready, what
        saved = self._leave()
        following = self._next(rank)
        if following != rank:
            self._threads[following].gate.release()
            self._sleep(rank)
        state.ready = None
        self._enter(saved)

    def end(self, rank: int, how: str) -> None:
        """Marks a rank as ended, and gives the turn to the next rank.

        Args:
            rank: the rank.
            how: how it ended, for the message of ranks that wait for it.
        """
        state = self._threads[rank]
        state.ready, state.ended = None, how
        if all(s.ended is not None for s in self._threads):
            self._all_ended.set()
        else:
            self._threads[self._next(rank)].gate.release()

    def join(self, timeout: float | None) -> bool:
        """Waits until all ranks have ended, and returns whether they have.

        Args:
            timeout: the longest wait in seconds; None for no limit.
        """
        return self._all_ended.wait(timeout)

    def abandon(self) -> None:
        """Ends every rank that waits, now or later."""
        self._abandoned = True
        for state in self._threads:
            with contextlib.suppress(RuntimeError):  # the gate is open
                state.gate.release()

    def _sleep(self, rank: int) -> None:
        self._threads[rank].gate.acquire()
        if self._abandoned:
            raise RankEnded
        self._running = rank

    def _next(self, rank: int) -> int:
        """Returns the next rank that can run. If none can, every rank that waits gets a turn in which it raises."""
        count = len(self._threads)
        order = [(rank + 1 + i) % count for i in range(count)]
        waiting = [r for r in order if self._threads[r].ready is not None]
        able = next((r for r in waiting if self._can_continue(self._threads[r])), None)
        if able is None:
            text = describe_wait([self._describe(r) for r in range(count)])
            for r in waiting:
                self._threads[r].stuck = text
            able = waiting[0]
        return able

    @staticmethod
    def _can_continue(state: _ThreadState) -> bool:
        return state.stuck is not None or (state.ready is not None and state.ready())

    def _describe(self, rank: int) -> str:
        state = self._threads[rank]
        return f"waits for {state.what()}" if state.ended is None else state.ended


def describe_wait(states: Sequence[str]) -> str:
    """Returns the message of a deadlock.

    Args:
        states: the description of the state of each rank.
    """
    return "\n".join(["no rank can go on:", *(f"  rank {rank} {state}" for rank, state in enumerate(states))])
