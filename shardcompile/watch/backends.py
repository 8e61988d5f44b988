"""The backends whose process groups are looked after; `shardcompile.collectives.transport` says what they are like."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardcompile.watch.queued import Passed


class Backend(NamedTuple):
    """What matters of a backend when a rank waits.

    Attributes:
        name: as `torch.distributed` has it.
        agrees: whether ranks can wait for one another by small messages with tags before a collective of torch's.
        aborts: whether a wait ends when the group is aborted; otherwise connections are closed.
        mark: notes the end of the device's queue, where calls wait on that and not on the host; otherwise None.
    """

    name: str
    agrees: bool
    aborts: bool
    mark: Callable[[], Passed] | None = None


_BACKENDS: dict[str, Backend] = {}


def look_after(backend: Backend) -> None:
    """Watch the groups of a backend."""
    _BACKENDS[backend.name] = backend


def backend_of(name: str) -> Backend | None:
    """A backend that is looked after, or None."""
    return _BACKENDS.get(name)
