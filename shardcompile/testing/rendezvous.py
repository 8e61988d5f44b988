"""Collectives and point-to-point messages between in-process ranks, through memory.

Results equal those of gloo bit for bit: an all-reduce adds in the order of gloo's ring. If two ranks differ in the
collective, the dtype or the size, gloo crashes or hangs. This backend raises an error that names both ranks.
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


class RendezvousError(RuntimeError):
    """Ranks of a group have called collectives, or messages, that do not match."""


@dataclass(frozen=True)
class Part:
    """One rank's part in a collective.

    Attributes:
        stated: the description of the collective, which must be the same on every rank.
        given: the input tensors.
        taken: the output tensors.
    """

    stated: str
    given: Tensors = ()
    taken: Tensors = ()


class _Event:
    """A collective or a message, which ranks may wait for."""

    done: bool
    error: str | None

    def ended(self) -> bool:
        """Returns whether no rank needs to wait for it any more."""
        return self.done or self.error is not None


@dataclass
class Rendezvous(_Event):
    """One collective, which runs when its last rank arrives.

    Attributes:
        size: the number of ranks that take part.
        run: moves the data. It takes the parts in the order of the ranks.
        parts: the parts of the ranks that have arrived, by rank in the group.
        done: whether the data has been moved.
        error: why it never will be moved; None if nothing is wrong.
    """

    size: int
    run: Callable[[Sequence[Part]], None]
    parts: dict[int, Part] = field(default_factory=dict)
    done: bool = False
    error: str | None = None


@dataclass
class Message(_Event):
    """A point-to-point message, of which one side or both sides have arrived.

    Attributes:
        sent: the sender's tensor; None until the sender has arrived.
        received: the receiver's tensor; None until the receiver has arrived.
        done: whether the data has been copied.
        error: why it never will be copied; None if nothing is wrong.
    """

    sent: Tensor | None = None
    received: Tensor | None = None
    done: bool = False
    error: str | None = None


class Room:
    """The state of a process group that its members share: its collectives and messages.

    Args:
        name: the name of the group.
        ranks: the global ranks of its members.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self.clear()

    def clear(self) -> None:
        """Drops all collectives and messages, also pending ones."""
        self._started: list[Rendezvous] = []
        self._next = [0] * len(self.ranks)
        self._unmatched: defaultdict[tuple[int, int, int], deque[Message]] = defaultdict(deque)

    def join(self, rank: int, part: Part, run: Callable[[Sequence[Part]], None]) -> tuple[int, Rendezvous]:
        """Joins a rank to its next collective. The last rank to arrive moves the data.

        Args:
            rank: the rank in the group.
            part: the rank's part.
            run: moves the data.

        Returns:
            The sequence number of the collective in the group, and the collective.
        """
        number = self._next[rank]
        self._next[rank] += 1
        if number == len(self._started):
            self._started.append(Rendezvous(len(self.ranks), run))
        rendezvous = self._started[number]
        other = next(iter(rendezvous.parts), None)
        rendezvous.parts[rank] = part
        if other is not None and part.stated != rendezvous.parts[other].stated:
            rendezvous.error = rendezvous.error or (
                f"ranks have come to different collectives, number {number} of the group of ranks "
                f"{', '.join(map(str, self.ranks))}: rank {self.ranks[other]} to {rendezvous.parts[other].stated}, "
                f"rank {self.ranks[rank]} to {part.stated}. Run the same collectives on every rank"
            )
        elif len(rendezvous.parts) == rendezvous.size and rendezvous.error is None:
            with torch.no_grad():
                rendezvous.run([rendezvous.parts[r] for r in range(rendezvous.size)])
            rendezvous.done = True
            rendezvous.parts = dict.fromkeys(rendezvous.parts, part)  # frees the tensors
        return number, rendezvous

    def missing(self, rendezvous: Rendezvous) -> list[int]:
        """Returns the global ranks that have not arrived at a collective."""
        return [self.ranks[r] for r in range(rendezvous.size) if r not in rendezvous.parts]

    def send(self, source: int, target: int, tag: int, x: Tensor) -> Message:
        """Sends a message. Its data is copied when the receiver arrives, as with large messages on sockets.

        Args:
            source: the sender's rank in the group.
            target: the receiver's rank in the group.
            tag: the tag of the message.
            x: a contiguous tensor, which must not be written before it is copied.
        """
        return self._match((source, target, tag), sent=x)

    def receive(self, source: int, target: int, tag: int, x: Tensor) -> Message:
        """Receives a message, see `send`."""
        return self._match((source, target, tag), received=x)

    def _match(self, key: tuple[int, int, int], sent: Tensor | None = None, received: Tensor | None = None) -> Message:
        pending = self._unmatched[key]
        if not pending or (pending[0].sent is None) == (sent is None):
            message = Message(sent, received)
            pending.append(message)
            return message
        message = pending.popleft()
        sent = message.sent if sent is None else sent
        received = message.received if received is None else received
        assert sent is not None and received is not None, "a message has two sides"
        if sent.nbytes != received.nbytes:
            source, target = (self.ranks[r] for r in key[:2])
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
    """Copies the memory of a contiguous tensor to another one of the same number of bytes."""
    if target.numel():
        target = target.detach()
        if target.dtype is source.dtype and target.shape == source.shape:
            target.copy_(source.detach())
        else:
            as_bytes(target).copy_(as_bytes(source.detach().contiguous()))


