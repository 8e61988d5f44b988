"""Transports: move rows between the ranks of one process group with the algorithms that suit its backend.

The modules imported here, and only these, define the supported backends. Everything runs at run time, on real tensors,
with rank-invariant sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

import shardcompile.collectives.transport.gloo
import shardcompile.collectives.transport.nccl  # noqa: F401
from shardcompile.collectives import scratch
from shardcompile.collectives.transport.base import TRANSPORTS as TRANSPORTS
from shardcompile.collectives.transport.base import CallWork as CallWork
from shardcompile.collectives.transport.base import Message as Message
from shardcompile.collectives.transport.base import Range as Range
from shardcompile.collectives.transport.base import Transport as Transport
from shardcompile.collectives.transport.base import as_bytes as as_bytes
from shardcompile.collectives.transport.base import between_peers as between_peers
from shardcompile.collectives.transport.base import complete as complete
from shardcompile.collectives.transport.base import lies_in_rows as lies_in_rows
from shardcompile.collectives.transport.base import overlap as overlap
from shardcompile.collectives.transport.base import rows_first as rows_first
from shardcompile.collectives.transport.base import running_ends as running_ends
from shardcompile.collectives.transport.base import shifted as shifted
from shardcompile.collectives.transport.reduce import check_reduction as check_reduction
from shardcompile.collectives.transport.reduce import reduce_rows as reduce_rows
from shardcompile.collectives.transport.reduce import reduced_in as reduced_in
from shardcompile.diagnosis import Call
from shardcompile.diagnosis.backends import Backend, register_backend

_DEFAULT = Transport()
"""For backends that are not listed, such as in-process ranks: all of them have messages with tags."""

for _transport in TRANSPORTS.values():
    if _transport.tells:
        register_backend(Backend(_transport.name, _transport.agrees, _transport.aborts, _transport.mark))


def transport_of(group: ProcessGroup) -> Transport:
    """Returns the transport for the backend of a group."""
    return TRANSPORTS.get(group.name(), _DEFAULT)


def device_type(backend: str | None = None) -> str:
    """Returns the device type of the tensors of a process group.

    Args:
        backend: its backend, or several as `torch.distributed` lists them; None for that of the default process group.
    """
    named = str(dist.get_backend_config()) if backend is None else backend
    return next((t.device for t in TRANSPORTS.values() if t.device != "cpu" and t.name in named), "cpu")


def exchange(call: Call, sends: Sequence[Message], receives: Sequence[Message]) -> list[Work]:
    """Starts sends to and receives from ranks of the group; empty messages are skipped on both sides.

    If the backend has tags, messages carry the tag of the call, so that messages of different calls never match.

    Args:
        call: the recorded call that the messages belong to.
        sends: pairs of a peer's rank in the group and a contiguous tensor.
        receives: the same, with tensors to write.
    """
    transport = transport_of(call.group)
    start = transport.exchange if call.of_all else transport.exchange_of_two
    return start(call, [(p, t) for p, t in sends if t.numel()], [(p, t) for p, t in receives if t.numel()])


def send_ranges(
    call: Call,
    rows: Tensor,
    to_peers: Sequence[Range],
    out: Tensor,
    from_peers: Sequence[Range],
    keep_own: bool = True,
) -> list[Work]:
    """Starts to send a range of rows to every peer, and to receive one from every peer in place.

    Args:
        call: the recorded call that the messages belong to.
        rows: contiguous, [n, ...].
        to_peers: for each rank of the group the range of `rows` that it gets.
        out: contiguous, [m, ...], written.
        from_peers: for each rank of the group the range of `out` that it fills.
        keep_own: whether to copy the range of this rank; otherwise its range of `out` is not written.
    """
    me = call.group.rank()
    mine, place = to_peers[me], from_peers[me]
    if keep_own and mine[1] > mine[0]:
        out[place[0] : place[1]].copy_(rows[mine[0] : mine[1]])
    return exchange(call, *between_peers(me, rows, to_peers, out, from_peers))


def gather_rows(call: Call, rows: Tensor, sizes: Sequence[int], out: Tensor, keep_own: bool = True) -> list[Work]:
    """Starts to gather the rows of all ranks into `out`, which is complete when all works are.

    Args:
        call: the recorded call that the messages belong to.
        rows: the local rows, contiguous, [n, ...].
        sizes: number of rows of each rank.
        out: contiguous, [sum of sizes, ...], written.
        keep_own: whether this rank's part of `out` is needed, too.
    """
    works = transport_of(call.group).gather(call, rows, sizes, out)
    if works is not None:
        return works
    whole = [(0, rows.shape[0])] * len(sizes)
    return send_ranges(call, rows, whole, out, running_ends(sizes), keep_own)


def reduce_scatter_rows(
    call: Call, rows: Tensor, sizes: Sequence[int], reduce_op: str, out: Tensor
) -> tuple[list[Work], Callable[[], object] | None]:
    """Starts to reduce the terms of all ranks and to scatter the rows of the result.

    Args:
        call: the recorded call that the messages belong to.
        rows: the local terms, contiguous, [sum of sizes, ...], ordered by the rank that gets them.
        sizes: number of rows that each rank gets.
        reduce_op: the reduction, see `check_reduction`.
        out: contiguous, [n, ...], written.

    Returns:
        The works, and the last local step that completes `out` after them, or None.
    """
    works = transport_of(call.group).reduce(call, rows, sizes, reduce_op, out)
    if works is not None:
        return works, None
    ranks, own = call.group.size(), out.shape[0]
    memory = scratch.borrow(ranks * out.numel(), rows)
    parts = memory.view(ranks * own, *out.shape[1:])
    from_peers = [(r * own, (r + 1) * own) for r in range(ranks)]
    works = send_ranges(call, rows, running_ends(sizes), parts, from_peers)

    def reduce() -> None:
        reduce_rows(parts.view(ranks, *out.shape), reduce_op, out)
        scratch.give_back(memory)

    return works, reduce
