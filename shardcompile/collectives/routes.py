"""Rows that go where data says: how many, how they are sharded then, and the exchange that moves them.

`counts` is a table, the same on every rank of a group: counts[s, d] rows go from rank s to rank d. It lies on the CPU,
since messages are sent from there. Rows that leave a rank are in the order of their destinations; rows that arrive are
in the order of their sources.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from shardcompile import compat
from shardcompile.collectives import scratch, transport
from shardcompile.collectives.descriptor import Descriptor, Joins
from shardcompile.collectives.pending import wait
from shardcompile.collectives.routing_statistics import note_rows
from shardcompile.collectives.traffic import (
    Load,
    Member,
    Traffic,
    even_exchange,
    even_gather,
    exchanged_in_a_bucket,
    is_number,
    of_any_rows,
)
from shardcompile.diagnosis import Call, enter
from shardcompile.errors import CollectiveError, LayoutError, RowRangeError
from shardcompile.sharding import GroupPartition, IntLike, Partition, digest_of, write_partition
from shardcompile.sharding.arguments import partition_schema

_NOMINAL_ROWS = 64

_OUT_OF_RANGE = -(2**62)
"""What a rank says in place of each of its counts, and a number that is out of range added to it."""
_FAR = 2**61
"""Numbers beyond it are told as it."""

_LIBRARY = torch.library.Library("shardcompile", "FRAGMENT")
_TAGS = [torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout]
for _schema in (
    "rows_from(Tensor counts, str group_name) -> Tensor",
    f"shard_starts(SymInt total, {partition_schema()}, str group_name) -> Tensor",
    "partition_of_sizes(Tensor sizes, int[] parts, SymInt size, SymInt shard, str group_names) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_TAGS)

_ops = torch.ops.shardcompile


class GatherCounts(NamedTuple):
    """Arguments of the op `gather_counts`; see the function.

    Attributes:
        input: this rank's counts.
        wanted: for the message.
        group_name: the ranks.
    """

    input: Tensor
    wanted: str
    group_name: str


class ExchangeRows(NamedTuple):
    """Arguments of the op `exchange_rows`; see the function.

    Attributes:
        inputs: rows, in the order of their destinations.
        counts: how many go where.
        shard: how many arrive.
        back: the other way.
        group_name: the ranks.
    """

    inputs: list[Tensor]
    counts: Tensor
    shard: IntLike
    back: bool
    group_name: str


def gather_counts(mine: Tensor, group_name: str, wanted: str = "counts are not negative") -> Tensor:
    """The counts that each rank of a group has: [ranks, k], int64, on the CPU.

    Args:
        mine: this rank's: [k]; of a route the rows that it sends to each rank, or what `counts_in_range` gives.
        group_name: the ranks.
        wanted: what a rank that has a number out of range has not kept to, for the message.

    Raises:
        RowRangeError: on every rank, if a rank has said that a number is out of range.
    """
    return wait(GATHER_COUNTS.packet(mine, wanted, group_name))


def counts_in_range(counts: Tensor, numbers: Tensor, bad: Tensor) -> Tensor:
    """Counts to gather; if a number is out of range, every other rank is told of it in their place.

    Args:
        counts: of rows, by rank: [k], int64.
        numbers: that were counted: [n], int64.
        bad: which of them are out of range: [n], bool.
    """
    told = torch.where(bad, numbers.clamp(-_FAR, _FAR), -_FAR - 1)
    return torch.where(bad.any(), torch.constant_pad_nd(told, [0, 1], -_FAR - 1).amax() + _OUT_OF_RANGE, counts)


def exchange_rows(
    inputs: Sequence[Tensor], counts: Tensor, shard: IntLike, group_name: str, *, back: bool = False
) -> list[Tensor]:
    """Send rows to the ranks that `counts` says, those of all tensors in one message to each. Differentiable.

    Args:
        inputs: each [n, ...], rows in the order of their destinations; any dtypes.
        counts: as `gather_counts` gives it.
        shard: how many rows arrive.
        group_name: the ranks.
        back: the other way: rows in the order of the ranks that they came from go back there.

    Returns:
        Each [shard, ...], rows in the order of the ranks that sent them.

    Raises:
        CollectiveError: there are not as many rows as `counts` says.
    """
    flat = EXCHANGE_ROWS.packet(list(inputs), counts, shard, back, group_name)
    return [wait(f).view([shard, *x.shape[1:]]) for f, x in zip(flat, inputs, strict=True)]


def rows_from(counts: Tensor, group_name: str) -> Tensor:
    """How many rows come to this rank from each: ``counts[:, rank]``, [ranks, ...].

    An op, since a graph must not name the rank that it is for.
    """
    return _ops.rows_from(counts, group_name)


def shard_starts(partition: Partition, mesh: DeviceMesh) -> Tensor:
    """At which row each shard of a sharded over one mesh dim begins: [ranks], int64, on the CPU.

    An op, since a graph knows the shard of its own rank only.
    """
    (mesh_dim,) = partition.mesh_dims
    ref = partition.group_ref(compat.coordinate(mesh) or ())
    group_name = compat.group_name_of(mesh, mesh_dim)
    return _ops.shard_starts(partition.size, *write_partition(ref), group_name)


def partition_of_sizes(
    sizes: Tensor,
    mesh: DeviceMesh,
    mesh_dims: Sequence[int],
    dim_size: IntLike | None = None,
    shard: IntLike | None = None,
    about: IntLike | None = None,
) -> Partition:
    """The partition with shard sizes that a tensor holds, which may be known only when a graph runs.

    Args:
        sizes: of all shards, outermost mesh dim slowest, the same on every rank; whole numbers.
        mesh: the mesh.
        mesh_dims: that partition, outermost first.
        size: what the sizes have to add up to; anything if None.
        shard: how large this rank's local shard is, if that is known.
        about: what they add up to as a rule: compilers and costs reckon with it.

    Raises:
        LayoutError: they do not, a size is negative, there are not as many as shards, or this rank's is another one.
    """
    parts = [mesh.shape[m] for m in mesh_dims]
    if sizes.dtype.is_floating_point or sizes.dtype.is_complex or sizes.dtype is torch.bool or sizes.ndim != 1:
        raise LayoutError(
            f"shard sizes are whole numbers, one for each of {math.prod(parts)} shards; got a tensor of "
            f"{sizes.dtype} of shape {tuple(sizes.shape)}"
        )
    groups = ",".join(compat.group_name_of(mesh, m) for m in mesh_dims)
    wanted, here = (-1 if n is None else n for n in (dim_size, shard))
    if not compat.is_fake(sizes):
        return _checked_partition(sizes, mesh_dims, parts, wanted, here, groups)[0]
    total, key, size = _ops.partition_of_sizes(sizes.detach(), parts, wanted, here, groups).unbind()
    symbol = compat.keep_symbol(key.item())
    dim_size = compat.keep_symbol(total.item()) if dim_size is None else dim_size
    shard = compat.keep_symbol(size.item()) if shard is None else shard
    torch._check(shard >= 0)
    torch._check(dim_size >= shard)
    likely = compat.size_hint(dim_size if about is None else about)
    compat.suggest_hint(dim_size, likely)
    compat.suggest_hint(shard, -(-likely // math.prod(parts)))
    return Partition.traced(mesh_dims, parts, dim_size, symbol, shard)


def first_rows(x: Tensor, count: IntLike) -> Tensor:
    """A copy of the first rows of a tensor.

    Args:
        x: [n, ...].
        count: how many, at most n; a symbol where the data says.
    """
    if isinstance(x.shape[0], int) and not isinstance(count, int):
        # n may be that of this rank's local shard. A bound would tell the compiler of `count` what is so on this rank
        # only: that it is 0, if n is.
        return x.index_select(0, torch.arange(count, device=x.device))  # type: ignore[call-overload]
    torch._check(count <= x.shape[0])
    return x.narrow(0, 0, count).clone()


def _checked_partition(
    sizes: Tensor, mesh_dims: Sequence[int], parts: Sequence[int], size: object, shard: object, group_names: str
) -> tuple[Partition, int]:
    """A partition, and this rank's local shard of it. What is not known of them is -1."""
    partition = Partition.of_sizes(mesh_dims, parts, sizes.tolist())
    if size not in (-1, partition.size):
        raise LayoutError(
            f"shard sizes {list(partition.sizes)} add up to {partition.size}, but the dim has size {size}"
        )
    index = 0
    for count, name in zip(parts, group_names.split(","), strict=True):
        index = index * count + compat.process_group(name).rank()
    if shard not in (-1, partition.sizes[index]):
        raise LayoutError(
            f"this rank's local shard has {shard} rows; shard sizes {list(partition.sizes)} say "
            f"{partition.sizes[index]}"
        )
    return partition, partition.sizes[index]


