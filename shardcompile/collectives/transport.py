"""Moving rows between the ranks of one process group.

Everything here runs at run time, on real tensors, with sizes that all ranks of the group agree on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from shardcompile.compat import register_work
from shardcompile.errors import CollectiveError
from shardcompile.layout.layout import REDUCE_OPS
from shardcompile.watch import Call

Range = tuple[int, int]
"""First row and end row."""

PAD_LIMIT = 1.25
"""NCCL only: the most that a padded all-gather may move, relative to the blocks, before exact sends are taken.

Its one ring kernel beats grouped sends at equal bytes; the limit is an estimate, not measured by this project.
"""


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


def exchange(call: Call, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Work]:
    """Start sends to and receives from ranks of the group; empty messages are skipped on both sides.

    Messages have the call's tag, so that those of calls that differ never meet.

    Args:
        call: what they belong to.
        sends: pairs of a peer's rank in the group and a contiguous tensor.
        receives: the same, to be written.
    """
    sends = [(peer, t) for peer, t in sends if t.numel()]
    receives = [(peer, t) for peer, t in receives if t.numel()]
    group, tag = call.group, call.tag
    if group.name() == "nccl":
        return _grouped_exchange(group, sends, receives)
    starts = [functools.partial(group.recv, [t], peer, tag) for peer, t in receives]
    starts += [functools.partial(group.send, [t], peer, tag) for peer, t in sends]
    return call.run(starts)


def _grouped_exchange(
    group: ProcessGroup, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
) -> list[Work]:
    # NCCL knows neither bool nor complex; rows are moved as bytes.
    messages = [dist.P2POp(dist.irecv, t.view(torch.uint8), group=group, group_peer=p) for p, t in receives]
    messages += [dist.P2POp(dist.isend, t.view(torch.uint8), group=group, group_peer=p) for p, t in sends]
    return dist.batch_isend_irecv(messages) if messages else []


def send_ranges(
    call: Call,
    rows: Tensor,
    to_peers: Sequence[Range],
    out: Tensor,
    from_peers: Sequence[Range],
    keep_own: bool = True,
) -> list[Work]:
    """Send a range of rows to every peer, and receive one from every peer, straight into place.

    Args:
        call: what they belong to.
        rows: contiguous, [n, ...].
        to_peers: for each rank of the group the range of `rows` that it gets.
        out: contiguous, [m, ...], written.
        from_peers: for each rank of the group the range of `out` that it fills.
        keep_own: copy what this rank keeps; otherwise its range of `out` is left as it is.
    """
    me, ranks = call.group.rank(), call.group.size()
    mine, place = to_peers[me], from_peers[me]
    if keep_own and mine[1] > mine[0]:
        out[place[0] : place[1]].copy_(rows[mine[0] : mine[1]])
    others = [p for p in range(ranks) if p != me]
    sends = [(p, rows[to_peers[p][0] : to_peers[p][1]]) for p in others]
    receives = [(p, out[from_peers[p][0] : from_peers[p][1]]) for p in others]
    return exchange(call, sends, receives)


def gather_rows(call: Call, rows: Tensor, sizes: Sequence[int], out: Tensor, keep_own: bool = True) -> list[Work]:
    """Start to gather every rank's rows into `out`, which is complete when all works are.

    Args:
        call: what they belong to.
        rows: of this rank, contiguous, [n, ...].
        sizes: rows of each rank.
        out: contiguous, [sum of sizes, ...], written.
        keep_own: whether this rank's part of `out` is needed, too.
    """
    if call.group.name() == "nccl" and max(sizes) * len(sizes) <= PAD_LIMIT * sum(sizes):
        return [_gather_padded(call, rows, sizes, out)]
    ends = running_ends(sizes)
    whole = [(0, rows.shape[0])] * len(sizes)
    return send_ranges(call, rows, whole, out, ends, keep_own)


def _gather_padded(call: Call, rows: Tensor, sizes: Sequence[int], out: Tensor) -> Work:
    size = max(sizes)
    padded = rows
    if rows.shape[0] < size:
        padded = rows.new_zeros([size, *rows.shape[1:]])
        padded[: rows.shape[0]].copy_(rows)
    start = torch.ops._c10d_functional.all_gather_into_tensor(padded, len(sizes), call.group.group_name)

    def unpack() -> None:
        gathered = torch.ops._c10d_functional.wait_tensor(start)
        torch.cat([gathered[r * size : r * size + n] for r, n in enumerate(sizes)], out=out)

    return CallWork(call, [], unpack)


_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
}
"""By dtype that kernels or backends do not reduce, the wider one it is reduced in. Sums still wrap around."""


def reduced_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms of a dtype are reduced."""
    return _WIDER.get(dtype, dtype)


def check_reduction(reduce_op: str, dtype: torch.dtype) -> None:
    """Refuse what `reduce_rows` cannot do, before anything is sent.

    Raises:
        CollectiveError: there is no such reduction of this dtype.
    """
    known = reduce_op in REDUCE_OPS
    ordered, divisible = not dtype.is_complex, dtype.is_floating_point or dtype.is_complex
    if (dtype.is_floating_point and dtype.itemsize == 1) or dtype is torch.uint64:
        raise CollectiveError(f"there is no reduction {reduce_op} of {dtype}; convert the terms to another dtype first")
    if not known or (reduce_op == "avg" and not divisible) or (reduce_op in ("max", "min") and not ordered):
        raise CollectiveError(f"there is no reduction {reduce_op} of {dtype}")


def reduce_rows(parts: Tensor, reduce_op: str, out: Tensor) -> None:
    """Reduce over the first dim, in rank order, into a tensor of the same dtype."""
    wide = reduced_in(parts.dtype)
    if wide is not parts.dtype:
        whole = out.to(wide)
        reduce_rows(parts.to(wide), reduce_op, whole)
        out.copy_(whole)
    elif reduce_op == "sum":
        torch.sum(parts, 0, dtype=parts.dtype, out=out)
    elif reduce_op == "avg":
        torch.mean(parts, 0, out=out)
    elif reduce_op == "product":
        torch.prod(parts, 0, dtype=parts.dtype, out=out)
    else:
        (torch.amax if reduce_op == "max" else torch.amin)(parts, 0, out=out)


def running_ends(sizes: Sequence[int]) -> list[Range]:
    """First and end row of every block."""
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
