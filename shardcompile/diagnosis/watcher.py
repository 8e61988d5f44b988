"""The watch thread: publishes the state of this rank, and finds out whether some rank waits without end."""

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
from shardcompile.diagnosis.deadlock import diagnose
from shardcompile.diagnosis.main_thread import MainThread, tell_main_thread
from shardcompile.diagnosis.processes import is_alive, machine
from shardcompile.diagnosis.queued import Queued
from shardcompile.diagnosis.states import CAME_TO_ITS_END, LEFT, ORDERLY_ENDS, State, Stay
from shardcompile.errors import DivergenceError, ShardError

if TYPE_CHECKING:
    from shardcompile.diagnosis.recorded_calls import Call, Members

log = logging.getLogger("shardcompile")

PERIOD_SECONDS = 0.5
"""How often a rank publishes its state, and reads whether there is a diagnosis."""
SUSPICIOUS_SECONDS = 2.0
"""How long a rank waits before it reads the states of the others."""
SILENT_SECONDS = 6.0
"""How long a rank on another machine may be silent before it counts as dead, if a connection has broken."""
LOST_SECONDS = 300.0
"""As `SILENT_SECONDS`, if no connection has broken. A rank on this machine is dead when its process is gone."""
PATIENCE_SECONDS = 9.0
"""How long a rank whose connection has broken waits for a diagnosis."""
_RANK_0_HOSTS_STORE = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
"""Whether rank 0 hosts the key-value store. Otherwise a launcher hosts it."""
_PEERS_AT_ONCE = 32
_RECENT_WITH_TEXT, _MORE_WITH_TEXT = 4, 32
"""The number of calls that are published with their text; more if the program runs ahead of the device."""