def _partition_of_sizes(sizes: Tensor, parts: list[int], dim_size: int, shard: int, group_names: str) -> Tensor:
    """Size, key and this rank's local shard: [3], int64, on the CPU."""
    partition, size = _checked_partition(sizes, range(len(parts)), parts, dim_size, shard, group_names)
    return torch.tensor([partition.size, partition.key, size], device="cpu")


def _shard_starts(total: int, sizes: list[int], key: int, grouping: list[int], group_name: str) -> Tensor:
    ranks = compat.process_group(group_name).size()
    shards = GroupPartition(sizes, key, grouping).shards(total, ranks)
    return torch.tensor([a for a, _ in transport.running_ends(shards)], device="cpu")


def _fake_starts(total: int, sizes: list[int], key: int, grouping: list[int], group_name: str) -> Tensor:
    return torch.empty([compat.process_group(group_name).size()], dtype=torch.int64, device="cpu")


def _gather_counts(a: GatherCounts) -> Tensor:
    group, mine = compat.process_group(a.group_name), a.input
    call = GATHER_COUNTS.enter(group, mine.dtype, group.size())
    call.agree()
    start = torch.ops._c10d_functional.all_gather_into_tensor(mine, group.size(), a.group_name)
    counts: Tensor = call.run([functools.partial(wait, start)])[0].view(group.size(), mine.shape[0]).cpu()
    _known_tables(a.group_name, counts.shape[1])[_digest(counts)] = None
    bad = [(r, told - _OUT_OF_RANGE) for r, told in enumerate(counts[:, 0].tolist()) if told < 0]
    if bad:
        others = ", ".join(f"rank {r} of the group has {number}" for r, number in bad)
        raise RowRangeError(f"{a.wanted}; {others}. No row was moved")
    return counts


