"""Which rank a thread is, where the ranks of a test are threads of one process."""

from __future__ import annotations

import threading


class _Here(threading.local):
    rank: int | None = None


_HERE = _Here()


def be_rank(rank: int) -> None:
    """Have this thread be a rank, for good."""
    _HERE.rank = rank


def rank_of_thread() -> int | None:
    """The rank that this thread is; None where a process is one rank, in all of its threads."""
    return _HERE.rank
