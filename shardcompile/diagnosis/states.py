"""The state of a rank, which other ranks read as text in the key-value store."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

CAME_TO_ITS_END, LEFT = "has come to its end", "has destroyed its process group"
ORDERLY_ENDS = (CAME_TO_ITS_END, LEFT)
"""The ends of ranks that have completed all collectives that they entered."""


@dataclass(frozen=True)
class Stay:
    """The place where a rank has waited for a while.

    Attributes:
        seconds: how long it has waited.
        quiet: how many seconds ago a byte last moved over its connections. Large messages take long but are not quiet.
        place: the user's line, as ``file:line in function``.
        group: the key of the process group for a collective of this library; empty for others.
        number: the number of the collective among those of the group.
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
    """The state of a rank.

    Attributes:
        beat: a number that grows while the process lives.
        pid: the id of the process.
        host: the name of the machine.
        counts: for each group, how many collectives the rank has entered.
        recent: for each group, the last collectives: number, tag, and for the very last ones a text.
        ended: how the rank ended, such as "has come to its end"; empty if it has not ended.
        stay: where the rank waits; None if it does not wait.
    """

    beat: int
    pid: int
    host: str
    counts: dict[str, int] = field(default_factory=dict)
    recent: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    ended: str = ""
    stay: Stay | None = None

    def to_text(self) -> str:
        """The state as one line of text."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_text(text: str) -> State:
        """The state in a text from `to_text`."""
        parts = json.loads(text)
        if parts["stay"] is not None:
            parts["stay"] = Stay(**parts["stay"])
        parts["recent"] = {g: [(n, tag, what) for n, tag, what in calls] for g, calls in parts["recent"].items()}
        return State(**parts)


def members_of(group: str) -> list[int]:
    """The ranks of a group, from its key."""
    return [int(rank) for rank in group.partition("#")[0].split(",")]


def key_of(ranks: list[int], ordinal: int) -> str:
    """The key of a group, which is the same on all of its ranks.

    Args:
        ranks: the ranks of the group.
        ordinal: how many groups of the same ranks were made before this one.
    """
    return f"{','.join(map(str, ranks))}#{ordinal}"
