"""Where a process has its number, and whether it is alive."""

from __future__ import annotations

import contextlib
import functools
import os
import socket


@functools.cache
def machine() -> str:
    """The name of the machine and its process table. A process id identifies a process within these."""
    table = ""
    with contextlib.suppress(OSError):
        table = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        table += file.read().strip()
    return f"{socket.gethostname()} {table}"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs: it exists, and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"  # a zombie
    return True