class World:
    """The watch over the ranks of a default process group.

    Attributes:
        waits: the calls that wait now, each with the start of the wait and its thread.
        queued: the calls that wait on the queue of a device.
        diagnosis: why ranks wait without end; None if no rank is known to.
        members: the calls of this rank, for each group that it has used.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.waits: dict[Call, tuple[float, int]] = {}
        self.queued: Queued[Call] = Queued()
        self.diagnosis: str | None = None
        self.members: list[Members] = []
        self._group = weakref.ref(group)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._backend = backend_of(dist.get_backend())
        self._queues = self._backend is not None and self._backend.mark is not None
        self._store: Any = compat.store()
        self._prefix = f"shardcompile/diagnosis/{_number_of_world()}"
        self._diagnosed = threading.Event()
        self._stop = threading.Event()
        self._beat, self._next_peer = 0, 0
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

    # Called by the threads that communicate

    def explain_failure(self, what: str, error: RuntimeError) -> ShardError:
        """Returns the error for a call whose connection broke. Waits for a diagnosis that says why."""
        if isinstance(error, ShardError):
            return error
        self._broken = True
        self._diagnosed.wait(PATIENCE_SECONDS)
        if self.diagnosis is not None:
            return DivergenceError(self.diagnosis)
        return DivergenceError(
            f"{what} failed, and no rank has said why: {error}. Look at the logs of the other ranks and at the network"
        )

    def end(self, how: str) -> None:
        """Publishes the exit status of this rank, for ranks that wait for it."""
        if self._ended:
            return
        self._ended = how
        if self._store_lost:
            return
        with contextlib.suppress(RuntimeError):
            self._publish()
            self._store.set(f"{self._prefix}/ended", str(self._rank))

    def finish(self) -> None:
        """Waits for the calls that this rank has put on the device's queue, which other ranks depend on.

        They would end with the process. If they cannot be completed, this ends the process with status 70.
        """
        if self._ended or self.queued.oldest() is None:
            return
        with contextlib.suppress(DivergenceError):  # raised in the main thread, at the end of its program
            while self.diagnosis is None and self.queued.oldest() is not None:
                time.sleep(PERIOD_SECONDS / 50)
            if self.diagnosis is None:
                return
        self.end(f"has been told: {self.diagnosis}")
        self.linger()
        log.critical("rank %d ends, since what it has started cannot be completed: %s", self._rank, self.diagnosis)
        os._exit(70)

    def linger(self) -> None:
        """Stops watching. Rank 0 may host the store, so it first gives the others time to read its exit status.

        On the queue of a device, calls that differ may complete with wrong values before the watch sees them. So rank 0
        compares the records of all ranks, and ends its process with status 70 if they differ.
        """
        orderly = self.diagnosis is None and self._ended in ORDERLY_ENDS
        end = time.monotonic() + (2.5 if orderly else 4) * PERIOD_SECONDS
        waits = self._rank == 0 and (_RANK_0_HOSTS_STORE or self._queues)
        while waits and time.monotonic() < end and not self._all_have_ended():
            time.sleep(PERIOD_SECONDS / 10)
        self._stop.set()
        self._thread.join(2)
        text = diagnose(self._all_states(), {}) if orderly and self._rank == 0 and self._queues else None
        if text is not None:
            log.critical("rank 0 ends: the program has come to its end with wrong values: %s", text)
            os._exit(70)

    def _all_have_ended(self) -> bool:
        with contextlib.suppress(RuntimeError):
            self._read([r for r in range(self._size) if r not in self._states or not self._states[r].ended])
        return len(self._states) == self._size and all(s.ended for s in self._states.values())

    def forget(self) -> None:
        """Stops watching, in a fork of the watched process."""
        self._stop.set()

    # Runs in the watch thread

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            if self._group() is not _world_group():
                self.end(LEFT)
                return
            self._main.sample()
            try:
                if not self._store_lost:
                    self._poll()
            except RuntimeError as error:
                self._store_lost, self._store_error = time.monotonic(), error
            if self._store_lost and self.diagnosis is None:
                self._diagnose_without_store()
            if self.diagnosis is not None:
                self._force_end()
                return

    def _poll(self) -> None:
        self._beat += 1
        self._publish()
        if self._store.check([f"{self._prefix}/diagnosis"]):
            self._apply_diagnosis(self._store.get(f"{self._prefix}/diagnosis").decode())
            return
        if self._is_suspicious() or self._store.check([f"{self._prefix}/ended"]):
            self._read(range(self._size))
        elif self._beat % 4 == 1:
            self._read({0, (self._rank + 1) % self._size})
        else:
            return
        self._diagnose()
        if _RANK_0_HOSTS_STORE and self._rank and 0 in self._states and self._states[0].ended:
            # The store ends with rank 0, and torch would print a warning for each further request.
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
            # Kernels before it may take long, so this wait never counts as a deadlock.
            return self._stay_in(call_on_queue[0], now - call_on_queue[1], quiet=0.0)
        if self._main.blocked >= SUSPICIOUS_SECONDS or self._broken:
            quiet = 0.0 if self._queues else self._quiet()
            return Stay(self._main.blocked, quiet, self._main.place())
        return None

    def _stay_in(self, call: Call, seconds: float, quiet: float) -> Stay:
        # Messages between two ranks have no sequence number, and their receiver is unknown.
        group = call.members.key if call.members is not None and call.entry.number else ""
        return Stay(seconds, quiet, self._main.place(), group, call.entry.number, call.entry.text())

    def _quiet(self) -> float:
        """Returns the seconds since a byte moved over the connections of this rank."""
        moved = connections.bytes_moved(connections.port_of(self._store))
        if moved != self._moved:
            self._moved, self._quiet_since = moved, time.monotonic()
        return time.monotonic() - self._quiet_since

    def _read(self, ranks: Iterable[int]) -> None:
        """Reads the states of other ranks, of at most `_PEERS_AT_ONCE` at a time."""
        others = [r for r in ranks if r != self._rank]
        if len(others) > _PEERS_AT_ONCE:
            first = self._next_peer % len(others)
            others = (others[first:] + others[:first])[:_PEERS_AT_ONCE]
            self._next_peer += _PEERS_AT_ONCE
        for rank in others:
            key = f"{self._prefix}/state/{rank}"
            if self._store.check([key]):
                state = State.from_text(self._store.get(key).decode())
                self._states[rank] = state
                if self._seen.get(rank, (-1, 0.0))[0] != state.beat:
                    self._seen[rank] = state.beat, time.monotonic()

    def _diagnose(self) -> None:
        text = diagnose(self._all_states(), self._gone())
        if text is not None:
            key = f"{self._prefix}/diagnosis"
            with contextlib.suppress(RuntimeError):
                text = self._store.compare_set(key, "", text).decode() or text
            self._apply_diagnosis(text)

    def _all_states(self) -> dict[int, State]:
        """Returns a state for every rank. A rank that has written none gets a state without collectives."""
        idle = State(0, 0, "")
        return {r: self._states.get(r, idle) for r in range(self._size)}

    def _gone(self) -> dict[int, str]:
        """Returns the ranks whose processes are dead, each with the evidence."""
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

    def _diagnose_without_store(self) -> None:
        """Diagnoses without the store. Its host is gone, which is normal at the end of a program."""
        if not self._is_suspicious():
            return
        self._states[self._rank] = state = self._state()
        text = diagnose(self._all_states(), self._gone())
        if text is None and time.monotonic() - self._store_lost > 2 * SUSPICIOUS_SECONDS:
            stay = state.stay
            text = (
                f"the key-value store of the process group cannot be reached ({self._store_error}). Its host, rank 0 "
                f"or a launcher, has ended or died; rank {self._rank} waits in "
                f"{stay.what or stay.place if stay is not None else 'a collective'}"
            )
        if text is not None:
            self._apply_diagnosis(text)

    def _apply_diagnosis(self, text: str) -> None:
        self.diagnosis = text
        if not self._ended:
            log.error("rank %d: %s", self._rank, text)
        self._diagnosed.set()
        if self._backend is not None and self._backend.aborts:
            self._abort()
            return
        if not self._store_lost:
            self._close_connections()

    def _abort(self) -> None:
        """Aborts the calls on the device's queue, and makes the main thread raise: their results will never arrive."""
        if not self._ended:
            tell_main_thread(self.diagnosis or "")
        groups = [group for group in (self._group(), *(m.group() for m in self.members)) if group is not None]
        aborting = functools.partial(compat.abort, list(dict.fromkeys(groups)))
        threading.Thread(target=aborting, name="shardcompile abort", daemon=True).start()  # abort may block, too

    def _close_connections(self) -> None:
        """Closes the connections to other ranks. Each rank publishes its endpoints in the store."""
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

    def _force_end(self) -> None:
        """If the wait goes on, closes all connections; if it still goes on, ends the process, since a hang is worse."""
        for attempt in range(12 if self._queues else 6):
            if self._stop.wait(PERIOD_SECONDS):
                return
            self._main.sample()
            if max(self._waited(), self._main.blocked) < PERIOD_SECONDS:
                return
            if attempt == 1:
                connections.close_all_but(connections.port_of(self._store))
        log.critical("rank %d ends its process, since nothing else ends its wait: %s", self._rank, self.diagnosis)
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
    """Returns whether a group is watched: it has several ranks, which are processes, and a watched backend."""
    return group.size() > 1 and backend_of(group.name()) is not None and rank_of_thread() is None


