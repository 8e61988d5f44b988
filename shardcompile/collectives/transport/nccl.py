"""The transport of NCCL: grouped messages, and several algorithms to gather uneven shards and to reduce into them.

`docs/transports.md` explains why this is safe with streams, the allocator and several groups. It has been run between
ranks that share a GPU, except for the algorithms over an even division, and not yet between GPUs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from shardcompile.collectives.transport.balance import Balance
from shardcompile.collectives.transport.base import (
    CallWork,
    Message,
    Range,
    Transport,
    as_bytes,
    between_peers,
    running_ends,
)
from shardcompile.collectives.transport.nccl_algorithms import ALIGNED, Algorithm, gather_algorithm, reduce_algorithm
from shardcompile.diagnosis import Call
from shardcompile.diagnosis.queued import Passed

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
"""Reductions in which NCCL agrees with `reduce_rows`. Its maximum does not propagate NaN."""

_REDUCED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}
"""Dtypes that NCCL reduces without conversion."""


def end_of_stream() -> Passed:
    """Records an event at the end of the current stream; the result tells whether the stream has passed it."""
    event, device = torch.cuda.Event(), torch.cuda.current_device()
    event.record()

    def passed() -> bool:
        try:
            with torch.cuda.device(device):  # else a watching thread would create a context on the first GPU
                return event.query()
        except RuntimeError:  # a failed kernel, which is reported where the program waits
            return True

    return passed


class Nccl(Transport):
    """Groups the messages of a call in one NCCL group. There are no tags: all ranks make their calls in one order.

    NCCL supports neither bool nor complex; rows are moved as bytes.

    Attributes:
        fixed: the algorithm for gathers and reductions, rank-invariant, for benchmarks; None for the cheapest.
    """

    name = "nccl"
    device = "cuda"
    tells = True
    agrees = False
    aborts = True
    rings = True
    mark = staticmethod(end_of_stream)

    def __init__(self) -> None:
        self.fixed: Algorithm | None = None
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
        """See `Transport`. Not in an NCCL group, so that the two ranks use a communicator of their own."""
        group = call.group
        starts = [functools.partial(dist.irecv, as_bytes(t), group=group, group_src=p) for p, t in receives]
        starts += [functools.partial(dist.isend, as_bytes(t), group=group, group_dst=p) for p, t in sends]
        return [work for work in call.run(starts) if work is not None]

    def gather(self, call: Call, rows: Tensor, sizes: Sequence[int], out: Tensor) -> list[Work] | None:
        """See `Transport`."""
        if not out.numel():
            return []
        width = out.numel() * out.dtype.itemsize // sum(sizes)
        lengths, local_bytes, whole = tuple([n * width for n in sizes]), as_bytes(rows), as_bytes(out)
        match self.fixed or gather_algorithm(lengths, torch.cuda.nccl.version()):
            case Algorithm.EVEN:
                return _gather_even(call, local_bytes, whole)
            case Algorithm.BROADCASTS:
                return _gather_by_broadcasts(call, local_bytes, running_ends(lengths), whole)
            case Algorithm.BALANCED:
                return [self._gather_balanced(call, local_bytes, lengths, whole)]
            case _:
                return None

    def reduce(self, call: Call, rows: Tensor, sizes: Sequence[int], reduce_op: str, out: Tensor) -> list[Work] | None:
        """See `Transport`. For sums and means of dtypes that NCCL reduces; they round as its all-reduce does."""
        if not rows.numel():
            return []
        dtype = rows.dtype.to_real() if rows.is_complex() else rows.dtype
        if reduce_op not in _OPERATIONS or dtype not in _REDUCED:
            return None
        terms, whole = rows.view(dtype).view(-1), out.view(dtype).view(-1)
        width = terms.numel() // sum(sizes)
        lengths = tuple([n * width for n in sizes])
        match self.fixed or reduce_algorithm(tuple([n * dtype.itemsize for n in lengths])):
            case Algorithm.EVEN:
                return _reduce_even(call, terms, reduce_op, whole)
            case Algorithm.SENDS:
                return None
            case _:
                return [self._reduce_balanced(call, terms, lengths, reduce_op, whole)]

    def _gather_balanced(self, call: Call, rows: Tensor, lengths: tuple[int, ...], out: Tensor) -> Work:
        # The ring reads what the messages write. No wait is needed: both run on the group's stream, in order.
        me, whole = call.group.rank(), out
        size, of_shard, of_part = Balance.of(lengths, me, ALIGNED)
        part = rows.new_empty([size])
        part[slice(*of_part[me])].copy_(rows[slice(*of_shard[me])])
        works = self.exchange(call, *between_peers(me, rows, of_shard, part, of_part))
        if out.shape[0] != size * len(lengths):
            whole = out.new_empty([size * len(lengths)])
        works += _gather_even(call, part, whole)
        return CallWork(call, works, None if whole is out else lambda: out.copy_(whole[: out.shape[0]]))

    def _reduce_balanced(self, call: Call, rows: Tensor, lengths: tuple[int, ...], reduce_op: str, out: Tensor) -> Work:
        me, whole = call.group.rank(), rows
        size, of_shard, of_part = Balance.of(lengths, me, max(ALIGNED // rows.dtype.itemsize, 1))
        if rows.shape[0] != size * len(lengths):
            whole = rows.new_empty([size * len(lengths)])  # the sums over the padding are not read
            whole[: rows.shape[0]].copy_(rows)
        part = rows.new_empty([size])
        works = _reduce_even(call, whole, reduce_op, part)
        works += self.exchange(call, *between_peers(me, part, of_part, out, of_shard))
        return CallWork(call, works, lambda: out[slice(*of_shard[me])].copy_(part[slice(*of_part[me])]))

    def _connect(self, group: ProcessGroup) -> None:
        """Makes all ranks of a group create its communicator together, as later some may have no message.

        Torch creates it in the first call, and documents that all ranks must take part in that call.
        """
        self._connected.add(group)
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)


def _gather_even(call: Call, rows: Tensor, out: Tensor) -> list[Work]:
    start = functools.partial(dist.all_gather_into_tensor, out, rows, group=call.group, async_op=True)
    return [work for work in call.run([start]) if work is not None]


def _gather_by_broadcasts(call: Call, rows: Tensor, ends: Sequence[Range], out: Tensor) -> list[Work]:
    # For tensors of different sizes, torch's NCCL backend broadcasts each from its rank, all in one group of calls.
    start = functools.partial(dist.all_gather, [out[a:b] for a, b in ends], rows, group=call.group, async_op=True)
    return [work for work in call.run([start]) if work is not None]


def _reduce_even(call: Call, rows: Tensor, reduce_op: str, out: Tensor) -> list[Work]:
    operation, group = _OPERATIONS[reduce_op], call.group
    start = functools.partial(dist.reduce_scatter_tensor, out, rows, op=operation, group=group, async_op=True)
    return [work for work in call.run([start]) if work is not None]
