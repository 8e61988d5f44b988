"""gloo that behaves as NCCL does: calls return at once, and a thread of each rank is the device's queue.

What a call receives is not there when it returns; only who waits for the queue may read it. A call whose peer is gone
keeps the queue until the group is aborted, as a kernel of NCCL does.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.distributed import ProcessGroup, Work

from shardcompile import compat
from shardcompile.diagnosis import connections, recorded_calls
from shardcompile.diagnosis.backends import Backend, register_backend
from shardcompile.diagnosis.queued import Passed

_QUEUES: dict[int, queue.SimpleQueue[Callable[[], object]]] = {}
_ABORTED = threading.Event()


def _put(step: Callable[[], object]) -> None:
    """Have the queue of this process take a step, when it comes to it."""
    if os.getpid() not in _QUEUES:
        _QUEUES[os.getpid()] = queue.SimpleQueue()
        threading.Thread(target=_run, args=[_QUEUES[os.getpid()]], daemon=True).start()
    _QUEUES[os.getpid()].put(step)


def _run(steps: queue.SimpleQueue[Callable[[], object]]) -> None:
    while True:
        try:
            steps.get()()
        except RuntimeError:
            _ABORTED.wait()


class _Queued(Work):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: object = None) -> bool:
        _put(self._work.wait)
        return True


def _queued(result: Any) -> Any:
    if isinstance(result, list):
        return [_queued(r) for r in result]
    return _Queued(result) if isinstance(result, Work) and not isinstance(result, _Queued) else result


def _mark() -> Passed:
    passed = threading.Event()
    _put(passed.set)
    return passed.is_set


def _abort(groups: Sequence[ProcessGroup]) -> None:
    _ABORTED.set()
    connections.close_all_but(connections.port_of(compat.store()))


def put_in() -> None:
    """Have gloo be like this in this process, and in those that it forks."""
    run = recorded_calls.Call.run

    def run_queued(self: recorded_calls.Call, steps: Iterable[Callable[[], Any]]) -> list[Any]:
        return [_queued(result) for result in run(self, steps)]

    recorded_calls.Call.run = run_queued  # type: ignore[assignment, method-assign]
    compat.abort = _abort
    register_backend(Backend("gloo", agrees=False, aborts=True, mark=_mark))
