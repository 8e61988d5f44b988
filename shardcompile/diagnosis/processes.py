"""Identifies the machine and the process table of a process id, and checks whether a process is alive."""

from __future__ import annotations

import contextlib
import functools
import os
import socket


@functools.cache
def machine() -> str:
    """Returns the name of the machine and its process table, within which process ids are unique."""
    process_table = ""
    with contextlib.suppress(OSError):
        process_table = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        process_table += file.read().strip()
    return f"{socket.gethostname()} {process_table}"


def is_alive(pid: int) -> bool:
    """Returns whether a process of this machine runs: it exists, and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return True