def world_of() -> World | None:
    """Returns the watch over the default process group, which starts at the first call; None if it is not watched."""
    group = _world_group()
    if not config.watch or group is None or not is_watched(group):
        return None
    with _LOCK:
        if group not in _WORLDS:
            if not _WORLDS_SO_FAR:
                _publish_exit_status()
            _WORLDS[group] = World(group)
        return _WORLDS[group]


def _publish_exit_status() -> None:
    """Registers hooks that publish, at the end of this process, whether it raised or came to its end."""
    hook = sys.excepthook
    errors: list[BaseException | None] = []

    def raised(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        errors.append(error)
        _publish_error(error)
        hook(kind, error, traceback)

    def ended() -> None:
        errors.append(sys.exc_info()[1])  # in a `multiprocessing` process, `sys.excepthook` is not called
        _publish_error(errors[-1])
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


def _publish_error(error: BaseException | None) -> None:
    """Publishes the error that ends this rank. If a connection broke in a compiled graph, adds the diagnosis to it."""
    while isinstance(error, SystemExit):
        error = error.__context__
    if error is None:
        return
    for world in list(_WORLDS.values()):
        if not isinstance(error, ShardError) and connections.is_broken(error):
            why = world.explain_failure("a collective of torch's", RuntimeError(error))
            error.add_note(f"{type(why).__name__}: {why}")
        elif world.diagnosis is None:
            world.end(f"has raised {type(error).__name__}: {str(error)[:500]}")


def _begin() -> None:
    world_of()


compat.forget_with_world(_begin)  # the watch starts with the first layout, before the rank communicates
