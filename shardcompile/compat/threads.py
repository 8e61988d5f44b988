"""Which rank a thread is, if the ranks of a test are threads of one process, and listeners to one rank each.

Also what threads need so that they may end after they have entered a `FakeTensorMode`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch


class _Here(threading.local):
    rank: int | None = None


_HERE = _Here()


def be_rank(rank: int) -> None:
    """Make this thread a rank for the rest of its life."""
    hold_device_guard()
    _HERE.rank = rank


def ranks_are_threads() -> bool:
    """Whether this thread is a rank: compiled code is then the same object for all ranks."""
    return rank_of_thread() is not None


def rank_of_thread() -> int | None:
    """The rank that this thread is; None if the whole process is one rank."""
    return _HERE.rank


def raise_in_main_thread(error: type[BaseException]) -> None:
    """Have the main thread raise, as soon as it is in Python.

    Args:
        error: is made without arguments.
    """
    ident = threading.main_thread().ident
    if ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


def hold_device_guard() -> None:
    """Let this thread enter a `FakeTensorMode`, and end later.

    A build of torch for CUDA without a GPU registers a stand-in for CUDA's device guard at the first entry. It is
    thread-local (`ensureCUDADeviceGuardSet` in c10, 2.11 - 2.15), so that the next entry after the thread's end is a
    segmentation fault. A thread that never ends enters first here.
    """
    if threading.current_thread() is not threading.main_thread() and torch.version.cuda is not None:
        _hold_device_guard()


@functools.cache
def _hold_device_guard() -> None:
    if torch.cuda.is_available():
        return
    entered = threading.Event()

    def hold() -> None:
        torch._C._ensureCUDADeviceGuardSet()  # 2.11 - 2.15
        entered.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="shardcompile device guard", daemon=True).start()
    entered.wait()


_T = TypeVar("_T")


class Listeners(Generic[_T]):
    """Listeners, each for what its own rank does, and the patches of torch that they need.

    Ranks that are threads come and go in any order. If each put in its own patches, they would not be taken out in
    reverse order. So the patches go in with the first listener, and out with the last one.

    Args:
        install: puts in the patches, and pushes what takes them out onto the stack that it gets.
    """

    def __init__(self, install: Callable[[contextlib.ExitStack], None] = lambda patches: None) -> None:
        self._install = install
        self._entries: list[tuple[int | None, _T]] = []
        self._patches = contextlib.ExitStack()

    @contextlib.contextmanager
    def with_one_more(self, listener: _T) -> Iterator[None]:
        """Inside the context, `listener` listens to what this rank does."""
        if not self._entries:
            self._install(self._patches)
        entry = (rank_of_thread(), listener)
        self._entries.append(entry)
        try:
            yield
        finally:
            self._entries.remove(entry)
            if not self._entries:
                self._patches.close()

    def here(self) -> list[_T]:
        """The listeners of this rank, the outermost first."""
        return [listener for rank, listener in self._entries if rank == rank_of_thread()]
