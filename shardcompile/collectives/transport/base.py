"""The base class of transports, which move the messages of a call between the ranks of a group, and shared helpers.

Everything here runs at run time, on real tensors, with rank-invariant sizes.
"""

from __future__ import annotations

import functools
import itertools
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
"""A peer's rank in the group, and a contiguous tensor to send or to write."""


class CallWork(Work):
    """The work of a call: complete when all its messages are, and a last local step has run.

    Args:
        call: the recorded call that the messages belong to.
        works: the works of the messages.
        then: the last local step.
    """

    def __init__(self, call: Call, works: Sequence[Work], then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._call = call
        self._works = list(works)
        self._then = then

    def wait(self, timeout: object = None) -> bool:
        """Waits for the messages, then runs the last step, both once: a second wait for a message never returns."""
        works, self._works = self._works, []
        self._call.run([work.wait for work in works])
        if self._then is not None:
            self._then()
            self._then = None
        return True


def lies_in_rows(x: Tensor, dim: int) -> bool:
    """Returns whether the rows of a dim are consecutive ranges of the tensor's memory, without lazy conj or neg."""
    return dim == 0 and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def rows_first(x: Tensor, dim: int) -> Tensor:
    """Returns `x` with `dim` moved to the front, contiguous, so that ranges of rows are ranges of memory."""
    return x if lies_in_rows(x, dim) else x.movedim(dim, 0).contiguous().resolve_conj().resolve_neg()


def as_bytes(x: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes: [n]."""
    flat = x.view(-1)
    # `view(dtype)` needs a last stride of 1, while a tensor of one element may have any stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


TRANSPORTS: dict[str, Transport] = {}
"""Keyed by the name of the backend."""


class Transport:
    """The transport of a backend that matches messages by tags, so that those of different calls never match.

    A new transport is a file with a subclass, which registers itself, and a line in ``__init__.py`` that imports the
    file.

    Attributes:
        name: name of the backend in `torch.distributed`.
        device: device type of its tensors.
        tells: whether `shardcompile.diagnosis` watches its groups.
        agrees: whether its ranks can synchronise by small messages before a collective of torch's.
        aborts: whether the watcher ends a wait by aborting the group; otherwise it closes connections.
        uses_cpu: whether the cores that compute also move its messages, through memory that all ranks share.
        rings: whether even all-gathers are better left to torch's own collective.
        has_all_to_all: whether `all_to_all` is implemented, and faster than messages.
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
        """Starts messages, none of which is empty. Every rank of the group calls this, even without messages.

        Args:
            call: the recorded call that the messages belong to.
            sends: the messages to send.
            receives: the messages to receive.
        """
        group, tag = call.group, call.tag
        # Gloo takes half the time for messages of 64 KiB to 1 MiB if sends start first (two ranks on two cores).
        starts = [functools.partial(group.send, [t], peer, tag) for peer, t in sends]
        starts += [functools.partial(group.recv, [t], peer, tag) for peer, t in receives]
        return call.run(starts)

    def exchange_of_two(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]:
        """Like `exchange`, but called only by the ranks that have messages."""
        return self.exchange(call, sends, receives)

    def gather(self, call: Call, rows: Tensor, sizes: Sequence[int], out: Tensor) -> list[Work] | None:
        """Starts to gather the rows of all ranks into `out`; returns None if messages are the better algorithm.

        Args:
            call: the recorded call.
            rows: the local rows, contiguous.
            sizes: number of rows of each rank.
            out: contiguous, written.
        """
        return None

    def reduce(self, call: Call, rows: Tensor, sizes: Sequence[int], reduce_op: str, out: Tensor) -> list[Work] | None:
        """Starts to reduce the terms of all ranks and to scatter the rows of the result; returns None if messages are
        the better algorithm.

        Args:
            call: the recorded call.
            rows: the local terms, contiguous, ordered by the rank that gets them.
            sizes: number of rows that each rank gets.
            reduce_op: the reduction.
            out: contiguous, written.
        """
        return None

    def all_to_all(
        self, call: Call, rows: Tensor, sent: Sequence[int], out: Tensor, received: Sequence[int]
    ) -> list[Work]:
        """Starts the backend's own all-to-all, which has no tags.

        Only for counts that are known to be consistent on all ranks.

        Args:
            call: the recorded call.
            rows: contiguous, ordered by destination.
            sent: number of rows to send to each rank.
            out: contiguous, written, ordered by source.
            received: number of rows to receive from each rank.
        """
        raise NotImplementedError


def running_ends(sizes: Sequence[int]) -> list[Range]:
    """Returns the range of each shard: its first row, and the row after its last one."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.pairwise(ends))


def overlap(a: Range, b: Range) -> Range:
    """Returns the intersection of two ranges; (n, n) if it is empty."""
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, max(start, end))


def shifted(a: Range, by: int) -> Range:
    """Returns the range shifted by a number of rows."""
    return (a[0] + by, a[1] + by)


def between_peers(
    me: int, rows: Tensor, to_peers: Sequence[Range], out: Tensor, from_peers: Sequence[Range]
) -> tuple[list[Message], list[Message]]:
    """Returns the messages to send and to receive for ranges of rows to and from each peer, without empty ones.

    Args:
        me: this rank in the group.
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
    """Makes `wait_tensor(out)` wait for the messages of a call, and run a last local step.

    Args:
        out: the results; with several tensors the first wait completes all of them.
        call: the recorded call that the messages belong to.
        works: the works of the messages.
        then: the last local step.
    """
    if works or then is not None:
        work = CallWork(call, works, then)
        for tensor in [out] if isinstance(out, Tensor) else out:
            register_work(tensor, work)
