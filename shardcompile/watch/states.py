"""What a rank tells the others of itself, as text in the key-value store."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

CAME_TO_ITS_END, LEFT = "has come to its end", "has destroyed its process group"
ORDERLY_ENDS = (CAME_TO_ITS_END, LEFT)
"""How a rank ends that has completed what it did."""


@dataclass(frozen=True)
class Stay:
    """Where a rank has been for a while.

    Attributes:
        seconds: for how long by now.
        quiet: for how long nothing has come or gone over its connections: a large message takes its time.
        place: the user's line, ``file:line in function``.
        group: key of the process group, where it is a collective of this library; empty where it is not.
        number: of this collective among those of the group.
        what: the collective in words.
    """

    seconds: float
    quiet: float
    place: str
    group: str = ""
    number: int = 0
    what: str = ""


@dataclass(frozen=True)
class State:
    """What a rank does.

    Attributes:
        beat: counts up as long as the process lives.
        pid: of its process.
        host: name of its machine.
        counts: by group, how many collectives it has entered.
        recent: by group, number and tag of the last collectives, and for the very last ones what they are.
        ended: how it ended, if it did, e.g. "has come to its end".
        stay: where it waits, if it does.
    """

    beat: int
    pid: int
    host: str
    counts: dict[str, int] = field(default_factory=dict)
    recent: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    ended: str = ""
    stay: Stay | None = None

    def to_text(self) -> str:
        """As one line of text."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_text(text: str) -> State:
        """Inverse of `to_text`."""
        parts = json.loads(text)
        if parts["stay"] is not None:
            parts["stay"] = Stay(**parts["stay"])
        parts["recent"] = {g: [(n, tag, what) for n, tag, what in calls] for g, calls in parts["recent"].items()}
        return State(**parts)


def members_of(group: str) -> list[int]:
    """The ranks of a group, from its key."""
    return [int(rank) for rank in group.partition("#")[0].split(",")]


def key_of(ranks: list[int], ordinal: int) -> str:
    """The key of a group: the same on all of its ranks.

    Args:
        ranks: of its members.
        ordinal: how many groups of the same ranks there were before it.
    """
    return f"{','.join(map(str, ranks))}#{ordinal}"
