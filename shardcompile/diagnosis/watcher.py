"""The thread that writes the state of this rank for the others, and finds out whether the rank waits without end."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardcompile import compat, config
from shardcompile.compat.threads import rank_of_thread
from shardcompile.diagnosis import connections
from shardcompile.diagnosis.backends import backend_of
from shardcompile.diagnosis.deadlock import verdict
from shardcompile.diagnosis.main_thread import MainThread, tell_main_thread
from shardcompile.diagnosis.processes import is_alive, machine
from shardcompile.diagnosis.queued import Queued
from shardcompile.diagnosis.states import CAME_TO_ITS_END, LEFT, ORDERLY_ENDS, State, Stay
from shardcompile.errors import DivergenceError, ShardError

if TYPE_CHECKING:
    from shardcompile.diagnosis.recorded_calls import Call, Members

log = logging.getLogger("shardcompile")

PERIOD_SECONDS = 0.5
"""How often a rank writes its state, and reads whether there is a verdict."""
SUSPICIOUS_SECONDS = 2.0
"""How long a rank waits before it reads the states of the others."""
SILENT_SECONDS = 6.0
"""How long a rank on another machine may be silent before it counts as dead, if a connection has broken."""
LOST_SECONDS = 300.0
"""The same if no connection has broken. A rank on this machine counts as dead when its process is gone."""
PATIENCE_SECONDS = 9.0
"""How long a rank whose connection has broken waits for a verdict."""
_RANK_0_HOLDS_STORE = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
"""Whether rank 0 holds the key-value store. Otherwise a launcher holds it."""
_PEERS_AT_ONCE = 32
_RECENT_WITH_TEXT, _MORE_WITH_TEXT = 4, 32
"""How many calls are published with their text; more where the program runs ahead of the device."""


class World:
    """The watch over the ranks of a default process group.

    Attributes:
        waits: the calls that wait now, each with the start of the wait and its thread.
        queued: the calls that wait on the queue of a device.
        verdict: why ranks wait without end; None if none is known to.
        members: for each group that was used, the calls of this rank.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.waits: dict[Call, tuple[float, int]] = {}
        self.queued: Queued[Call] = Queued()
        self.verdict: str | None = None
        self.members: list[Members] = []
        self._group = weakref.ref(group)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._backend = backend_of(dist.get_backend())
        self._queues = self._backend is not None and self._backend.mark is not None
        self._store: Any = compat.store()
        self._prefix = f"shardcompile/diagnosis/{_number_of_world()}"
        self._judged = threading.Event()
        self._stop = threading.Event()
        self._beat, self._turn = 0, 0
        self._ended = ""
        self._broken = False
        self._store_lost = 0.0
        self._store_error: RuntimeError | None = None
        self._states: dict[int, State] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._main = MainThread(spins=self._queues)
        self._moved, self._quiet_since = 0, time.monotonic()
        self._publish()
        self._thread = threading.Thread(target=self._watch, name="shardcompile watch", daemon=True)
        self._thread.start()

    # Called by ranks that communicate

    def explain_failure(self, what: str, error: RuntimeError) -> ShardError:
        """The error for a call whose connection broke. It waits for a verdict that says why."""
        if isinstance(error, ShardError):
            return error
        self._broken = True
        self._judged.wait(PATIENCE_SECONDS)
        if self.verdict is not None:
            return DivergenceError(self.verdict)
        return DivergenceError(
            f"{what} failed, and no rank has said why: {error}. Look at the logs of the other ranks and at the network"
        )

    def end(self, how: str) -> None:
        """Write how this rank ended, for ranks that wait for it."""
        if self._ended:
            return
        self._ended = how
        if self._store_lost:
            return
        with contextlib.suppress(RuntimeError):
            self._publish()
            self._store.set(f"{self._prefix}/ended", str(self._rank))

    def finish(self) -> None:
        """Wait for the calls that this rank has put on the device's queue: other ranks wait for them.

        They would end with the process. If they cannot be completed, this ends the process with status 70.
        """
        if self._ended or self.queued.oldest() is None:
            return
        with contextlib.suppress(DivergenceError):  # told to the main thread, whose program has come to its end
            while self.verdict is None and self.queued.oldest() is not None:
                time.sleep(PERIOD_SECONDS / 50)
            if self.verdict is None:
                return
        self.end(f"has been told: {self.verdict}")
        self.linger()
        log.critical("rank %d ends, since what it has started cannot be completed: %s", self._rank, self.verdict)
        os._exit(70)

    def linger(self) -> None:
        """Stop watching. Rank 0 may hold the store, so it first gives the others time to read how it ended.

        On the queue of a device, calls that differ may be complete before the watch looks, with wrong values. So rank 0
        compares the statements of all ranks, and ends its process with status 70 if they differ.
        """
        orderly = self.verdict is None and self._ended in ORDERLY_ENDS
        end = time.monotonic() + (2.5 if orderly else 4) * PERIOD_SECONDS
        waits = self._rank == 0 and (_RANK_0_HOLDS_STORE or self._queues)
        while waits and time.monotonic() < end and not self._all_have_ended():
            time.sleep(PERIOD_SECONDS / 10)
        self._stop.set()
        self._thread.join(2)
        text = verdict(self._known(), {}) if orderly and self._rank == 0 and self._queues else None
        if text is not None:
            log.critical("rank 0 ends: the program has come to its end with wrong values: %s", text)
            os._exit(70)

    def _all_have_ended(self) -> bool:
        with contextlib.suppress(RuntimeError):
            self._read([r for r in range(self._size) if r not in self._states or not self._states[r].ended])
        return len(self._states) == self._size and all(s.ended for s in self._states.values())

    def forget(self) -> None:
        """Stop watching, in a fork of the watched process."""
        self._stop.set()

    # The thread

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            if self._group() is not _world_group():
                self.end(LEFT)
                return
            self._main.sample()
            try:
                if not self._store_lost:
                    self._look()
            except RuntimeError as error:
                self._store_lost, self._store_error = time.monotonic(), error
            if self._store_lost and self.verdict is None:
                self._without_store()
            if self.verdict is not None:
                self._insist()
                return

    def _look(self) -> None:
        self._beat += 1
        self._publish()
        if self._store.check([f"{self._prefix}/verdict"]):
            self._pronounce(self._store.get(f"{self._prefix}/verdict").decode())
            return
        if self._is_suspicious() or self._store.check([f"{self._prefix}/ended"]):
            self._read(range(self._size))
        elif self._beat % 4 == 1:
            self._read({0, (self._rank + 1) % self._size})
        else:
            return
        self._judge()
        if _RANK_0_HOLDS_STORE and self._rank and 0 in self._states and self._states[0].ended:
            # The store ends with rank 0, and torch would print a warning at each further request.
            self._store_lost, self._store_error = time.monotonic(), RuntimeError("rank 0 has ended")

    def _is_suspicious(self) -> bool:
        return self._broken or self._waited() >= SUSPICIOUS_SECONDS or self._main.blocked >= SUSPICIOUS_SECONDS

    def _waited(self) -> float:
        queued = self.queued.oldest()
        since = [since for since, _ in [*self.waits.values()]] + ([queued[1]] if queued else [])
        return time.monotonic() - min(since, default=time.monotonic())

    def _publish(self) -> None:
        self._states[self._rank] = state = self._state()
        self._store.set(f"{self._prefix}/state/{self._rank}", state.to_text())

    def _state(self) -> State:
        recent = {}
        for m in self.members:
            calls = list(m.recent)
            texts = _MORE_WITH_TEXT if self._queues else _RECENT_WITH_TEXT
            plain = [(c.number, c.tag, "") for c in calls[:-texts]]
            recent[m.key] = plain + [(c.number, c.tag, c.text()) for c in calls[-texts:]]
        counts = {m.key: m.number for m in self.members}
        return State(self._beat, os.getpid(), machine(), counts, recent, self._ended, self._stay())

    def _stay(self) -> Stay | None:
        now = time.monotonic()
        for call, (since, _) in list(self.waits.items()):
            if now - since >= SUSPICIOUS_SECONDS or self._broken:
                return self._stay_in(call, now - since, self._quiet())
        call_on_queue = self.queued.oldest()
        if call_on_queue is not None and now - call_on_queue[1] >= SUSPICIOUS_SECONDS:
            # Kernels before it may take long, so it is never a sign of a deadlock.
            return self._stay_in(call_on_queue[0], now - call_on_queue[1], quiet=0.0)
        if self._main.blocked >= SUSPICIOUS_SECONDS or self._broken:
            quiet = 0.0 if self._queues else self._quiet()
            return Stay(self._main.blocked, quiet, self._main.place())
        return None

    def _stay_in(self, call: Call, seconds: float, quiet: float) -> Stay:
        # Messages between two ranks have no number, and their receiver is not known here.
        group = call.members.key if call.members is not None and call.entry.number else ""
        return Stay(seconds, quiet, self._main.place(), group, call.entry.number, call.entry.text())

    def _quiet(self) -> float:
        """How many seconds ago a byte last moved over this rank's connections."""
        moved = connections.bytes_moved(connections.port_of(self._store))
        if moved != self._moved:
            self._moved, self._quiet_since = moved, time.monotonic()
        return time.monotonic() - self._quiet_since

    def _read(self, ranks: Iterable[int]) -> None:
        """Read the states of other ranks, of at most `_PEERS_AT_ONCE` at a time."""
        others = [r for r in ranks if r != self._rank]
        if len(others) > _PEERS_AT_ONCE:
            first = self._turn % len(others)
            others = (others[first:] + others[:first])[:_PEERS_AT_ONCE]
            self._turn += _PEERS_AT_ONCE
        for rank in others:
            key = f"{self._prefix}/state/{rank}"
            if self._store.check([key]):
                state = State.from_text(self._store.get(key).decode())
                self._states[rank] = state
                if self._seen.get(rank, (-1, 0.0))[0] != state.beat:
                    self._seen[rank] = state.beat, time.monotonic()

    def _judge(self) -> None:
        text = verdict(self._known(), self._gone())
        if text is not None:
            key = f"{self._prefix}/verdict"
            with contextlib.suppress(RuntimeError):
                text = self._store.compare_set(key, "", text).decode() or text
            self._pronounce(text)

    def _known(self) -> dict[int, State]:
        """The known states. A rank that has written none gets a state without collectives."""
        idle = State(0, 0, "")
        return {r: self._states.get(r, idle) for r in range(self._size)}

    def _gone(self) -> dict[int, str]:
        """The ranks whose processes are dead, each with how that was found out."""
        gone = {}
        now = time.monotonic()
        for rank, (_, seen) in self._seen.items():
            state, silent = self._states[rank], now - seen
            if state.ended:
                continue
            host = state.host.partition(" ")[0]
            if state.host == machine():
                if not is_alive(state.pid):
                    gone[rank] = f"has died (process {state.pid} of {host} is gone)"
            elif silent >= (SILENT_SECONDS if self._broken else LOST_SECONDS):
                gone[rank] = f"on {host} has not been heard of for {silent:.0f} s"
        return gone

    def _without_store(self) -> None:
        """Judge without the store. The rank that holds it is gone, which is normal at the end of a program."""
        if not self._is_suspicious():
            return
        self._states[self._rank] = state = self._state()
        text = verdict(self._known(), self._gone())
        if text is None and time.monotonic() - self._store_lost > 2 * SUSPICIOUS_SECONDS:
            stay = state.stay
            text = (
                f"the key-value store of the process group cannot be reached ({self._store_error}). Its holder, rank 0 "
                f"or a launcher, has ended or died; rank {self._rank} waits in "
                f"{stay.what or stay.place if stay is not None else 'a collective'}"
            )
        if text is not None:
            self._pronounce(text)

    def _pronounce(self, text: str) -> None:
        self.verdict = text
        if not self._ended:
            log.error("rank %d: %s", self._rank, text)
        self._judged.set()
        if self._backend is not None and self._backend.aborts:
            self._abort()
            return
        if not self._store_lost:
            self._close_connections()

    def _abort(self) -> None:
        """End the calls on the device's queue, and have the main thread raise: their results will never come."""
        if not self._ended:
            tell_main_thread(self.verdict or "")
        groups = [group for group in (self._group(), *(m.group() for m in self.members)) if group is not None]
        aborting = functools.partial(compat.abort, list(dict.fromkeys(groups)))
        threading.Thread(target=aborting, name="shardcompile abort", daemon=True).start()  # it may wait, too

    def _close_connections(self) -> None:
        """Close the connections to other ranks. Each rank writes the ends that it holds to the store."""
        port = connections.port_of(self._store)
        end = time.monotonic() + 4 * PERIOD_SECONDS
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/ends/{self._rank}", repr(connections.ends(port)))
        missing = set(range(self._size)) - {self._rank}
        while missing and time.monotonic() < end:
            with contextlib.suppress(RuntimeError):
                for rank in sorted(missing):
                    if self._store.check([f"{self._prefix}/ends/{rank}"]):
                        found = connections.parse_ends(self._store.get(f"{self._prefix}/ends/{rank}").decode())
                        missing.discard(rank)
                        connections.close_connections_to(found, port)
            time.sleep(PERIOD_SECONDS / 5)

    def _insist(self) -> None:
        """If the wait goes on, close all connections; if it still goes on, end the process. A hang would be worse."""
        for attempt in range(12 if self._queues else 6):
            if self._stop.wait(PERIOD_SECONDS):
                return
            self._main.sample()
            if max(self._waited(), self._main.blocked) < PERIOD_SECONDS:
                return
            if attempt == 1:
                connections.close_all_but(connections.port_of(self._store))
        log.critical("rank %d ends its process, since nothing else ends its wait: %s", self._rank, self.verdict)
        os._exit(70)