def describe(kind: str, x: Tensor, *words: object) -> str:
    """Describes a collective or a message of one tensor."""
    dtype = str(x.dtype).removeprefix("torch.")
    return " ".join([kind, *map(str, words), "of", f"{dtype}[{', '.join(map(str, x.shape))}]"])


# The data movement of the collectives. Each function takes all parts, in the order of the ranks.

_SEGMENT_BYTES = 1 << 20
"""The largest segment of gloo's ring all-reduce."""


def ring_sum_order(nbytes: int, itemsize: int, ranks: int) -> list[tuple[int, int, list[int]]]:
    """Returns the order in which gloo's ring all-reduce adds terms, for ranges of elements.

    Each rank owns equally many segments. The terms of a segment are added along the ring: first the term of the rank
    before the owner, then those of lower ranks, and the owner's last (gloo/allreduce.cc, `ring`).

    Args:
        nbytes: the size of the tensor in bytes.
        itemsize: the size of an element in bytes.
        ranks: the number of ranks in the group.

    Returns:
        For each range the first element, the end, and the ranks in the order of their terms.
    """
    largest = itemsize * max(1, _SEGMENT_BYTES // itemsize)
    per_rank = _divide_up(max(_divide_up(nbytes, largest), 2 * ranks), ranks)
    segment = _divide_up(_divide_up(nbytes, per_rank * ranks), itemsize)  # elements
    owned, total = segment * per_rank, nbytes // itemsize
    return [
        (min(r * owned, total), min((r + 1) * owned, total), [(r - 1 - i) % ranks for i in range(ranks)])
        for r in range(ranks)
    ]


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _combine(a: Tensor, b: Tensor, reduce_op: str) -> Tensor:
    binary: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": lambda x, y: torch.where(y < x, y, x),  # gloo's std::min and std::max do not propagate a NaN
        "MAX": lambda x, y: torch.where(y > x, y, x),
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    return binary[reduce_op](a, b).to(a.dtype)


def reduce_flat(terms: Tensors, reduce_op: str) -> Tensor:
    """Reduces tensors of equal size, flattened, in gloo's order of additions."""
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
    """All-reduce: replaces every rank's tensors by their reduction over the ranks."""

    def run(parts: Sequence[Part]) -> None:
        for n in range(len(parts[0].given)):
            result = reduce_flat([p.given[n] for p in parts], reduce_op)
            for p in parts:
                p.taken[n].detach().copy_(result.view(p.taken[n].shape))

    return run


def reduce_to(root: int, reduce_op: str) -> Callable[[Sequence[Part]], None]:
    """Reduce: as `all_reduce`, but only the root gets the result."""

    def run(parts: Sequence[Part]) -> None:
        x = parts[root].taken[0]
        x.detach().copy_(reduce_flat([p.given[0] for p in parts], reduce_op).view(x.shape))

    return run


def all_gather(parts: Sequence[Part]) -> None:
    """All-gather: every rank receives the input of every rank, in rank order."""
    for p in parts:
        for target, source in zip(p.taken, parts, strict=True):
            copy_bytes(target, source.given[0].contiguous())


def reduce_scatter(reduce_op: str) -> Callable[[Sequence[Part]], None]:
    """Reduce-scatter: every rank has one input for each rank, and receives the reduction of the inputs for itself."""

    def run(parts: Sequence[Part]) -> None:
        flat = [torch.cat([t.detach().reshape(-1) for t in p.given]) for p in parts]
        result, start = reduce_flat(flat, reduce_op), 0
        for p in parts:
            end = start + p.taken[0].numel()
            p.taken[0].detach().copy_(result[start:end].view(p.taken[0].shape))
            start = end

    return run


def broadcast(root: int) -> Callable[[Sequence[Part]], None]:
    """Broadcast: every rank receives the tensor of the root."""

    def run(parts: Sequence[Part]) -> None:
        for rank, p in enumerate(parts):
            if rank != root:
                copy_bytes(p.taken[0], parts[root].taken[0].contiguous())

    return run


def scatter(root: int) -> Callable[[Sequence[Part]], None]:
    """Scatter: every rank receives one tensor of the root."""

    def run(parts: Sequence[Part]) -> None:
        for p, source in zip(parts, parts[root].given, strict=True):
            copy_bytes(p.taken[0], source.contiguous())

    return run


def gather(root: int) -> Callable[[Sequence[Part]], None]:
    """Gather: the root receives a tensor from every rank."""

    def run(parts: Sequence[Part]) -> None:
        for target, p in zip(parts[root].taken, parts, strict=True):
            copy_bytes(target, p.given[0].contiguous())

    return run


def all_to_all(parts: Sequence[Part]) -> None:
    """All-to-all: every rank sends a tensor to every rank."""
    for target_rank, p in enumerate(parts):
        for source_rank, target in enumerate(p.taken):
            source = parts[source_rank].given[target_rank]
            if source.nbytes != target.nbytes:
                raise RendezvousError(
                    f"all_to_all: rank {source_rank} of the group sends {source.nbytes} bytes to rank {target_rank}, "
                    f"which expects {target.nbytes}. Make the sizes of both agree"
                )
            copy_bytes(target, source.contiguous())


def barrier(parts: Sequence[Part]) -> None:
    """Barrier: moves no data."""


def op_name(reduce_op: object) -> str:
    """Returns the name of a `ReduceOp`."""
    return dist.ReduceOp.RedOpType(getattr(reduce_op, "op", reduce_op)).name
