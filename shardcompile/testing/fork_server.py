"""A fork server: a process that imports the modules that ranks need once, and forks every rank.

Importing torch and shardcompile takes several seconds of CPU. Forked ranks have the modules already, and share their
memory. Ranks cannot be forked if there is an accelerator, whose driver does not survive a fork, or from a process with
several threads. In these cases each rank starts a new interpreter.
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
    """Starts a new interpreter, which calls a function of this package with a file descriptor.

    Args:
        function: the function, as ``module:name``. It takes the file descriptor.
        descriptor: a file descriptor that stays open in the new process.
        environment: the environment of the process.
        output: the file descriptor for stdout and stderr.
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
    """A process forked by the fork server, with the methods of `subprocess.Popen` that ranks need.

    Attributes:
        pid: the id of the process, and of its process group. The system does not reuse it before `bury`.
    """

    def __init__(self, pid: int, status: int, server: ForkServer) -> None:
        self.pid = pid
        self._status = status
        self._process = _pidfd(pid)
        self._fork_server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while the process runs."""
        if self._code is None and _readable(self._status, 0):
            reported = os.read(self._status, _CODE.size)
            if not reported and self._process is not None and not _readable(self._process, 0):
                return None  # the fork server has died, but the process still runs
            self._code = _CODE.unpack(reported)[0] if reported else _UNKNOWN_CODE
            os.close(self._status)
            if self._process is not None:
                os.close(self._process)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process to end, and returns its exit code.

        Args:
            timeout: the longest wait in seconds; None for no limit.

        Raises:
            subprocess.TimeoutExpired: the process still runs after the timeout.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for descriptor in (self._process, self._status):  # the fork server reports an end with a short delay
            if self._code is None and descriptor is not None:
                _readable(descriptor, None if deadline is None else max(0.0, deadline - time.monotonic()))
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout or 0.0)
        return code

    def bury(self) -> None:
        """Releases the process id of the ended process, as `waitpid` does."""
        self._fork_server.bury(self.pid)

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _pidfd(pid: int) -> int | None:
    """Opens a file descriptor that becomes readable when the process ends; None before Linux 5.3."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _readable(descriptor: int, timeout: float | None) -> bool:
    return bool(select.select([descriptor], [], [], timeout)[0])


class ForkServer:
    """A process that forks ranks, as its client sees it.

    Args:
        environment: the environment that all ranks share.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.made_for = _inherited_state(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            main = "shardcompile.testing.fork_server:serve"
            self._process = start_fresh(main, theirs.fileno(), environment, subprocess.DEVNULL)
        self._socket.settimeout(_START_SECONDS)
        self._forks: bool | None = None
        self._lock = threading.Lock()

    @property
    def forks(self) -> bool:
        """Whether the server can fork ranks. The first call waits until it has imported its modules."""
        if self._forks is None:
            try:
                self._forks = self._socket.recv(_MESSAGE_BYTES) == _YES
            except OSError:
                self._forks = False
            if not self._forks:
                self.close()
        return self._forks and self._process.poll() is None

    def fork(self, own: Mapping[str, str], connection: int, output: int) -> ForkedProcess:
        """Forks a new rank, which serves a connection.

        Args:
            own: the environment of this rank alone.
            connection: the file descriptor of the connection, for `worker.main`.
            output: the file descriptor for stdout and stderr.

        Raises:
            OSError: the fork server has died.
        """
        status, theirs = os.pipe()
        try:
            message = json.dumps({"own": dict(own)}).encode()
            with self._lock:
                socket.send_fds(self._socket, [message], [connection, output, theirs])
                pid = int(self._socket.recv(_MESSAGE_BYTES) or b"0")
        finally:
            os.close(theirs)
        if not pid:
            os.close(status)
            raise OSError("the fork server has died")
        return ForkedProcess(pid, status, self)

    def bury(self, pid: int) -> None:
        """Releases the id of a process that has ended."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"bury": pid}).encode())

    def close(self) -> None:
        """Ends the fork server. Ranks that it forked keep running."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def fork_server_for(environment: Mapping[str, str]) -> ForkServer | None:
    """Returns the fork server of this process, which starts at the first call; None if ranks cannot be forked.

    Args:
        environment: the environment that all ranks share. There is one server at a time: another environment, working
            directory or `sys.path` replaces it.
    """
    if sys.platform != "linux":
        return None
    server = _SERVERS.get(os.getpid())
    if server is None or server.made_for != _inherited_state(environment):
        if server is not None:
            server.close()
        _SERVERS.clear()
        server = _SERVERS[os.getpid()] = ForkServer(environment)
    return server if server.forks else None


_SERVERS: dict[int, ForkServer] = {}
"""The fork server by process id, since a fork of this process does not own its fork server."""


@atexit.register
def _close() -> None:
    server = _SERVERS.get(os.getpid())
    if server is not None:
        server.close()


def _inherited_state(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Returns all that a forked rank inherits from the start of the server. If it changes, a new server is needed."""
    return tuple(sorted(environment.items())), tuple(sys.path), os.getcwd(), sys.executable


# Runs in the process of the fork server


def serve(descriptor: int) -> NoReturn:
    """Forks ranks until the client closes its end of the socket.

    Args:
        descriptor: the file descriptor of the socket.
    """
    requests = socket.socket(fileno=descriptor)
    requests.set_inheritable(False)
    forks = _import_what_ranks_need()
    requests.send(_YES if forks else _NO)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, _MESSAGE_BYTES)
            _report_ends(running)
        if requests.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
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
                requests.close()
                _be_rank(message["own"], connection, output)
            running[pid] = status
            os.close(connection)
            os.close(output)
            requests.send(str(pid).encode())


def _import_what_ranks_need() -> bool:
    """Imports the modules, and returns whether this process can be forked."""
    # Loaded here, once, so that forked ranks have it.
    import torch

    import shardcompile.testing.worker  # noqa: F401
    from shardcompile import compat

    compat.load_inductor()
    gc.collect()
    gc.freeze()  # otherwise a collection in a rank would write to, and so copy, all shared pages
    return not torch.accelerator.is_available() and len(os.listdir("/proc/self/task")) == 1


def _report_ends(running: dict[int, int]) -> None:
    """Reports exit codes, but keeps the process ids: the client may be about to kill one of these process groups."""
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
