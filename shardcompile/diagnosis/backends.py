"""The backends whose process groups are watched. `shardcompile.collectives.transport` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardcompile.diagnosis.queued import Passed


class Backend(NamedTuple):
    """The properties of a backend that matter while a rank waits.

    Attributes:
        name: the name in `torch.distributed`.
        agrees: whether ranks can meet by small messages with tags before a collective of torch's.
        aborts: whether aborting the group ends a wait. Otherwise closed connections end it.
        mark: notes the end of the device's queue, if calls wait on the queue and not on the host; None otherwise.
    """

    name: str
    agrees: bool
    aborts: bool
    mark: Callable[[], Passed] | None = None


_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Have the groups of a backend watched."""
    _BACKENDS[backend.name] = backend


def backend_of(name: str) -> Backend | None:
    """The watched backend of this name, or None."""
    return _BACKENDS.get(name)
