"""Calls that wait on the queue of a device, as those of NCCL do, while the host goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")

Passed = Callable[[], bool]
"""Whether a device has passed a place of its queue."""

_LOOK_FROM = 64
"""From this number of places on, a new call drops those that were passed. Below it, the watching thread does."""

_MOST = 1024
"""The most places that are kept. Further calls are not noted until the device has passed some."""


class Queued(Generic[C]):
    """For each call, the place of the queue behind it, in order. Several threads may use it."""

    def __init__(self) -> None:
        self._places: deque[tuple[C, Passed, float]] = deque()
        self._lock = threading.Lock()

    def note(self, call: C, passed: Passed) -> None:
        """Keep the place behind a call.

        Args:
            call: that was started, or waited for, on the device's queue.
            passed: tells whether the device has passed the present end of the queue.
        """
        if len(self._places) >= _LOOK_FROM:
            self.oldest()
        if len(self._places) < _MOST:
            self._places.append((call, passed, time.monotonic()))

    def oldest(self) -> tuple[C, float] | None:
        """The first call that the device has not passed, and the time when it was noted; None if there is none."""
        with self._lock:
            while self._places:
                call, passed, since = self._places[0]
                if not passed():
                    return call, since
                self._places.popleft()
        return None
