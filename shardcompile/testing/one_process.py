"""All ranks of a world in this process: threads that take turns, in a world of `torch.distributed` of their own."""

from __future__ import annotations

import contextlib
import ctypes
import pdb
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.compat import one_process as rank_state
from shardcompile.testing.cleanup import forget_compiled, seed
from shardcompile.testing.here import default_mesh, set_mesh_shape
from shardcompile.testing.meetings import MeetingError
from shardcompile.testing.thread_group import BACKENDS, Rooms
from shardcompile.testing.turns import RankEnded, RanksWaitError, Turns

_T = TypeVar("_T")


@dataclass
class RankEnd:
    """How a function ended on one rank.

    Attributes:
        result: what it returned.
        error: what it raised.
        running: where it was when its time was over, as text.
    """

    result: Any = None
    error: BaseException | None = None
    running: str = ""


class TurnStore(dist.Store):
    """The key-value store of ranks that are threads: who waits for a key lets others run."""

    def __init__(self, rooms: Rooms) -> None:
        super().__init__()
        self._rooms = rooms
        self._values: dict[str, bytes] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """The value of a key, once there is one."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Let others run until all keys have values.

        Raises:
            RanksWaitError: no rank can go on.
        """
        names = ", ".join(keys)
        self._rooms.turns.wait(
            rank_state.here().rank, lambda: self._has(keys), lambda: f"{names} in the store of the process group"
        )

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values; others run before the answer is no."""
        if not self._has(keys):
            self._rooms.turns.let_others_run(rank_state.here().rank)
        return self._has(keys)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(k in self._values for k in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether there was one."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Number of keys."""
        return len(self._values)


@dataclass
class _Shared:
    """What `once` has found, in its order.

    Attributes:
        results: of each call where the action stands, and what it has given, or raised.
        asked: how many calls each rank has made.
    """

    results: list[Any] = field(default_factory=list)
    asked: dict[int, int] = field(default_factory=dict)


_SHARED: _Shared | None = None


