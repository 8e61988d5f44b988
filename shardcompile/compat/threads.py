"""Which rank a thread is, where the ranks of a test are threads of one process, and who listens to which rank."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar


class _Here(threading.local):
    rank: int | None = None


_HERE = _Here()


def be_rank(rank: int) -> None:
    """Have this thread be a rank, for good."""
    _HERE.rank = rank


def rank_of_thread() -> int | None:
    """The rank that this thread is; None where a process is one rank, in all of its threads."""
    return _HERE.rank


def raise_in_main_thread(error: type[BaseException]) -> None:
    """Have the main thread raise, as soon as it is in Python.

    Args:
        error: is made without arguments.
    """
    ident = threading.main_thread().ident
    if ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


_T = TypeVar("_T")


class Listeners(Generic[_T]):
    """Who is to be told of something, each by its rank alone, and patches of torch that are in place meanwhile.

    Ranks that are threads come and go in any order. Patches that each of them put in place for itself would not be
    taken back in the opposite order.

    Args:
        install: puts the patches in place, for as long as the stack that it is given is open.
    """

    def __init__(self, install: Callable[[contextlib.ExitStack], None] = lambda patches: None) -> None:
        self._install = install
        self._entries: list[tuple[int | None, _T]] = []
        self._patches = contextlib.ExitStack()

    @contextlib.contextmanager
    def with_one_more(self, listener: _T) -> Iterator[None]:
        """Have somebody told inside of this, of what this rank does."""
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
