"""In-process ranks: threads that take turns, each with its own `torch.distributed` state."""

from __future__ import annotations

import contextlib
import contextvars
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
from shardcompile.testing.current import default_mesh, set_mesh_shape
from shardcompile.testing.rendezvous import RendezvousError
from shardcompile.testing.scheduler import RankEnded, RanksWaitError, ThreadScheduler
from shardcompile.testing.thread_group import BACKENDS, Rooms

_T = TypeVar("_T")


@dataclass
class RankEnd:
    """How a function ended on one rank.

    Attributes:
        result: the result of the function.
        error: the exception that it raised, or None.
        running: the stack at the timeout, as text; empty if the function has ended.
    """

    result: Any = None
    error: BaseException | None = None
    running: str = ""


class ThreadStore(dist.Store):
    """The key-value store of in-process ranks. A rank that waits for a key lets other ranks run."""

    def __init__(self, rooms: Rooms) -> None:
        super().__init__()
        self._rooms = rooms
        self._values: dict[str, bytes] = {}

    def clear(self) -> None:
        """Deletes all keys."""
        self._values.clear()

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Returns the value of a key. Waits until the key exists."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Lets other ranks run until all keys exist.

        Raises:
            RanksWaitError: no rank can go on.
        """
        names = ", ".join(keys)
        self._rooms.scheduler.wait(
            rank_state.here().rank, lambda: self._has(keys), lambda: f"{names} in the store of the process group"
        )

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys exist. Lets other ranks run before it returns False, so that callers can poll."""
        if not self._has(keys):
            self._rooms.scheduler.let_others_run(rank_state.here().rank)
        return self._has(keys)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(k in self._values for k in keys)

    def add(self, key: str, amount: int) -> int:
        """Adds to an integer, and returns the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def delete_key(self, key: str) -> bool:
        """Deletes a key, and returns whether it existed."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Returns the number of keys."""
        return len(self._values)


@dataclass
class _Shared:
    """The results of `once`, which in-process ranks share.

    Attributes:
        results: for each call, in order: the source location of the action, its result, and its exception.
        num_calls: the number of calls that each rank has made.
    """

    results: list[Any] = field(default_factory=list)
    num_calls: dict[int, int] = field(default_factory=dict)


_SHARED: _Shared | None = None


