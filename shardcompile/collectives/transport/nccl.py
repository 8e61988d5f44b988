"""NCCL: grouped messages, and three ways to gather blocks of any sizes.

A way is chosen by sizes that all ranks know, and by the version of NCCL, which is the same on all ranks: NCCL refuses
others. Why this is safe with streams, the allocator and several groups is written down in `docs/transports.md`. All of
it has run between ranks that share a GPU, and nothing yet between GPUs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from shardcompile.collectives.transport.base import CallWork, Message, Range, Transport, as_bytes, running_ends
from shardcompile.watch import Call
from shardcompile.watch.queued import Passed

PAD_LIMIT = 1.25
"""The most that a padded all-gather may move, relative to the blocks."""

FUSES_BROADCASTS = (2, 30)
"""From this version on NCCL makes one kernel of the broadcasts of a group, whatever their sizes."""

_SENDS = 1.25
"""Bytes that a ring moves in the time of a byte of grouped sends: an estimate, not measured by this project."""

_COPIES = 0.1
"""The same for a byte that is read and written in a GPU's own memory."""

_LAUNCH = 2**18
"""The same for a kernel that is launched, and its latency."""


class Way(Enum):
    """How blocks are gathered."""

    EVEN = "torch's all-gather, straight into place"
    PADDED = "torch's all-gather of blocks that are padded to the largest one"
    BROADCASTS = "a broadcast of each block, all of them in one group"
    SENDS = "a message from each rank to each other, all of them in one group"


def way_of(nbytes: Sequence[int], version: tuple[int, ...]) -> Way:
    """The way in which blocks are gathered soonest.

    Args:
        nbytes: of each rank's block.
        version: of NCCL.
    """
    costs = costs_of(nbytes, version)
    return min(costs, key=lambda way: costs[way])


def costs_of(nbytes: Sequence[int], version: tuple[int, ...]) -> dict[Way, float]:
    """What each way that may be taken costs, in bytes that a ring moves in that time; of equal ones the first counts.

    A ring of broadcasts moves over each link all blocks but the one of the rank that it leads to. A block that is sent
    to each other rank leaves its owner ``n - 1`` times.
    """
    n, largest, whole = len(nbytes), max(nbytes), sum(nbytes)
    if largest * n == whole:
        return {Way.EVEN: _LAUNCH + (n - 1) * largest}
    costs: dict[Way, float] = {}
    launches = 1 if version >= FUSES_BROADCASTS else sum(b > 0 for b in nbytes)
    costs[Way.BROADCASTS] = launches * _LAUNCH + whole - min(nbytes)
    if largest * n <= PAD_LIMIT * whole:
        copied = largest + 2 * whole
        costs[Way.PADDED] = 3 * _LAUNCH + (n - 1) * largest + _COPIES * copied
    costs[Way.SENDS] = _LAUNCH + _SENDS * max((n - 1) * largest, whole - min(nbytes))
    return costs


def end_of_stream() -> Passed:
    """Note the end of the current stream."""
    event, device = torch.cuda.Event(), torch.cuda.current_device()
    event.record()

    def passed() -> bool:
        try:
            with torch.cuda.device(device):  # else a thread that only looks makes a context on the first GPU
                return event.query()
        except RuntimeError:  # of a kernel, which the program is told where it waits
            return True

    return passed


class Nccl(Transport):
    """Messages of a call go in one group of NCCL. There are no tags: all ranks come to their calls in one order.

    NCCL knows neither bool nor complex; rows are moved as bytes.

    Attributes:
        fixed: the way in which blocks are gathered, on every rank alike, for who measures it; None for the cheapest.
    """

    name = "nccl"
    device = "cuda"
    tells = True
    agrees = False
    aborts = True
    rings = True
    mark = staticmethod(end_of_stream)

    def __init__(self) -> None:
        self.fixed: Way | None = None
        self._connected: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

    def exchange(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]:
        """See `Transport`."""
        group = call.group
        if group not in self._connected:
            call.run([lambda: self._connect(group)])
        messages = [dist.P2POp(dist.irecv, as_bytes(t), group=group, group_peer=p) for p, t in receives]
        messages += [dist.P2POp(dist.isend, as_bytes(t), group=group, group_peer=p) for p, t in sends]
        return call.run([lambda: dist.batch_isend_irecv(messages)])[0] if messages else []

    def exchange_of_two(self, call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]:
        """See `Transport`. Not in a group, so that two ranks meet in a communicator of their own."""
        group = call.group
        starts = [functools.partial(dist.irecv, as_bytes(t), group=group, group_src=p) for p, t in receives]
        starts += [functools.partial(dist.isend, as_bytes(t), group=group, group_dst=p) for p, t in sends]
        return [work for work in call.run(starts) if work is not None]

    def gather(self, call: Call, rows: Tensor, sizes: Sequence[int], out: Tensor) -> list[Work] | None:
        """See `Transport`."""
        if not out.numel():
            return []
        width = out.numel() * out.dtype.itemsize // sum(sizes)
        lengths, mine, whole = [n * width for n in sizes], as_bytes(rows), as_bytes(out)
        match self.fixed or way_of(lengths, torch.cuda.nccl.version()):
            case Way.EVEN:
                return _gather_even(call, mine, whole)
            case Way.PADDED:
                return [_gather_padded(call, mine, lengths, whole)]
            case Way.BROADCASTS:
                return _gather_by_broadcasts(call, mine, running_ends(lengths), whole)
            case _:
                return None

    def _connect(self, group: ProcessGroup) -> None:
        """Have all ranks of a group make its communicator together, before some of them have no message to send.

        Torch makes it in the first call, and says that all ranks have to take part in that one.
        """
        self._connected.add(group)
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)


def _gather_even(call: Call, rows: Tensor, out: Tensor) -> list[Work]:
    start = functools.partial(dist.all_gather_into_tensor, out, rows, group=call.group, async_op=True)
    return [work for work in call.run([start]) if work is not None]


def _gather_padded(call: Call, rows: Tensor, lengths: Sequence[int], out: Tensor) -> Work:
    size = max(lengths)
    padded = rows
    if rows.shape[0] < size:
        padded = rows.new_empty([size])  # nobody reads what is behind the rows
        padded[: rows.shape[0]].copy_(rows)
    gathered = rows.new_empty([size * len(lengths)])
    works = _gather_even(call, padded, gathered)

    def unpack() -> None:
        torch.cat([gathered[r * size : r * size + n] for r, n in enumerate(lengths)], out=out)

    return CallWork(call, works, unpack)


def _gather_by_broadcasts(call: Call, rows: Tensor, ends: Sequence[Range], out: Tensor) -> list[Work]:
    # Given tensors of several sizes, torch's NCCL broadcasts each of them from its rank, all in one group of calls.
    start = functools.partial(dist.all_gather, [out[a:b] for a, b in ends], rows, group=call.group, async_op=True)
    return [work for work in call.run([start]) if work is not None]
