"""What collectives move, by kind.

An even collective moves what a ring or pairwise exchange does, which is the least possible (Thakur, Rabenseifner,
Gropp, "Optimization of collective communication operations in MPICH", 2005; nccl-tests, PERFORMANCE.md). Uneven blocks
are sent directly, as `shardcompile.collectives.transport` does: a rank sends its block to each of the n-1 others, so
that the owner of the largest one decides where every rank has its own link, with (n-1) max(block); that is also what a
gather padded to the largest block moves. Where all share one the sum decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardcompile.collectives.transport import running_ends
from shardcompile.passes.blocks import Member, Side, shares


@dataclass(frozen=True)
class Traffic:
    """What a collective moves.

    Attributes:
        busiest: bytes that the rank sends or receives that has most to.
        total: bytes that all ranks send.
        packed: bytes that the busiest rank reads and writes in its own memory before anything is sent.
        unpacked: the same after everything has come, when the collective is awaited.
    """

    busiest: float
    total: float
    packed: float = 0.0
    unpacked: float = 0.0


@dataclass(frozen=True)
class Load:
    """What each rank has of the tensors of a collective, in bytes: a row for blocks, two for an exchange.

    Attributes:
        nbytes: nbytes[row, rank]: of blocks the rank's own; of an exchange what it sends, and what it receives.
    """

    nbytes: np.ndarray

    @staticmethod
    def of(kind: str, members: Sequence[Member], n: int) -> Load:
        """What the ranks have of one collective.

        Args:
            kind: of it; what is no exchange and has no blocks counts as divided evenly.
            members: of it.
            n: ranks in the group.
        """
        if kind == "all_to_all_v":
            return Load(np.array(_sent_and_received(members, n)))
        times = n if kind == "all_gather" else 1  # its members are blocks
        return Load(np.sum([np.array([shares(m.put or m.get, n)]) * (times * m.nbytes) for m in members], axis=0))

    @staticmethod
    def together(loads: Sequence[Load]) -> Load:
        """Of several collectives."""
        return Load(np.sum([load.nbytes for load in loads], axis=0))

    @property
    def largest(self) -> float:
        """Of the rank that has most."""
        return float(self.nbytes.max())

    @property
    def whole(self) -> float:
        """Of all ranks."""
        return float(self.nbytes[0].sum())

    @property
    def ranks(self) -> int:
        """How many there are."""
        return int(self.nbytes.shape[1])


def gathered_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed, and what has come unpacked."""
    n = load.ranks
    return Traffic((n - 1) * load.largest, (n - 1) * load.whole, 2 * load.largest, 2 * load.whole)


def scattered_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed. The sum of n terms comes out in its place."""
    n = load.ranks
    return Traffic((n - 1) * load.largest, (n - 1) * load.whole, 2 * load.whole, (n + 1) * load.largest)


def exchanged_in_a_bucket(load: Load) -> Traffic:
    """As without a bucket; what is sent is packed, and what has come unpacked."""
    return Traffic(load.largest, load.whole, 2 * load.largest, 2 * load.largest)


def reduced_in_a_bucket(load: Load, passes: int) -> Traffic:
    """What torch's even collectives move of tensors that were joined: once to reduce, twice to tell everybody."""
    n, whole = load.ranks, load.whole
    return Traffic(passes * (n - 1) / n * whole, passes * (n - 1) * whole, 2 * whole)


def _block_traffic(members: Sequence[Member], n: int) -> Traffic:
    """all_gather_v: each block goes to the n-1 others. reduce_scatter_v: the same backwards, and the sum of n terms."""
    largest, whole = _largest_and_whole(members, n)
    reduced = (n + 1) * largest if members[0].get is not None else 0.0
    return Traffic((n - 1) * largest, (n - 1) * whole, unpacked=reduced)


def _gather_bucket_traffic(members: Sequence[Member], n: int) -> Traffic:
    return gathered_in_a_bucket(Load.of("all_gather_bucket", members, n))


def _scatter_bucket_traffic(members: Sequence[Member], n: int) -> Traffic:
    return scattered_in_a_bucket(Load.of("reduce_scatter_bucket", members, n))


def _largest_and_whole(members: Sequence[Member], n: int) -> tuple[float, float]:
    """Bytes of the rank that holds most, and of all ranks."""
    columns = zip(*([m.nbytes * s for s in shares(m.put or m.get, n)] for m in members), strict=True)
    return max(sum(column) for column in columns), sum(m.nbytes for m in members)


def _even_gather_traffic(members: Sequence[Member], n: int) -> Traffic:
    """all_gather of equal blocks: `nbytes` are those of one block."""
    whole = n * sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * whole, (n - 1) * whole)


def _even_scatter_traffic(members: Sequence[Member], n: int) -> Traffic:
    whole = sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * whole, (n - 1) * whole)


def _all_reduce_traffic(members: Sequence[Member], n: int) -> Traffic:
    """A reduce-scatter and an all-gather."""
    half = _even_scatter_traffic(members, n)
    return Traffic(2 * half.busiest, 2 * half.total)


def _broadcast_traffic(members: Sequence[Member], n: int) -> Traffic:
    """Pipelined: each rank receives all and passes it on."""
    whole = sum(m.nbytes for m in members)
    return Traffic(whole, (n - 1) * whole)