_KNOWN = 256
_TABLES: dict[tuple[str, int], OrderedDict[int, None]] = {}
compat.forget_with_world(_TABLES.clear)


def _known_tables(group_name: str, columns: int) -> OrderedDict[int, None]:
    """Digests of the tables that a group has gathered last: the same on all of its ranks."""
    known = _TABLES.setdefault((group_name, columns), OrderedDict())
    while len(known) > _KNOWN:
        known.popitem(last=False)
    return known


def _digest(counts: Tensor) -> int:
    return digest_of(repr(counts.tolist()))


def _peers(counts: Tensor, back: bool, group: ProcessGroup) -> tuple[list[int], list[int]]:
    """Rows that this rank sends to each rank, and receives from each."""
    if tuple(counts.shape) != (group.size(), group.size()):
        raise CollectiveError(
            f"exchange_rows: the route is one of {tuple(counts.shape)} ranks, the group has {group.size()}"
        )
    out, back_in = counts[group.rank()].tolist(), counts[:, group.rank()].tolist()
    return (back_in, out) if back else (out, back_in)


def _exchange_rows(a: ExchangeRows) -> list[Tensor]:
    group, inputs, shard = compat.process_group(a.group_name), a.inputs, int(a.shard)
    sent, received = _peers(a.counts, a.back, group)
    for x in inputs:
        if x.shape[0] != sum(sent) or shard != sum(received):
            raise CollectiveError(
                f"exchange_rows: rank {group.rank()} of the group has {x.shape[0]} rows (shape {tuple(x.shape)}) and "
                f"is to get {shard}; its route sends {sum(sent)} and brings {sum(received)}"
            )
    note_rows(group, inputs, a.counts, a.back)
    outs = [x.new_empty([shard * math.prod(x.shape[1:])]) for x in inputs]
    if len(inputs) == 1:
        target = outs[0].view([shard, *inputs[0].shape[1:]])
        call, works = _start(
            group, inputs, transport.rows_first(inputs[0], 0), sent, target, received, a.counts, a.back
        )
        transport.complete(outs, call, works)
        return outs
    rows = [_bytes(transport.rows_first(x, 0)) for x in inputs]
    packed = torch.cat([r[a:b].reshape(-1) for a, b in transport.running_ends(sent) for r in rows])
    widths = [r.shape[1] for r in rows]
    memory = scratch.borrow(shard * sum(widths), packed)
    lengths = [[n * sum(widths) for n in peers] for peers in (sent, received)]
    call, works = _start(group, inputs, packed, lengths[0], memory, lengths[1], a.counts, a.back)

    def unpack() -> None:
        shares = zip(memory.split(lengths[1]), received, strict=True)
        parts = [share.split([n * w for w in widths]) for share, n in shares]
        for out, of_peers in zip(outs, zip(*parts, strict=True), strict=True):
            torch.cat(of_peers, out=out.view(torch.uint8))
        scratch.give_back(memory)

    transport.complete(outs, call, works, unpack)
    return outs