_WORLDS: weakref.WeakKeyDictionary[ProcessGroup, World] = weakref.WeakKeyDictionary()
_WORLDS_SO_FAR = 0
_LOCK = threading.Lock()


def _number_of_world() -> int:
    global _WORLDS_SO_FAR
    _WORLDS_SO_FAR += 1
    return _WORLDS_SO_FAR


def _world_group() -> ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def is_watched(group: ProcessGroup) -> bool:
    """Whether a group needs a watch: it has several ranks, which are processes, and a watched backend."""
    return group.size() > 1 and backend_of(group.name()) is not None and rank_of_thread() is None


def world_of() -> World | None:
    """The watch over the default process group, which starts at the first call; None if it is not watched."""
    group = _world_group()
    if not config.watch or group is None or not is_watched(group):
        return None
    with _LOCK:
        if group not in _WORLDS:
            if not _WORLDS_SO_FAR:
                _say_last_words()
            _WORLDS[group] = World(group)
        return _WORLDS[group]


def _say_last_words() -> None:
    """At the end of this process, write whether it raised or came to its end."""
    hook = sys.excepthook
    errors: list[BaseException | None] = []

    def raised(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        errors.append(error)
        _tell_of(error)
        hook(kind, error, traceback)

    def ended() -> None:
        errors.append(sys.exc_info()[1])  # in a `multiprocessing` process, `sys.excepthook` is not called
        _tell_of(errors[-1])
        for world in list(_WORLDS.values()):
            if all(error is None or isinstance(error, SystemExit) for error in errors):
                world.finish()
            world.end(CAME_TO_ITS_END)
            world.linger()

    def forget() -> None:
        for world in list(_WORLDS.values()):
            world.forget()
        _WORLDS.clear()

    sys.excepthook = raised
    multiprocessing.util.Finalize(None, ended, exitpriority=100)
    os.register_at_fork(after_in_child=forget)


def _tell_of(error: BaseException | None) -> None:
    """Write the error that ends this rank. If a connection broke in a compiled graph, add the verdict to the error."""
    while isinstance(error, SystemExit):
        error = error.__context__
    if error is None:
        return
    for world in list(_WORLDS.values()):
        if not isinstance(error, ShardError) and connections.is_broken(error):
            why = world.explain_failure("a collective of torch's", RuntimeError(error))
            error.add_note(f"{type(why).__name__}: {why}")
        elif world.verdict is None:
            world.end(f"has raised {type(error).__name__}: {str(error)[:500]}")


def _begin() -> None:
    world_of()


compat.forget_with_world(_begin)  # a rank is watched from its first layout on, before it communicates
