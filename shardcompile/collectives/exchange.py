"""A rank's part in a collective in which rows go from those that hold them to those that want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from shardcompile import compat
from shardcompile.collectives import transport
from shardcompile.collectives.arguments import A
from shardcompile.collectives.descriptor import Descriptor
from shardcompile.collectives.transport import Message


class Exchange(NamedTuple):
    """What a rank sends and gets. What it has itself of its result is in place before anything is sent.

    Attributes:
        out: the result, flat.
        sends: the messages that go.
        receives: those that come: where they are written.
        stated: what the rank states, see `Descriptor.states`.
        then: the last step, after all messages; None if the result is complete with them.
    """

    out: Tensor
    sends: list[Message]
    receives: list[Message]
    stated: tuple[object, ...]
    then: Callable[[], object] | None = None

    def start(self, of: Descriptor[A], group_name: str) -> Tensor:
        """Start it as a collective of its own.

        Args:
            of: the collective.
            group_name: the ranks.

        Returns:
            The result, complete after its wait.
        """
        call = of.enter(compat.process_group(group_name), self.out.dtype, *self.stated)
        transport.complete(self.out, call, transport.exchange(call, self.sends, self.receives), self.then)
        return self.out
