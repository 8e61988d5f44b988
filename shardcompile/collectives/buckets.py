"""Several collectives of one group as one: a message for each peer, in place of one for each peer and member.

What the passes put in place of single collectives. Each rank packs its blocks one after the other, whatever their
sizes, so that nothing is padded; the result holds the members one after the other, each as its own collective would
have given it, flat and rows first. Of all-gathers of several dtypes the bytes are gathered. No gradients: passes run
when these are traced.

A member's cuts are passed as in `shardcompile.collectives.ops`, those of all members in one list each: `sizes`,
`keys`, `nests`, and in `lengths`, for each cut, how many of the sizes and of the nests are its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.ops import blocks_of, check_block
from shardcompile.watch import Call, enter

_FEW_BYTES = 2**18
"""What a rank sends in so few bytes takes less time than to look at its members one by one from Python."""

_LONG_UNIT = 64
"""Bytes that are copied at once for about the price of copying one."""

Cut = tuple[Sequence[Any], Any, Sequence[Any]]
"""Sizes, key and nest, see `shardcompile.layout.GroupCut`."""

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_CUTS = "SymInt[] sizes, SymInt[] keys, int[] nests, int[] lengths"
_SCHEMAS = (
    f"all_gather_bucket(Tensor[] inputs, int[] dims, SymInt[] totals, {_CUTS}, str group_name) -> Tensor",
    f"reduce_scatter_bucket(Tensor[] inputs, int[] dims, SymInt[] blocks, str reduce_op, {_CUTS}, str group_name) "
    "-> Tensor",
    f"all_to_all_bucket(Tensor[] inputs, int[] dims, SymInt[] extents, {_CUTS}, str group_name) -> Tensor",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema, tags=[torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout])

_ops = torch.ops.shardcompile
BUCKETS = (_ops.all_gather_bucket, _ops.reduce_scatter_bucket, _ops.all_to_all_bucket)
"""The ops of this module."""


def flat_cuts(cuts: Sequence[Cut]) -> tuple[list[Any], list[Any], list[Any], list[int]]:
    """Cuts as arguments of a bucket: sizes, keys, nests, lengths."""
    sizes = [s for c in cuts for s in c[0]]
    nests = [n for c in cuts for n in c[2]]
    return sizes, [c[1] for c in cuts], nests, [n for c in cuts for n in (len(c[0]), len(c[2]))]


def _cuts(sizes: Sequence[int], keys: Sequence[int], nests: Sequence[int], lengths: Sequence[int]) -> list[Cut]:
    cuts: list[Cut] = []
    i = j = 0
    for key, n_sizes, n_nest in zip(keys, lengths[::2], lengths[1::2], strict=True):
        cuts.append((sizes[i : i + n_sizes], key, nests[j : j + n_nest]))
        i, j = i + n_sizes, j + n_nest
    return cuts


def bucket_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype in which members of these dtypes are gathered together: bytes, unless they have one."""
    return dtypes[0] if len(set(dtypes)) == 1 else torch.uint8


