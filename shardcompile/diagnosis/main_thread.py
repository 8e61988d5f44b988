"""The thread that runs the program: where it stands, and an error for it if ranks are found to differ."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

import torch

from shardcompile.compat.threads import raise_in_main_thread
from shardcompile.errors import DivergenceError


class MainThread:
    """Whether the main thread stands still in a collective that is not ours, and where it is.

    Args:
        spins: whether who waits may compute meanwhile, as NCCL does.
    """

    def __init__(self, spins: bool) -> None:
        self._spins = spins
        self._ident = threading.main_thread().ident
        self._at: tuple[int, int] | None = None
        self._cpu = 0.0
        self._since = time.monotonic()
        self.blocked = 0.0

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._ident or 0)

    def sample(self) -> None:
        """Look where it is. It stands still if it neither moves on nor computes."""
        frame = self._frame()
        at = None if frame is None else (id(frame), frame.f_lasti)
        cpu = time.clock_gettime(time.pthread_getcpuclockid(self._ident)) if self._ident else 0.0
        file = "" if frame is None else frame.f_code.co_filename
        computes = cpu - self._cpu > 0.02 and not (self._spins and file.endswith(_COLLECTIVES_OF_TORCH))
        if at != self._at or computes:
            self._since = time.monotonic()
        self._at, self._cpu = at, cpu
        in_collective = file.endswith((_OPS_OF_TORCH, _COLLECTIVES_OF_TORCH))
        self.blocked = time.monotonic() - self._since if in_collective else 0.0

    def place(self) -> str:
        """The innermost line that is neither torch's nor ours."""
        frame = self._frame()
        while frame is not None and not _is_the_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


_OPS_OF_TORCH, _COLLECTIVES_OF_TORCH = "torch/_ops.py", "torch/distributed/distributed_c10d.py"
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _is_the_users(file: str) -> bool:
    generated = file.startswith("<") or "torchinductor_" in file
    of_python = file.startswith(_PYTHON) and "site-packages" not in file
    return not (generated or of_python or file.startswith((_OURS, _TORCH)))


def tell_main_thread(text: str) -> None:
    """Have the main thread raise a `DivergenceError` of this text, as soon as it is in Python."""

    def init(self: DivergenceError) -> None:
        DivergenceError.__init__(self, text)

    names = {"__init__": init, "__module__": DivergenceError.__module__}
    raise_in_main_thread(type(DivergenceError.__name__, (DivergenceError,), names))
