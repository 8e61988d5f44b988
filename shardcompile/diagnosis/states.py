"""The state of a rank, which other ranks read from the key-value store as text."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

CAME_TO_ITS_END, LEFT = "has come to its end", "has destroyed its process group"
ORDERLY_ENDS = (CAME_TO_ITS_END, LEFT)
"""The ends of ranks that have completed all collectives that they entered."""


@dataclass(frozen=True)
class Stay:
    """A wait of a rank.

    Attributes:
        seconds: how long it has waited.
        quiet: the seconds since a byte moved over its connections, by which slow, large messages are no deadlock.
        place: the line of the program, as ``file:line in function``.
        group: the key of the process group for a collective of this library; empty for others.
        number: the sequence number of the collective in the group.
        what: a description of the collective.
    """

    seconds: float
    quiet: float
    place: str
    group: str = ""
    number: int = 0
    what: str = ""


@dataclass(frozen=True)
class State:
    """The state of a rank.

    Attributes:
        beat: a heartbeat counter.
        pid: the id of the process.
        host: the name of the machine.
        counts: for each group, the number of collectives that the rank has entered.
        recent: for each group, the last collectives: sequence number, tag, and for the very last ones a description.
        ended: how the rank ended, such as "has come to its end"; empty if it has not ended.
        stay: the wait of the rank; None if it does not wait.
    """

    beat: int
    pid: int
    host: str
    counts: dict[str, int] = field(default_factory=dict)
    recent: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    ended: str = ""
    stay: Stay | None = None

    def to_text(self) -> str:
        """Serializes the state as one line of text."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_text(text: str) -> State:
        """Parses a text from `to_text`."""
        parts = json.loads(text)
        if parts["stay"] is not None:
            parts["stay"] = Stay(**parts["stay"])
        parts["recent"] = {g: [(n, tag, what) for n, tag, what in calls] for g, calls in parts["recent"].items()}
        return State(**parts)


def members_of(group: str) -> list[int]:
    """Returns the ranks of a group, from its key."""
    return [int(rank) for rank in group.partition("#")[0].split(",")]


def key_of(ranks: list[int], ordinal: int) -> str:
    """Returns the key of a group, which is the same on all of its ranks.

    Args:
        ranks: the ranks of the group.
        ordinal: the number of earlier groups of the same ranks.
    """
    return f"{','.join(map(str, ranks))}#{ordinal}"