def _start(
    group: ProcessGroup,
    inputs: Sequence[Tensor],
    packed: Tensor,
    sent: list[int],
    out: Tensor,
    received: list[int],
    counts: Tensor,
    back: bool,
) -> tuple[Call, list[Work]]:
    """Start to send ranges of `packed` and to fill ranges of `out`, as many rows as `sent` and `received` say.

    A backend's own all-to-all has no tags: a rank with another table would take messages for what they are not. So it
    is left to tables that the group has gathered, which are the same on all ranks; others travel as messages whose tags
    are made of them.
    """
    row = digest_of(repr(tuple((str(x.dtype), *x.shape[1:]) for x in inputs)))
    table = _digest(counts)
    if table in _known_tables(group.group_name, counts.shape[1]) and transport.transport_of(group).has_all_to_all:
        call = enter(group, EXCHANGE_ROWS.kind, inputs[0].dtype, ("row",), row)
        return call, transport.transport_of(group).all_to_all(call, packed, sent, out, received)
    arriving = tuple(counts.sum(1 if back else 0).tolist())
    call = EXCHANGE_ROWS.enter(group, inputs[0].dtype, arriving, table, row)
    ends = transport.running_ends
    return call, transport.send_ranges(call, packed, ends(sent), out, ends(received))


def _bytes(rows: Tensor) -> Tensor:
    """Rows as bytes: [n, width]."""
    return transport.as_bytes(rows).view(rows.shape[0], math.prod(rows.shape[1:]) * rows.itemsize)


def _rows_from(counts: Tensor, group_name: str) -> Tensor:
    return counts[:, compat.process_group(group_name).rank()].clone()


def _fake_exchange(a: ExchangeRows) -> list[Tensor]:
    return [x.new_empty([a.shard * math.prod(x.shape[1:])]) for x in a.inputs]


def _load(members: Sequence[Member], n: int) -> Load:
    """As much from each rank as from this one."""
    return Load(np.full([2, n], (n - 1) / n * sum(m.nbytes for m in members)))


def _traffic(members: Sequence[Member], n: int) -> Traffic:
    """What goes to others, and copies of it where several tensors share a message."""
    return even_exchange(members, n) if len(members) == 1 else exchanged_in_a_bucket(_load(members, n))


def _fake_counts(a: GatherCounts) -> Tensor:
    ranks = compat.process_group(a.group_name).size()
    return torch.empty([ranks, a.input.shape[0]], dtype=torch.int64, device="cpu")


def _whole(a: ExchangeRows) -> object:
    """As many rows from each rank as the symbol says that this rank sends or gets; it has one hint on all of them.

    A number would be that of this rank alone.
    """
    rows = next((n for n in (a.inputs[0].shape[0], a.shard) if not is_number(n)), _NOMINAL_ROWS)
    width = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in a.inputs)
    return compat.process_group(a.group_name).size() * rows * width


def _exchange_adjoint(
    a: ExchangeRows, shapes: Sequence[torch.Size], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    # Autograd has zeros for what has no gradient, such as the numbers of experts: nobody wants them back.
    wanted = [(i, g) for i, g in enumerate(grads) if g is not None and (g.is_floating_point() or g.is_complex())]
    pairs = [(i, g.view([a.shard, *shapes[i][1:]])) for i, g in wanted]
    out: list[Tensor | None] = [None] * len(grads)
    returned = exchange_rows([g for _, g in pairs], a.counts, shapes[0][0], a.group_name, back=not a.back)
    for (i, _), grad in zip(pairs, returned, strict=True):
        out[i] = grad
    return out


GATHER_COUNTS = Descriptor(
    "gather_counts",
    GatherCounts,
    _gather_counts,
    fake=_fake_counts,
    traffic=even_gather,
    states=("ranks",),
    of_one_rank=True,
    moves_rows=False,
)

EXCHANGE_ROWS = Descriptor(
    "exchange_rows",
    ExchangeRows,
    _exchange_rows,
    fake=_fake_exchange,
    adjoint=_exchange_adjoint,
    members=lambda a, n: [of_any_rows(x, a.shard) for x in a.inputs],
    traffic=_traffic,
    whole=_whole,
    joins=Joins("exchange_rows", load=_load),
    states=("rows", "route", "row"),
    of_one_rank=True,
    returns="Tensor[]",
)

_LIBRARY.impl("rows_from", _rows_from, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardcompile::rows_from",
    lambda counts, _: counts.new_empty([counts.shape[0], *counts.shape[2:]]),
    lib=_LIBRARY,
)
_LIBRARY.impl("shard_starts", _shard_starts, "CompositeExplicitAutograd")
torch.library.register_fake("shardcompile::shard_starts", _fake_starts, lib=_LIBRARY)
_LIBRARY.impl("partition_of_sizes", _partition_of_sizes, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardcompile::partition_of_sizes", lambda *_: torch.empty([3], dtype=torch.int64, device="cpu"), lib=_LIBRARY
)