def once(action: Callable[[], _T]) -> _T:
    """Computes a rank-invariant value on one rank only. Call this on every rank, in the same order.

    If ranks are threads of one process, the first rank computes the value, and all ranks share the result: do not
    modify it. If each rank is a process, each rank computes it.

    Args:
        action: computes the value. It must not communicate.

    Raises:
        RendezvousError: another rank has called this with another action.
    """
    shared = _SHARED
    if shared is None:
        return action()
    rank = rank_state.here().rank
    number = shared.num_calls.get(rank, 0)
    shared.num_calls[rank] = number + 1
    if number == len(shared.results):
        shared.results.append((_source_location(action), *_attempt(action)))
    location, result, error = shared.results[number]
    own_location = _source_location(action)
    if location != own_location:
        raise RendezvousError(
            f"call {number} of `once` is {location} on another rank, and {own_location} on rank {rank}: call it in the "
            "same order on every rank"
        )
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _source_location(action: Callable[[], object]) -> str:
    code = getattr(action, "__code__", None)
    return repr(action) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _attempt(action: Callable[[], object]) -> tuple[object, BaseException | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def standing_mesh() -> DeviceMesh:
    """Returns a mesh of one dim over all ranks. It is made once for each rank, since that takes a millisecond."""
    state = rank_state.here()
    state.standing = state.standing or default_mesh()
    return state.standing


_SECONDS_TO_END = 5.0


class RankThreads:
    """The in-process ranks of a world: threads that are reused from call to call.

    Args:
        world_size: the number of ranks.
        device: the type of the tensors' devices. Ranks may share a GPU.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        if device == "cuda":
            torch.cuda.init()  # from now on each rank saves and restores the random state of GPUs
        self._rooms = Rooms(world_size, device)
        self._store = ThreadStore(self._rooms)
        self._world_size = world_size
        # Each `init_process_group` wraps the hook, to print the rank before each line.
        excepthook = sys.excepthook
        caller = _Caller()
        with rank_state.in_rank_threads():
            self._threads = [_RankThread(rank, world_size, self._rooms) for rank in range(world_size)]
            ends = self._on_all(self._join, None, caller)
        sys.excepthook = excepthook
        for end in ends:
            if end.error is not None:
                raise end.error

    @property
    def usable(self) -> bool:
        """Whether all ranks ended in the last call."""
        return bool(self._threads)

    def run(
        self,
        function: Callable[[int], object],
        timeout: float | None = None,
        mesh_shape: tuple[int, ...] | None = None,
        first: int = 0,
    ) -> list[RankEnd]:
        """Calls a function on every rank.

        Args:
            function: takes the rank. It starts with the context variables of the calling thread, and so with its
                settings of torch's compiler.
            timeout: seconds after which ranks that still run are abandoned. The threads cannot be used again then. Time
                in a debugger does not count.
            mesh_shape: the shape of `shardcompile.testing.mesh`.
            first: the rank that runs first. It compiles, and the others use its code.

        Returns:
            How the function ended on each rank.
        """
        global _SHARED

        def call(rank: int) -> object:
            try:
                return function(rank)
            finally:
                rank_state.here().forget()

        outer, _SHARED = _SHARED, _Shared()
        set_mesh_shape(mesh_shape)
        caller = _Caller()  # taken before the settings of ranks are in place
        try:
            with rank_state.in_rank_threads():
                seed()  # every rank starts with the random state of this thread
                ends = self._on_all(call, timeout, caller, first)
                self._forget()
        finally:
            set_mesh_shape(None)
            _SHARED = outer
        return ends

    def close(self) -> None:
        """Ends the threads, and joins them. A thread that still runs when Python ends may crash the process."""
        for thread in self._threads:
            thread.leave()
        for thread in self._threads:
            thread.join(_SECONDS_TO_END)
        self._threads = []

    def _join(self, rank: int) -> None:
        # Torch wraps this store in a PrefixStore, which waits in C++, where no other rank could run.
        dist.init_process_group(BACKENDS[self._rooms.device], store=self._store, rank=rank, world_size=self._world_size)
        rank_state.use_store(self._store)

    def _forget(self) -> None:
        self._store.clear()
        self._rooms.forget()
        forget_compiled()
        rank_state.forget_graphs()
        compat.start_epoch()

    def _on_all(
        self, function: Callable[[int], object], timeout: float | None, caller: _Caller, first: int = 0
    ) -> list[RankEnd]:
        caller.rank_globals = rank_state.save_rank_globals()
        scheduler = self._rooms.scheduler = ThreadScheduler(
            self._world_size, rank_state.save_rank_globals, rank_state.restore_rank_globals, _refuse_while_compiling
        )
        ends = [RankEnd() for _ in self._threads]
        for rank, thread in enumerate(self._threads):
            thread.call(function, scheduler, ends[rank], caller)
        ended = False
        try:
            with _no_timeout_in_debugger(scheduler, timeout) as wait_for_end:
                scheduler.start(first)
                ended = wait_for_end()
        finally:  # after Ctrl-C, too
            if not ended:
                self._give_up(scheduler, ends)
        return ends

    def _give_up(self, scheduler: ThreadScheduler, ends: Sequence[RankEnd]) -> None:
        frame = sys._current_frames().get(self._threads[scheduler.running].ident or 0)
        ends[scheduler.running].running = "".join(traceback.format_stack(frame)) if frame is not None else "?"
        for end in ends:
            end.running = end.running or "it waited for its turn"
        scheduler.abandon()
        self._threads[scheduler.running].interrupt()  # the other ranks wait, and end by `abandon`
        self._threads = []


@dataclass
class _Caller:
    """The state of the calling thread that its in-process ranks inherit.

    Attributes:
        context: the context variables, among them the settings of torch's compiler (`torch._dynamo.config`).
        recompiles: torch's recompile limit.
        rank_globals: the result of `save_rank_globals`.
    """

    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    recompiles: int = field(default_factory=rank_state.recompile_limit)
    rank_globals: list[Any] = field(default_factory=list)


class _RankThread(threading.Thread):
    """The thread of one rank."""

    def __init__(self, rank: int, ranks: int, rooms: Rooms) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self._ranks = ranks
        self._state = rank_state.RankState(rank, rooms)
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def call(
        self, function: Callable[[int], object], scheduler: ThreadScheduler, end: RankEnd, caller: _Caller
    ) -> None:
        """Queues a function, which the rank calls at its turn."""
        # A copy for each rank: threads cannot be in one context at the same time.
        self._calls.put((function, scheduler, end, caller, caller.context.copy()))

    def leave(self) -> None:
        """Ends this thread after its pending calls."""
        self._calls.put(None)

    def interrupt(self) -> None:
        """Ends this thread at its next line of Python."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(RankEnded))

    def run(self) -> None:
        """Runs queued calls until `leave` is called."""
        rank_state.enter_rank(self._state)
        rank = self._state.rank
        while (call := self._calls.get()) is not None:
            function, scheduler, end, caller, context = call
            try:
                scheduler.begin(rank)
                rank_state.restore_rank_globals(caller.rank_globals)
                end.result = context.run(self._with_settings, function, self._ranks * caller.recompiles)
            except RankEnded:
                return
            except BaseException as error:
                end.error = error
            scheduler.end(rank, _ending(end.error))
            del call, function, scheduler, end, caller, context

    def _with_settings(self, function: Callable[[int], object], recompiles: int) -> object:
        with rank_state.settings_of_ranks(recompiles):
            return function(self._state.rank)


def _ending(error: BaseException | None) -> str:
    if error is None:
        return "has come to its end"
    first_line = str(error).partition("\n")[0]
    return f"has raised {type(error).__name__}: {first_line}"


def _refuse_while_compiling(what: str) -> None:
    """Raises if a rank would wait while it compiles. It holds locks of the compiler, so no other rank could run."""
    if compat.is_compiling():
        raise RanksWaitError(
            f"this rank would wait while it compiles a function: for {what}. Move this communication out of the "
            "compiled function, or use a functional collective, which becomes part of the graph"
        )


def raise_worst(ends: Sequence[RankEnd]) -> None:
    """Raises the most telling exception of all ranks, if any. A note names its rank and how the other ranks ended.

    Raises:
        RuntimeError: some rank did not end.
    """
    late = [rank for rank, end in enumerate(ends) if end.running]
    if late:
        where = "\n".join(f"rank {rank}: {ends[rank].running}" for rank in late)
        raise RuntimeError(f"the time is over, and not all of {len(ends)} ranks in this process have ended\n{where}")
    failed = {rank: end.error for rank, end in enumerate(ends) if end.error is not None}
    independent = [rank for rank, error in failed.items() if not isinstance(error, (RanksWaitError, RendezvousError))]
    if not failed:
        return
    rank = next(iter(independent or failed))
    error = failed[rank]
    others = [f"rank {r} {_ending(end.error)}" for r, end in enumerate(ends) if r != rank]
    error.add_note("\n".join([f"on rank {rank} of {len(ends)} in one process", *others]))
    raise error


@contextlib.contextmanager
def _no_timeout_in_debugger(scheduler: ThreadScheduler, timeout: float | None) -> Iterator[Callable[[], bool]]:
    """Gives a function that waits for the end of a run. Once a debugger was entered, the wait has no timeout."""
    debugged = threading.Event()
    interaction = pdb.Pdb.interaction

    def note_and_interact(self: pdb.Pdb, *args: Any, **kwargs: Any) -> None:
        debugged.set()
        return interaction(self, *args, **kwargs)

    def wait_for_end() -> bool:
        return scheduler.join(timeout) or (debugged.is_set() and scheduler.join(None))

    pdb.Pdb.interaction = note_and_interact  # type: ignore[method-assign]
    try:
        yield wait_for_end
    finally:
        pdb.Pdb.interaction = interaction  # type: ignore[method-assign]
