"""A process that has imported what ranks need and forks them, so that only the first one has to wait for imports.

Importing torch and shardcompile takes a rank several seconds of CPU. Forked ranks have it done already, and share the
memory. They cannot be forked where an accelerator is present, whose driver does not survive a fork, nor from a process
with more than one thread; there each rank is started afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import NoReturn

# The interpreter starts fresh, so it must be told where this process finds modules before it can import ours.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import {} as run; run(int(sys.argv[2]))"
_START_SECONDS = 120.0
_MESSAGE_BYTES = 1 << 16
_YES, _NO = b"forks", b"does not fork"
_CODE = struct.Struct("i")
_UNKNOWN_CODE = 255


def start_fresh(function: str, descriptor: int, environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """A new interpreter, which calls a function of a module of ours with a descriptor.

    Args:
        function: as ``module:name``; takes the descriptor.
        descriptor: stays open in the new process.
        environment: of the process.
        output: descriptor that takes stdout and stderr.
    """
    return subprocess.Popen(
        [sys.executable, "-u", "-c", _BOOT.format(*function.split(":")), json.dumps(sys.path), str(descriptor)],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[descriptor],
        start_new_session=True,  # Ctrl-C is for pytest; and a session of its own can be killed as one
    )


class ForkedProcess:
    """A process that a nursery has forked: what ranks need of `subprocess.Popen`.

    Attributes:
        pid: of the process, which also leads a process group. The number stays taken until `bury`.
    """

    def __init__(self, pid: int, status: int, nursery: Nursery) -> None:
        self.pid = pid
        self._status = status
        self._nursery = nursery
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while the process runs."""
        if self._code is None and select.select([self._status], [], [], 0)[0]:
            told = os.read(self._status, _CODE.size)
            self._code = _CODE.unpack(told)[0] if told else _UNKNOWN_CODE  # the nursery is gone
            os.close(self._status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not come within a number of seconds.
        """
        if self._code is None:
            select.select([self._status], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout or 0.0)
        return code

    def bury(self) -> None:
        """Give the process id free, once the process has ended."""
        self._nursery.bury(self.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """Forks ranks, from one process for all of them.

    Args:
        environment: of the ranks, but for what each one has of its own.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.made_for = _surroundings(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            served = "shardcompile.testing.nursery:serve"
            self._process = start_fresh(served, theirs.fileno(), environment, subprocess.DEVNULL)
        self._socket.settimeout(_START_SECONDS)
        self._forks: bool | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def forks(self) -> bool:
        """Whether it can fork ranks. The first time it takes until everything is imported to know."""
        if self._forks is None:
            try:
                self._forks = self._socket.recv(_MESSAGE_BYTES) == _YES
            except OSError:
                self._forks = False
            if not self._forks:
                self.close()
        return self._forks and self._process.poll() is None

    def fork(self, own: Mapping[str, str], connection: int, output: int) -> ForkedProcess:
        """A new rank, which serves a connection.

        Args:
            own: environment of this rank alone.
            connection: descriptor, passed on to `worker.main`.
            output: descriptor of the file that takes stdout and stderr.

        Raises:
            OSError: the nursery has died.
        """
        status, theirs = os.pipe()
        try:
            message = json.dumps({"own": dict(own)}).encode()
            with self._one_at_a_time:
                socket.send_fds(self._socket, [message], [connection, output, theirs])
                pid = int(self._socket.recv(_MESSAGE_BYTES) or b"0")
        finally:
            os.close(theirs)
        if not pid:
            os.close(status)
            raise OSError("the process that forks ranks has died")
        return ForkedProcess(pid, status, self)

    def bury(self, pid: int) -> None:
        """Give the number of a process free that has ended."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"bury": pid}).encode())

    def close(self) -> None:
        """End the nursery; ranks live on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def nursery_for(environment: Mapping[str, str]) -> Nursery | None:
    """The nursery of this process, if ranks can be forked here; one at a time, for one environment.

    Args:
        environment: of the ranks, but for what each one has of its own.
    """
    if sys.platform != "linux":
        return None
    held = _HELD.get(os.getpid())
    if held is None or held.made_for != _surroundings(environment):
        if held is not None:
            held.close()
        _HELD.clear()
        held = _HELD[os.getpid()] = Nursery(environment)
    return held if held.forks else None


_HELD: dict[int, Nursery] = {}
"""By process id: a process that was forked from one with a nursery has none."""


@atexit.register
def _close() -> None:
    held = _HELD.get(os.getpid())
    if held is not None:
        held.close()


def _surroundings(environment: Mapping[str, str]) -> tuple[object, ...]:
    """What a process takes over when it starts, and modules read when they are imported."""
    return tuple(sorted(environment.items())), tuple(sys.path), os.getcwd(), sys.executable


# The other side


def serve(descriptor: int) -> NoReturn:
    """Fork ranks until the process that wants them closes its end.

    Args:
        descriptor: of a socket.
    """
    asked = socket.socket(fileno=descriptor)
    asked.set_inheritable(False)
    forks = _import_what_ranks_need()
    asked.send(_YES if forks else _NO)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([asked.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, _MESSAGE_BYTES)
            _tell_who_has_ended(running)
        if asked.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, 3)
            if not data:
                os._exit(0)
            message = json.loads(data)
            if "bury" in message:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(message["bury"], 0)
                continue
            connection, output, status = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (woken, wake, status, *running.values()):
                    os.close(other)
                asked.close()
                _be_rank(message["own"], connection, output)
            running[pid] = status
            os.close(connection)
            os.close(output)
            asked.send(str(pid).encode())


def _import_what_ranks_need() -> bool:
    """Import it; returns whether this process can be forked."""
    # Loaded here, once, to be forked with the process.
    import torch

    import shardcompile.testing.worker  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise write to all the pages that are shared
    return not torch.accelerator.is_available() and len(os.listdir("/proc/self/task")) == 1


def _tell_who_has_ended(running: dict[int, int]) -> None:
    """Tell exit codes. Process ids stay taken: somebody may be about to kill the group of that number."""
    for pid, status in list(running.items()):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            with contextlib.suppress(OSError):
                os.write(status, _CODE.pack(code))
            os.close(running.pop(pid))


def _be_rank(own: Mapping[str, str], connection: int, output: int) -> NoReturn:
    # Loaded before the fork.
    from shardcompile.testing.worker import main

    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.update(own)
        main(connection)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
