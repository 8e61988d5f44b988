"""The ops of the namespace ``shardcompile``: schemas, implementations, fake implementations, gradients.

Conventions. A cut is passed as three arguments: `sizes` (the group's block sizes, empty if not known while tracing),
`key` (stands for the sizes of a dynamic cut; 0 is torch.chunk) and `nest` (which part of the key's cut belongs to
this group); see `shardcompile.layout.GroupCut`. Extents of outputs are passed as symbols, so that no op has to
invent one. The payload comes first and the group name last, as Inductor expects of a collective. Results are
complete after `Pending.wait`. Collectives return one flat tensor, the rows one after the other, so that rows arrive
in place; `Pending` gives it its shape after the wait. (With a shape, Inductor would have to compare symbolic strides
at the wait, and would specialise on the size of this rank's block.)
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcompile import compat
from shardcompile.collectives import extrema, scratch, transport
from shardcompile.collectives.transport import Range
from shardcompile.errors import CollectiveError
from shardcompile.layout import Cut, GroupCut, IntLike, digest_of
from shardcompile.watch import Call, enter

_LIBRARY = torch.library.Library("shardcompile", "DEF")
_CUT = "SymInt[] sizes, SymInt key, int[] nest"
_TWO_CUTS = "SymInt[] src_sizes, SymInt src_key, int[] src_nest, SymInt[] dst_sizes, SymInt dst_key, int[] dst_nest"

_SCHEMAS = (
    f"all_gather_v(Tensor input, int dim, SymInt total, {_CUT}, str group_name) -> Tensor",
    f"reduce_scatter_v(Tensor input, int dim, SymInt block, str reduce_op, {_CUT}, str group_name) -> Tensor",
    f"all_to_all_v(Tensor input, int src_dim, int dst_dim, SymInt total, SymInt block, {_TWO_CUTS}, "
    "str group_name) -> Tensor",
    f"fetch_ranges(Tensor input, int dim, SymInt total, SymInt block, {_TWO_CUTS}, SymInt[] reach, "
    "float? fill, str group_name) -> Tensor",
    f"return_ranges(Tensor input, int dim, SymInt total, SymInt block, {_TWO_CUTS}, SymInt[] reach, "
    "float? fill, str group_name) -> Tensor",
    "mirror_blocks(Tensor input, int dim, SymInt block, str group_name) -> Tensor",
    f"take_block(Tensor input, int dim, SymInt block, {_CUT}, str group_name) -> Tensor",
    f"place_block(Tensor input, int dim, SymInt total, {_CUT}, str group_name) -> Tensor",
    "gather_cut(Tensor input, int dim, str group_name) -> Tensor",
    "state_cut(Tensor input, int dim, SymInt[] sizes, str group_name) -> Tensor",
)
for _schema in _SCHEMAS:
    # CUDA graphs cannot hold these: which rows move is decided on the host, at run time.
    _LIBRARY.define(_schema, tags=[torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout])

_ops = torch.ops.shardcompile
COLLECTIVES = (
    _ops.all_gather_v,
    _ops.reduce_scatter_v,
    _ops.all_to_all_v,
    _ops.fetch_ranges,
    _ops.return_ranges,
    _ops.mirror_blocks,
    _ops.gather_cut,
)
"""Ops that communicate."""

OPS = (*COLLECTIVES, _ops.take_block, _ops.place_block, _ops.state_cut)
"""All ops of the namespace."""


@dataclass(frozen=True)
class Pending:
    """A collective that has started.

    Attributes:
        flat: what it writes.
        rows: shape of the result with `dim` first.
        dim: where the rows go.
        call: where the messages are torch's own, and nothing is traced: what is waited for.
    """

    flat: Tensor
    rows: tuple[Any, ...]
    dim: int
    call: Call | None = None

    @staticmethod
    def of(flat: Tensor, shape: Sequence[Any], dim: int, extent: Any) -> Pending:
        """A collective whose result has the given shape, but for the extent of `dim`."""
        return Pending(flat, (extent, *(s for d, s in enumerate(shape) if d != dim)), dim)

    def result(self) -> Tensor:
        """The result, not to be read before the wait."""
        return self._shaped(self.flat)

    def wait(self) -> Tensor:
        """Complete the collective; keeps it alive in a graph even if its result is empty on this rank."""
        if self.call is not None:
            return self._shaped(self.call.run([functools.partial(wait, self.flat)])[0])
        return self._shaped(wait(self.flat))

    def _shaped(self, flat: Tensor) -> Tensor:
        rows = flat.view(self.rows)
        return rows.movedim(0, self.dim) if self.dim else rows


@dataclass(frozen=True)
class Decoded:
    """A reduction that has started of numbers in another form: in a wider dtype, or floats encoded for a maximum.

    Attributes:
        pending: the collective.
        encoded: the dtype that was encoded; None if numbers were only made wider.
        dtype: of the result.
    """

    pending: Pending
    encoded: torch.dtype | None
    dtype: torch.dtype

    def wait(self) -> Tensor:
        """Complete the collective."""
        out = self.pending.wait()
        return (out if self.encoded is None else extrema.decode(out, self.encoded)).to(self.dtype)

    result = wait
    """What is decoded has been read, so that there is nothing to give before the wait."""


def wait(x: Tensor | Pending | Decoded) -> Tensor:
    """Complete an asynchronous collective."""
    return torch.ops._c10d_functional.wait_tensor(x) if isinstance(x, Tensor) else x.wait()


def all_reduce(x: Tensor, reduce_op: str, group_name: str, *, async_op: bool = False) -> Pending | Decoded:
    """Start torch's own all-reduce, flat for the same reason as the collectives here; NaN wins a maximum or minimum.

    Args:
        x: a term.
        reduce_op: the reduction.
        group_name: the ranks.
        async_op: do not wait for the others before it starts, as is done for a while to see that they do the same.

    Raises:
        CollectiveError: there is no such reduction of this dtype.
    """
    transport.check_reduction(reduce_op, x.dtype)
    if reduce_op in ("max", "min") and x.is_floating_point():
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        pending = _all_reduce(extrema.encode(wide, reduce_op), reduce_op, group_name, async_op)
        return Decoded(pending, wide.dtype, x.dtype)
    if x.is_complex() and reduce_op == "product":
        raise CollectiveError(
            f"torch has no all-reduce of products of {x.dtype}; redistribute the terms to Shard, then to Replicate"
        )
    carried = transport.reduced_in(x.dtype)
    if carried is not x.dtype:
        return Decoded(_all_reduce(x.to(carried), reduce_op, group_name, async_op), None, x.dtype)
    return _all_reduce(x, reduce_op, group_name, async_op)


def _all_reduce(x: Tensor, reduce_op: str, group_name: str, async_op: bool) -> Pending:
    # Inside a trace `reshape` asks how the block is stored, and would specialise on its size.
    with contextlib.nullcontext() if type(x) is Tensor else compat.without_guards(x):
        flat = x.reshape([-1]) if x.ndim > 1 else x
    call = None
    if type(x) is Tensor and not torch.compiler.is_dynamo_compiling():
        group = compat.process_group(group_name)
        call = enter(group, f"all_reduce ({reduce_op})", x.dtype, ("shape",), tuple(x.shape))
        if not async_op:
            call.agree()
    return Pending(torch.ops._c10d_functional.all_reduce(flat, reduce_op, group_name), tuple(x.shape), 0, call)


def _new_rows(x: Tensor, dim: int, extent: Any) -> Tensor:
    """An uninitialised flat tensor for `x` with another extent of `dim`."""
    return x.new_empty([math.prod([extent, *(s for d, s in enumerate(x.shape) if d != dim)])])


def _as_rows(flat: Tensor, x: Tensor, dim: int, extent: int) -> Tensor:
    return flat.view([extent, *(s for d, s in enumerate(x.shape) if d != dim)])


def blocks_of(
    total: int, dim: int, cut: tuple[Sequence[int], int, Sequence[int]], ranks: int, what: str
) -> list[Range]:
    """Ranges of all blocks along a dim.

    Args:
        total: its extent.
        dim: for messages.
        cut: sizes, key and nest.
        ranks: in the group.
        what: the op, for messages.

    Raises:
        CollectiveError: the blocks do not add up to the extent.
    """
    sizes = GroupCut.resolve(total, *cut, ranks)
    if sum(sizes) != total:
        raise CollectiveError(f"{what}: block sizes {sizes} along dim {dim} add up to {sum(sizes)}, not to {total}")
    return transport.running_ends(sizes)


def check_block(shape: Sequence[int], dim: int, block: Range, rank: int, what: str) -> None:
    """Refuse a block that is not what its layout says.

    Raises:
        CollectiveError: it has another extent.
    """
    if shape[dim] != block[1] - block[0]:
        raise CollectiveError(
            f"{what}: rank {rank} of the group holds {shape[dim]} rows along dim {dim} (shape {tuple(shape)}), "
            f"its layout says {block[1] - block[0]}"
        )


_DETAILS = ("dim", "in blocks of", "to dim", "in", "other extents")


def _call(group: ProcessGroup, kind: str, x: Tensor, moved: Sequence[int], *details: Any) -> Call:
    """State a collective on blocks: its dims with the sizes of all blocks, and the extents that do not change."""
    rest = tuple([n for d, n in enumerate(x.shape) if d not in moved])
    stated = [tuple(d) if isinstance(d, list) else d for d in details]
    return enter(group, kind, x.dtype, (*_DETAILS[: len(stated)], _DETAILS[-1]), *stated, rest)


def _sizes(blocks: Sequence[Range]) -> tuple[int, ...]:
    return tuple([b - a for a, b in blocks])


def _flat(ranges: Sequence[Range]) -> tuple[int, ...]:
    return tuple([n for r in ranges for n in r])


def _all_gather_v(
    x: Tensor, dim: int, total: int, sizes: list[int], key: int, nest: list[int], group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    blocks = blocks_of(total, dim, (sizes, key, nest), group.size(), "all_gather_v")
    check_block(x.shape, dim, blocks[group.rank()], group.rank(), "all_gather_v")
    out = _new_rows(x, dim, total)
    rows = transport.rows_first(x, dim)
    held = _sizes(blocks)
    call = _call(group, "all_gather_v", x, (dim,), dim, held)
    works = transport.gather_rows(call, rows, held, _as_rows(out, x, dim, total))
    transport.complete(out, call, works)
    return out


def _reduce_scatter_v(
    x: Tensor, dim: int, block: int, reduce_op: str, sizes: list[int], key: int, nest: list[int], group_name: str
) -> Tensor:
    transport.check_reduction(reduce_op, x.dtype)
    group = compat.process_group(group_name)
    blocks = blocks_of(x.shape[dim], dim, (sizes, key, nest), group.size(), "reduce_scatter_v")
    rows = transport.rows_first(x, dim)
    memory = scratch.borrow(group.size() * block * rows.shape[1:].numel(), rows)
    parts = memory.view(group.size() * block, *rows.shape[1:])
    from_peers = [(r * block, (r + 1) * block) for r in range(group.size())]
    call = _call(group, f"reduce_scatter_v ({reduce_op})", x, (dim,), dim, _sizes(blocks))
    works = transport.send_ranges(call, rows, blocks, parts, from_peers)
    out = _new_rows(x, dim, block)
    target = _as_rows(out, x, dim, block)

    def reduce() -> None:
        transport.reduce_rows(parts.view(group.size(), *target.shape), reduce_op, target)
        scratch.give_back(memory)

    transport.complete(out, call, works, reduce)
    return out


def _all_to_all_v(
    x: Tensor,
    src_dim: int,
    dst_dim: int,
    total: int,
    block: int,
    src_sizes: list[int],
    src_key: int,
    src_nest: list[int],
    dst_sizes: list[int],
    dst_key: int,
    dst_nest: list[int],
    group_name: str,
) -> Tensor:
    group = compat.process_group(group_name)
    me = group.rank()
    src = blocks_of(total, src_dim, (src_sizes, src_key, src_nest), group.size(), "all_to_all_v")
    dst = blocks_of(x.shape[dst_dim], dst_dim, (dst_sizes, dst_key, dst_nest), group.size(), "all_to_all_v")
    check_block(x.shape, src_dim, src[me], me, "all_to_all_v")
    kept = x.narrow(dst_dim, dst[me][0], block)
    out = _new_rows(kept, src_dim, total)
    target = _as_rows(out, kept, src_dim, total)
    target[src[me][0] : src[me][1]].copy_(kept.movedim(src_dim, 0))
    peers = [p for p in range(group.size()) if p != me]
    sends = [(p, transport.rows_first(x.narrow(dst_dim, dst[p][0], dst[p][1] - dst[p][0]), src_dim)) for p in peers]
    receives = [(p, target[src[p][0] : src[p][1]]) for p in peers]
    call = _call(group, "all_to_all_v", x, (src_dim, dst_dim), src_dim, _sizes(src), dst_dim, _sizes(dst))
    transport.complete(out, call, transport.exchange(call, sends, receives))
    return out


def _wanted(
    total: int, dim: int, cut: tuple[Sequence[int], int, Sequence[int]], reach: Sequence[int], ranks: int, what: str
) -> list[Range]:
    """The ranges of rows that every rank wants, given the blocks of a cut.

    Args:
        total: number of rows that there are.
        dim: for messages.
        cut: as for `blocks_of`.
        reach: empty if the blocks themselves are wanted. Otherwise they are blocks of other rows, and wanted is what
            these read: `count`, `num`, `den`, `before` and `after` say that there are `count`, of which row j reads
            those from ``(j * num - before) / den``, rounded up, to ``(j * num + after) / den``, rounded down.
        ranks: in the group.
        what: the op, for messages.
    """
    if not reach:
        return blocks_of(total, dim, cut, ranks, what)
    count, num, den, before, after = reach
    wanted = []
    for a, b in blocks_of(count, dim, cut, ranks, what):
        start = -((before - a * num) // den)
        wanted.append((start, max(((b - 1) * num + after) // den + 1, start)) if b > a else (0, 0))
    return wanted


def _within(ranges: Sequence[Range], total: int) -> list[Range]:
    return [(max(a, 0), min(b, total)) for a, b in ranges]


def _pieces(x: Tensor, dim: int, to_peers: Sequence[Range], me: int) -> list[tuple[int, Tensor]]:
    """What the others get of a block. Only that is put in order of rows: a halo is little of a block."""
    ranges = [(p, a, b) for p, (a, b) in enumerate(to_peers) if p != me and b > a]
    return [(p, transport.rows_first(x.narrow(dim, a, b - a), dim)) for p, a, b in ranges]


def _fetch_ranges(
    x: Tensor,
    dim: int,
    total: int,
    block: int,
    src_sizes: list[int],
    src_key: int,
    src_nest: list[int],
    dst_sizes: list[int],
    dst_key: int,
    dst_nest: list[int],
    reach: list[int],
    fill: float | None,
    group_name: str,
) -> Tensor:
    group = compat.process_group(group_name)
    held = blocks_of(total, dim, (src_sizes, src_key, src_nest), group.size(), "fetch_ranges")
    wanted = _wanted(total, dim, (dst_sizes, dst_key, dst_nest), reach, group.size(), "fetch_ranges")
    wanted = _within(wanted, total) if fill is None else wanted
    return fetch_wanted(x, dim, held, wanted, block, group, "fetch_ranges", fill)


def fetch_wanted(
    x: Tensor,
    dim: int,
    held: Sequence[Range],
    wanted: Sequence[Range],
    block: int,
    group: ProcessGroup,
    what: str,
    fill: float | None = None,
) -> Tensor:
    """Start to get the range of rows that each rank wants from whoever holds them.

    Args:
        x: this rank's block.
        dim: of the rows.
        held: the range that each rank holds.
        wanted: the range that each rank wants.
        block: how many rows this rank wants.
        group: the ranks.
        what: the op.
        fill: what rows outside of the dim hold; None if none are wanted.

    Returns:
        The rows, flat.
    """
    me, total = group.rank(), held[-1][1]
    check_block(x.shape, dim, held[me], me, what)
    out = _new_rows(x, dim, block)
    to_peers = [transport.shifted(transport.overlap(held[me], w), -held[me][0]) for w in wanted]
    from_peers = [transport.shifted(transport.overlap(h, wanted[me]), -wanted[me][0]) for h in held]
    target = _as_rows(out, x, dim, block)
    if fill is not None:
        start, end = wanted[me]
        target[: max(-start, 0)].fill_(fill)
        target[max(min(total, end) - start, 0) :].fill_(fill)
    target[slice(*from_peers[me])].copy_(x.movedim(dim, 0)[slice(*to_peers[me])])
    peers = [p for p in range(group.size()) if p != me]
    sends = _pieces(x, dim, to_peers, me)
    receives = [(p, target[slice(*from_peers[p])]) for p in peers]
    call = _call(group, what, x, (dim,), dim, _sizes(held), dim, _flat(wanted))
    transport.complete(out, call, transport.exchange(call, sends, receives))
    return out


def _return_ranges(
    x: Tensor,
    dim: int,
    total: int,
    block: int,
    src_sizes: list[int],
    src_key: int,
    src_nest: list[int],
    dst_sizes: list[int],
    dst_key: int,
    dst_nest: list[int],
    reach: list[int],
    fill: float | None,
    group_name: str,
) -> Tensor:
    group = compat.process_group(group_name)
    held = blocks_of(total, dim, (src_sizes, src_key, src_nest), group.size(), "return_ranges")
    wanted = _wanted(total, dim, (dst_sizes, dst_key, dst_nest), reach, group.size(), "return_ranges")
    wanted = _within(wanted, total) if fill is None else wanted
    return return_wanted(x, dim, held, wanted, block, group, "return_ranges")


def return_wanted(
    x: Tensor,
    dim: int,
    held: Sequence[Range],
    wanted: Sequence[Range],
    block: int,
    group: ProcessGroup,
    what: str,
) -> Tensor:
    """Start the adjoint of `fetch_wanted`: rows go to those that hold them, and are added there.

    Args:
        x: what belongs to the rows that this rank wants.
        dim: of the rows.
        held: as for `fetch_wanted`.
        wanted: as for `fetch_wanted`.
        block: how many rows this rank holds.
        group: the ranks.
        what: the op.

    Returns:
        The sums, flat.
    """
    me = group.rank()
    check_block(x.shape, dim, wanted[me], me, what)
    to_peers = [transport.shifted(transport.overlap(h, wanted[me]), -wanted[me][0]) for h in held]
    back = [transport.shifted(transport.overlap(held[me], w), -held[me][0]) for w in wanted]
    peers = [p for p in range(group.size()) if p != me]
    out = _new_rows(x, dim, block).zero_()
    target = _as_rows(out, x, dim, block)
    target[slice(*back[me])].copy_(x.movedim(dim, 0)[slice(*to_peers[me])])
    width = target.shape[1:].numel()
    counts = [back[p][1] - back[p][0] for p in peers]
    memory = [scratch.borrow(n * width, target) for n in counts]
    parts = [m.view(n, *target.shape[1:]) for m, n in zip(memory, counts, strict=True)]
    sends = _pieces(x, dim, to_peers, me)
    call = _call(group, what, x, (dim,), dim, _sizes(held), dim, _flat(wanted))
    works = transport.exchange(call, sends, list(zip(peers, parts, strict=True)))

    def accumulate() -> None:
        for p, part in zip(peers, parts, strict=True):
            target[slice(*back[p])].add_(part)
        scratch.give_back(*memory)

    transport.complete(out, call, works, accumulate)
    return out


def _mirror_blocks(x: Tensor, dim: int, block: int, group_name: str) -> Tensor:
    """The block of the rank that is as far from the last one as this rank is from the first."""
    group = compat.process_group(group_name)
    peer = group.size() - 1 - group.rank()
    out = _new_rows(x, dim, block)
    rows, target = transport.rows_first(x, dim), _as_rows(out, x, dim, block)
    call = _call(group, "mirror_blocks", x, (dim,), dim)  # also by the rank in the middle: ranks count their calls
    if peer == group.rank():
        target.copy_(rows)
    else:
        transport.complete(out, call, transport.exchange(call, [(peer, rows)], [(peer, target)]))
    return out


def _take_block(
    x: Tensor, dim: int, block: int, sizes: list[int], key: int, nest: list[int], group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    blocks = blocks_of(x.shape[dim], dim, (sizes, key, nest), group.size(), "take_block")
    return x.narrow(dim, blocks[group.rank()][0], block).clone(memory_format=torch.contiguous_format)


def _place_block(
    x: Tensor, dim: int, total: int, sizes: list[int], key: int, nest: list[int], group_name: str
) -> Tensor:
    group = compat.process_group(group_name)
    blocks = blocks_of(total, dim, (sizes, key, nest), group.size(), "place_block")
    out = x.new_zeros(_with_extent(x, dim, total))
    out.narrow(dim, blocks[group.rank()][0], x.shape[dim]).copy_(x)
    return out


def _with_extent(x: Tensor, dim: int, extent: Any) -> list[Any]:
    return [extent if d == dim else s for d, s in enumerate(x.shape)]


def _gather_cut(x: Tensor, dim: int, group_name: str) -> Tensor:
    """Global extent and key of the cut of which every rank holds a block: [2], int64."""
    group = compat.process_group(group_name)
    rest = [x.ndim, *(s for d, s in enumerate(x.shape) if d != dim)]
    mine = torch.tensor([x.shape[dim], digest_of(repr((str(x.dtype), dim, rest)))], device=x.device)
    rows = torch.ops._c10d_functional.all_gather_into_tensor(mine, group.size(), group_name)
    rows = wait(rows).view(group.size(), 2).tolist()
    other = next((i for i, r in enumerate(rows) if r[1] != rows[0][1]), None)
    if other is not None:
        raise CollectiveError(
            f"the blocks do not belong together: dtype or extents other than that of dim {dim} are not the same on "
            f"ranks 0 and {other} of the group; here {x.dtype}, {tuple(x.shape)}"
        )
    return _extent_and_key([r[0] for r in rows], x)


def _state_cut(x: Tensor, dim: int, sizes: list[int], group_name: str) -> Tensor:
    """Global extent and key of the cut with these sizes: [2], int64."""
    group = compat.process_group(group_name)
    if len(sizes) != group.size():
        raise CollectiveError(f"sharding_shapes has {len(sizes)} sizes for a mesh dim of {group.size()} ranks: {sizes}")
    check_block(x.shape, dim, (0, sizes[group.rank()]), group.rank(), "from_local")
    return _extent_and_key(sizes, x)


def _extent_and_key(sizes: list[int], like: Tensor) -> Tensor:
    cut = Cut.of_sizes([0], [len(sizes)], sizes)
    return torch.tensor([cut.extent, cut.key], device=like.device)


def _fake_all_to_all_v(x: Tensor, src_dim: int, dst_dim: int, total: Any, block: Any, *_: Any) -> Tensor:
    return _new_rows(x.new_empty(_with_extent(x, dst_dim, block)), src_dim, total)


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "all_gather_v": (_all_gather_v, lambda x, dim, total, *_: _new_rows(x, dim, total)),
    "reduce_scatter_v": (_reduce_scatter_v, lambda x, dim, block, *_: _new_rows(x, dim, block)),
    "all_to_all_v": (_all_to_all_v, _fake_all_to_all_v),
    "fetch_ranges": (_fetch_ranges, lambda x, dim, total, block, *_: _new_rows(x, dim, block)),
    "return_ranges": (_return_ranges, lambda x, dim, total, block, *_: _new_rows(x, dim, block)),
    "mirror_blocks": (_mirror_blocks, lambda x, dim, block, *_: _new_rows(x, dim, block)),
    "take_block": (_take_block, lambda x, dim, block, *_: x.new_empty(_with_extent(x, dim, block))),
    "place_block": (_place_block, lambda x, dim, total, *_: x.new_empty(_with_extent(x, dim, total))),
}
_IMPLEMENTATIONS["gather_cut"] = (_gather_cut, lambda x, *_: x.new_empty([2], dtype=torch.int64))
_IMPLEMENTATIONS["state_cut"] = (_state_cut, lambda x, *_: x.new_empty([2], dtype=torch.int64))
for _name, (_real, _fake) in _IMPLEMENTATIONS.items():
    _packet = getattr(_ops, _name)
    if _packet in COLLECTIVES:
        _fake = compat.lowered_when_traced(_packet.default, _fake)
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardcompile::{_name}", _fake, lib=_LIBRARY)


def symbolic_cut(x: Tensor, dim: int, sizes: Sequence[IntLike] | None, group_name: str) -> tuple[IntLike, IntLike]:
    """Global extent and key of the cut of which `x` is this rank's block, as symbols that are known at run time.

    Args:
        x: the block.
        dim: the dim that is cut.
        sizes: of all blocks; None to ask the other ranks.
        group_name: the ranks.
    """
    x = x.detach()
    both = wait(_ops.gather_cut(x, dim, group_name)) if sizes is None else _ops.state_cut(x, dim, sizes, group_name)
    extent, key = both.unbind()
    total = compat.keep_symbol(extent.item())
    torch._check(total >= x.shape[dim])
    return total, compat.keep_symbol(key.item())


# Gradients. Every op is linear (reduce_scatter_v for sum and avg); its gradient is its adjoint.


def _gradient(ctx: Any, flat: Tensor, shape: Sequence[Any], dim: int, extent: Any) -> tuple[Any, ...]:
    return (Pending.of(flat, shape, dim, extent).wait(), *[None] * len(ctx.args))


def _all_gather_v_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, total, *cut_and_group = ctx.args
    whole = Pending.of(grad, ctx.shape, dim, total).result()
    out = _ops.reduce_scatter_v(whole, dim, ctx.shape[dim], "sum", *cut_and_group)
    return _gradient(ctx, out, ctx.shape, dim, ctx.shape[dim])


def _reduce_scatter_v_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, block, reduce_op, *cut_and_group = ctx.args
    if reduce_op not in ("sum", "avg"):
        raise CollectiveError(f"reduce_scatter_v with {reduce_op} has no gradient; only sum and avg have")
    if reduce_op == "avg":
        grad = grad / compat.process_group(cut_and_group[-1]).size()
    own = Pending.of(grad, ctx.shape, dim, block).result()
    out = _ops.all_gather_v(own, dim, ctx.shape[dim], *cut_and_group)
    return _gradient(ctx, out, ctx.shape, dim, ctx.shape[dim])


def _all_to_all_v_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    src_dim, dst_dim, total, block, *cuts, group_name = ctx.args
    shape = [block if d == dst_dim else s for d, s in enumerate(ctx.shape)]
    moved = Pending.of(grad, shape, src_dim, total).result()
    back = (*cuts[3:], *cuts[:3])
    out = _ops.all_to_all_v(moved, dst_dim, src_dim, ctx.shape[dst_dim], ctx.shape[src_dim], *back, group_name)
    return _gradient(ctx, out, ctx.shape, dst_dim, ctx.shape[dst_dim])


def _fetch_ranges_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, total, block, *rest = ctx.args
    fetched = Pending.of(grad, ctx.shape, dim, block).result()
    out = _ops.return_ranges(fetched, dim, total, ctx.shape[dim], *rest)
    return _gradient(ctx, out, ctx.shape, dim, ctx.shape[dim])


def _return_ranges_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, total, block, *rest = ctx.args
    returned = Pending.of(grad, ctx.shape, dim, block).result()
    out = _ops.fetch_ranges(returned, dim, total, ctx.shape[dim], *rest)
    return _gradient(ctx, out, ctx.shape, dim, ctx.shape[dim])


def _mirror_blocks_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, block, group_name = ctx.args
    mirrored = Pending.of(grad, ctx.shape, dim, block).result()
    out = _ops.mirror_blocks(mirrored, dim, ctx.shape[dim], group_name)
    return _gradient(ctx, out, ctx.shape, dim, ctx.shape[dim])


def _take_block_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, _, *rest = ctx.args
    return (_ops.place_block(grad, dim, ctx.shape[dim], *rest), *[None] * len(ctx.args))


def _place_block_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, _, *rest = ctx.args
    return (_ops.take_block(grad, dim, ctx.shape[dim], *rest), *[None] * len(ctx.args))


_GRADIENTS = {
    "all_gather_v": _all_gather_v_grad,
    "reduce_scatter_v": _reduce_scatter_v_grad,
    "all_to_all_v": _all_to_all_v_grad,
    "fetch_ranges": _fetch_ranges_grad,
    "return_ranges": _return_ranges_grad,
    "mirror_blocks": _mirror_blocks_grad,
    "take_block": _take_block_grad,
    "place_block": _place_block_grad,
}


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape
    ctx.args = inputs[1:]


for _name, _backward in _GRADIENTS.items():
    torch.library.register_autograd(f"shardcompile::{_name}", _backward, setup_context=_keep_arguments, lib=_LIBRARY)

compat.count_as_collective(COLLECTIVES)
