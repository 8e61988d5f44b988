"""Which collectives run, one after the other."""

from __future__ import annotations

from shardcompile.testing.watch import CollectiveWatch


class Sent(CollectiveWatch):
    """Notes the collectives of eager ops.

    Attributes:
        names: of their ops, without the namespace.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def saw(self, name: str, x: object, out: object) -> None:
        self.names.append(name.partition("::")[2])
