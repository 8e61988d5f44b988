"""The messages of one rank in a collective that moves rows from the ranks that hold them to those that want them."""

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
    """The messages that a rank sends and receives. The part of the result that is local is in place before.

    Attributes:
        out: the result, flat.
        sends: messages to send.
        receives: messages to receive, each into its part of the result or of scratch memory.
        stated: what the rank states, see `Descriptor.states`.
        then: a last local step after all messages; None if the result is complete without.
    """

    out: Tensor
    sends: list[Message]
    receives: list[Message]
    stated: tuple[object, ...]
    then: Callable[[], object] | None = None

    def start(self, of: Descriptor[A], group_name: str) -> Tensor:
        """Starts the exchange as a collective of its own.

        Args:
            of: the collective.
            group_name: the process group.

        Returns:
            The result, complete after its wait.
        """
        call = of.enter(compat.process_group(group_name), self.out.dtype, *self.stated)
        transport.complete(self.out, call, transport.exchange(call, self.sends, self.receives), self.then)
        return self.out