def once(action: Callable[[], _T]) -> _T:
    """Do on one rank what gives the same on every rank.

    Where ranks are threads of one process, the first rank that gets here acts, and all share what it returns: do not
    change that. Where each rank is a process, all act. Call it on every rank, in the same order.

    Args:
        action: must not communicate.

    Raises:
        MeetingError: this rank has come to another action than those before it.
    """
    shared = _SHARED
    if shared is None:
        return action()
    rank = rank_state.here().rank
    number = shared.asked.get(rank, 0)
    shared.asked[rank] = number + 1
    if number == len(shared.results):
        shared.results.append((_place_of(action), *_attempt(action)))
    place, result, error = shared.results[number]
    if place != _place_of(action):
        here = _place_of(action)
        raise MeetingError(f"call {number} of `once` is {place} on another rank, and {here} on rank {rank}")
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _place_of(action: Callable[[], object]) -> str:
    code = getattr(action, "__code__", None)
    return repr(action) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _attempt(action: Callable[[], object]) -> tuple[object, BaseException | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def standing_mesh() -> DeviceMesh:
    """A mesh of one dim over all ranks, which this rank makes once: torch takes a millisecond to make one."""
    state = rank_state.here()
    state.standing = state.standing or default_mesh()
    return state.standing


_SECONDS_TO_END = 5.0


class RankThreads:
    """The ranks of a world, as threads that stay from call to call.

    Args:
        world_size: number of ranks.
        device: type of the devices that have the ranks' tensors; ranks may share a GPU.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        if device == "cuda":
            torch.cuda.init()  # from here on random numbers of GPUs are each rank's own, too
        self._rooms = Rooms(world_size, device)
        self._store = TurnStore(self._rooms)
        self._world_size = world_size
        excepthook = sys.excepthook  # torch writes the rank in front of each line of an error, for each rank that joins
        with rank_state.in_rank_threads():
            self._threads = [_RankThread(rank, world_size, self._rooms) for rank in range(world_size)]
            ends = self._on_all(self._join, None)
        sys.excepthook = excepthook
        for end in ends:
            if end.error is not None:
                raise end.error

    @property
    def usable(self) -> bool:
        """Whether all ranks came to their end the last time."""
        return bool(self._threads)

    def run(
        self,
        function: Callable[[int], object],
        timeout: float | None = None,
        mesh_shape: tuple[int, ...] | None = None,
        first: int = 0,
    ) -> list[RankEnd]:
        """Call a function on every rank.

        Args:
            function: called with the rank.
            timeout: seconds after which ranks that still run are given up; the threads cannot be used again then.
                Time in a debugger does not count.
            mesh_shape: what `shardcompile.testing.mesh` gives.
            first: the rank that runs first. It compiles what the others then use.

        Returns:
            How it ended, by rank.
        """
        global _SHARED

        def one_test(rank: int) -> object:
            try:
                return function(rank)
            finally:
                rank_state.here().forget()

        outer, _SHARED = _SHARED, _Shared()
        set_mesh_shape(mesh_shape)
        try:
            with rank_state.in_rank_threads():
                seed()  # every rank starts from what this thread has
                ends = self._on_all(one_test, timeout, first)
                self._forget()
        finally:
            set_mesh_shape(None)
            _SHARED = outer
        return ends

    def close(self) -> None:
        """End the threads, and wait until they have: one that still runs when Python ends may take the process down."""
        for thread in self._threads:
            thread.leave()
        for thread in self._threads:
            thread.join(_SECONDS_TO_END)
        self._threads = []

    def _join(self, rank: int) -> None:
        # Torch makes a prefix store of ours, which waits in C++: others could not run.
        dist.init_process_group(BACKENDS[self._rooms.device], store=self._store, rank=rank, world_size=self._world_size)
        rank_state.use_store(self._store)

    def _forget(self) -> None:
        self._store.clear()
        self._rooms.forget()
        forget_compiled()
        rank_state.forget_graphs()
        compat.start_epoch()

    def _on_all(self, function: Callable[[int], object], timeout: float | None, first: int = 0) -> list[RankEnd]:
        kept = rank_state.save_rank_globals()
        turns = self._rooms.turns = Turns(
            self._world_size, rank_state.save_rank_globals, rank_state.restore_rank_globals, _refuse_while_compiling
        )
        ends = [RankEnd() for _ in self._threads]
        for rank, thread in enumerate(self._threads):
            thread.call(function, turns, ends[rank], kept)
        ended = False
        try:
            with _debugging_stops_the_clock(turns, timeout) as over:
                turns.start(first)
                ended = over()
        finally:  # after Ctrl-C, too
            if not ended:
                self._give_up(turns, ends)
        return ends

    def _give_up(self, turns: Turns, ends: Sequence[RankEnd]) -> None:
        frame = sys._current_frames().get(self._threads[turns.running].ident or 0)
        ends[turns.running].running = "".join(traceback.format_stack(frame)) if frame is not None else "?"
        for end in ends:
            end.running = end.running or "it waited for its turn"
        turns.abandon()
        self._threads[turns.running].interrupt()  # the others wait, and have just been told to end
        self._threads = []


class _RankThread(threading.Thread):
    """One rank of some."""

    def __init__(self, rank: int, ranks: int, rooms: Rooms) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self._ranks = ranks
        self._state = rank_state.RankState(rank, rooms)
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def call(self, function: Callable[[int], object], turns: Turns, end: RankEnd, kept: list[Any]) -> None:
        """Have this rank call a function when its turn comes."""
        self._calls.put((function, turns, end, kept))

    def leave(self) -> None:
        """Have this thread end after the calls that it has got."""
        self._calls.put(None)

    def interrupt(self) -> None:
        """Have this thread end at the next line of Python that it comes to."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(RankEnded))

    def run(self) -> None:
        """Serve calls."""
        rank_state.enter_rank(self._state)
        rank = self._state.rank
        while (call := self._calls.get()) is not None:
            function, turns, end, kept = call
            try:
                turns.begin(rank)
                rank_state.restore_rank_globals(kept)
                with rank_state.settings_of_ranks(self._ranks):
                    end.result = function(rank)
            except RankEnded:
                return
            except BaseException as error:
                end.error = error
            turns.end(rank, _how(end.error))
            del call, function, turns, end, kept


def _how(error: BaseException | None) -> str:
    if error is None:
        return "has come to its end"
    first_line = str(error).partition("\n")[0]
    return f"has raised {type(error).__name__}: {first_line}"


def _refuse_while_compiling(what: str) -> None:
    """A rank that compiles holds locks that others need: they could not run, and nobody would see why."""
    if compat.is_compiling():
        raise RanksWaitError(
            f"this rank would wait while it compiles a function: for {what}. Nothing may communicate then: move it "
            "out of the compiled function, or use a functional collective, which becomes part of the graph"
        )


def raise_worst(ends: Sequence[RankEnd]) -> None:
    """Raise what a rank raised, if any did: the one to look at first. A note says on which rank, and where others are.

    Raises:
        RuntimeError: some rank came to no end.
    """
    late = [rank for rank, end in enumerate(ends) if end.running]
    if late:
        where = "\n".join(f"rank {rank}: {ends[rank].running}" for rank in late)
        raise RuntimeError(f"the time is over, and not all of {len(ends)} ranks in this process have ended\n{where}")
    failed = {rank: end.error for rank, end in enumerate(ends) if end.error is not None}
    by_itself = [rank for rank, error in failed.items() if not isinstance(error, (RanksWaitError, MeetingError))]
    if not failed:
        return
    rank = next(iter(by_itself or failed))
    error = failed[rank]
    others = [f"rank {r} {_how(end.error)}" for r, end in enumerate(ends) if r != rank]
    error.add_note("\n".join([f"on rank {rank} of {len(ends)} in one process", *others]))
    raise error


@contextlib.contextmanager
def _debugging_stops_the_clock(turns: Turns, timeout: float | None) -> Iterator[Callable[[], bool]]:
    """What waits for the end of a run; without end where somebody has entered a debugger."""
    debugged = threading.Event()
    interaction = pdb.Pdb.interaction

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        debugged.set()
        return interaction(self, *args, **kwargs)

    def over() -> bool:
        return turns.join(timeout) or (debugged.is_set() and turns.join(None))

    pdb.Pdb.interaction = noted  # type: ignore[method-assign]
    try:
        yield over
    finally:
        pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
