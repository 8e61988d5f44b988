"""Calls that wait on the queue of a device while the host continues, as NCCL calls do."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")

Passed = Callable[[], bool]
"""Returns whether the device has passed an event of its queue, as `torch.cuda.Event.query` does."""

_PRUNE_FROM = 64
"""From this number of events on, a new call drops those that were passed. Below it, the watching thread does."""

_MOST = 1024
"""The most events that are kept. Further calls are not noted until the device has passed some."""


class Queued(Generic[C]):
    """For each call, the event behind it in the device's queue, in order. Thread-safe."""

    def __init__(self) -> None:
        self._places: deque[tuple[C, Passed, float]] = deque()
        self._lock = threading.Lock()

    def note(self, call: C, passed: Passed) -> None:
        """Adds the event behind a call.

        Args:
            call: the call, which was started, or waited for, on the device's queue.
            passed: returns whether the device has passed the present end of the queue.
        """
        if len(self._places) >= _PRUNE_FROM:
            self.oldest()
        if len(self._places) < _MOST:
            self._places.append((call, passed, time.monotonic()))

    def oldest(self) -> tuple[C, float] | None:
        """Returns the first call that the device has not passed, and the time it was noted; None if there is none."""
        with self._lock:
            while self._places:
                call, passed, since = self._places[0]
                if not passed():
                    return call, since
                self._places.popleft()
        return None
