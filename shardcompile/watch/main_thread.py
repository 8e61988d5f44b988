"""Where the main thread of a rank is, and whether it stands still in a collective that states nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

import torch

_WAITING_FILES = ("torch/_ops.py", "torch/distributed/distributed_c10d.py")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _is_the_users(file: str) -> bool:
    generated = file.startswith("<") or "torchinductor_" in file
    of_python = file.startswith(_PYTHON) and "site-packages" not in file
    return not (generated or of_python or file.startswith((_OURS, _TORCH)))


class MainThread:
    """Whether the main thread stands still in a foreign collective, and where it is."""

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident
        self._at: tuple[int, int] | None = None
        self._cpu = 0.0
        self._since = time.monotonic()
        self.blocked = 0.0

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._ident or 0)

    def sample(self) -> None:
        """Note where the thread is. It stands still if it neither moves on nor uses the CPU."""
        frame = self._frame()
        at = None if frame is None else (id(frame), frame.f_lasti)
        cpu = time.clock_gettime(time.pthread_getcpuclockid(self._ident)) if self._ident else 0.0
        if at != self._at or cpu - self._cpu > 0.02:
            self._since = time.monotonic()
        self._at, self._cpu = at, cpu
        in_collective = frame is not None and frame.f_code.co_filename.endswith(_WAITING_FILES)
        self.blocked = time.monotonic() - self._since if in_collective else 0.0

    def place(self) -> str:
        """The innermost line of the user's code, as ``file:line in function``, or an empty text."""
        frame = self._frame()
        while frame is not None and not _is_the_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
