"""Ends waits from outside: closes the connections between this rank and the others."""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

_TCP = (socket.AF_INET, socket.AF_INET6)

Endpoints = tuple[str, int, str, int]
"""Own address and port, the peer's address and port."""


def endpoints() -> dict[int, Endpoints]:
    """By file descriptor, the ends of every TCP connection of this process; none where they are not listed."""
    found: dict[int, Endpoints] = {}
    for fd in _descriptors():
        with contextlib.suppress(OSError), _opened(fd) as connection:
            if connection is not None and connection.family in _TCP and connection.type == socket.SOCK_STREAM:
                here, there = connection.getsockname(), connection.getpeername()
                found[fd] = (here[0], here[1], there[0], there[1])
    return found


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _opened(fd: int) -> Iterator[socket.socket | None]:
    """The socket of a file descriptor, which stays open; None if it is no socket."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        yield None
        return
    with socket.socket(fileno=os.dup(fd)) as connection:
        yield connection


def bytes_moved(port_of_store: int | None) -> int:
    """Bytes that have been sent and received over the TCP connections of this process but those to the store.

    0 where the system does not tell: `tcp_info` of Linux has them from 4.1 on, at bytes 120 and 128.
    """
    total = 0
    for fd, (_, port, _, peer_port) in endpoints().items():
        if port_of_store in (port, peer_port) or not hasattr(socket, "TCP_INFO"):
            continue
        with contextlib.suppress(OSError), _opened(fd) as connection:
            info = b"" if connection is None else connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            if len(info) >= 136:
                total += sum(struct.unpack_from("=QQ", info, 120))
    return total


def close_those_with(others: set[Endpoints], port_of_store: int | None) -> int:
    """Shut down the connections of which another rank holds the other end, but for those to the store.

    Nothing is freed: who waits on a connection finds that it was closed, and raises.

    Args:
        others: the ends of connections as other ranks see them.
        port_of_store: of the key-value store.

    Returns:
        How many were closed.
    """
    closed = 0
    for fd, (address, port, peer, peer_port) in endpoints().items():
        if (peer, peer_port, address, port) in others and port_of_store not in (port, peer_port):
            with contextlib.suppress(OSError), _opened(fd) as connection:
                if connection is not None:
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
    return closed


def close_all_but(port_of_store: int | None) -> None:
    """Shut down all TCP connections of this process but those to the store."""
    close_those_with({(e[2], e[3], e[0], e[1]) for e in endpoints().values()}, port_of_store)


def is_broken(error: BaseException) -> bool:
    """Whether an error of torch's says that a connection between ranks has broken."""
    return isinstance(error, RuntimeError) and any(part in str(error) for part in ("gloo/transport", "NCCL"))


def parsed(text: str) -> set[Endpoints]:
    """The ends of connections from their ``repr``."""
    return {(str(a), int(p), str(b), int(q)) for a, p, b, q in ast.literal_eval(text)}
