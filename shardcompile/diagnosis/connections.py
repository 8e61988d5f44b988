"""Closes the connections between this rank and the others, which ends a wait of another thread."""

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
"""The local address and port, and the peer's address and port, of a connection."""


def _connections(port_of_store: int | None) -> Iterator[tuple[socket.socket, Endpoints]]:
    """Yields the TCP connections of this process, except those to the store; none if the system does not list them."""
    for fd in _descriptors():
        with contextlib.suppress(OSError), _open(fd) as connection:
            if connection is None or connection.family not in _TCP or connection.type != socket.SOCK_STREAM:
                continue
            local, peer = connection.getsockname(), connection.getpeername()
            if port_of_store not in (local[1], peer[1]):
                yield connection, (local[0], local[1], peer[0], peer[1])


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _open(fd: int) -> Iterator[socket.socket | None]:
    """Opens the socket of a file descriptor; None if it is no socket. The descriptor stays open."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        yield None
        return
    with socket.socket(fileno=os.dup(fd)) as connection:
        yield connection


def port_of(store: object) -> int | None:
    """Returns the port of a key-value store; None if it has none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)


def ends(port_of_store: int | None) -> list[Endpoints]:
    """Returns the endpoints of all TCP connections of this process, except those to the store."""
    return [endpoints for _, endpoints in _connections(port_of_store)]


def bytes_moved(port_of_store: int | None) -> int:
    """Returns the bytes sent and received over the TCP connections of this process, except those to the store.

    The counters are those of `tcp_info` at bytes 120 and 128, since Linux 4.1. On other systems the result is 0.
    """
    total = 0
    for connection, _ in _connections(port_of_store) if hasattr(socket, "TCP_INFO") else ():
        with contextlib.suppress(OSError):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            total += sum(struct.unpack_from("=QQ", info, 120)) if len(info) >= 136 else 0
    return total


def close_connections_to(others: set[Endpoints], port_of_store: int | None) -> None:
    """Shuts down the connections to another rank, except those to the store.

    File descriptors stay open. A thread that waits on such a connection sees its end, and raises.

    Args:
        others: the endpoints of connections as the other rank lists them.
        port_of_store: the port of the key-value store.
    """
    for connection, (address, port, peer, peer_port) in _connections(port_of_store):
        if (peer, peer_port, address, port) in others:
            _shut_down(connection)


def close_all_but(port_of_store: int | None) -> None:
    """Shuts down all TCP connections of this process, except those to the store."""
    for connection, _ in _connections(port_of_store):
        _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer may have closed it
        connection.shutdown(socket.SHUT_RDWR)


def is_broken(error: BaseException) -> bool:
    """Returns whether an error from torch says that a connection between ranks broke."""
    return isinstance(error, RuntimeError) and any(part in str(error) for part in ("gloo/transport", "NCCL"))


def parse_ends(text: str) -> set[Endpoints]:
    """Parses the ``repr`` of endpoints."""
    return {(str(a), int(p), str(b), int(q)) for a, p, b, q in ast.literal_eval(text)}
