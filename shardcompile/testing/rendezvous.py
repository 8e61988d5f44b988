"""Collectives and messages between ranks in one process, through memory.

Results equal those of gloo bit for bit: an all-reduce adds in the order of gloo's ring. If two ranks differ in the
collective, the dtype or the size, gloo crashes or hangs. Here it is an error that names both ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardcompile.collectives.transport import as_bytes

Tensors = Sequence[Tensor]


class MeetingError(RuntimeError):
    """Ranks of a group have come to collectives, or messages, that do not match."""


@dataclass(frozen=True)
class Part:
    """One rank's part in a collective.

    Attributes:
        stated: the collective in words, which must be the same on every rank.
        given: the tensors that the collective reads.
        taken: the tensors that the collective writes.
    """

    stated: str
    given: Tensors = ()
    taken: Tensors = ()


class _Event:
    done: bool
    error: str | None

    def ended(self) -> bool:
        """Whether no rank needs to wait for it any more."""
        return self.done or self.error is not None


@dataclass
class Meeting(_Event):
    """One collective.

    Attributes:
        size: the number of ranks that take part.
        run: moves the data when all ranks have come. It takes the parts in the order of the ranks.
        parts: the parts of the ranks that have come, by rank in the group.
        done: whether the data has been moved.
        error: why it never will be; None if nothing is wrong.
    """

    size: int
    run: Callable[[Sequence[Part]], None]
    parts: dict[int, Part] = field(default_factory=dict)
    done: bool = False
    error: str | None = None


@dataclass
class Message(_Event):
    """A message, of which one side or both sides have come.

    Attributes:
        sent: the sender's tensor; None until the sender has come.
        received: the receiver's tensor; None until the receiver has come.
        done: whether the data has been copied.
        error: why it never will be; None if nothing is wrong.
    """

    sent: Tensor | None = None
    received: Tensor | None = None
    done: bool = False
    error: str | None = None


class Room:
    """The collectives and messages of a group.

    Args:
        name: the name of the group.
        ranks: the global ranks of its members.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self.clear()

    def clear(self) -> None:
        """Drop all collectives and messages, even those that have not ended."""
        self._begun: list[Meeting] = []
        self._next = [0] * len(self.ranks)
        self._unmatched: defaultdict[tuple[int, int, int], deque[Message]] = defaultdict(deque)

    def join(self, rank: int, part: Part, run: Callable[[Sequence[Part]], None]) -> tuple[int, Meeting]:
        """Bring a rank to its next collective. The last rank to come moves the data.

        Args:
            rank: the rank in the group.
            part: the rank's part.
            run: moves the data.

        Returns:
            The number of the collective in the group, and the collective.
        """
        number = self._next[rank]
        self._next[rank] += 1
        if number == len(self._begun):
            self._begun.append(Meeting(len(self.ranks), run))
        meeting = self._begun[number]
        other = next(iter(meeting.parts), None)
        meeting.parts[rank] = part
        if other is not None and part.stated != meeting.parts[other].stated:
            meeting.error = meeting.error or (
                f"ranks have come to different collectives, number {number} of the group of ranks "
                f"{', '.join(map(str, self.ranks))}: rank {self.ranks[other]} to {meeting.parts[other].stated}, "
                f"rank {self.ranks[rank]} to {part.stated}. Run the same collectives on every rank"
            )
        elif len(meeting.parts) == meeting.size and meeting.error is None:
            with torch.no_grad():
                meeting.run([meeting.parts[r] for r in range(meeting.size)])
            meeting.done = True
            meeting.parts = dict.fromkeys(meeting.parts, part)  # frees the tensors
        return number, meeting

    def missing(self, meeting: Meeting) -> list[int]:
        """The global ranks that have not come to a collective."""
        return [self.ranks[r] for r in range(meeting.size) if r not in meeting.parts]

    def send(self, source: int, target: int, tag: int, x: Tensor) -> Message:
        """Send a message. Its data is copied when the receiver comes, as with large messages on sockets.

        Args:
            source: the sender's rank in the group.
            target: the receiver's rank in the group.
            tag: the tag of the message.
            x: a contiguous tensor, which must not be written before it is copied.
        """
        return self._match((source, target, tag), sent=x)

    def receive(self, source: int, target: int, tag: int, x: Tensor) -> Message:
        """Receive a message, see `send`."""
        return self._match((source, target, tag), received=x)

    def _match(self, way: tuple[int, int, int], sent: Tensor | None = None, received: Tensor | None = None) -> Message:
        pending = self._unmatched[way]
        if not pending or (pending[0].sent is None) == (sent is None):
            message = Message(sent, received)
            pending.append(message)
            return message
        message = pending.popleft()
        sent = message.sent if sent is None else sent
        received = message.received if received is None else received
        assert sent is not None and received is not None, "a message has two sides"
        if sent.nbytes != received.nbytes:
            source, target = (self.ranks[r] for r in way[:2])
            message.error = (
                f"rank {source} sends {sent.nbytes} bytes ({sent.dtype} {tuple(sent.shape)}) to rank {target}, which "
                f"expects {received.nbytes} ({received.dtype} {tuple(received.shape)})"
            )
            return message
        with torch.no_grad():
            copy_bytes(received, sent)
        message.done = True
        message.sent = message.received = None
        return message


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy the memory of a contiguous tensor to another one of the same number of bytes."""
    if target.numel():
        target = target.detach()
        if target.dtype is source.dtype and target.shape == source.shape:
            target.copy_(source.detach())
        else:
            as_bytes(target).copy_(as_bytes(source.detach().contiguous()))


def describe(kind: str, x: Tensor, *words: object) -> str:
    """A collective in words."""
    dtype = str(x.dtype).removeprefix("torch.")
    return " ".join([kind, *map(str, words), "of", f"{dtype}[{', '.join(map(str, x.shape))}]"])


# The data movement of the collectives. Each takes all parts, in the order of the ranks.

_SEGMENT_BYTES = 1 << 20
"""The largest piece that gloo's ring reduces at once."""


