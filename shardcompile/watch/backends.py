"""The backends whose process groups are looked after; `shardcompile.collectives.transport` says what they are like."""

from __future__ import annotations

from typing import NamedTuple


class Backend(NamedTuple):
    """What matters of a backend when a rank waits.

    Attributes:
        name: as `torch.distributed` has it.
        agrees: whether ranks can wait for one another by small messages with tags before a collective of torch's.
        aborts: whether a wait ends when the group is aborted; otherwise connections are closed.
    """

    name: str
    agrees: bool
    aborts: bool


_BACKENDS: dict[str, Backend] = {}


def look_after(backend: Backend) -> None:
    """Watch the groups of a backend."""
    _BACKENDS[backend.name] = backend


def backend_of(name: str) -> Backend | None:
    """A backend that is looked after, or None."""
    return _BACKENDS.get(name)
