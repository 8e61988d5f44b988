"""The process of a rank, as pytest sees it: a connection to it, and its output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import Pipe

from shardcompile.testing.fork_server import ForkedProcess, fork_server_for, start_fresh
from shardcompile.testing.messages import Kind, Outcome

_OUTPUT_BYTES = 64 * 1024  # the last bytes of the output, which are kept
_DEATH_SECONDS = 2.0  # the longest time between a closed connection and the end of the process


class RankProcess:
    """A process that serves one rank.

    Attributes:
        connection: the connection to the rank, readable when the rank has answered or died.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        """Starts the process, which waits for its `Setup`."""
        self.connection, theirs = Pipe()
        self._output = _unlinked_file()
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        with theirs:
            self._process = _fork(own, theirs.fileno(), self._output) or start_fresh(
                "shardcompile.testing.worker:main", theirs.fileno(), _environment() | own, self._output
            )

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def send(self, message: object) -> None:
        """Sends a message. Does nothing for a dead rank, since `reply` reports its death."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def reply(self) -> object:
        """Returns the rank's answer, a `DIED` outcome, or None if there is no answer yet."""
        was_alive = self.alive  # checked first, since a dead rank may have sent an answer before
        if self.connection.poll():
            try:
                return self.connection.recv()
            except (EOFError, OSError):
                return Outcome(Kind.DIED, self.cause_of_death())
        return None if was_alive else Outcome(Kind.DIED, self.cause_of_death())

    def cause_of_death(self) -> str:
        """Returns the exit status of a process that no longer answers: its exit code or the signal that killed it."""
        self.wait(time.monotonic() + _DEATH_SECONDS)
        code = self._process.poll()
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):  # real-time signals have no name
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    def output(self) -> str:
        """Returns the rank's output since the last `clear_output`, stdout and stderr together."""
        size = os.fstat(self._output).st_size
        skipped = max(0, size - _OUTPUT_BYTES)
        text = os.pread(self._output, _OUTPUT_BYTES, skipped).decode(errors="replace")
        return f"[{skipped} bytes left out]\n{text}" if skipped else text

    def clear_output(self) -> None:
        """Drops the rank's output."""
        os.ftruncate(self._output, 0)
        os.lseek(self._output, 0, os.SEEK_SET)  # the rank shares this offset, and writes at the start from now on

    def print_stack(self) -> None:
        """Asks the rank to print its stack, which takes a moment. This works inside a collective, too."""
        if self.alive:
            self._process.send_signal(signal.SIGUSR1)

    def wait(self, deadline: float) -> None:
        """Waits until the process ends or `time.monotonic()` reaches the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kills the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: not permitted on a zombie
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if isinstance(self._process, ForkedProcess):
            self._process.bury()
        self.connection.close()
        os.close(self._output)


def _unlinked_file() -> int:
    """Opens a file without a name, which is deleted with its last descriptor."""
    descriptor, name = tempfile.mkstemp(prefix="shardcompile-rank-")
    os.unlink(name)
    return descriptor


def _fork(own: Mapping[str, str], connection: int, output: int) -> ForkedProcess | None:
    server = fork_server_for(_environment())
    with contextlib.suppress(OSError):  # the fork server has died
        return None if server is None else server.fork(own, connection, output)
    return None


def _environment() -> dict[str, str]:
    """Returns the environment that all ranks share."""
    defaults = {"SHARDCOMPILE_VERIFY": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    of_pytest = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
    kept = {name: value for name, value in os.environ.items() if name not in of_pytest}
    required = {
        "OMP_NUM_THREADS": "1",
        # The C++ kernels of a graph compile in parallel, in threads. No pool of compile processes starts in advance.
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "TORCH_WARM_POOL": "0",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return defaults | kept | required
