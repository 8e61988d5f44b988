"""Calls that wait on a queue of the device, as NCCL's do, while the program on the host goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")

Passed = Callable[[], bool]
"""Whether a device has come to the place of its queue where this was made."""

_LOOK_FROM = 64
"""So many places are kept before a call looks which of them were passed; otherwise the watching thread looks."""

_MOST = 1024
"""No more places are kept: those that come then are left out until some were passed."""


class Queued(Generic[C]):
    """The places of a queue behind calls, in their order. One thread notes them; another looks which were passed."""

    def __init__(self) -> None:
        self._places: deque[tuple[C, Passed, float]] = deque()
        self._lock = threading.Lock()

    def note(self, call: C, passed: Passed) -> None:
        """Keep the place behind a call.

        Args:
            call: that was started, or waited for, on the device's queue.
            passed: whether the device has come to the end of the queue as it is now.
        """
        if len(self._places) >= _LOOK_FROM:
            self.oldest()
        if len(self._places) < _MOST:
            self._places.append((call, passed, time.monotonic()))

    def oldest(self) -> tuple[C, float] | None:
        """The first call whose place was not passed, and since when it is in the queue; None if there is none."""
        with self._lock:
            while self._places:
                call, passed, since = self._places[0]
                if not passed():
                    return call, since
                self._places.popleft()
        return None
