"""The main thread, which runs the program: where it waits, and how another thread raises an error in it."""

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
    """Samples the main thread, to find out whether and where it waits in a collective that is not shardcompile's.

    Args:
        spins: whether a waiting thread may use CPU time, as with NCCL, which polls.

    Attributes:
        blocked: for how many seconds it has waited in such a collective; 0 if it does not.
    """

    def __init__(self, spins: bool) -> None:
        self._spins = spins
        self._ident = threading.main_thread().ident
        self._position: tuple[int, int] | None = None
        self._cpu = 0.0
        self._since = time.monotonic()
        self.blocked = 0.0

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._ident or 0)

    def sample(self) -> None:
        """Takes a sample. The thread counts as blocked if its instruction is the same and it uses no CPU time."""
        frame = self._frame()
        position = None if frame is None else (id(frame), frame.f_lasti)
        cpu = time.clock_gettime(time.pthread_getcpuclockid(self._ident)) if self._ident else 0.0
        file = "" if frame is None else frame.f_code.co_filename
        computes = cpu - self._cpu > 0.02 and not (self._spins and file.endswith(_COLLECTIVES_OF_TORCH))
        if position != self._position or computes:
            self._since = time.monotonic()
        self._position, self._cpu = position, cpu
        in_collective = file.endswith((_OPS_OF_TORCH, _COLLECTIVES_OF_TORCH))
        self.blocked = time.monotonic() - self._since if in_collective else 0.0

    def place(self) -> str:
        """Returns the innermost line that is neither in torch nor in shardcompile, as ``file:line in function``."""
        frame = self._frame()
        while frame is not None and not _is_user_code(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return ""
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


_OPS_OF_TORCH, _COLLECTIVES_OF_TORCH = "torch/_ops.py", "torch/distributed/distributed_c10d.py"
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _is_user_code(file: str) -> bool:
    generated = file.startswith("<") or "torchinductor_" in file
    of_python = file.startswith(_PYTHON) and "site-packages" not in file
    return not (generated or of_python or file.startswith((_OURS, _TORCH)))


def tell_main_thread(text: str) -> None:
    """Makes the main thread raise a `DivergenceError` with this text as soon as it runs Python."""

    def init(self: DivergenceError) -> None:
        DivergenceError.__init__(self, text)

    names = {"__init__": init, "__module__": DivergenceError.__module__}
    raise_in_main_thread(type(DivergenceError.__name__, (DivergenceError,), names))