def _width(shape: Sequence[Any], itemsize: int, dtype: torch.dtype, *without: int) -> Any:
    """Elements of `dtype` in a row of a tensor: in what its other dims hold."""
    return math.prod(s for d, s in enumerate(shape) if d not in without) * (itemsize // dtype.itemsize)


@dataclass(frozen=True)
class _Plan:
    """Lengths of the pieces of a bucket, in elements of its dtype.

    Attributes:
        counts: counts[member][rank].
        by_rank: counts[rank][member].
        shares: of each rank, all members together.
        unit: a common divisor of all counts.
        order: of the units that the ranks send, one rank after the other, the numbers in the order of the members,
            int32; None where the pieces are better joined one by one.
    """

    counts: list[list[int]]
    by_rank: list[list[int]]
    shares: list[int]
    unit: int
    order: Tensor | None


@functools.lru_cache(maxsize=512)
def _plan_of(
    what: str,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    dtype: torch.dtype,
    dims: tuple[int, ...],
    totals: tuple[int, ...] | None,
    cuts: tuple[tuple[int, ...], ...],
    ranks: int,
    holder: int | None,
) -> _Plan:
    """The pieces of a bucket, after checking that the tensors are what the layouts say.

    Kept, because a bucket of many small members takes longer to divide than to send.

    Args:
        what: the op, for messages.
        shapes: of the inputs.
        dtypes: of the inputs.
        dtype: of the bucket.
        dims: that are cut.
        totals: their extents; None for those that the inputs have.
        cuts: sizes, keys, nests and lengths.
        ranks: in the group.
        holder: this rank, if the inputs are its blocks.
    """
    counts = []
    for n, (shape, dim, cut) in enumerate(zip(shapes, dims, _cuts(*cuts), strict=True)):
        blocks = blocks_of(shape[dim] if totals is None else totals[n], dim, cut, ranks, what)
        if holder is not None:
            check_block(shape, dim, blocks[holder], holder, what)
        width = _width(shape, dtypes[n].itemsize, dtype, dim)
        counts.append([(b - a) * width for a, b in blocks])
    by_rank = [list(column) for column in zip(*counts, strict=True)]
    shares = [sum(row) for row in by_rank]
    unit = math.gcd(*(n for row in counts for n in row)) or 1
    few, long = sum(shares) * dtype.itemsize <= _FEW_BYTES * ranks, unit * dtype.itemsize >= _LONG_UNIT
    order = _order(counts, unit) if few and long and holder is not None else None
    return _Plan(counts, by_rank, shares, unit, order)


def _order(counts: Sequence[Sequence[int]], unit: int) -> Tensor:
    """Of pieces [rank][member] one after the other the units' numbers, member after member and rank after rank."""
    lengths = torch.tensor(counts, device="cpu") // unit
    by_rank = lengths.t().reshape(-1)
    starts = (by_rank.cumsum(0) - by_rank).view(lengths.t().shape).t().reshape(-1)
    lengths = lengths.view(-1)
    ends = lengths.cumsum(0)
    moved = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return (torch.arange(len(moved), device="cpu") + moved).int()


def _rows(x: Tensor, dim: int) -> Tensor:
    """The elements of a tensor, flat, `dim` first."""
    return transport.rows_first(x, dim).view(-1)


def _turned(pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Pieces [a][b] as one list in the order (b, a)."""
    return [piece for column in zip(*pieces, strict=True) for piece in column]


def _all_gather_bucket(
    inputs: list[Tensor],
    dims: list[int],
    totals: list[int],
    sizes: list[int],
    keys: list[int],
    nests: list[int],
    lengths: list[int],
    group_name: str,
) -> Tensor:
    group = compat.process_group(group_name)
    dtypes = [x.dtype for x in inputs]
    dtype = bucket_dtype(dtypes)
    plan = _plan_of(
        "all_gather_bucket",
        tuple([x.shape for x in inputs]),
        tuple(dtypes),
        dtype,
        tuple(dims),
        tuple(totals),
        (tuple(sizes), tuple(keys), tuple(nests), tuple(lengths)),
        group.size(),
        group.rank(),
    )
    share = plan.shares[group.rank()]
    if share * dtype.itemsize <= _FEW_BYTES and not any(dims) and len(set(dtypes)) == 1:
        packed = compat.joined(inputs).resolve_conj().resolve_neg()
        borrowed = []
    else:
        rows = [_rows(x, d) for x, d in zip(inputs, dims, strict=True)]
        packed = _packed([x if x.dtype == dtype else x.view(dtype) for x in rows], share)
        borrowed = [packed]
    gathered = scratch.borrow(sum(plan.shares), packed)
    borrowed.append(gathered)
    call = _call(group, "all_gather_bucket", packed, plan.shares)
    if plan.order is not None and packed.device.type == "cpu":
        works = transport.gather_rows(call, packed, plan.shares, gathered)
        return _ordered_later(call, works, gathered, plan.order, plan.unit, borrowed)
    works = transport.gather_rows(call, packed, plan.shares, gathered, keep_own=False)
    return _unpacked_later(call, works, packed, gathered, plan.shares, plan.by_rank, borrowed)


def _packed(pieces: list[Tensor], numel: int) -> Tensor:
    """Flat pieces one after the other, borrowed.

    Args:
        pieces: of one dtype.
        numel: of all of them.
    """
    return torch.cat(pieces, out=scratch.borrow(numel, pieces[0]))


def _call(group: ProcessGroup, kind: str, packed: Tensor, shares: Sequence[int]) -> Call:
    return enter(group, kind, packed.dtype, ("shares",), tuple(shares))


def _unpacked_later(
    call: Call,
    works: Sequence[Work],
    own: Tensor,
    received: Tensor,
    shares: Sequence[int],
    by_rank: Sequence[Sequence[int]],
    borrowed: Sequence[Tensor],
) -> Tensor:
    """The result of a bucket, which is complete after its wait: what came, member after member.

    Args:
        call: what the messages belong to.
        works: that write into `received`.
        own: what this rank keeps.
        received: what each rank sends, one after the other; the place of this rank is not read.
        shares: elements of `received` from each rank.
        by_rank: by_rank[rank][member] is how many of them belong to a member.
        borrowed: what is given back in the end.
    """
    out = torch.empty_like(received)
    blocks = list(received.split(shares))
    blocks[call.group.rank()] = own
    pieces = _turned([block.split(counts) for block, counts in zip(blocks, by_rank, strict=True)])

    return _filled_later(out, call, works, lambda: torch.cat(pieces, out=out), borrowed)


def _ordered_later(
    call: Call, works: Sequence[Work], received: Tensor, order: Tensor, unit: int, borrowed: Sequence[Tensor]
) -> Tensor:
    """As `_unpacked_later`, by the units' numbers: one call, whatever the number of pieces."""
    out = torch.empty_like(received)

    def unpack() -> None:
        torch.index_select(received.view(-1, unit), 0, order, out=out.view(-1, unit))

    return _filled_later(out, call, works, unpack, borrowed)


def _filled_later(
    out: Tensor, call: Call, works: Sequence[Work], fill: Callable[[], object], borrowed: Sequence[Tensor]
) -> Tensor:
    """A tensor that is complete after its wait: works done, it is filled, and what was borrowed goes back."""

    def finish() -> None:
        fill()
        scratch.give_back(*borrowed)

    transport.complete(out, call, works, finish)
    return out


def _reduce_scatter_bucket(
    inputs: list[Tensor],
    dims: list[int],
    blocks: list[int],
    reduce_op: str,
    sizes: list[int],
    keys: list[int],
    nests: list[int],
    lengths: list[int],
    group_name: str,
) -> Tensor:
    transport.check_reduction(reduce_op, inputs[0].dtype)
    group = compat.process_group(group_name)
    plan = _plan_of(
        "reduce_scatter_bucket",
        tuple([x.shape for x in inputs]),
        tuple([x.dtype for x in inputs]),
        inputs[0].dtype,
        tuple(dims),
        None,
        (tuple(sizes), tuple(keys), tuple(nests), tuple(lengths)),
        group.size(),
        None,
    )
    members = [_rows(x, d).split(counts) for x, d, counts in zip(inputs, dims, plan.counts, strict=True)]
    packed = _packed(_turned(members), sum(plan.shares))
    own = plan.shares[group.rank()]
    out = packed.new_empty([own])
    parts = scratch.borrow(group.size() * own, out)
    from_peers = [(r * own, (r + 1) * own) for r in range(group.size())]
    call = _call(group, f"reduce_scatter_bucket ({reduce_op})", packed, plan.shares)
    works = transport.send_ranges(call, packed, transport.running_ends(plan.shares), parts, from_peers)

    def reduce() -> None:
        transport.reduce_rows(parts.view(group.size(), own), reduce_op, out)

    return _filled_later(out, call, works, reduce, [packed, parts])


def _all_to_all_bucket(
    inputs: list[Tensor],
    dims: list[int],
    extents: list[int],
    sizes: list[int],
    keys: list[int],
    nests: list[int],
    lengths: list[int],
    group_name: str,
) -> Tensor:
    group = compat.process_group(group_name)
    me, ranks = group.rank(), range(group.size())
    cuts = _cuts(sizes, keys, nests, lengths)
    stated: list[int] = []
    sent: list[list[Tensor]] = [[] for _ in ranks]
    received: list[list[int]] = [[] for _ in ranks]
    for n, x in enumerate(inputs):
        src_dim, dst_dim = dims[2 * n : 2 * n + 2]
        total, block = extents[2 * n : 2 * n + 2]
        src = blocks_of(total, src_dim, cuts[2 * n], group.size(), "all_to_all_bucket")
        dst = blocks_of(x.shape[dst_dim], dst_dim, cuts[2 * n + 1], group.size(), "all_to_all_bucket")
        check_block(x.shape, src_dim, src[me], me, "all_to_all_bucket")
        stated += [src_dim, dst_dim, *(n for blocks in (src, dst) for r in blocks for n in r)]
        width = _width(x.shape, x.dtype.itemsize, x.dtype, src_dim, dst_dim) * block
        for r in ranks:
            part = x.narrow(dst_dim, dst[r][0], dst[r][1] - dst[r][0])
            sent[r].append(transport.rows_first(part, src_dim).view(-1))
            received[r].append((src[r][1] - src[r][0]) * width)
    to_peers = transport.running_ends([sum(p.numel() for p in row) for row in sent])
    shares = [sum(row) for row in received]
    parts = scratch.borrow(sum(shares), inputs[0])
    packed = _packed([p for row in sent for p in row], to_peers[-1][1])
    call = _call(group, "all_to_all_bucket", packed, stated)
    works = transport.send_ranges(call, packed, to_peers, parts, transport.running_ends(shares), keep_own=False)
    own = packed[slice(*to_peers[me])]
    return _unpacked_later(call, works, own, parts, shares, received, [packed, parts])


def _fake_all_gather(inputs: list[Tensor], dims: list[int], totals: list[Any], *_: Any) -> Tensor:
    dtype = bucket_dtype([x.dtype for x in inputs])
    numel = sum(t * _width(x.shape, x.dtype.itemsize, dtype, d) for x, d, t in zip(inputs, dims, totals, strict=True))
    return inputs[0].new_empty([numel], dtype=dtype)


def _fake_reduce_scatter(inputs: list[Tensor], dims: list[int], blocks: list[Any], *_: Any) -> Tensor:
    numel = sum(b * _width(x.shape, x.dtype.itemsize, x.dtype, d) for x, d, b in zip(inputs, dims, blocks, strict=True))
    return inputs[0].new_empty([numel])


def _fake_all_to_all(inputs: list[Tensor], dims: list[int], extents: list[Any], *_: Any) -> Tensor:
    pairs = zip(inputs, dims[::2], dims[1::2], extents[::2], extents[1::2], strict=True)
    lengths = (t * n * _width(x.shape, x.dtype.itemsize, x.dtype, a, b) for x, a, b, t, n in pairs)
    return inputs[0].new_empty([sum(lengths)])


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "all_gather_bucket": (_all_gather_bucket, _fake_all_gather),
    "reduce_scatter_bucket": (_reduce_scatter_bucket, _fake_reduce_scatter),
    "all_to_all_bucket": (_all_to_all_bucket, _fake_all_to_all),
}
for _name, (_real, _fake) in _IMPLEMENTATIONS.items():
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    _fake = compat.lowered_when_traced(getattr(_ops, _name).default, _fake)
    torch.library.register_fake(f"shardcompile::{_name}", _fake, lib=_LIBRARY)

compat.count_as_collective(BUCKETS)
