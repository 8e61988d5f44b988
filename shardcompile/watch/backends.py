"""The backends whose process groups are watched. `shardcompile.collectives.transport` registers them."""

from __future__ import annotations

from typing import NamedTuple


class Backend(NamedTuple):
    """The properties of a backend that matter while a rank waits.

    Attributes:
        name: the name in `torch.distributed`.
        agrees: whether ranks can meet by small messages with tags before a collective of torch's.
        aborts: whether aborting the group ends a wait. Otherwise closed connections end it.
    """

    name: str
    agrees: bool
    aborts: bool


_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Have the groups of a backend watched."""
    _BACKENDS[backend.name] = backend


def backend_of(name: str) -> Backend | None:
    """The watched backend of this name, or None."""
    return _BACKENDS.get(name)
