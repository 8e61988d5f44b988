"""A process that imports the modules that ranks need, and forks ranks, so that ranks start without imports.

To import torch and shardcompile takes several seconds of CPU. Forked ranks have the modules already, and share their
memory. Ranks cannot be forked if there is an accelerator, whose driver does not survive a fork, or from a process with
several threads. Then each rank starts a new interpreter.
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
import time
import traceback
from collections.abc import Mapping
from typing import NoReturn

# A new interpreter needs this process's `sys.path` before it can import our modules.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import {} as run; run(int(sys.argv[2]))"
_START_SECONDS = 120.0
_MESSAGE_BYTES = 1 << 16
_YES, _NO = b"forks", b"does not fork"
_CODE = struct.Struct("i")
_UNKNOWN_CODE = 255


def start_fresh(function: str, descriptor: int, environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """Start a new interpreter that calls a function of one of our modules with a descriptor.

    Args:
        function: the function, as ``module:name``. It takes the descriptor.
        descriptor: a descriptor that stays open in the new process.
        environment: the environment of the process.
        output: the descriptor for stdout and stderr.
    """
    return subprocess.Popen(
        [sys.executable, "-u", "-c", _BOOT.format(*function.split(":")), json.dumps(sys.path), str(descriptor)],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[descriptor],
        start_new_session=True,  # Ctrl-C goes to pytest alone; and the session can be killed as a whole
    )


class ForkedProcess:
    """A process that a nursery has forked, with the methods of `subprocess.Popen` that ranks need.

    Attributes:
        pid: the id of the process, and of its process group. The system does not reuse it before `bury`.
    """

    def __init__(self, pid: int, status: int, nursery: Nursery) -> None:
        self.pid = pid
        self._status = status
        self._process = _descriptor_of(pid)
        self._nursery = nursery
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while the process runs."""
        if self._code is None and _readable(self._status, 0):
            told = os.read(self._status, _CODE.size)
            if not told and self._process is not None and not _readable(self._process, 0):
                return None  # the nursery is gone, not the process
            self._code = _CODE.unpack(told)[0] if told else _UNKNOWN_CODE
            os.close(self._status)
            if self._process is not None:
                os.close(self._process)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return the exit code.

        Args:
            timeout: the longest wait in seconds; None for no limit.

        Raises:
            subprocess.TimeoutExpired: the process still runs after the timeout.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for descriptor in (self._process, self._status):  # a nursery tells of an end a moment after it
            if self._code is None and descriptor is not None:
                _readable(descriptor, None if deadline is None else max(0.0, deadline - time.monotonic()))
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout or 0.0)
        return code

    def bury(self) -> None:
        """Release the process id after the end of the process."""
        self._nursery.bury(self.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _descriptor_of(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None before Linux 5.3."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _readable(descriptor: int, timeout: float | None) -> bool:
    return bool(select.select([descriptor], [], [], timeout)[0])


class Nursery:
    """Forks all ranks from one process.

    Args:
        environment: the environment that all ranks share.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.made_for = _surroundings(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            served = "shardcompile.testing.fork_server:serve"
            self._process = start_fresh(served, theirs.fileno(), environment, subprocess.DEVNULL)
        self._socket.settimeout(_START_SECONDS)
        self._forks: bool | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def forks(self) -> bool:
        """Whether it can fork ranks. The first answer waits until the process has imported its modules."""
        if self._forks is None:
            try:
                self._forks = self._socket.recv(_MESSAGE_BYTES) == _YES
            except OSError:
                self._forks = False
            if not self._forks:
                self.close()
        return self._forks and self._process.poll() is None

    def fork(self, own: Mapping[str, str], connection: int, output: int) -> ForkedProcess:
        """Fork a new rank, which serves a connection.

        Args:
            own: the environment of this rank alone.
            connection: the descriptor of the connection, for `worker.main`.
            output: the descriptor of the file for stdout and stderr.

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
        """Release the id of a process that has ended."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"bury": pid}).encode())

    def close(self) -> None:
        """End the nursery. Its ranks go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def nursery_for(environment: Mapping[str, str]) -> Nursery | None:
    """The nursery of this process, or None if ranks cannot be forked. There is one nursery at a time.

    Args:
        environment: the environment that all ranks share. Another environment replaces the nursery.
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
"""The nursery by process id, since a fork of this process does not own its nursery."""


@atexit.register
def _close() -> None:
    held = _HELD.get(os.getpid())
    if held is not None:
        held.close()


def _surroundings(environment: Mapping[str, str]) -> tuple[object, ...]:
    """What a process inherits at its start, and what modules read at their import."""
    return tuple(sorted(environment.items())), tuple(sys.path), os.getcwd(), sys.executable


# The process of the nursery


def serve(descriptor: int) -> NoReturn:
    """Fork ranks until the other process closes its end of the socket.

    Args:
        descriptor: the descriptor of the socket.
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
            _report_ends(running)
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
    """Import the modules, and return whether this process can be forked."""
    # Loaded here, once, to be forked with the process.
    import torch

    import shardcompile.testing.worker  # noqa: F401
    from shardcompile import compat

    compat.load_inductor()
    gc.collect()
    gc.freeze()  # otherwise a collection in a rank would write to, and so copy, all shared pages
    return not torch.accelerator.is_available() and len(os.listdir("/proc/self/task")) == 1


def _report_ends(running: dict[int, int]) -> None:
    """Report exit codes. The process ids are not released: another process may be about to kill that process group."""
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
