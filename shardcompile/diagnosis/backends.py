"""The backends whose process groups are watched. `shardcompile.collectives.transport` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardcompile.diagnosis.queued import Passed


class Backend(NamedTuple):
    """The properties of a backend that the watcher needs.

    Attributes:
        name: the name in `torch.distributed`.
        agrees: whether ranks can exchange small tagged messages, to compare their records before a torch collective.
        aborts: whether aborting the group ends a wait. Otherwise closing the connections ends it.
        mark: records an event at the end of the device's queue; None if calls block the host.
    """

    name: str
    agrees: bool
    aborts: bool
    mark: Callable[[], Passed] | None = None


_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Registers a backend, whose groups are watched from then on."""
    _BACKENDS[backend.name] = backend


def backend_of(name: str) -> Backend | None:
    """Returns the watched backend of this name, or None."""
    return _BACKENDS.get(name)
