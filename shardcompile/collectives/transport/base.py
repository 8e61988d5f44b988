"""What a transport is: how messages of one call travel between the ranks of a group, and what follows from the backend.

Everything here runs at run time, on real tensors, with sizes that all ranks of the group agree on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from shardcompile.compat import register_work
from shardcompile.diagnosis import Call
from shardcompile.diagnosis.queued import Passed

Range = tuple[int, int]
"""First row and end row."""

Message = tuple[int, Tensor]
"""A peer's rank in the group, and a contiguous tensor that is sent or written."""


class CallWork(Work):
    """Work of a call: complete when its messages are, and a last local step has run.

    Args:
        call: what they belong to.
        works: the messages.
        then: the last step.
    """

    def __init__(self, call: Call, works: Sequence[Work], then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._call = call
        self._works = list(works)
        self._then = then

    def wait(self, timeout: object = None) -> bool:
        """Wait for the messages, then run the last step, once: a message that is waited for twice never comes."""
        works, self._works = self._works, []
        self._call.run([work.wait for work in works])
        if self._then is not None:
            self._then()
            self._then = None
        return True


def lies_in_rows(x: Tensor, dim: int) -> bool:
    """Whether the rows of a dim are ranges of a tensor's memory, one after the other and as they are."""
    return dim == 0 and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def rows_first(x: Tensor, dim: int) -> Tensor:
    """`x` with `dim` moved to the front, contiguous: rows are then ranges of memory."""
    return x if lies_in_rows(x, dim) else x.movedim(dim, 0).contiguous().resolve_conj().resolve_neg()


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor: [n]."""
    flat = x.view(-1)
    # Torch gives a view with elements of another size along a stride of 1 only, and one element may have any.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


TRANSPORTS: dict[str, Transport] = {}
"""By the name of the backend."""


class Transport:
    """Messages of a backend that matches them by tags: those of calls that differ never meet.

    A subclass is known by its name from where it is defined: see `TRANSPORTS`.

    Attributes:
        name: of the backend, as `torch.distributed` has it.
        device: type of the device that its tensors are on.
        tells: whether `shardcompile.diagnosis` looks after its groups.
        agrees: whether its ranks can wait for one another by small messages before a collective of torch's.
        aborts: whether the watch ends a wait by aborting the group; otherwise it closes connections.
        uses_cpu: whether the cores that compute also move its messages, through memory that all ranks share.
        rings: whether gathers of shards of one size are better left to torch's own collective.
        has_all_to_all: whether `all_to_all` is there, and better than messages.
        mark: see `shardcompile.diagnosis.backends.Backend`.
    """

    name = ""
    device = "cpu"
    tells = False
    agrees = True
    aborts = False
    uses_cpu = False
    rings = False
    has_all_to_all = False
    mark: Callable[[], Passed] | None = None

    def __init_subclass__(cls) -> None:
        TRANSPORTS[cls.name] = cls()

    def exchange(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]:
        """Start messages of which none is empty. Every rank of the group calls this, also one that has none.

        Args:
            call: what they belong to.
            sends: what goes.
            receives: what comes.
        """
        group, tag = call.group, call.tag
        starts = [functools.partial(group.recv, [t], peer, tag) for peer, t in receives]
        starts += [functools.partial(group.send, [t], peer, tag) for peer, t in sends]
        return call.run(starts)

    def exchange_of_two(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]:
        """The same where only the ranks call it that have messages."""
        return self.exchange(call, sends, receives)

    def gather(self, call: Call, rows: Tensor, sizes: Sequence[int], out: Tensor) -> list[Work] | None:
        """Start to gather every rank's rows into `out`; None if that is best done by messages.

        Args:
            call: what it belongs to.
            rows: of this rank, contiguous.
            sizes: rows of each rank.
            out: contiguous, written.
        """
        return None

    def reduce(self, call: Call, rows: Tensor, sizes: Sequence[int], reduce_op: str, out: Tensor) -> list[Work] | None:
        """Start to reduce every rank's terms, of which each rank gets its rows; None if that is best done by messages.

        Args:
            call: what it belongs to.
            rows: the terms of this rank, contiguous, first those that the first rank gets.
            sizes: rows that each rank gets.
            reduce_op: the reduction.
            out: contiguous, written.
        """
        return None

    def all_to_all(
        self, call: Call, rows: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]
    ) -> list[Work]:
        """Start the backend's own all-to-all, which knows no tags.

        Only for tables that all ranks are known to have alike.

        Args:
            call: what it belongs to.
            rows: contiguous, in the order of their destinations.
            sent: how many go to each rank.
            out: contiguous, written, in the order of the sources.
            received: how many come from each.
        """
        raise NotImplementedError


def running_ends(sizes: Sequence[int]) -> list[Range]:
    """First and end row of every shard."""
    ranges, start = [], 0
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    return ranges


def overlap(a: Range, b: Range) -> Range:
    """Rows that both ranges hold; empty ranges come out as (n, n)."""
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, max(start, end))


def shifted(a: Range, by: int) -> Range:
    """The range moved by a number of rows."""
    return (a[0] + by, a[1] + by)


def between_peers(
    me: int, rows: Tensor, to_peers: Sequence[Range], out: Tensor, from_peers: Sequence[Range]
) -> tuple[list[Message], list[Message]]:
    """The messages, sent and received, in which each other rank gets a range of rows, and sends one. None is empty.

    Args:
        me: this rank, of the group.
        rows: contiguous, [n, ...].
        to_peers: for each rank of the group the range of `rows` that it gets.
        out: contiguous, [m, ...].
        from_peers: for each rank of the group the range of `out` that it fills.
    """
    if not rows.shape[1:].numel():
        return [], []
    sends = [(p, rows[a:b]) for p, (a, b) in enumerate(to_peers) if p != me and b > a]
    receives = [(p, out[a:b]) for p, (a, b) in enumerate(from_peers) if p != me and b > a]
    return sends, receives


def complete(
    out: Tensor | Sequence[Tensor], call: Call, works: Sequence[Work], then: Callable[[], object] | None = None
) -> None:
    """Have `wait_tensor(out)` wait for the messages of a call, and take a last local step.

    Args:
        out: what is waited for; of several tensors the first one waits for all.
        call: what the messages belong to.
        works: the messages.
        then: the last step.
    """
    if works or then is not None:
        work = CallWork(call, works, then)
        for tensor in [out] if isinstance(out, Tensor) else out:
            register_work(tensor, work)