def ring_sum_order(nbytes: int, itemsize: int, ranks: int) -> list[tuple[int, int, list[int]]]:
    """The order in which gloo's ring all-reduce adds terms, for ranges of elements.

    Each rank owns equally many segments. The terms of a segment are added on the way round the ring: first that of the
    rank before the owner, then of lower ranks, the owner's last (gloo/allreduce.cc, `ring`).

    Args:
        nbytes: the bytes of the tensor.
        itemsize: the bytes of an element.
        ranks: the number of ranks in the group.

    Returns:
        For each range the first element, the end, and the ranks in the order of their terms.
    """
    largest = itemsize * max(1, _SEGMENT_BYTES // itemsize)
    per_rank = _divide_up(max(_divide_up(nbytes, largest), 2 * ranks), ranks)
    segment = _divide_up(_divide_up(nbytes, per_rank * ranks), itemsize)  # elements
    shard, total = segment * per_rank, nbytes // itemsize
    return [
        (min(b * shard, total), min((b + 1) * shard, total), [(b - 1 - i) % ranks for i in range(ranks)])
        for b in range(ranks)
    ]


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _combine(a: Tensor, b: Tensor, reduce_op: str) -> Tensor:
    binary: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": lambda x, y: torch.where(y < x, y, x),  # gloo's std::min and max drop a NaN
        "MAX": lambda x, y: torch.where(y > x, y, x),
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    return binary[reduce_op](a, b).to(a.dtype)


def reduce_flat(terms: Tensors, reduce_op: str) -> Tensor:
    """The reduction of tensors of one size, flattened, in gloo's order of additions."""
    flat = [t.detach().reshape(-1) for t in terms]
    out = flat[0].clone()
    for start, end, order in ring_sum_order(flat[0].nbytes, flat[0].itemsize, len(flat)) if len(flat) > 1 else []:
        if end > start:
            part = flat[order[0]][start:end].clone()
            for rank in order[1:]:
                part = _combine(flat[rank][start:end], part, reduce_op)
            out[start:end] = part
    return out / len(flat) if reduce_op == "AVG" else out


def all_reduce(reduce_op: str) -> Callable[[Sequence[Part]], None]:
    """Every rank's tensors become their reduction over the ranks."""

    def run(parts: Sequence[Part]) -> None:
        for n in range(len(parts[0].given)):
            result = reduce_flat([p.given[n] for p in parts], reduce_op)
            for p in parts:
                p.taken[n].detach().copy_(result.view(p.taken[n].shape))

    return run


def reduce_to(root: int, reduce_op: str) -> Callable[[Sequence[Part]], None]:
    """As `all_reduce`, on one rank only."""

    def run(parts: Sequence[Part]) -> None:
        x = parts[root].taken[0]
        x.detach().copy_(reduce_flat([p.given[0] for p in parts], reduce_op).view(x.shape))

    return run


def all_gather(parts: Sequence[Part]) -> None:
    """Each rank takes one tensor from every rank, in their order."""
    for p in parts:
        for target, source in zip(p.taken, parts, strict=True):
            copy_bytes(target, source.given[0].contiguous())


def reduce_scatter(reduce_op: str) -> Callable[[Sequence[Part]], None]:
    """Each rank gives one term for every rank, and takes the reduction of those for itself."""

    def run(parts: Sequence[Part]) -> None:
        whole = [torch.cat([t.detach().reshape(-1) for t in p.given]) for p in parts]
        result, start = reduce_flat(whole, reduce_op), 0
        for p in parts:
            end = start + p.taken[0].numel()
            p.taken[0].detach().copy_(result[start:end].view(p.taken[0].shape))
            start = end

    return run


def broadcast(root: int) -> Callable[[Sequence[Part]], None]:
    """Every rank takes what one rank gives."""

    def run(parts: Sequence[Part]) -> None:
        for rank, p in enumerate(parts):
            if rank != root:
                copy_bytes(p.taken[0], parts[root].taken[0].contiguous())

    return run


def scatter(root: int) -> Callable[[Sequence[Part]], None]:
    """One rank gives a tensor to every rank."""

    def run(parts: Sequence[Part]) -> None:
        for p, source in zip(parts, parts[root].given, strict=True):
            copy_bytes(p.taken[0], source.contiguous())

    return run


def gather(root: int) -> Callable[[Sequence[Part]], None]:
    """One rank takes a tensor from every rank."""

    def run(parts: Sequence[Part]) -> None:
        for target, p in zip(parts[root].taken, parts, strict=True):
            copy_bytes(target, p.given[0].contiguous())

    return run


def all_to_all(parts: Sequence[Part]) -> None:
    """Every rank gives a tensor to every rank."""
    for target_rank, p in enumerate(parts):
        for source_rank, target in enumerate(p.taken):
            source = parts[source_rank].given[target_rank]
            if source.nbytes != target.nbytes:
                raise MeetingError(
                    f"all_to_all: rank {source_rank} of the group sends {source.nbytes} bytes to rank {target_rank}, "
                    f"which expects {target.nbytes}. Make the sizes of both agree"
                )
            copy_bytes(target, source.contiguous())


def barrier(parts: Sequence[Part]) -> None:
    """A barrier moves no data."""


def op_name(reduce_op: object) -> str:
    """The name of a `ReduceOp`."""
    return dist.ReduceOp.RedOpType(getattr(reduce_op, "op", reduce_op)).name