def _even_exchange_traffic(members: Sequence[Member], n: int) -> Traffic:
    """all_to_all_single, and rows that go where data says: of its payload each rank keeps one part in n."""
    payload = sum(m.nbytes for m in members)
    return Traffic((n - 1) / n * payload, (n - 1) * payload)


def _mirror_traffic(members: Sequence[Member], n: int) -> Traffic:
    payload = sum(m.nbytes for m in members)
    return Traffic(payload, n * payload)


def _sent_and_received(members: Sequence[Member], n: int) -> tuple[list[float], list[float]]:
    """all_to_all_v: rank p sends the part of its block that belongs to rank q's."""
    sent, received = [0.0] * n, [0.0] * n
    for m in members:
        for r, (put, get) in enumerate(zip(shares(m.put, n), shares(m.get, n), strict=True)):
            sent[r] += m.nbytes * put * (1 - get)
            received[r] += m.nbytes * get * (1 - put)
    return sent, received


def _turn_traffic(members: Sequence[Member], n: int) -> Traffic:
    sent, received = _sent_and_received(members, n)
    return Traffic(max(*sent, *received), sum(sent))


def _turn_bucket_traffic(members: Sequence[Member], n: int) -> Traffic:
    return exchanged_in_a_bucket(Load.of("all_to_all_v", members, n))


def _fetch_traffic(members: Sequence[Member], n: int) -> Traffic:
    """fetch_ranges and return_ranges: what a rank wants and does not hold."""
    (m,) = members
    assert m.put is not None and m.get is not None
    narrow, wide = (m.put, m.get) if m.get.halo or not m.put.halo else (m.get, m.put)
    held, wanted = narrow.sizes or narrow.assumed, wide.sizes or wide.assumed
    if held is None or wanted is None:
        # Cuts that are known at run time only: all but one part in n may have to move.
        return Traffic((n - 1) / n * m.nbytes / n, (n - 1) / n * m.nbytes)
    rows = max(sum(held), 1)
    taken, given = _moved_rows(held, wanted, wide.halo)
    return Traffic(m.nbytes * max(*taken, *given) / rows, m.nbytes * sum(taken) / rows)


def _fetch_block_traffic(members: Sequence[Member], n: int) -> Traffic:
    (m,) = members
    return _step_traffic(m.nbytes, m.put, m.get, n)


def _return_block_traffic(members: Sequence[Member], n: int) -> Traffic:
    (m,) = members
    return _step_traffic(m.nbytes, m.get, m.put, n)


def _step_traffic(nbytes: int, own: Side | None, away: Side | None, n: int) -> Traffic:
    """A step of a ring: what ranks have of other ranks' blocks has come, or goes back."""
    assert own is not None and away is not None
    if own.sizes is None or away.sizes is None:
        return Traffic(nbytes / n, nbytes)
    rows = max(sum(own.sizes), 1)
    return Traffic(nbytes * max(away.sizes) / rows, nbytes * sum(away.sizes) / rows)


def _moved_rows(held: Sequence[int], wanted: Sequence[int], halo: int) -> tuple[list[int], list[int]]:
    """Rows that each rank takes from others and gives to others. A halo counts half on either side."""
    before, after = halo - halo // 2, halo // 2
    total = sum(held)
    own = running_ends(held)
    taken, given = [0] * len(held), [0] * len(held)
    first = 0
    for r, (start, end) in enumerate(running_ends(wanted)):
        if end == start:
            continue
        start, end = max(start - before, 0), min(end + after, total)
        while first and own[first][0] > start:
            first -= 1
        while own[first][1] <= start:
            first += 1
        for p in range(first, len(own)):
            a, b = own[p]
            if a >= end:
                break
            rows = min(b, end) - max(a, start)
            if p != r and rows > 0:
                taken[r] += rows
                given[p] += rows
    return taken, given


TRAFFIC: dict[str, Callable[[Sequence[Member], int], Traffic]] = {
    "all_gather": _even_gather_traffic,
    "reduce_scatter": _even_scatter_traffic,
    "all_reduce": _all_reduce_traffic,
    "all_to_all": _even_exchange_traffic,
    "broadcast": _broadcast_traffic,
    "all_gather_v": _block_traffic,
    "reduce_scatter_v": _block_traffic,
    "all_to_all_v": _turn_traffic,
    "fetch_ranges": _fetch_traffic,
    "return_ranges": _fetch_traffic,
    "mirror_blocks": _mirror_traffic,
    "fetch_block": _fetch_block_traffic,
    "return_block": _return_block_traffic,
    "gather_cut": _even_gather_traffic,
    "gather_counts": _even_gather_traffic,
    "exchange_rows": _even_exchange_traffic,
    "fetch_spans": _even_exchange_traffic,
    "return_spans": _even_exchange_traffic,
    "nearest": _even_gather_traffic,
    "all_gather_bucket": _gather_bucket_traffic,
    "reduce_scatter_bucket": _scatter_bucket_traffic,
    "all_to_all_bucket": _turn_bucket_traffic,
}
"""By a collective's kind: from its members and the number of ranks."""
